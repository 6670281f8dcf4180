"""TRL 1.16: the token-budgeted micro-batches of `AsyncGRPOTrainer`, divided by our search.

    from evenload.seams import trl as seam
    seam.install()
    AsyncGRPOTrainer(model, args=AsyncGRPOConfig(token_budget=16_384, gradient_accumulation_steps=8), ...).train()

What it changes: `TokenBudgetBatcher` drops samples as they come into the row of a process that has the least attention,
and closes a micro-batch when one fits nowhere. Here its micro-batches of one optimizer step are taken together, and
their samples divided anew into as many micro-batches of as many rows. Steps hold the same samples; no row is empty or
above the budget; samples of a prompt that TRL put into one row stay in one, and share its tokens. TRL weighs a sample
by the tokens of its micro-batch, so advantages are scaled by what that changes: losses and gradients of a step are
those without the seam, but for a router's balancing loss; logged means are of other micro-batches. All samples of a
step are taken from the queue before its first micro-batch is, which is one micro-batch ahead of its use: they are up to
one step older than their staleness says. The first process makes rows twice, a few microseconds a token. Where TRL's
own division is predicted to be as fast, it stays.

`SFTTrainer` and others that sample by `train_sampling_strategy` have `seams.transformers`, with `padding_free=True`.
`TokenBudgetBatcher` of `async_distillation` is left alone: its loss has no advantage to scale. `integrations.trainer`
reads documents from files, which rollouts are not.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.errors import InfeasiblePlanError
from evenload.plan.micro_batches import Cost, micro_batches
from evenload.seams.methods import Method, Replaced, require_release

RELEASES = ("1.16",)

Rows = list[Any]
"""A micro-batch: TRL's `TreeRow` for every process."""


def install(cost: Cost | None = None) -> Replaced:
    """Divide the steps of every `AsyncGRPOTrainer` whose loader is made from now on; returns what undoes it.

    Args:
        cost: predicts seconds; None = `Cost()`.

    Raises:
        MissingPackageError: TRL is not installed.
        ConfigError: another release of TRL, or the seam is installed already.
    """
    require_release("trl", RELEASES)
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, TokenBudgetBatcher

    steps: list[int] = []  # micro-batches of a step of the trainer whose loader is being made

    def loading(theirs: Callable) -> Callable:
        def get_train_dataloader(self: Any) -> Any:
            steps.append(self.args.gradient_accumulation_steps)
            try:
                return theirs(self)
            finally:
                steps.pop()

        return get_train_dataloader

    def counting(theirs: Callable) -> Callable:
        def __init__(self: Any, dataset: Any, num_processes: int, token_budget: int, metrics: Any) -> None:
            theirs(self, dataset, num_processes, token_budget, metrics)
            self.micro_batches_of_step = steps[-1] if steps else 1

        return __init__

    def dividing(theirs: Callable) -> Callable:
        def __iter__(self: Any) -> Iterator[Rows]:
            batches, count = theirs(self), getattr(self, "micro_batches_of_step", 1)
            while step := list(itertools.islice(batches, count)):
                yield from divided(step, self.token_budget, cost or Cost())

        return __iter__

    arguments = ("self", "dataset", "num_processes", "token_budget", "metrics")
    return Replaced(
        Method(AsyncGRPOTrainer, "get_train_dataloader", ("self",), loading),
        Method(TokenBudgetBatcher, "__init__", arguments, counting),
        Method(TokenBudgetBatcher, "__iter__", ("self",), dividing),
    )


def divided(step: list[Rows], token_budget: int, cost: Cost) -> list[Rows]:
    """Return the samples of these micro-batches in as many others, or the same where those would not be faster."""
    kind, num_rows = type(step[0][0]), len(step[0])
    shares, weights = [], []  # samples of one prompt in one row; the tokens that their loss is divided by
    for rows in step:
        for row in rows:
            of_prompt: dict[Any, list] = {}
            for sample in row.samples:
                of_prompt.setdefault(sample["group_id"], []).append(sample)
            shares += of_prompt.values()
            weights += [_weight(rows)] * len(of_prompt)
    sizes = [_size(share) for share in shares]
    # Of tokens that samples share each is computed once, but all their losses count against the budget.
    tokens = [max(size.tokens, size.trained) for size in sizes]
    rules: Any = {"work_s": [size.work_s(cost) for size in sizes], "cost": cost, "count": len(step), "no_empty": True}
    try:
        made = micro_batches(tokens, num_rows, token_budget, **rules)
    except InfeasiblePlanError:
        return step  # rows that also share tokens of different prompts may hold more than can be divided anew
    theirs_s = sum(max(_size_of(row).work_s(cost) for row in rows) + cost.micro_batch_s for rows in step)
    if made.step_s >= theirs_s:
        return step
    new = [
        [_filled(kind(), itertools.chain(*(shares[at] for at in rank[index]))) for rank in made.ranks]
        for index in range(len(step))
    ]
    by_sample = {id(sample): weight for share, weight in zip(shares, weights, strict=True) for sample in share}
    for rows in new:
        weight = _weight(rows)
        for row in rows:
            row.samples = [
                sample | {"advantage": sample["advantage"] * weight / by_sample[id(sample)]} for sample in row.samples
            ]
    return new


class _Size(NamedTuple):
    """Hold a row's distinct tokens, its trained ones of all samples, and its pairs of queries and keys."""

    tokens: int
    trained: int
    pairs: int

    def work_s(self, cost: Cost) -> float:
        # A document of L tokens has L · (L + 1) / 2 pairs.
        return cost.linear_s * self.tokens + cost.quadratic_s * (2 * self.pairs - self.tokens)


def _size(share: list[dict[str, Any]]) -> _Size:
    """Return what TRL's row of these samples would hold, without making it, which takes a microsecond a token."""
    tokens, pairs, before = 0, 0, np.empty(0, np.int64)
    for row in map(np.asarray, sorted(sample["input_ids"].tolist() for sample in share)):
        shared = _num_shared(before, row)
        tokens += len(row) - shared
        pairs += (len(row) * (len(row) + 1) - shared * (shared + 1)) // 2
        before = row
    return _Size(tokens, sum(int(sample["completion_mask"].sum()) for sample in share), pairs)


def _num_shared(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return how many first tokens two samples share in a row of TRL: those whose next token is the same too."""
    if np.array_equal(one, other):
        return len(one)
    common = min(len(one), len(other))
    differs = np.flatnonzero(one[:common] != other[:common])
    return max(0, int(differs[0]) - 1 if len(differs) else common - 1)


def _size_of(row: Any) -> _Size:
    return _Size(len(row.tokens), row.trained, row.load)


def _filled(row: Any, samples: Iterable[dict[str, Any]]) -> Any:
    for sample in samples:
        row.add(sample)
    return row


def _weight(rows: Rows) -> float:
    """Return what TRL divides the losses of a micro-batch by: its trained tokens a process, at least 1."""
    trained = sum(int(sample["completion_mask"][1:].sum()) for row in rows for sample in row.samples)
    return max(trained / len(rows), 1.0)
