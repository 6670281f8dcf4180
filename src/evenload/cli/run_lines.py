"""The lines that a run prints: what is on and why, what the first plan made of it, steps, validation, changes of
layout, predictions that do not hold, how to go on after a stop.

Silent no-op options are what users of packing trainers suffer from (is it on? why is it slower?), so everything that
decides speed or data order stands here, with its value.
"""

import shlex
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evenload.bench.runs import QUIET_WAITED_SHARE
from evenload.cost.coefficients import CostCoefficients, OverlapCost
from evenload.cost.validity import completed_between_layouts
from evenload.data.config import DataConfig
from evenload.explore.prediction_interval import PredictionInterval
from evenload.plan.strategies.registry import strategy_named
from evenload.report.run_files import MetricRow
from evenload.report.table import format_action, progress_text, step_line
from evenload.report.units import format_count, format_plain, format_seconds
from evenload.types.cluster import data_sheet_flops_per_s
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan
from evenload.types.run import LayoutDecision, LossOf, Validation
from evenload.types.text import counted, format_bytes

if TYPE_CHECKING:
    from evenload.runtime.comm.mesh import Meshes
    from evenload.runtime.stages.live_stages import Switch, Twins

_NUM_STEPS = 3
"""Steps after the first, which pays for what is done once, whose predictions are looked at."""
_FACTOR = 1.2
"""All of them beyond it, on the same side, are no accident."""


def strategy_line(name: str, context_ranks: int, merging: str = "") -> str:
    shared = f"; {context_ranks} ranks share every pack" if context_ranks > 1 else ""
    return f"strategy {name}: {strategy_named(name).description}{shared}{'; ' if merging else ''}{merging}"


def reduction_line(copies: Collection[int], overlap: OverlapCost | None) -> str:
    """Say when gradients are reduced, over so many ranks in each layout of the run; "" where each rank has its weights
    alone in all of them.

    Args:
        overlap: None = none is configured.
    """
    if max(copies) == 1:
        return ""
    over = f"gradients are reduced over {_over(copies)}"
    if overlap is None:
        return f"{over} after the last backward (train.overlap_reduction = false)"
    if not overlap.pays:
        return f"{over} after the last backward: beside it they {_slowdowns(overlap)}, as measured"
    return f"{over} unit by unit beside the last backward, where they are taken to {_slowdowns(overlap)}"


def gather_line(copies: Collection[int], overlap: OverlapCost | None) -> str:
    """Say when updated weights are gathered; arguments and result as `reduction_line`."""
    if max(copies) == 1:
        return ""
    over = f"updated weights are gathered from {_over(copies)}"
    if overlap is None:
        return f"{over} before the next step (train.overlap_gather = false)"
    if not overlap.pays:
        return f"{over} before the next step: beside its packs they {_slowdowns(overlap)}, as measured"
    return f"{over} unit by unit beside the next step's first packs, where they are taken to {_slowdowns(overlap)}"


def _slowdowns(overlap: OverlapCost) -> str:
    """What collectives and compute cost each other, after "they"."""
    return (
        f"last {overlap.communication_slowdown:.2f} times as long as alone and keep computing from "
        f"{overlap.compute_slowdown:.0%} of that time"
    )


def context_line(largest_group: int, exchange: str) -> str:
    """Say how keys and values travel in a run whose largest group that may share documents has so many ranks; "" where
    no ranks may."""
    if largest_group == 1:
        return ""
    if exchange == "ring":
        return "keys and values of shared documents travel round the ranks, beside attention of those that are there"
    return "keys and values of shared documents are gathered while attention of local ones is computed"


def data_sheet_line(device: str) -> str:
    """That nothing is known of a GPU's peak; "" where it is."""
    if data_sheet_flops_per_s(device) is not None:
        return ""
    return f"mfu_of_data_sheet stays empty: the peak of {device} is not known here; mfu is of the measured peak"


def _over(copies: Collection[int]) -> str:
    """Ranks with the same weights, in each layout of a run."""
    least, most = min(copies), max(copies)
    if least == most:
        return f"{most} ranks"
    return f"up to {most} ranks (by layout{', in those with replicas' if least == 1 else ''})"


def data_line(config: DataConfig, num_files: int, num_bytes: int) -> str:
    batch = (
        f"{config.batch_tokens:,} tokens"
        if config.batch_documents is None
        else counted(config.batch_documents, "document")
    )
    order = (
        "in the order of the files"
        if config.shuffle_window == 1
        else f"shuffled over {counted(config.shuffle_window, 'document')} in {counted(config.num_streams, 'stream')}, "
        f"seed {config.seed}"
    )
    readers = f"{config.workers} worker process{'es' if config.workers > 1 else ''}" if config.workers else "a thread"
    ahead = (
        f"{counted(config.prefetch_steps, 'step')} ahead"
        if config.prefetch_steps
        else "when the step asks, so steps wait for data (data.prefetch_steps = 0)"
    )
    longer = {
        "error": "longer ones stop the run",
        "split": "longer ones are split",
        "truncate": "longer ones lose their end (ledger: truncated)",
        "drop": "longer ones are left out (ledger: overlong)",
    }[config.overlong]
    mixed = f"{counted(len(config.mixture), 'part')} by weight, " if config.mixture else ""
    if config.held_out_share:
        order += f", {config.held_out_share:.3g} of the documents held out for validation"
    return (
        f"data {mixed}{counted(num_files, 'file')} of {num_bytes / 1e6:,.1f} MB, {order} | a step trains {batch}, "
        f"whatever the "
        f"strategy | documents of at most {config.max_document_tokens:,} tokens, {longer} | read by {readers} a rank, "
        f"{ahead}"
    )


def resumed_line(checkpoint: str, steps_done: int, saved_strategy: str, strategy: str) -> str:
    """Which run this start goes on with; a `saved_strategy` of "" is not known."""
    text = f"resumed from {checkpoint} after {counted(steps_done, 'step')}"
    if saved_strategy in ("", strategy):
        return text
    return (
        f"{text} | plan.strategy changes from {saved_strategy} to {strategy}: this goes on with the same run, it does "
        "not begin another one. To compare strategies, give each its own train.output_dir"
    )


def first_plan_line(plan: StepPlan, max_pack_tokens: int, interval: PredictionInterval) -> str:
    packs = [pack for replica in plan.pack_plans for pack in replica.forward]
    tokens = sum(document.num_tokens for document in plan.documents)
    padding = sum(pack.num_padding_tokens for pack in packs)
    largest = max((pack.num_tokens + pack.num_padding_tokens for pack in packs), default=0)
    shared = {piece.doc_id for pack in packs for piece in pack.slices if piece.cp > 1}
    cut = {piece.doc_id for pack in packs for piece in pack.slices if piece.start} - shared
    policies: list[str] = sorted({policy for replica in plan.pack_plans for policy in replica.policies.values()})
    if any(again := plan.layout.recomputed_counts):
        policies.append(f"{'+'.join(map(str, again))} layers of the stages recomputed")
    computed = tokens + padding
    return (
        f"first step {counted(len(plan.documents), 'document')} of {tokens:,} tokens in {len(packs)} forward and "
        f"{counted(sum(len(replica.backward) for replica in plan.pack_plans), 'backward pack')} of at most "
        f"{largest:,} tokens "
        f"(limit {max_pack_tokens:,}) | {tokens / computed if computed else 1.0:.1%} of computed tokens are real | "
        f"{counted(len(cut), 'document')} cut, {len(shared)} shared by ranks, {len(plan.left_out)} left for later | "
        f"activations "
        f"{', '.join(policies) or 'replay'} | predicted {format_seconds(plan.predicted.step_time_s)}; "
        f"{interval.describe()}"
    )


def interval_line(ratios: Sequence[float], interval: PredictionInterval, waited_share: float) -> str:
    """How well predictions held; "" where there are no ratios.

    Args:
        ratios: measured over predicted seconds of the steps after the first.
        waited_share: of the time, in which this rank stood without a core (`cost.coefficients.Noise`).
    """
    if not ratios:
        return ""
    said = f"steps after the first took {median(ratios):.2f} times their predicted time"
    if waited_share > QUIET_WAITED_SHARE:
        return said + _busy(waited_share)
    if not (held := interval.count_inside(ratios)):
        return f"{said}; {interval.describe()}"
    return f"{said}; {held} lie in the 90 % interval of {interval.low:.2f} to {interval.high:.2f} times"


def _busy(waited_share: float) -> str:
    return (
        f": other programs held cores that this run needed for {waited_share:.0%} of the time, so this says little "
        "about the predictions"
    )


def prediction_line(
    ratios: Sequence[float], device: str, cost_file: str | None, waited_share: Callable[[], float]
) -> str:
    """A sentence where a run's steps consistently take another time than predicted, or "".

    Costs that were measured beside other work, or on a machine that has become busy since, are off for every step
    alike; the planner then still compares plans by them, but step times and what is worth its overhead are wrong.
    `ratios` are measured over predicted seconds of the steps after the first, `device` is where costs were measured,
    `waited_share` as for `interval_line`: costs that were measured anew beside other programs would be no better.
    """
    if len(ratios) != _NUM_STEPS:
        return ""
    is_slower, is_faster = min(ratios) > _FACTOR, max(ratios) < 1 / _FACTOR
    if not (is_slower or is_faster):
        return ""
    times = f"steps take {median(ratios):.2f} times their predicted time"
    if is_slower and (waited := waited_share()) > QUIET_WAITED_SHARE:
        return times + _busy(waited)
    reason = (
        f"the machine is busier or slower now than when costs were measured ({device})"
        if is_slower
        else f"the machine was busier when costs were measured ({device}), or was a slower one"
    )
    advice = "train.recalibrate=true measures them anew"
    if cost_file is not None:
        advice = f"leave out train.cost_file {cost_file} to have them measured here"
    return f"{times}: {reason}; {advice}"


def resume_command(arguments: Sequence[str], *, is_resumed: bool) -> str:
    """The same command once more, with `train.resume` turned on where it is off; the interpreter is the first argument
    (`sys.orig_argv`)."""
    words = list(arguments)
    scripts = [at for at, word in enumerate(words[:3]) if Path(word).name == "evenload"]
    if scripts:
        # The interpreter in front of an installed script is not what anybody types.
        words = words[scripts[0] :]
    return shlex.join(words if is_resumed else [*words, "train.resume=true"])


BAR_WIDTH = 20


class StepLines:
    """Of one start of a run.

    Args:
        every_s: seconds between two lines; 0 = every step has one.
        total: steps of the run; None = nobody knows.
    """

    def __init__(self, console: Console, every_s: float, steps_done: int, total: int | None) -> None:
        self._console, self._every_s = console, every_s
        self._is_first, self._next_s = True, 0.0
        self._waiting: MetricRow | None = None
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("first step", total=total, completed=steps_done)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """The line that moves, on a terminal; at the end the last step has its line."""
        with self._progress:
            yield
        if self._waiting is not None:
            self._print(self._waiting)

    def show(self, row: MetricRow, steps_done: int) -> None:
        """A step's line, where it is time for one."""
        self._progress.update(self._task, completed=steps_done, description=progress_text(row))
        # The second step is the first whose speed tells something.
        if self._is_first or time.monotonic() >= self._next_s:
            self._next_s = 0.0 if self._is_first else time.monotonic() + self._every_s
            self._is_first = False
            self._print(row)
        else:
            self._waiting = row

    def _print(self, row: MetricRow) -> None:
        self._waiting = None
        self._console.print(step_line(row), soft_wrap=True, markup=False)


def groups_line(meshes: "Meshes", *, are_declared: bool) -> str:
    """At the start; "" for a run of one layout.

    Args:
        are_declared: in `plan.layouts`; else the run chose them.
    """
    if len(meshes.layouts) == 1:
        return ""
    named = ", ".join(layout.describe() for layout in meshes.layouts)
    chosen = "" if are_declared else ", as plan.layouts names none (plan.options.flexpipe.most_layouts, most_groups)"
    return f"layouts that the run may take: {named}{chosen} | {counted(meshes.num_groups, 'process group')}"


def twins_line(twins: "Twins | None", budget_bytes: int | None) -> str:
    """At the start; "" where ranks have nothing to share."""
    if twins is None:
        return ""
    if twins.reason:
        return f"shared memory: none, what moves between layouts is sent ({twins.reason})"
    limit = "no limit" if budget_bytes is None else f"limit {format_bytes(budget_bytes)}"
    left_out = twins.num_pieces - twins.num_shared
    rest = f"; {left_out} do not fit and are sent (plan.twin_bytes)" if left_out else ""
    return (
        f"shared memory: {twins.num_shared} of {twins.num_pieces} pieces of the model, at most "
        f"{format_bytes(twins.num_bytes)} of a machine ({limit}){rest}"
    )


def switch_line(step: int, switch: "Switch", decision: LayoutDecision | None = None) -> str:
    """Of one change, and where it comes from if not from the step's decision."""
    resumed = ""
    if decision is not None and decision.before != switch.before:
        resumed = f"; processes start in {switch.before}, the steps before the checkpoint ran in {decision.before}"
    return (
        f"layout {switch.before} -> {switch.after} before step {step}: training waited "
        f"{format_seconds(switch.stall_s)} (predicted {format_seconds(switch.predicted_stall_s)}) for "
        f"{format_bytes(switch.weight_bytes)} of weights, {format_seconds(switch.wait_s)} more for "
        f"{format_bytes(switch.state_bytes)} of optimizer state behind the step{resumed}"
    )


def validation_lines(validation: Validation, *, shows_left_out: bool) -> list[str]:
    """One line, and one each by length and by source where there are several.

    Args:
        shows_left_out: what reading left out, too.
    """
    whole = validation.whole
    name = "validation of the average" if validation.of_average else "validation"
    lines = [
        f"{name} after step {validation.step} | loss {format_plain(whole.loss, '.4f')} | perplexity "
        f"{format_plain(whole.perplexity, '.4g')} | {counted(whole.documents, 'document')}, {whole.tokens:,} tokens in "
        f"{format_seconds(validation.seconds)} ({format_count(whole.tokens / max(validation.seconds, 1e-9))} tokens/s)"
    ]
    if len(validation.by_length) > 1:
        lines.append(f"  loss by length: {_losses(validation.by_length)}")
    if len(validation.by_source) > 1:
        lines.append(f"  loss by source: {_losses(validation.by_source)}")
    if shows_left_out:
        lines += [
            f"  left out of the validation data: {counted(documents, 'document')}, {tokens:,} tokens ({reason})"
            for reason, documents, tokens in validation.left_out
        ]
    return lines


def _losses(parts: Sequence[LossOf]) -> str:
    return ", ".join(f"{one.name} {format_plain(one.loss, '.4f')}" for one in parts)


def layout_line(decision: LayoutDecision) -> str:
    """One line about a switch; "" where the layout stays."""
    if not decision.is_switch:
        return ""
    said = (
        f"{decision.before} -> {decision.layout} before step {decision.step}, {format_action(decision)}: {decision.why}"
    )
    switch_s = format_seconds(decision.switch_s)
    if decision.gain_s is None:
        return f"layout {said}; forced by memory, whatever it costs; predicted: {switch_s} for the switch"
    steps = f"{decision.known_steps} known step{'s' if decision.known_steps > 1 else ''}"
    gain = f"{format_seconds(decision.gain_s)} gained over {steps}"
    return f"layout {said}; predicted: {switch_s} for the switch, {gain}"


def other_layouts_lines(costs: CostCoefficients, layouts: Sequence[ParallelLayout]) -> tuple[str, ...]:
    """At the start: what was not measured and is taken from something else where the layout changes."""
    if len(layouts) == 1:
        return ()
    notes = [note for layout in layouts for note in completed_between_layouts(costs, layout)[1]]
    return tuple(f"costs of other layouts: {note}" for note in dict.fromkeys(notes))
