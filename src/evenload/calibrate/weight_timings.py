"""What W of a split backward takes: the weight gradients of a pack's linears, put off and then added.

By count of products W is half of the linears' backward. By the clock it is less: the elementwise work of a layer is in
the same seconds a token, and stays in I. So a pack of short documents goes forward and backward with its weight
gradients put off, as `PipelineStage` does it in a pipeline, and what adding them takes is timed.

Price: four forwards and backwards of 1,024 tokens.
"""

import functools
import statistics

import torch

from evenload.calibrate.pack_clock import PackClock
from evenload.calibrate.rounds import num_tokens_of, pack_tokens, whole
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore

TOKENS = 1024
_DOCUMENT_TOKENS = 128
_REPEATS = 3


def weight_seconds(stage: PipelineStage, clock: PackClock) -> float:
    """Of a pack of `TOKENS` on one layer; the median of some repeats, after one that does not count. As
    `time_weights`."""
    found = [time_weights(stage, clock) for _ in range(1 + _REPEATS)][1:]
    return statistics.median(found) / len(stage.model.layers)


def time_weights(stage: PipelineStage, clock: PackClock) -> float:
    """Once, seconds of all layers. Adds to gradients. Collective over ranks that share matrices."""
    (ranges,) = packs = whole(*[_DOCUMENT_TOKENS] * (TOKENS // _DOCUMENT_TOKENS))
    num_tokens = num_tokens_of(packs)
    stage.begin_step(num_tokens)
    store = ActivationStore(num_tokens, packs, shard=stage.row_shard)
    pack, rows = pack_tokens(ranges, stage), stage.num_rows(ranges)
    hidden, grad = torch.randn(2, rows, stage.hidden_size, dtype=stage.dtype, device=stage.device)
    stage.forward_layers(pack, hidden, store)
    stage.backward_layers(pack, grad, store, store.defer_weights(0))
    return clock.time("weight gradients", functools.partial(store.add_deferred_weights, 0)).device_s
