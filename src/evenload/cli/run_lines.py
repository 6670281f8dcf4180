"""The lines that a run prints: everything that decides speed or data order, with its value, what the first plan made of
it, steps, validation, changes of layout, predictions that do not hold."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console

from evenload.bench.results import QUIET_WAITED_SHARE
from evenload.cli.options import print_lines, progress_bar
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.validity import fill_between_layouts
from evenload.data.config import DataConfig
from evenload.explore.prediction_interval import PredictionInterval
from evenload.planning.strategies.registry import strategy_named
from evenload.report.run_files import MetricRow
from evenload.report.table import format_action, progress_text, step_line
from evenload.types.layout import ParallelLayout
from evenload.types.plan import StepPlan
from evenload.types.run import LayoutDecision, Validation
from evenload.types.text import counted, format_bytes, format_count, format_plain, format_seconds

if TYPE_CHECKING:
    from evenload.runtime.comm.mesh import Meshes
    from evenload.runtime.stages.live_stages import Switch, Twins

_NUM_STEPS = 3
"""Steps after the first, which pays for what is done once, whose predictions are checked."""
_FEW_STEPS = 20
_BUSY = (
    ": other programs held cores that this run needed for {:.0%} of the time, so this says little about the predictions"
)
_FACTOR = 1.2
"""All of them beyond it, on the same side, are no accident."""


def strategy_line(name: str, context_ranks: int, merging: str = "", whole_documents: str = "") -> str:
    """State what the strategy does, whether ranks or replicas share documents, and why documents are not cut."""
    shared = f"{context_ranks} ranks share every pack" if context_ranks > 1 else ""
    what = f"strategy {name}: {strategy_named(name).description}"
    return "; ".join(filter(None, (what, shared, merging, whole_documents)))


def batch_size(documents: int | None, tokens: int | None) -> str:
    """Return the size of a global batch, of which one is given."""
    return f"{tokens:,} tokens" if documents is None else counted(documents, "document")


_OVERLONG = {
    "error": "longer ones stop the run",
    "split": "longer ones are split",
    "truncate": "longer ones lose their end (ledger: truncated)",
    "drop": "longer ones are left out (ledger: overlong)",
}


def data_line(config: DataConfig, num_files: int, num_bytes: int) -> str:
    """State what is read, in which order, how much a step trains, and how far ahead it is read."""
    order = "in the order of the files"
    if config.shuffle_window > 1:
        window, streams = counted(config.shuffle_window, "document"), counted(config.num_streams, "stream")
        order = f"shuffled over {window} in {streams}, seed {config.seed}"
    if config.held_out_share:
        order += f", {config.held_out_share:.3g} of the documents held out for validation"
    readers = counted(config.workers, "worker process") if config.workers else "a thread"
    ahead = "when the step asks, so steps wait for data (data.prefetch_steps = 0)"
    if config.prefetch_steps:
        ahead = f"{counted(config.prefetch_steps, 'step')} ahead"
    mixed = f"{counted(len(config.mixture), 'part')} by weight, " if config.mixture else ""
    return (
        f"data {mixed}{counted(num_files, 'file')} of {num_bytes / 1e6:,.1f} MB, {order} | a step trains "
        f"{batch_size(config.batch_documents, config.batch_tokens)}, whatever the strategy | documents of at most "
        f"{config.max_document_tokens:,} tokens, {_OVERLONG[config.overlong]} | read by {readers} a rank, {ahead}"
    )


def resumed_line(checkpoint: str, steps_done: int, saved_strategy: str, strategy: str) -> str:
    """State which run this start goes on with; a `saved_strategy` of "" is not known."""
    text = f"resumed from {checkpoint} after {counted(steps_done, 'step')}"
    if saved_strategy in ("", strategy):
        return text
    return (
        f"{text} | plan.strategy changes from {saved_strategy} to {strategy}: this goes on with the same run. To "
        "compare strategies, give each its own train.output_dir"
    )


def first_plan_line(plan: StepPlan, max_pack_tokens: int, interval: PredictionInterval) -> str:
    """State what the first plan makes of its documents, and what it is predicted to take."""
    packs = [pack for replica in plan.pack_plans for pack in replica.forward]
    num_backward = sum(len(replica.backward) for replica in plan.pack_plans)
    tokens = sum(document.num_tokens for document in plan.documents)
    padding = sum(pack.num_padding_tokens for pack in packs)
    largest = max((pack.num_tokens + pack.num_padding_tokens for pack in packs), default=0)
    shared = {piece.doc_id for pack in packs for piece in pack.slices if piece.cp > 1}
    cut = {piece.doc_id for pack in packs for piece in pack.slices if piece.start} - shared
    policies: list[str] = sorted({policy for replica in plan.pack_plans for policy in replica.policies.values()})
    if any(again := plan.layout.recomputed_counts):
        policies.append(f"{'+'.join(map(str, again))} layers of the stages recomputed")
    real = tokens / (tokens + padding) if tokens + padding else 1.0
    saved = sum(document.num_shared_tokens for document in plan.documents)
    in_trees = f", for {tokens + saved:,} of sequences that share prefixes," if saved else ""
    return (
        f"first step {counted(len(plan.documents), 'document')} of {tokens:,} tokens{in_trees} in {len(packs)} forward "
        f"and {counted(num_backward, 'backward pack')} of at most {largest:,} tokens (limit {max_pack_tokens:,}) | "
        f"{real:.1%} of computed tokens are real | {counted(len(cut), 'document')} cut, {len(shared)} shared by ranks, "
        f"{len(plan.left_out)} left for later | activations {', '.join(policies) or 'replay'} | predicted "
        f"{format_seconds(plan.predicted.step_time_s)}; {interval.describe()}"
    )


def interval_line(ratios: Sequence[float], interval: PredictionInterval, waited_share: float) -> str:
    """State how well predictions held: `ratios` of measured over predicted seconds of the steps after the first, while
    a rank stood without a core for `waited_share` of the time; "" where there are no ratios."""
    if not ratios:
        return ""
    message = f"steps after the first took {median(ratios):.2f} times their predicted time"
    if waited_share > QUIET_WAITED_SHARE:
        return f"{message} on a busy machine{_BUSY.format(waited_share)}"
    if not (held := interval.count_inside(ratios)):
        return f"{message}; {interval.describe()}"
    return f"{message}; {held} lie in the 90 % interval of {interval.low:.2f} to {interval.high:.2f} times"


def prediction_line(
    ratios: Sequence[float], device: str, cost_file: str | None, waited_share: Callable[[], float]
) -> str:
    """Warn where the first steps all take more, or all less, than predicted from costs that were measured on `device`;
    else "". On a machine that is busy now (`waited_share`) costs that were measured anew would be no better."""
    if len(ratios) != _NUM_STEPS:
        return ""
    is_slower = min(ratios) > _FACTOR
    if not is_slower and max(ratios) >= 1 / _FACTOR:
        return ""
    times = f"steps take {median(ratios):.2f} times their predicted time"
    if is_slower and (waited := waited_share()) > QUIET_WAITED_SHARE:
        return times + _BUSY.format(waited)
    reason = f"was busier when costs were measured ({device}), or was a slower one"
    if is_slower:
        reason = f"is busier or slower now than when costs were measured ({device})"
    advice = "train.recalibrate=true measures them anew"
    if cost_file is not None:
        advice = f"leave out train.cost_file {cost_file} to have them measured here"
    return f"{times}: the machine {reason}; {advice}"


class StepLines:
    """Prints the lines of steps in one start of a run, one in `every_s` seconds (0 = all), of `total` steps; all where
    it has few, and the first ones where it is not known how many."""

    def __init__(self, console: Console, every_s: float, steps_done: int, total: int | None) -> None:
        self._console, self._every_s = console, every_s
        self._steps_done, self._total = steps_done, total
        self._is_first, self._next_s = True, 0.0
        self._few_left = 0 if total is not None and total - steps_done > _FEW_STEPS else _FEW_STEPS
        self._waiting: MetricRow | None = None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Show a bar on a terminal; at the end the last step has its line."""
        with progress_bar(self._console) as self._move:
            self._move(self._steps_done, self._total, "first step")
            yield
        if self._waiting is not None:
            print_lines(self._console, step_line(self._waiting))

    def show(self, row: MetricRow, steps_done: int) -> None:
        """Print a step's line, where it is time for one."""
        self._move(steps_done, self._total, progress_text(row))
        # The second step is the first whose speed means something.
        self._few_left -= 1
        if self._is_first or self._few_left >= 0 or time.monotonic() >= self._next_s:
            self._next_s = 0.0 if self._is_first else time.monotonic() + self._every_s
            self._is_first, self._waiting = False, None
            print_lines(self._console, step_line(row))
        else:
            self._waiting = row


def groups_line(meshes: "Meshes", *, are_declared: bool) -> str:
    """Name the layouts that the run may take, declared in `plan.layouts` or chosen; "" for one."""
    if len(meshes.layouts) == 1:
        return ""
    named = ", ".join(layout.describe() for layout in meshes.layouts)
    chosen = ""
    if not are_declared:
        chosen = (
            ", with any layers in their stages, as plan.layouts names none (plan.options.flexpipe.most_layouts, "
            "most_groups)"
        )
    return f"layouts that the run may take: {named}{chosen} | {counted(meshes.num_groups, 'process group')}"


def twins_line(twins: "Twins | None", budget_bytes: int | None) -> str:
    """State what of the model lies in shared memory; "" where ranks have nothing to share."""
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
    """Describe one change of the layout, and where it comes from if not from the step's decision."""
    resumed = ""
    if decision is not None and decision.before != switch.before:
        resumed = f"; processes start in {switch.before}, the steps before the checkpoint ran in {decision.before}"
    return (
        f"layout {switch.before} -> {switch.after} before step {step}: training waited "
        f"{format_seconds(switch.stall_s)} (predicted {format_seconds(switch.predicted_stall_s)}) for "
        f"{format_bytes(switch.weight_bytes)} of weights, {format_seconds(switch.wait_s)} more for "
        f"{format_bytes(switch.state_bytes)} of optimizer state behind the step{resumed}"
    )


def layout_line(decision: LayoutDecision) -> str:
    """Explain a switch; "" where the layout stays."""
    if not decision.is_switch:
        return ""
    forced, gain = "; forced by memory, whatever it costs", ""
    if decision.gain_s is not None:
        steps = counted(decision.known_steps, "known step")
        forced, gain = "", f", {format_seconds(decision.gain_s)} gained over {steps}"
    return (
        f"layout {decision.before} -> {decision.layout} before step {decision.step}, {format_action(decision)}: "
        f"{decision.why}{forced}; predicted: {format_seconds(decision.switch_s)} for the switch{gain}"
    )


def other_layouts_lines(costs: CostCoefficients, layouts: Sequence[ParallelLayout]) -> tuple[str, ...]:
    """State what was not measured and is taken from something else where the layout changes."""
    if len(layouts) == 1:
        return ()
    notes = [note for layout in layouts for note in fill_between_layouts(costs, layout)[1]]
    return tuple(f"costs of other layouts: {note}" for note in dict.fromkeys(notes))


def validation_lines(validation: Validation, *, shows_left_out: bool) -> Iterator[str]:
    """Give the losses in one line, one each by length and by source where there are several, and what was left out."""
    whole = validation.whole
    name = "validation of the average" if validation.of_average else "validation"
    yield (
        f"{name} after step {validation.step} | loss {format_plain(whole.loss, '.4f')} | perplexity "
        f"{format_plain(whole.perplexity, '.4g')} | {counted(whole.documents, 'document')}, {whole.tokens:,} tokens in "
        f"{format_seconds(validation.seconds)} ({format_count(whole.tokens / max(validation.seconds, 1e-9))} tokens/s)"
    )
    for kind, parts in (("length", validation.by_length), ("source", validation.by_source)):
        if len(parts) > 1:
            losses = ", ".join(f"{one.name} {format_plain(one.loss, '.4f')}" for one in parts)
            yield f"  loss by {kind}: {losses}"
    for reason, documents, tokens in validation.left_out if shows_left_out else ():
        yield f"  left out of the validation data: {counted(documents, 'document')}, {tokens:,} tokens ({reason})"
