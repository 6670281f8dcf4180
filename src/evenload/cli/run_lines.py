"""What a run says in words: what is on and why, what the first plan made of it, predictions that do not hold, how to go
on after a stop.

Silent no-op options are what users of packing trainers suffer from (is it on? why is it slower?), so everything that
decides speed or data order stands here, with its value.
"""

import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import median

from evenload.bench.runs import QUIET_WAITED_SHARE
from evenload.cost.coefficients import OverlapCost
from evenload.data.config import DataConfig
from evenload.explore.prediction_interval import PredictionInterval
from evenload.plan.strategies.registry import strategy_named
from evenload.report.units import format_seconds
from evenload.types.counted import counted
from evenload.types.data_sheets import data_sheet_flops_per_s
from evenload.types.plan import StepPlan

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
    return "keys and values of shared documents are gathered behind attention of local ones"


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
        waited_share: of the time, in which this rank stood without a core (`cost.measured_on.Disturbance`).
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
