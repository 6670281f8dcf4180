"""Offloaded activations: nothing is read before its copy has arrived, nothing is used after it has left."""

import pytest
import torch

from evenload.runtime.replay.host_copies import HostRows, ThreadHostCopies, host_copies
from evenload.runtime.replay.store import ActivationStore
from reference_training import make_tokens, plain_loss_and_gradients, relative_error, tiny_config
from single_stage import pack_tokens, packs_of, sliced_packs, stage_of, trained
from spoiled_copies import SpoiledHostCopies

LENGTHS = [61, 30, 1, 7, 2, 1, 19]


def _spoiled(tensor: torch.Tensor) -> float | int:
    """NaN, and of choices of experts one that there is not: whoever reads it fails."""
    return torch.nan if tensor.is_floating_point() else -(2**40)


class _LateCopy:
    """A copy that happens at the last moment, and then spoils its source."""

    def __init__(self, into: torch.Tensor, pieces: list[torch.Tensor], *, spoils: bool) -> None:
        self._into, self._pieces, self._spoils, self._done = into, pieces, spoils, False

    def __call__(self) -> None:
        if not self._done:
            self._into.copy_(torch.cat([piece.contiguous() for piece in self._pieces]))
            for piece in self._pieces if self._spoils else ():
                piece.fill_(_spoiled(piece))
            self._done = True


class LateHostCopies:
    """The least favourable device: copies run only when they are waited for, and freed memory is overwritten."""

    def __init__(self) -> None:
        self.num_to_host = self.num_to_device = 0
        self.arena = self  # that frees

    def to_host(self, tensor):
        self.num_to_host += 1
        host = torch.full_like(tensor, _spoiled(tensor))
        return HostRows((host,), ()), _LateCopy(host, [tensor], spoils=True)

    def free(self, host):
        host.pieces[0].fill_(_spoiled(host.pieces[0]))

    def to_device(self, pieces, device):
        self.num_to_device += 1
        rows = sum(len(piece) for piece in pieces)
        buffer = torch.empty((rows, *pieces[0].shape[1:]), dtype=pieces[0].dtype, device=device)
        buffer.fill_(_spoiled(buffer))
        return buffer, _LateCopy(buffer, list(pieces), spoils=False)


@pytest.mark.parametrize("whole", [True, False], ids=["whole packs", "cut packs"])
@pytest.mark.parametrize("policies", ["all", "some"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("unfavourable", [LateHostCopies, SpoiledHostCopies])
def test_copies_that_come_late_and_memory_that_is_spoiled_at_once_change_nothing(unfavourable, kind, whole, policies):
    """Nothing is read before it arrives or used after it left; tensors may lie in pieces."""
    config, copies = tiny_config(kind), unfavourable()
    tokens = make_tokens(LENGTHS, config.vocab_size)
    stage, buffers = stage_of(config)
    stage.begin_step(dict(enumerate(LENGTHS)))
    forward, backward = [packs_of(LENGTHS, [], 40, last_first=False)] * 2 if whole else sliced_packs(LENGTHS)
    offloaded = [doc for doc in range(len(LENGTHS)) if policies == "all" or doc % 2 == 0]
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
    weights = {name: p.detach() for name, p in trained(buffers).items()}
    plain_loss, plain = plain_loss_and_gradients(config, weights, tokens, torch.float64)
    assert loss == pytest.approx(plain_loss, rel=1e-10)
    for name, parameter in trained(buffers).items():
        assert relative_error(parameter.main_grad, plain[name]) <= 1e-10, name
    if isinstance(copies, LateHostCopies):
        assert copies.num_to_host > 0
        assert copies.num_to_device > 0
    else:
        assert copies.num_pieces > copies.num_tensors > 0
        assert copies.arena.live_bytes == 0


def test_copies_run_beside_the_caller_and_in_order():
    """Out and back through the thread: what is asked for last is there last, and equal to what left."""
    copies = host_copies(torch.device("cpu"))
    assert isinstance(copies, ThreadHostCopies)
    tensors = [torch.randn(50, 3), torch.randn(7, 3, 2).transpose(1, 2)]
    for tensor in tensors:
        parts = [copies.to_host(part) for part in (tensor[:5], tensor[5:])]
        pieces = [piece for host, _ in parts for piece in host.pieces]
        back, copy = copies.to_device(pieces, torch.device("cpu"))
        copy()
        assert all(piece.data_ptr() != tensor.data_ptr() for piece in pieces)
        assert torch.equal(back, tensor)


def test_what_an_abandoned_step_left_in_host_memory_is_free_in_the_next():
    copies = ThreadHostCopies()
    for _ in range(3):
        copies.begin_step()
        copies.to_host(torch.zeros(7, 3))
    assert copies.arena.peak_live_bytes == copies.arena.live_bytes == 512
