"""Bytes that layers really leave for their backward, by activation policy, and what an allocator takes on top."""

from pathlib import Path

import torch

from evenload.calibrate.pack_clock import PackClock
from evenload.calibrate.rounds import Packs, num_tokens_of, pack_tokens, time_round
from evenload.cost.activation import POLICIES, activation_bytes_per_token, kv_bytes_per_token
from evenload.errors import EvenloadError
from evenload.runtime.device import forget_peak_bytes
from evenload.runtime.replay.held_bytes import STORE_KINDS
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.types.model import ModelSpec
from evenload.types.token_range import Range

_TOKENS = 256


def activation_bytes(stage: PipelineStage, model: ModelSpec, tp: int) -> dict[str, int]:
    """Bytes that one token leaves on one layer of the device under each policy, without keys and values.

    Args:
        model: whose memory is predicted; layers of the stage are its.

    Raises:
        EvenloadError: the cost model says something else, or something else of keys and values.
    """
    counted: dict[str, int] = {}
    rows = _TOKENS * len(stage.model.layers)
    for policy in POLICIES:
        ranges = (Range(0, 0, _TOKENS),)
        store = ActivationStore({0: _TOKENS}, (ranges,), policies={0: policy}, shard=stage.row_shard)
        stage.begin_step({0: _TOKENS})
        hidden = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype, device=stage.device)
        stage.forward_layers(pack_tokens(ranges, stage), hidden, store)
        held = store.held.held_by_kind
        of_keys = held["keys_and_values"]
        # Of offloaded tensors nothing stays on the device; what is there for a moment counts as buffers.
        kept = sum(held[kind] for kind in STORE_KINDS if kind == f"activations_{policy}")
        for what, found, said in (
            (f"activations under policy {policy}", kept, activation_bytes_per_token(model, policy, tp)),
            ("keys and values", of_keys, kv_bytes_per_token(model, tp)),
        ):
            if found != said * rows:
                raise EvenloadError(
                    f"a token of model {model.name} leaves {found / rows:,.1f} bytes of {what} on a layer, and the "
                    f"cost model says {said:,}; predicted memory would be wrong: please report it"
                )
        counted[policy] = kept // rows
    return counted


def held_and_counted(stage: PipelineStage, packs: Packs, before_bytes: int, static_bytes: int) -> tuple[int, int]:
    """Memory held at the peak of one round, and what its tensors needed: of a GPU reserved and allocated; of a CPU what
    the process grew by (0 where the system does not say) and what is counted, without temporary tensors of a layer.

    Args:
        before_bytes: `resident_bytes` before the model was made.
        static_bytes: of weights and gradients.
    """
    forget_peak_bytes(stage.device)
    if stage.device.type == "cuda":
        for _ in time_round(stage, packs, PackClock(stage.device)):
            pass
        return torch.cuda.max_memory_reserved(stage.device), torch.cuda.max_memory_allocated(stage.device)
    store = ActivationStore(num_tokens_of(packs), packs, shard=stage.row_shard)
    stage.begin_step(num_tokens_of(packs))
    for ranges in packs:
        hidden = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype)
        stage.forward_layers(pack_tokens(ranges, stage), hidden, store)
    grown_bytes = resident_bytes() - before_bytes if before_bytes else 0
    return max(0, grown_bytes), static_bytes + store.held.held_bytes


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    for line in status.read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
