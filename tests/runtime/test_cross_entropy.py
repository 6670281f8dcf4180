"""Loss and gradient of the head's logits by hand: torch's own, in less memory."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from evenload.runtime.replay.head import cross_entropy_and_gradient


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
