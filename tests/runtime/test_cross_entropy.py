"""Loss and gradient of the head's logits by hand: torch's own, in less memory."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from evenload.runtime.replay.head import cross_entropy_and_gradient, head_gradient
from evenload.types.document import Range
from reference_training import tiny_config
from single_stage import stage_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unlabelled", [0.0, 0.4, 1.0])
def test_loss_and_gradient_equal_torchs(dtype, unlabelled):
    """Also without any label: zero, not 0/0."""
    torch.manual_seed(1)
    logits = (5 * torch.randn(65, 300)).to(dtype).requires_grad_()
    targets = torch.randint(0, 300, (65,)).masked_fill(torch.rand(65) < unlabelled, -100)
    before = logits.detach().clone()
    loss, grad = cross_entropy_and_gradient(logits, targets, 1 / 7)
    exact = logits.to(torch.float64 if dtype == torch.float64 else torch.float32)
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction="sum") / 7
    expected.backward()
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(float(expected.detach()), rel=tolerance)
    assert grad.dtype == dtype
    assert logits.grad is not None
    error = (grad.double() - logits.grad.double()).abs().max()
    assert error <= (4e-3 if dtype == torch.bfloat16 else tolerance)
    assert torch.equal(logits, before), "the caller's logits belong to autograd"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_cost_model_charges(dtype):
    """e + 8 bytes a logit with the logits themselves (cost.memory); autograd's own takes 16 in fp32."""
    logits = torch.randn(512, 4096).to(dtype)
    targets = torch.randint(0, 4096, (512,))
    cross_entropy_and_gradient(logits, targets, 1.0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cross_entropy_and_gradient(logits, targets, 1.0)
    held = peak = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert 8.0 <= peak / logits.numel() <= 8.2


class _Allocations(TorchDispatchMode):
    """Counts the tensors of at least so many elements that got memory of their own."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.num_elements, self.kept = num_elements, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() >= self.num_elements:
            self.kept[out.untyped_storage().data_ptr()] = out  # alive, so that no other one gets its address
        return out


def test_the_heads_backward_copies_no_gradient_of_logits():
    """The logits, their copy in fp32, exponentials, and the gradient in the logits' precision: no fifth."""
    config = tiny_config("llama", vocab_size=4096)
    stage, _ = stage_of(config, torch.bfloat16)
    hidden, targets = torch.randn(512, config.hidden_size).bfloat16(), torch.randint(0, 4096, (512,))
    with _Allocations(512 * 4096) as found:
        head_gradient(stage.model, hidden, targets, 512, (Range(0, 0, 512),), None)
    assert len(found.kept) == 4
