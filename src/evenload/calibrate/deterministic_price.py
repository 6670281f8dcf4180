"""What `train.deterministic` costs on this device: attention's backward in one order of summation against any order.

The other kernels that change (sums of gradients of embeddings) take a small part of a step. Price: two dozen backwards
of one document of 4,096 tokens.
"""

import statistics

from evenload.calibrate.kernel_timings import AttentionWork
from evenload.calibrate.repeats import timed
from evenload.cost.activation import local_kv_heads
from evenload.runtime.device import use_deterministic_kernels
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.model import ModelSpec

_ROWS = 4096
_REPEATS = 11


def deterministic_price(stage: PipelineStage, model: ModelSpec, tp: int, rows: int = _ROWS) -> float:
    """Seconds in one order / in any order, medians of interleaved repeats. Leaves deterministic kernels switched on."""
    heads, kv_heads = model.num_heads // tp, local_kv_heads(model, tp)
    work = AttentionWork(stage.backend, rows, 0, heads, kv_heads, model.head_dim, stage.device, stage.dtype)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(_REPEATS + 1):
        for wanted in seconds:
            use_deterministic_kernels(wanted)
            took_s = timed(work.backward, stage.device)
            if repeat:  # the first one warms up
                seconds[wanted].append(took_s)
    return statistics.median(seconds[True]) / statistics.median(seconds[False])
