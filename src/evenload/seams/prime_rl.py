"""prime-rl, as of August 2026: the micro-batches of every trainer.

In the orchestrator's process, before it packs:

    from evenload import Cost
    from evenload.seams import prime_rl

    prime_rl.install(cost=Cost(linear_s=9e-6, quadratic_s=4e-10, micro_batch_s=6e-3))

What changes: micro-batches are chosen by the time they take instead of first fit, and for all trainers together, so
that heavy ones meet heavy ones. Samples with images train apart from those without, whereas prime-rl fills room beside
images with text. What stays: samples are cut to `seq_len` and micro-batches padded as before; all trainers have equally
many, of one modality at every index; copies that train nothing make up for samples that are fewer than trainers.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from evenload.errors import InfeasiblePlanError
from evenload.planning.micro_batches import Cost, Rules, micro_batches
from evenload.seams.replacing import Replaced, module_of

_COST = Cost()
_MODULE, _TESTED = "prime_rl.trainer.batch", "prime-rl 559b4477"
_USED = ("prepare_sample", "pad_micro_batch", "_MicroBatchBin", "_materialize_bin", "_make_dummy_batch")
_USED += ("_assert_token_arrays_aligned",)


def install(cost: Cost = _COST) -> Replaced:
    """Put `prepare_batch` in the place of prime-rl's.

    Raises:
        MissingPackageError: prime-rl is not installed.
        ConfigError: its function takes other arguments than the tested one, or is replaced already.
    """
    return Replaced(_TESTED, (module_of(_MODULE, _TESTED, _USED), partial(prepare_batch, cost=cost)))


def prepare_batch(
    rollouts: list[Any],
    seq_len: int,
    num_train_workers: int,
    bin_cost: Callable[[Sequence[int]], int],
    pad_to_multiple_of: int = 1,
    *,
    cost: Cost = _COST,
) -> list[list[Any]]:
    """Return prime-rl's micro-batches of every trainer.

    `bin_cost` decides what sequences cost, in any unit; `micro_batch_s` over `linear_s` of `cost` how many tokens a
    micro-batch costs besides.

    Raises:
        ValueError: prime-rl refuses a rollout.
    """
    theirs = import_module(_MODULE)

    def built(samples: list[Any]) -> Any:
        content = theirs._MicroBatchBin(samples, sum(len(sample.input_ids) for sample in samples))
        made = theirs.pad_micro_batch(theirs._materialize_bin(content), pad_to_multiple_of)
        theirs._assert_token_arrays_aligned(made)
        return made

    workers: list[list[Any]] = [[] for _ in range(num_train_workers)]
    classes: dict[Hashable, list[Any]] = {}
    for sample in (theirs.prepare_sample(rollout, seq_len) for rollout in rollouts):
        classes.setdefault(_what_packs(sample), []).append(sample)
    for samples in classes.values():
        lengths = [len(sample.input_ids) for sample in samples]
        work_s = [cost.linear_s * bin_cost([length]) / bin_cost([1]) for length in lengths]
        rules: Rules = {"work_s": work_s, "cost": cost}
        try:
            made = micro_batches(lengths, num_train_workers, seq_len, no_empty=True, **rules)
        except InfeasiblePlanError:  # too few samples for equally many micro-batches: copies make up for the others
            made = micro_batches(lengths, num_train_workers, seq_len, **rules)
        for at_index in zip(*made.ranks, strict=True):
            filled = [built([samples[one] for one in members]) if members else None for members in at_index]
            shortest = min((one for one in filled if one), key=lambda one: len(one.input_ids))
            for worker, micro_batch in zip(workers, filled, strict=True):
                worker.append(micro_batch or theirs._make_dummy_batch(shortest))
    return workers


def _what_packs(sample: Any) -> Hashable:
    """Return what samples of one micro-batch have in common: routed experts, and images of the same arrays or none."""
    images = sorted((sample.mm_kwargs or {}).items())
    return sample.routed_experts is None, tuple((name, one.dtype, tuple(one.shape[1:])) for name, one in images)
