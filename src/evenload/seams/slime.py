"""slime and miles, as of August 2026: which samples every rank trains in which micro-batch.

In the process of the rollout manager, say in the module that `--rollout-function-path` names:

    from evenload.seams import slime

    slime.install(cost="llama3-8b")  # miles: slime.install("miles.utils.dp_schedule", cost="llama3-8b")

What changes: micro-batches are chosen by the time they take instead of first fit, and for all ranks together. Ranks get
equal works; under expert parallelism, where they wait for each other at every micro-batch, heavy ones meet heavy ones.
`--balance-data` and `--balance-by-flops` have no say any more; with the latter, too, no micro-batch exceeds
`--max-tokens-per-gpu`. What stays: the samples of every step, equally many micro-batches on every rank, a multiple of
what virtual pipeline stages need, none empty, a longer sample alone.
"""

from functools import partial
from typing import Any

import numpy as np

from evenload.errors import ConfigError
from evenload.planning.micro_batches import Cost, Rules, micro_batches
from evenload.seams.replacing import Replaced, module_of

_COST = Cost()
_TESTED = "slime 624b824a or miles 31f1ca96"


def install(module: str = "slime.utils.dp_schedule", cost: Cost | str = _COST) -> Replaced:
    """Put `build_dp_schedule` in the place of slime's, or of miles's with `module="miles.utils.dp_schedule"`. Raises
    `MissingPackageError` and `ConfigError` as `module_of` and `Replaced`."""
    return Replaced(_TESTED, (module_of(module, _TESTED), partial(build_dp_schedule, cost=cost)))


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, Any],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
    cost: Cost | str = _COST,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Divide samples among ranks and micro-batches, step by step.

    Of `args` it reads `use_dynamic_batch_size` with `max_tokens_per_gpu`, or `micro_batch_size`; where there are any,
    `expert_model_parallel_size` and `allow_partial_train_step` (miles), which makes rollouts left over a last smaller
    step.

    Returns:
        The samples of every rank; its micro-batches, as positions among these; the number of micro-batches of every
        step; and its number of rollouts.

    Raises:
        ConfigError: there is no whole step, or samples of a fixed number fill no equal shares.
        InfeasiblePlanError: a step has too few samples for all ranks.
    """
    ranks, stages = train_parallel_config["dp_size"], train_parallel_config["vpp_size"] or 1
    multiple = train_parallel_config["microbatch_group_size_per_vp_stage"] if stages > 1 else 1
    partitions: list[list[int]] = [[] for _ in range(ranks)]
    positions: list[list[list[int]]] = [[] for _ in range(ranks)]
    counts, sizes = [], []
    rules: Rules = {"cost": cost, "count_multiple": multiple, "no_empty": True, "too_long": "alone"}
    limit = args.max_tokens_per_gpu * train_parallel_config["cp_size"] if args.use_dynamic_batch_size else None
    waits_once = limit is not None and getattr(args, "expert_model_parallel_size", 1) == 1
    for rollouts in _steps(args, rollout_indices, global_batch_size, ranks):
        samples = np.array([sample for rollout in rollouts for sample in rollout])
        lengths = np.asarray(total_lengths, np.int64)[samples]
        if limit is None:
            num_micro_batches = -(-len(samples) // args.micro_batch_size)
            if num_micro_batches % (ranks * multiple):
                raise ConfigError(
                    f"{len(samples)} samples are {num_micro_batches} micro-batches of micro_batch_size = "
                    f"{args.micro_batch_size}, must be a multiple of {ranks * multiple} (ranks times those of virtual "
                    "stages); change it or the number of samples"
                )
            rules |= {"count": num_micro_batches // ranks, "max_documents": args.micro_batch_size}
        made = micro_batches(lengths, ranks, limit, waits="step" if waits_once else "micro_batch", **rules)
        counts.append(made.seconds.shape[1])
        sizes.append(len(rollouts))
        for partition, own, micro_batches_of_rank in zip(partitions, positions, made.ranks, strict=True):
            for members in micro_batches_of_rank:
                own.append(list(range(len(partition), len(partition) + len(members))))
                partition += samples[members].tolist()
    return partitions, positions, counts, sizes


def _steps(args: Any, rollout_indices: list[int], size: int, ranks: int) -> list[list[list[int]]]:
    """Return the samples of every rollout of every step."""
    members: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        members.setdefault(rollout, []).append(sample)
    rollouts = list(members.values())
    if len(rollouts) < size:
        raise ConfigError(f"global_batch_size is {size}, there are {len(rollouts)} rollouts; lower it, or sample more")
    steps = [rollouts[first : first + size] for first in range(0, len(rollouts), size)]
    is_partial_wanted = getattr(args, "allow_partial_train_step", False) and args.use_dynamic_batch_size
    if len(steps[-1]) < size and not (is_partial_wanted and sum(map(len, steps[-1])) >= ranks):
        steps.pop()
    return steps
