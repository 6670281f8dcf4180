"""Time kernels apart from packs through layers, and count the bytes that layers keep.

`..._work` functions make their tensors once and return a call to time again and again. Weight gradients (W of a split
backward) are timed on a pack of short documents whose backward defers them.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from evenload.calibrate.fit import median_seconds
from evenload.calibrate.rounds import PackClock, Packs, num_tokens_of, pack_tokens, time_round, whole
from evenload.cost.layer_counts import POLICIES, activation_bytes_per_token, kv_bytes_per_token
from evenload.errors import EvenloadError
from evenload.runtime.device import reset_peak_bytes, resident_bytes
from evenload.runtime.replay.head import Around
from evenload.runtime.replay.held_bytes import STORE_KINDS
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from evenload.types.document import ActivationPolicy, Range
from evenload.types.model import ModelSpec

HEAD_ROWS = (16, 64, 256, 512, 1024, 2048)
QUICK_HEAD_ROWS = (16, 64, 512, 2048)
_OPTIMIZER_PARAMETERS = 1 << 22  # more than caches hold, as in a step
_COPIED_BYTES = 1 << 25


def head_rows(model: ModelSpec, tp: int, most_flops: float) -> list[int]:
    row_flops = 6.0 * model.embedding_parameters / tp
    return [rows for rows in HEAD_ROWS if rows in HEAD_ROWS[:2] or rows * row_flops <= most_flops]


def head_work(
    stage: PipelineStage, vocab_size: int, rows: Iterable[int] = QUICK_HEAD_ROWS
) -> Mapping[int, Callable[[], object]]:
    """Make work of final norm, logits, loss and their gradient, by rows. Last stage only."""

    def of(rows: int) -> Callable[[], object]:
        ranges = (Range(0, 0, rows),)
        hidden = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype, device=stage.device)
        targets = torch.randint(0, vocab_size, (rows,), device=stage.device)
        pack = replace(pack_tokens(ranges, stage), targets=targets)
        return lambda: stage.head(pack, hidden, 1)

    return {count: of(count) for count in rows}


def embedding_work(stage: PipelineStage, vocab_size: int, rows: int) -> Callable[[], object]:
    """Make work of embedding rows and adding their gradients; first stage without tensor parallelism only."""
    known = getattr(stage.model.config, "max_position_embeddings", None) or rows
    token_ids = torch.randint(0, vocab_size, (rows,), device=stage.device)
    positions = torch.arange(rows, device=stage.device) % known
    grad = torch.randn(1, rows, stage.hidden_size, dtype=stage.dtype, device=stage.device)

    def work() -> None:
        with torch.enable_grad(), Around(stage.model, None):
            hidden, _ = stage.model.calls(positions, token_ids, grad[0])
        if hidden.requires_grad:
            hidden.backward(grad)

    return work


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of matrix products, which MFU is a share of."""
    # A GPU in the precision that it computes in, with matrices that keep it busy.
    n, dtype = (8192, dtype) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * n**3 / median_seconds(lambda: a @ b, device)


def optimizer_work(data_size: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """Make work of a step's gradients and weights between transfers; also return the parameters of a rank's shard."""
    count = _OPTIMIZER_PARAMETERS
    gradients = torch.zeros(data_size * count, device=device)
    parameter, shard = torch.zeros(count, device=device), gradients[:count]
    parameter.grad = shard
    adamw = torch.optim.AdamW([parameter], fused=True)

    def update() -> None:
        gradients.zero_()
        torch.linalg.vector_norm(shard, dtype=torch.float64)
        shard.mul_(0.5)
        adamw.step()
        parameter.clone()

    return update, count


def copy_work(model: ModelSpec, tp: int, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    width = max((one.local_key_width(tp) for one in model.attentions), default=model.hidden_size)
    rows = max(1, _COPIED_BYTES // (width * dtype.itemsize))
    gathered = torch.randn(rows, width, device=device, dtype=dtype)
    # The halves swap, so every byte is read and written once.
    places = torch.arange(rows, device=device).roll(rows // 2)
    return lambda: gathered[places], rows * width * dtype.itemsize


TOKENS = 1024
_DOCUMENT_TOKENS = 128


def weight_seconds(stage: PipelineStage, clock: PackClock, repeats: int) -> float:
    seconds = [time_weights(stage, clock) for _ in range(1 + repeats)][1:]
    return statistics.median(seconds) / len(stage.model.layers)


def time_weights(stage: PipelineStage, clock: PackClock) -> float:
    """Time weight gradients once, in seconds of all layers. Adds to gradients. Collective with tensor parallelism."""
    (ranges,) = packs = whole(*[_DOCUMENT_TOKENS] * (TOKENS // _DOCUMENT_TOKENS))
    store = _forward(stage, packs)
    grad = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype, device=stage.device)
    stage.backward_layers(pack_tokens(ranges, stage), grad, store, store.defer_weights(0))
    return clock.time("weight gradients", functools.partial(store.add_deferred_weights, 0)).device_s


def _forward(
    stage: PipelineStage, packs: Packs, policies: Mapping[int, ActivationPolicy] | None = None
) -> ActivationStore:
    num_tokens = num_tokens_of(packs)
    stage.begin_step(num_tokens)
    store = ActivationStore(num_tokens, packs, policies=policies, shard=stage.row_shard)
    for ranges in packs:
        hidden = torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=stage.dtype, device=stage.device)
        stage.forward_layers(pack_tokens(ranges, stage), hidden, store)
    return store


_TOKENS = 256


def activation_bytes(stage: PipelineStage, model: ModelSpec, tp: int) -> dict[str, int]:
    """Count the bytes that one layer keeps of one token on the device under each policy, without K and V; raise
    `EvenloadError` where the cost model predicts others, also of K and V."""
    counted: dict[str, int] = {}
    layers = list(stage.model.layers)
    kinds, rows = [model.layers[layer] for layer in layers], _TOKENS * len(layers)
    for policy in POLICIES:
        held = _forward(stage, whole(_TOKENS), {0: policy}).held.held_by_kind
        # Offloaded tensors that are on the device for a moment count as buffers.
        kept = sum(held[kind] for kind in STORE_KINDS if kind == f"activations_{policy}")
        for what, held_bytes, predicted in (
            (f"activations under policy {policy}", kept, activation_bytes_per_token(model, policy, tp)),
            ("keys and values", held["keys_and_values"], kv_bytes_per_token(model, tp)),
        ):
            if held_bytes != (expected := _TOKENS * int(predicted[kinds].sum())):
                raise EvenloadError(
                    f"a token of model {model.name} leaves {held_bytes / rows:,.1f} bytes of {what} on a layer, and "
                    f"the cost model says {expected / rows:,.1f}; predicted memory would be wrong: please report it"
                )
        counted[policy] = kept // rows
    return counted


def held_and_counted(stage: PipelineStage, packs: Packs, before_bytes: int, static_bytes: int) -> tuple[int, int]:
    """Return the bytes held at the peak of one round, and those its tensors needed: on a GPU reserved and allocated, on
    a CPU the growth of the process since `before_bytes` were resident (0 = not known) and the counted bytes, with
    `static_bytes` of weights and gradients, without temporary tensors."""
    reset_peak_bytes(stage.device)
    if stage.device.type == "cuda":
        list(time_round(stage, packs, PackClock(stage.device)))
        return torch.cuda.max_memory_reserved(stage.device), torch.cuda.max_memory_allocated(stage.device)
    store = _forward(stage, packs)
    grown_bytes = (resident_bytes() or 0) - before_bytes if before_bytes else 0
    return max(0, grown_bytes), static_bytes + store.held.held_bytes
