"""Judge steps of anybody's trainer: how long ranks waited as the run divided the documents, and how long they wait as
`evenload.micro_batches` does.

A line of the file is a step: `{"lengths": [812, 97, 40]}`; where the run's partition is known, with the documents of
every micro-batch of every rank, in the order they ran: `"micro_batches": [[[0]], [[1, 2]]]`. Both divisions have one
price: the cost model's seconds of every document, and a constant a micro-batch.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.data.lengths import open_numbers
from evenload.errors import DataError
from evenload.explore.batches import OnProgress, no_progress
from evenload.planning.micro_batches import Cost, micro_batches
from evenload.types.base import Frozen

Waits = Literal["micro_batch", "step"]
"""Where ranks wait for each other, as `micro_batches` takes it."""
Ranks = list[list[list[int]]]
"""The documents of every micro-batch of every rank."""
_MOST_TOKENS = 2**40
_EXAMPLE = 'leave empty documents out; one step a line, as {"lengths": [9, 7], "micro_batches": [[[0], []], [[1], []]]}'


class RecordedStep(Frozen):
    """Holds tokens of every document of a step, and how the run divided them; None = not recorded."""

    lengths: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]], msgspec.Meta(min_length=1)]
    micro_batches: Ranks | None = None

    @property
    def largest_tokens(self) -> int:
        """Return the tokens of the largest micro-batch, 0 where none is known."""
        parts = (part for rank in self.micro_batches or () for part in rank)
        return max((sum(self.lengths[document] for document in part) for part in parts), default=0)


Steps = Mapping[int, RecordedStep]
"""Steps by their line in the file, at least one."""


class JudgedStep(NamedTuple):
    """Hold a step, or the mean of several, as `micro_batches` divides it and as the run did (NaN = not recorded):
    seconds until the last rank is done, those of them that the mean rank waits, and micro-batches of the rank with
    most. No division within the token limit takes less than `bound_s`."""

    documents: float
    tokens: float
    bound_s: float
    step_s: float
    waiting_s: float
    micro_batches: float
    recorded_step_s: float
    recorded_waiting_s: float
    recorded_micro_batches: float

    @property
    def divisions(self) -> list[tuple[float, float]]:
        """Return seconds and those of waiting, as recorded, where known, and in ours."""
        both = [(self.recorded_step_s, self.recorded_waiting_s), (self.step_s, self.waiting_s)]
        return both[1:] if math.isnan(self.recorded_step_s) else both


def read_steps(source: str, context: int | None = None, *, equal_counts: bool = True) -> Steps:
    """Read the steps of a .jsonl or .jsonl.gz, here or at a URL, at least one, by their line.

    Args:
        context: most tokens of a document; None = not limited.
        equal_counts: all ranks run equally many micro-batches.

    Raises:
        ConfigError: no such file. DataError: the first line that is no step, or has other ranks than those before.
    """
    decoder, steps, num_ranks = msgspec.json.Decoder(RecordedStep), {}, None
    with open_numbers(source) as stream:
        for line, content in enumerate(stream, start=1):
            if not content.strip():
                continue
            try:
                step = decoder.decode(content)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{source}:{line}: {error}; {_EXAMPLE}") from error
            num_ranks = len(step.micro_batches or ()) if num_ranks is None else num_ranks
            if problem := _problem(step, num_ranks, context or _MOST_TOKENS, equal_counts):
                raise DataError(f"{source}:{line}: {problem}")
            steps[line] = step
    if not steps:
        raise DataError(f"{source} holds no steps; {_EXAMPLE}")
    return steps


def _problem(step: RecordedStep, num_ranks: int, context: int, equal_counts: bool) -> str:
    """Say what is wrong with a step; "" = nothing."""
    n, ranks, longest = len(step.lengths), step.micro_batches or [], max(step.lengths)
    times = Counter(document for rank in ranks for part in rank for document in part)
    wrong = [at for at in [*times, *range(n)] if times[at] != 1 or not 0 <= at < n][:1]
    counts = sorted({len(rank) for rank in ranks})
    problems = {
        f"document {step.lengths.index(longest)} has {longest:,} tokens, a micro-batch holds {context:,}; cut it, "
        "or raise --context": longest > context,
        f"{''.join(f'document {at} is {times[at]} times' for at in wrong)} in micro_batches; each of 0 to {n - 1}, the "
        "documents in the order of lengths, must be there once": wrong and step.micro_batches is not None,
        f"micro_batches has {len(ranks)} ranks, the steps before have {num_ranks}; give equally many in all lines, or "
        "no micro_batches at all": len(ranks) != num_ranks,
        f"ranks have {' or '.join(map(str, counts))} micro-batches, and wait for each other at every one; give ranks "
        "short of work empty ones, [], or --engine deepspeed where they wait once a step": (
            equal_counts and len(counts) > 1
        ),
    }
    return next((text for text, is_so in problems.items() if is_so), "")


def fitted_cost(costs: PackCosts, lengths: Sequence[int]) -> Cost:
    """Return what a trainer gives to `micro_batches`, four digits each: nearest to the cost model, by non-negative
    least squares over documents of `lengths`, and of 256 to 131,072 tokens for what those leave open."""
    from scipy.optimize import nnls  # takes 0.3 s to import, which every other plan would wait for

    given, sizes = np.array(lengths), 2 ** np.arange(8, 18)
    given_s, sizes_s = costs.document_seconds(given), costs.document_seconds(sizes)
    # One length alone fixes one coefficient: the sizes, which weigh a thousandth of the whole work each, fix the other.
    scale_s = np.concatenate([np.full(len(given), given_s.sum()), 1e3 * sizes_s])[:, None]
    rows = (np.concatenate([given, sizes])[:, None] / sizes[-1]) ** [1.0, 2.0]
    found = nnls(rows / scale_s, np.concatenate([given_s, sizes_s]) / scale_s[:, 0])[0] / sizes[-1] ** [1.0, 2.0]
    return Cost(*(float(f"{one:.4g}") for one in (*found, costs.pack_constant_s)))


def judge_steps(
    steps: Steps, costs: PackCosts, cost: Cost, max_tokens: int, waits: Waits, on_progress: OnProgress = no_progress
) -> dict[int, JudgedStep]:
    """Price every step as the run divided it, and as `micro_batches` does by `cost` into micro-batches of at most
    `max_tokens` on the replicas of the layout of `costs`, which price both. Takes 1 to 60 ms a step."""
    num_ranks, constant_s, judged = costs.layout.dp, costs.pack_constant_s, {}
    for line, step in steps.items():
        on_progress(len(judged), len(steps), "dividing steps")
        work_s, tokens = costs.document_seconds(step.lengths), sum(step.lengths)
        made = micro_batches(step.lengths, num_ranks, max_tokens, cost=cost, waits=waits)
        least = -(-tokens // (num_ranks * max_tokens)) if waits == "micro_batch" else 1
        bound_s = float(max(work_s.sum() / num_ranks, work_s.max()) + least * constant_s)
        both = (_predicted(ranks, work_s, constant_s, waits) for ranks in (made.ranks, step.micro_batches))
        judged[line] = JudgedStep(len(work_s), tokens, bound_s, *itertools.chain(*both))
    return judged


def _predicted(ranks: Ranks | None, work_s: NDArray[np.float64], constant_s: float, waits: Waits) -> list[float]:
    """Return the seconds of a step, those that the mean rank waits, and the micro-batches of the rank with most."""
    if ranks is None:
        return [math.nan] * 3
    seconds = np.zeros((len(ranks), max(map(len, ranks))))
    for rank, parts in enumerate(ranks):
        seconds[rank, : len(parts)] = [work_s[part].sum() + constant_s for part in parts]
    step_s = float(seconds.max(axis=0).sum() if waits == "micro_batch" else seconds.sum(axis=1).max())
    return [step_s, step_s - float(seconds.sum()) / len(ranks), seconds.shape[1]]
