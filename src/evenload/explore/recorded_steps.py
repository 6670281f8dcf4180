"""Judge steps of anybody's trainer: how long ranks waited as the run divided the documents, and how long they wait as
`evenload.micro_batches` does.

A line of the file is a step: `{"lengths": [812, 97, 40]}`; where the run's partition is known, with the documents of
every micro-batch of every rank, in the order they ran: `"micro_batches": [[[0]], [[1, 2]]]`. Both divisions have one
price: the cost model's seconds of every document, and a constant a micro-batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.data.lengths import open_numbers
from evenload.errors import DataError
from evenload.explore.batches import OnProgress, no_progress
from evenload.plan.micro_batches import Cost, micro_batches
from evenload.types.base import Frozen
from evenload.types.division import Division, JudgedStep, JudgedSteps, Waits

_EXAMPLE = 'a line is one step: {"lengths": [812, 97, 40], "micro_batches": [[[0]], [[1, 2]]]}, the latter if known'


class _Line(Frozen):
    lengths: list[int]
    micro_batches: list[list[list[int]]] | None = None


@dataclass(frozen=True, eq=False)
class Partition:
    """Hold the micro-batch of every document, rank · most micro-batches of a rank + index, int64[n], and how many every
    rank runs, int64[ranks]."""

    slot_of: NDArray[np.int64]
    counts: NDArray[np.int64]

    def sums(self, values: NDArray[np.number]) -> NDArray[np.float64]:
        """Return the sum over the documents of every micro-batch; float64[ranks, most of a rank]."""
        shape = len(self.counts), int(self.counts.max())
        return np.bincount(self.slot_of, values, shape[0] * shape[1]).astype(np.float64).reshape(shape)


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """Hold a line, the lengths of its documents, int64[n], and how the run divided them; None = not recorded."""

    line: int
    num_tokens: NDArray[np.int64]
    partition: Partition | None

    @property
    def ranks(self) -> int:
        """Return the ranks of the partition, 0 without one."""
        return 0 if self.partition is None else len(self.partition.counts)

    @property
    def largest_tokens(self) -> int:
        """Return the tokens of the largest micro-batch, 0 where none is known."""
        return 0 if self.partition is None else int(self.partition.sums(self.num_tokens).max())


def read_steps(source: str, most_tokens: int | None = None, *, equal_counts: bool = True) -> tuple[RecordedStep, ...]:
    """Read the steps of a .jsonl or .jsonl.gz, here or at a URL, at least one.

    Args:
        most_tokens: of a document; None = not limited.
        equal_counts: all ranks run equally many micro-batches.

    Raises:
        ConfigError: no such file. DataError: the first line that is no step, or has other ranks than those before.
    """
    decoder, steps = msgspec.json.Decoder(_Line), []
    with open_numbers(source) as stream:
        for line, content in enumerate(stream, start=1):
            if not content.strip():
                continue
            try:
                row = decoder.decode(content)
                num_tokens = _lengths(row.lengths, 2**40 if most_tokens is None else most_tokens)
                partition = None if row.micro_batches is None else _partition(row.micro_batches, len(num_tokens))
                step = RecordedStep(line, num_tokens, partition)
                _require_alike(step, steps, equal_counts)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{source}:{line}: {error}; {_EXAMPLE}") from error
            except DataError as error:
                raise DataError(f"{source}:{line}: {error}") from error
            steps.append(step)
    if not steps:
        raise DataError(f"{source} holds no steps; {_EXAMPLE}")
    return tuple(steps)


def _lengths(lengths: list[int], most_tokens: int) -> NDArray[np.int64]:
    if not lengths:
        raise DataError("lengths is empty; leave steps without documents out")
    if wrong := [at for at, length in enumerate(lengths) if not 1 <= length <= most_tokens]:
        raise DataError(
            f"document {wrong[0]} has {lengths[wrong[0]]:,} tokens, a micro-batch holds 1 to {most_tokens:,}; leave "
            "empty documents out, cut long ones, or raise --context"
        )
    return np.array(lengths, np.int64)


def _partition(ranks: list[list[list[int]]], num_documents: int) -> Partition:
    counts = np.array([len(micro_batches) for micro_batches in ranks], np.int64)
    most = counts.max(initial=0)
    slots = [rank * most + index for rank, count in enumerate(counts) for index in range(count)]
    parts = list(itertools.chain.from_iterable(ranks))
    named = list(itertools.chain.from_iterable(parts))
    if unknown := [one for one in named if not 0 <= one < num_documents]:
        raise DataError(
            f"micro_batches names document {unknown[0]}; the step's documents are 0 to {num_documents - 1}, in the "
            "order of lengths"
        )
    times = np.bincount(np.array(named, np.int64), minlength=num_documents)
    if (times != 1).any():
        at = int((times != 1).argmax())
        raise DataError(f"document {at} is {times[at]} times in micro_batches; every document is there once")
    slot_of = np.empty(num_documents, np.int64)
    slot_of[named] = np.repeat(slots, [len(part) for part in parts])
    return Partition(slot_of, counts)


def _require_alike(step: RecordedStep, before: Sequence[RecordedStep], equal_counts: bool) -> None:
    if before and before[0].ranks != step.ranks:
        raise DataError(
            f"micro_batches has {step.ranks or 'no'} ranks, the steps before have {before[0].ranks or 'none'}; give "
            "equally many in all lines, or no micro_batches at all"
        )
    if step.partition and equal_counts and step.partition.counts.min() < step.partition.counts.max():
        raise DataError(
            f"ranks have {step.partition.counts.min()} to {step.partition.counts.max()} micro-batches, and wait for "
            "each other at every one; give ranks short of work empty ones, [], or --engine deepspeed where they wait "
            "once a step"
        )


def fitted_cost(costs: PackCosts, steps: Sequence[RecordedStep]) -> Cost:
    """Return what a trainer gives to `micro_batches`: three numbers of four digits, by least squares nearest to the
    cost model on the documents of these steps."""
    num_tokens, times = np.unique(np.concatenate([step.num_tokens for step in steps]), return_counts=True)
    weight = np.sqrt(times)
    powers, work_s = num_tokens[:, None].astype(float) ** [1, 2] * weight[:, None], costs.document_seconds(num_tokens)
    found = np.linalg.lstsq(powers, work_s * weight)[0]
    if not (is_used := found > 0).all():  # short documents have a constant, so longer ones take less a token
        found = np.zeros(2)
        found[is_used] = np.linalg.lstsq(powers[:, is_used], work_s * weight)[0]
    linear_s, quadratic_s, micro_batch_s = (float(f"{one:.4g}") for one in (*found, costs.pack_constant_s))
    return Cost(linear_s=linear_s, quadratic_s=quadratic_s, micro_batch_s=micro_batch_s)


def judge_steps(
    steps: Sequence[RecordedStep],
    costs: PackCosts,
    cost: Cost,
    max_tokens: int,
    waits: Waits,
    on_progress: OnProgress = no_progress,
) -> JudgedSteps:
    """Price every step as the run divided it, and as `micro_batches` does by `cost` into micro-batches of at most
    `max_tokens` on the replicas of the layout of `costs`, which price both. Takes 1 to 60 ms a step."""
    ranks, constant_s = costs.layout.dp, costs.pack_constant_s
    judged = []
    for done, step in enumerate(steps):
        on_progress(done, len(steps), "dividing steps")
        num_tokens, work_s = step.num_tokens, costs.document_seconds(step.num_tokens)
        made = micro_batches(num_tokens, ranks, max_tokens, cost=cost, waits=waits)
        count, total = made.seconds.shape[1], int(num_tokens.sum())
        ours = Partition(made.rank_of * count + made.index_of, np.full(ranks, count))
        least = -(-total // (ranks * max_tokens)) if waits == "micro_batch" else 1
        judged.append(
            JudgedStep(
                step=step.line,
                documents=len(num_tokens),
                tokens=total,
                theirs=_division(step.partition, work_s, constant_s, waits) if step.partition else None,
                ours=_division(ours, work_s, constant_s, waits),
                bound_s=float(max(work_s.sum() / ranks, work_s.max()) + least * constant_s),
            )
        )
    return JudgedSteps(
        theirs=_mean([one.theirs for one in judged if one.theirs]) if steps[0].partition else None,
        ours=_mean([one.ours for one in judged]),
        bound_s=float(np.mean([one.bound_s for one in judged])),
        steps_beyond_limit=sum(step.largest_tokens > max_tokens for step in steps),
        steps=tuple(judged),
    )


def _division(partition: Partition, work_s: NDArray[np.float64], constant_s: float, waits: Waits) -> Division:
    counts = partition.counts
    seconds = partition.sums(work_s) + constant_s * (np.arange(counts.max()) < counts[:, None])
    step_s = float(seconds.max(axis=0).sum() if waits == "micro_batch" else seconds.sum(axis=1).max())
    waiting_s = step_s - float(seconds.sum()) / len(counts)
    return Division(step_s=step_s, waiting_s=waiting_s, micro_batches=int(counts.max()))


def _mean(divisions: Sequence[Division]) -> Division:
    step_s, waiting_s, count = np.mean([msgspec.structs.astuple(one) for one in divisions], axis=0).tolist()
    return Division(step_s=step_s, waiting_s=waiting_s, micro_batches=count)
