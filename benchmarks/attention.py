"""Range attention on the CPU: one document as slices against its keys, compared with one causal call, one thread.

A slice with a prefix is two kernel calls merged through their log-sum-exps (attention/cpu_flash.py), and finer
slices give the kernel fewer query rows at a time. Time is forward plus backward of the whole document.

    python benchmarks/attention.py [--quick] [--append]
"""

import itertools

import torch

from evenload.attention.cpu_flash import CpuFlashAttention
from evenload.attention.range_attention import KeyRange, Scoring
from results import Row, interleaved_seconds, median_ratio, run_benchmark

TOKENS, QUICK_TOKENS = 8192, 2048
HEADS, GROUPS, HEAD_DIM = 4, 2, 64
NUM_SLICES = (2, 5, 8, 32)
REPEATS, QUICK_REPEATS = 7, 2


def attend(tensors: tuple[torch.Tensor, ...], num_slices: int) -> None:
    """Forward and backward of equal slices, last slice first in backward."""
    backend = CpuFlashAttention()
    q, k, v, grad = tensors
    edges = torch.linspace(0, len(q), num_slices + 1).round().int().tolist()
    slices = list(itertools.pairwise(edges))
    seen = [[KeyRange(slice(0, b - a), k[:b], v[:b])] for a, b in slices]
    results = [backend.forward(q[a:b], ranges, Scoring(0.125)) for (a, b), ranges in zip(slices, seen, strict=True)]
    for (a, b), ranges, (out, lse) in zip(reversed(slices), reversed(seen), reversed(results), strict=True):
        next(backend.backward(grad[a:b], q[a:b], ranges, out, lse, Scoring(0.125)))


def measure(quick: bool) -> list[Row]:
    """Several numbers of slices."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = QUICK_TOKENS if quick else TOKENS
    tensors = tuple(torch.randn(tokens, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS, HEADS))
    variants = {str(count): (lambda n=count: attend(tensors, n)) for count in (1, *NUM_SLICES)}
    seconds = interleaved_seconds(variants, QUICK_REPEATS if quick else REPEATS)
    return [
        Row("attention", f"{count} slices of one document of {tokens:,} tokens", "time",
            median_ratio(seconds[str(count)], seconds["1"]), "x", "one causal call")
        for count in NUM_SLICES
    ]  # fmt: skip


if __name__ == "__main__":
    run_benchmark(measure, "slices against one causal call")
