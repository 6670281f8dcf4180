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
step leave the queue before its first micro-batch does: they are up to one step older than their staleness says. The
first process makes rows twice, a microsecond a token. Where TRL's own division is predicted to be as fast, it stays.

`async_distillation` is left alone: its loss has no advantage to scale.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from evenload.errors import InfeasiblePlanError
from evenload.planning.micro_batches import Cost, micro_batches
from evenload.seams.replacing import Replaced, require_release

_COST = Cost()

Rows = list[Any]
"""A micro-batch: TRL's `TreeRow` for every process."""


def install(cost: Cost = _COST) -> Replaced:
    """Divide the steps of every `AsyncGRPOTrainer` whose loader is made from now on; returns what undoes it. Raises
    `MissingPackageError` and `ConfigError` as `require_release` and `Replaced`."""
    tested = require_release("trl", ("1.16",))
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, TokenBudgetBatcher

    their_loader, their_iter = AsyncGRPOTrainer.get_train_dataloader, TokenBudgetBatcher.__iter__

    def get_train_dataloader(self: Any) -> Any:
        loader: Any = their_loader(self)
        loader.dataset.micro_batches_of_step = self.args.gradient_accumulation_steps
        return loader

    def __iter__(self: Any) -> Iterator[Rows]:
        batches, count = their_iter(self), getattr(self, "micro_batches_of_step", 1)
        while step := list(islice(batches, count)):
            yield from divided(step, self.token_budget, cost)

    return Replaced(tested, (AsyncGRPOTrainer, get_train_dataloader), (TokenBudgetBatcher, __iter__))


def divided(step: list[Rows], token_budget: int, cost: Cost) -> list[Rows]:
    """Return the samples of these micro-batches in as many others, or the same where those would not be faster."""
    shares: list[list[dict[str, Any]]] = []  # samples of one prompt in one row, advantages over the divisor of losses
    for rows in step:
        divisor = _divisor([row.samples for row in rows])
        for row in rows:
            of_prompt: dict[Any, list] = {}
            for sample in row.samples:
                part = sample | {"advantage": sample["advantage"] / divisor}
                of_prompt.setdefault(sample["group_id"], []).append(part)
            shares += of_prompt.values()
    sizes = [_size(share) for share in shares]
    # Of tokens that samples share each is computed once, but all their losses count against the budget.
    held = [max(tokens, trained) for tokens, trained, _ in sizes]
    works = [_work_s(tokens, pairs, cost) for tokens, _, pairs in sizes]
    try:
        made = micro_batches(held, len(step[0]), token_budget, work_s=works, cost=cost, count=len(step), no_empty=True)
    except InfeasiblePlanError:
        return step  # rows that also share tokens of different prompts may hold more than can be divided anew
    longest_s = [max(_work_s(len(row.tokens), row.load, cost) for row in rows) for rows in step]
    if made.step_s >= sum(longest_s) + len(step) * cost.micro_batch_s:
        return step
    return [
        _filled(type(step[0][0]), [[sample for at in members for sample in shares[at]] for members in at_index])
        for at_index in zip(*made.ranks, strict=True)
    ]


def _filled(kind: type, samples_of_row: list[list[dict[str, Any]]]) -> Rows:
    """Return TRL's rows of these samples, whose advantages lack what TRL divides their losses by."""
    divisor, rows = _divisor(samples_of_row), []
    for samples in samples_of_row:
        rows.append(kind())
        for sample in samples:
            rows[-1].add(sample | {"advantage": sample["advantage"] * divisor})
    return rows


def _divisor(samples_of_row: list[list[dict[str, Any]]]) -> float:
    """Return what TRL divides the losses of a micro-batch by: its trained tokens a process, at least 1."""
    trained = sum(int(sample["completion_mask"][1:].sum()) for samples in samples_of_row for sample in samples)
    return max(trained / len(samples_of_row), 1.0)


def _size(share: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Return the distinct tokens, the trained ones of all samples, and the pairs of queries and keys of TRL's row of
    these samples, without making it, which takes a microsecond a token."""
    tokens, pairs, before = 0, 0, []
    for row in sorted(sample["input_ids"].tolist() for sample in share):
        ends = (at for at, (one, other) in enumerate(zip(before, row, strict=False)) if one != other)
        # Tokens are shared whose next one is the same too.
        shared = len(row) if row == before else max(0, next(ends, min(len(before), len(row))) - 1)
        tokens += len(row) - shared
        pairs += (len(row) * (len(row) + 1) - shared * (shared + 1)) // 2
        before = row
    return tokens, sum(int(sample["completion_mask"].sum()) for sample in share), pairs


def _work_s(tokens: int, pairs: int, cost: Cost) -> float:
    # A document of L tokens has L · (L + 1) / 2 pairs.
    return cost.linear_s * tokens + cost.quadratic_s * (2 * pairs - tokens)
