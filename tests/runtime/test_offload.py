"""Offloaded activations: nothing is read before its copy has arrived, nothing is used after it has left."""

import pytest
import torch

from evenload.attention.backends import select_backend
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.model.supported import attention_soft_cap
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.host_copies import ThreadHostCopies, host_copies
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from reference_training import exact_casts, make_tokens, plain_loss_and_gradients, relative_error, tiny_config
from single_stage import pack_tokens, packs_of

LENGTHS = [61, 30, 1, 7, 2, 1, 19]


class _LateCopy:
    """A copy that happens at the last moment, and then spoils its source."""

    def __init__(self, into: torch.Tensor, pieces: list[torch.Tensor], *, spoils: bool) -> None:
        self._into, self._pieces, self._spoils, self._done = into, pieces, spoils, False

    def wait(self) -> None:
        if not self._done:
            self._into.copy_(torch.cat([piece.contiguous() for piece in self._pieces]))
            for piece in self._pieces if self._spoils else ():
                piece.fill_(torch.nan)
            self._done = True

    release = wait


class LateHostCopies:
    """The least favourable device: copies run only when they are waited for, and freed memory is overwritten."""

    def __init__(self) -> None:
        self.num_to_host = self.num_to_device = 0

    def host_bytes(self, tensor):
        return tensor.nbytes

    def to_host(self, tensor):
        self.num_to_host += 1
        host = torch.full_like(tensor, torch.nan)
        return host, _LateCopy(host, [tensor], spoils=True)

    def to_device(self, pieces, device):
        self.num_to_device += 1
        rows = sum(len(piece) for piece in pieces)
        buffer = torch.full((rows, *pieces[0].shape[1:]), torch.nan, dtype=pieces[0].dtype, device=device)
        return buffer, _LateCopy(buffer, list(pieces), spoils=False)


@pytest.mark.parametrize("whole", [True, False], ids=["whole packs", "cut packs"])
@pytest.mark.parametrize("policies", ["all", "some"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_no_tensor_is_read_before_it_arrives_or_used_after_it_left(kind, whole, policies):
    with exact_casts(kind):
        assert_late_copies_change_nothing(tiny_config(kind), whole, policies)


def assert_late_copies_change_nothing(config, whole, policies):
    tokens = make_tokens(LENGTHS, config.vocab_size)
    model = build_stage_model(
        config, layers=(0, 4), dtype=torch.float64, device=torch.device("cpu"), weights=None, seed=3
    )
    buffers = flatten_units(model, dp=1)
    stage = PipelineStage(model, select_backend("auto", "cpu", attention_soft_cap(config)))
    stage.begin_step(dict(enumerate(LENGTHS)))
    forward = packs_of(LENGTHS, [] if whole else [0.3, 0.75], 40, last_first=False)
    backward = forward if whole else packs_of(LENGTHS, [0.5], 33, last_first=True)
    offloaded = [doc for doc in range(len(LENGTHS)) if policies == "all" or doc % 2 == 0]
    copies = LateHostCopies()
    store = ActivationStore(
        dict(enumerate(LENGTHS)),
        [tuple(pack) for pack in backward],
        policies=dict.fromkeys(offloaded, "offload"),
        copies=copies,
    )
    for pack in forward:
        stage.forward(pack_tokens(pack, tokens), None, store)
        assert store.held.held_by_kind["offload_buffers"] == 0
    assert store.held.host_bytes > 0
    labels = sum(n - 1 for n in LENGTHS)
    loss = sum(stage.backward(pack_tokens(pack, tokens), None, store, labels)[1].item() for pack in backward)
    store.check_empty()
    assert store.held.host_bytes == store.held.held_bytes == 0
    assert copies.num_to_host > 0
    assert copies.num_to_device > 0
    weights = {n: p.detach() for b in buffers for n, p in zip(b.names, b.parameters, strict=True)}
    plain_loss, plain = plain_loss_and_gradients(config, weights, tokens, torch.float64)
    assert loss == pytest.approx(plain_loss, rel=1e-10)
    for buffer in buffers:
        for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
            assert relative_error(parameter.main_grad, plain[name]) <= 1e-10, name


def test_copies_run_beside_the_caller_and_in_order():
    """Out and back through the thread: what is asked for last is there last, and equal to what left."""
    copies = host_copies(torch.device("cpu"))
    assert isinstance(copies, ThreadHostCopies)
    tensors = [torch.randn(50, 3), torch.randn(7, 3, 2).transpose(1, 2)]
    for tensor in tensors:
        parts = [copies.to_host(part) for part in (tensor[:5], tensor[5:])]
        back, copy = copies.to_device([host for host, _ in parts], torch.device("cpu"))
        copy.wait()
        assert all(host.data_ptr() != tensor.data_ptr() for host, _ in parts)
        assert torch.equal(back, tensor)
