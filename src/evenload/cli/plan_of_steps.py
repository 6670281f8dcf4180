"""`evenload plan --lengths-per-step`: what the recorded steps of any trainer lost to waiting, and what they would take
as `evenload.micro_batches` divides them.

A line of the file is a step: `{"lengths": [812, 97, 40]}`; where the run's partition is known, with the documents of
every micro-batch of every rank, in the order they ran: `"micro_batches": [[[0]], [[1, 2]]]`. Both divisions have one
price: the cost model's seconds of every document, and a constant a micro-batch.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import version
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from evenload.cli.options import indented_json, print_lines, progress_bar, shown_name, write_output
from evenload.cli.plan_inputs import PlanInputs, plan_inputs
from evenload.cli.plan_request import PlanRequest, length_source
from evenload.cost.pack_cost import PackCosts
from evenload.data.lengths import open_numbers
from evenload.errors import ConfigError, DataError
from evenload.explore.batches import OnProgress, no_progress
from evenload.integrations.catalog import EngineProfile, engine_named, require_heads, require_layout
from evenload.planning.micro_batches import Cost, micro_batches
from evenload.types.base import Frozen
from evenload.types.cluster import cluster_of
from evenload.types.layout import ParallelLayout, read_layout_text
from evenload.types.text import counted, format_percent, format_seconds

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


_TAKEN = ("lengths_per_step", "model", "cluster", "layout", "context", "engine", "cost", "json_file")


def judge_recorded_steps(request: PlanRequest, file: str, console: Console) -> None:
    """Print what is predicted of the steps in `file`, and write it as JSON where that is asked for."""
    _require_compatible(request)
    profile = engine_named(request.engine) if request.engine else None
    context = request.tokens_of("context")
    steps = read_steps(file, context, equal_counts=profile is None or profile.equal_counts)
    if not (limit := context or max(step.largest_tokens for step in steps.values())):
        raise ConfigError(f"--context is missing, the most tokens of a micro-batch, and {file} has no micro_batches")
    inputs, layout = _inputs(request, file, len(next(iter(steps.values())).micro_batches or ()), profile)
    waits: Waits = "micro_batch" if profile is None or profile.waits_in(layout) else "step"
    costs = PackCosts(inputs.costs.model, inputs.costs.of(layout), layout)
    cost = fitted_cost(costs, [length for step in steps.values() for length in step.lengths])
    with progress_bar() as on_progress:
        judged = judge_steps(steps, costs, cost, limit, waits, on_progress)
    call = f"evenload.micro_batches(lengths, {layout.dp}, {limit}, waits={waits!r}, cost=evenload.{cost})"
    at = "at every micro-batch" if waits == "micro_batch" else "once a step"
    shown: dict[str, str | int] = {
        "lengths_per_step": shown_name(file),
        "steps": len(steps),
        "documents": sum(len(step.lengths) for step in steps.values()),
        "tokens": sum(sum(step.lengths) for step in steps.values()),
        "model": inputs.model_name,
        "cluster": inputs.cluster.name,
        "costs": costs.coefficients.source,
        "layout": layout.describe(),
        "ranks_wait": f"{at} ({f'engine {profile.name}' if profile else 'no --engine named'})",
        "max_tokens": limit,
        "max_tokens_from": "--context" if context else "the largest micro-batch",
    }
    facts = (f"{name.replace('_', ' ')} {f'{one:,}' if isinstance(one, int) else one}" for name, one in shown.items())
    mean = JudgedStep(*np.mean(list(judged.values()), axis=0).tolist())
    beyond = sum(step.largest_tokens > limit for step in steps.values())
    headline, *remarks = _findings(judged, mean, beyond)
    messages = [f"cost: {message}" for message in inputs.costs.messages(layout)]
    print_lines(console, headline, ", ".join(facts), *remarks, *messages, f"ours: {call}")
    if request.json_file:
        content: dict[str, object] = {"version": version("evenload"), "headline": headline, "inputs": shown}
        content |= {"call": call, "steps_beyond_limit": beyond, "mean": mean._asdict()}
        content["steps"] = {line: one._asdict() for line, one in judged.items()}
        write_output(request.json_file, indented_json(content))


def _require_compatible(request: PlanRequest) -> None:
    if request.lengths is not None:
        raise ConfigError(f"LENGTHS {request.lengths} and --lengths-per-step exclude each other; give one")
    others = [one for one in fields(request) if one.name not in _TAKEN and getattr(request, one.name) != one.default]
    if others:
        names = (next(iter(one.metadata["typer"].param_decls), f"--{one.name.replace('_', '-')}") for one in others)
        raise ConfigError(f"--lengths-per-step judges steps as they are: leave out {', '.join(names)}")


def _inputs(
    request: PlanRequest, file: str, ranks: int, profile: EngineProfile | None
) -> tuple[PlanInputs, ParallelLayout]:
    """Return what steps are priced for: the ranks of the file's partitions (0 = none), on H100s or a named cluster."""
    if not (request.layout or ranks):
        raise ConfigError(f"--layout dp=N is missing, the ranks to divide among, and {file} has no micro_batches")
    written = read_layout_text(request.layout or f"dp={ranks}")
    dp = written.sizes.get("dp", ranks)
    if not dp or dp != (ranks or dp) or written.size("pp") * written.size("virtual") > 1:
        needed = f"dp={ranks}, as many ranks as micro_batches of {file} has" if ranks else "a number of ranks dp"
        raise ConfigError(f"--layout {written.text} must have {needed}, and no pipeline")
    text = written.text if "dp" in written.sizes else f"dp={dp},{written.text}"
    cluster = request.cluster or cluster_of("h100", dp * written.ranks_per_replica).name
    inputs = plan_inputs(replace(request, layout=text, cluster=cluster), length_source(file, request))
    layout = inputs.layout
    assert layout is not None
    if profile:
        require_layout(profile, layout)
        require_heads(profile, inputs.costs.model, layout)
    if profile and profile.is_constant_in(layout):
        raise ConfigError(
            f"engine {profile.name} runs equally many micro-batches in all steps, ours has as many as each step needs; "
            "leave --engine out, or name deepspeed, whose ranks wait once a step too"
        )
    return inputs, layout


def _findings(judged: Mapping[int, JudgedStep], mean: JudgedStep, beyond: int) -> list[str]:
    """Compare both divisions, name the step that loses most, and say where ours is no better, or keeps a limit that the
    run did not, in so many steps `beyond` it."""
    shares = [format_percent(waiting_s / step_s) for step_s, waiting_s in mean.divisions]
    headline = f"Predicted: {format_seconds(mean.step_s)} a step, of which ranks wait {shares[0]}."
    if len(shares) > 1:
        headline = (
            f"Predicted: {format_seconds(mean.step_s)} a step instead of {format_seconds(mean.recorded_step_s)}, "
            f"{mean.recorded_step_s / mean.step_s:.2f} times as fast: ranks wait {shares[0]} of a step in this "
            f"partition, {shares[1]} in ours."
        )
    worst = max(judged, key=lambda line: judged[line].divisions[0][1])
    waits = (f"{format_percent(part / whole)} of {format_seconds(whole)}" for whole, part in judged[worst].divisions)
    bound = f"any division takes {format_seconds(mean.bound_s)} a step or more, in the mean"
    slower = sum(one.recorded_step_s < one.step_s for one in judged.values())
    findings = {
        headline: True,
        f"ranks wait longest in step {worst}: {', in ours '.join(waits)}; {bound}": True,
        f"ours takes longer than this partition in {counted(slower, 'step')}": slower,
        f"this partition breaks --context in {counted(beyond, 'step')}, ours in none": beyond,
    }
    return [text for text, is_so in findings.items() if is_so]
