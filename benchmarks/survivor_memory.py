"""What it costs a step that ranks keep it for survivors (`train.survivor_memory`): one copy of a shard.

Weights and moments of 8 M fp32 parameters, the shard of one rank, on one thread: copied into shared memory, beside the
optimizer's update of the same shard and beside matrix products, in the same round. A rank computes 6 FLOPs a parameter
and token, so the copy takes as long as some tokens of its replica, whatever the model: divided by dp x cp, because that
is what a shard is.

    python benchmarks/survivor_memory.py [--quick] [--append]
"""

import statistics

import torch

from evenload.runtime.checkpoint.kept_steps import KeptSteps
from evenload.runtime.checkpoint.pieces import TensorPieces, pieces_of_range
from evenload.runtime.checkpoint.shared_directory import shared_directory
from results import Row, interleaved_seconds, median_ratio, run_benchmark

PARAMETERS, MATRICES, WIDTH = 8_000_000, 8, 1_000
TOKENS, HIDDEN = 512, 1_024
FLOPS_PER_PARAMETER_AND_TOKEN = 6
REPEATS, QUICK_REPEATS = 60, 5


def measure(quick: bool) -> list[Row]:
    """Ratios of the copy to the update, and to the products of a token."""
    torch.set_num_threads(1)
    weights = torch.randn(PARAMETERS)
    weights.grad = torch.randn(PARAMETERS)
    optimizer = torch.optim.AdamW([weights], lr=1e-3, fused=True)
    optimizer.step()
    state = optimizer.state[weights]
    kinds = {"weights": weights, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    left, right = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    with shared_directory() as folder:
        kept, steps = KeptSteps(folder, 0, 0, 1), iter(range(10**6))
        seconds = interleaved_seconds(
            {
                "copy": lambda: kept.write(next(steps), pieces_of(kinds)),
                "update": optimizer.step,
                "products": lambda: left @ right,
            },
            QUICK_REPEATS if quick else REPEATS,
        )
    products_flops = 2 * TOKENS * HIDDEN * HIDDEN
    token_flops = FLOPS_PER_PARAMETER_AND_TOKEN * PARAMETERS
    tokens = median_ratio(seconds["copy"], seconds["products"]) * products_flops / token_flops
    case = f"shard of {PARAMETERS / 1e6:.0f} M fp32 parameters, 1 thread"
    update = f"AdamW of the same shard {statistics.median(seconds['update']) * 1e3:.3g} ms"
    return [
        Row("survivor_memory", case, "copy a step", median_ratio(seconds["copy"], seconds["update"]), "x", update),
        Row("survivor_memory", case, "copy a step", tokens, "tokens", "matrix products of a token, dp x cp = 1"),
    ]


def pieces_of(kinds: dict[str, torch.Tensor]) -> dict[str, TensorPieces]:
    """As a rank of matrices that it owns whole."""
    size, found = PARAMETERS // MATRICES, {}
    for kind, flat in kinds.items():
        for number, part in enumerate(flat.detach().split(size)):
            found[f"{kind}.{number}"] = TensorPieces(*pieces_of_range(part, 0, (size // WIDTH, WIDTH), None))
    return found


if __name__ == "__main__":
    run_benchmark(measure, __doc__ or "")
