"""Answer what `evenload plan` was asked in a few short sentences, and say what to do next.

Strategies that differ by less than predictions of a difference can be trusted are named together: in the public ledger
(docs/accuracy.md) 125 of 128 pairs that differ by more than `SAME_SHARE` came in the right order.
"""

import math
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

import numpy as np

from evenload.data.lengths import ESTIMATED
from evenload.explore.batches import SampledBatch
from evenload.explore.evaluate import Evaluation, StrategyResult
from evenload.explore.layout_search import PLAINER_SHARE, FewLayouts, LayoutResult
from evenload.explore.tree_savings import TreeSavings
from evenload.integrations.catalog import engine_named
from evenload.integrations.evaluate import EngineEvaluation
from evenload.planning.strategies.auto import AUTO
from evenload.planning.strategies.baselines import BEST_FIT
from evenload.types.text import counted, format_bytes, format_interval, format_power_of_two, format_seconds

SAME_SHARE = 0.05
"""By which a strategy may be slower than the fastest and be named with it."""
WARNED_SHARE = 0.05
"""Of the tokens that are not trained, from which on that is a warning."""
_MOST_NAMED = 3
_FLOAT32_BYTES = 16  # Of a parameter: weight, gradient and the two moments of AdamW, all in float32


def equally_fast(evaluation: Evaluation) -> tuple[StrategyResult, ...]:
    """Return the strategies that are as fast as the fastest one within the error of prediction: `auto` first, which is
    what runs use where nothing is set, then by time; () where none fits memory."""
    return tuple(within_error([one for one in evaluation.results if one.feasible and one.mean_step_time_s is not None]))


def within_error(rows: Sequence[Any]) -> list[Any]:
    """Return the rows that are as fast as the fastest within the error of prediction: `auto` first, then by time."""
    limit_s = min((_seconds(row) for row in rows), default=0.0) * (1 + SAME_SHARE)
    near = [row for row in rows if _seconds(row) <= limit_s]
    return sorted(near, key=lambda row: (row.name != AUTO.name, _seconds(row)))


def first_sentences(
    evaluation: Evaluation,
    inputs: Mapping[str, Any],
    batches: Sequence[SampledBatch],
    few: FewLayouts | None,
    savings: TreeSavings | None,
) -> tuple[str, ...]:
    """Return the outcome, what sharing prefixes saves, a layout that is faster where one was given, and what the
    batches leave out or repeat."""
    sentences = (
        _outcome(evaluation, inputs, few),
        "" if savings is None else _savings(savings, inputs["unit"]),
        _other_layout(evaluation, inputs, few),
        _of_batches(inputs, batches),
    )
    return tuple(filter(None, sentences))


def engine_sentence(engine: EngineEvaluation, inputs: Mapping[str, Any]) -> str:
    """Return the outcome on an engine, and what every GPU holds where the engine shards nothing."""
    near = within_error([result for result in engine.results if not result.why])
    fastest = f"{_named(near)}, about {format_seconds(min(map(_seconds, near)))} a step"
    if engine_named(engine.engine).gathers != "never" or inputs["has_adapters"]:
        return f"Fastest on {engine.engine}: {fastest} if memory suffices, which is not predicted."
    offered, held = inputs["memory_cap_bytes"], _FLOAT32_BYTES * inputs["parameters"]
    whole = f"{format_bytes(held)} of weights, gradients and moments ({format_bytes(held / 2)} if all are bfloat16)"
    if held <= offered:
        return f"Fastest on {engine.engine}: {fastest}; every GPU holds {whole}, of {format_bytes(offered)}."
    instead = "train LoRA, or shard them (--engine fsdp2, deepspeed)"
    return f"On {engine.engine} every GPU of {format_bytes(offered)} holds {whole}: {instead}. By time alone {fastest}."


def next_line(evaluation: Evaluation, inputs: Mapping[str, Any], few: FewLayouts | None) -> str:
    """Return the setting or command that follows from the comparison."""
    if faster := _faster_layouts(evaluation, inputs, few):
        return f"next: the same with --layout {option_of(faster[0].layout)}"
    if not (near := equally_fast(evaluation)):
        return "next: --search-layout tries every layout; more devices, or a smaller --context, need less of each"
    sizes = ", ".join(f"{axis} = {size}" for axis, size in inputs["layout"].items() if size > 1)
    settings = f'plan.strategy = "{near[0].name}"' + (f", parallel = {{{sizes}}}" if sizes else "")
    if str(inputs["lengths"]).endswith(".toml"):
        return f"next: {settings}, then evenload train {inputs['lengths']}"
    command = f"evenload init --model {quote(inputs['model'])}"
    command += f" --data {quote(inputs['lengths'])}" if inputs["tokenizer"] else ""
    command += f" --text-column {quote(inputs['text_column'])}" if inputs["text_column"] else ""
    command += f" --group-by {quote(inputs['group_by'])}" if inputs["group_by"] else ""
    command += f" --record {inputs['record']}" if inputs["record"] else ""
    command += "" if inputs["context_from"] else f" --context {inputs['context']}"
    instead = "" if inputs["data_trees"] else "; a Trainer: evenload plan --engine trainer"
    untried = f" (our runtime never ran on several GPUs{instead})" if sizes else ""
    return f"next: {command} --gpus {inputs['cluster']} writes a config.toml; here {settings} was fastest{untried}"


def dropped_share(batches: Sequence[SampledBatch]) -> float:
    """Return the share of the tokens drawn that is cut off or dropped."""
    dropped = sum(batch.dropped_tokens for batch in batches)
    documents = (document for batch in batches for document in batch.documents)
    kept = sum(document.num_tokens + document.num_shared_tokens for document in documents)
    return dropped / (dropped + kept) if dropped else 0.0


def option_of(sizes: Mapping[str, int]) -> str:
    """Write the sizes of a layout as --layout takes them."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1"


def _named(rows: Sequence[Any]) -> str:
    """Name strategies as equals, a few of them."""
    names = [row.name for row in rows]
    if (others := len(names) - _MOST_NAMED) > 0:
        names[_MOST_NAMED:] = [counted(others, "other")]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _outcome(evaluation: Evaluation, inputs: Mapping[str, Any], few: FewLayouts | None) -> str:
    near = equally_fast(evaluation)
    if not near:
        return f"No strategy fits memory with {option_of(inputs['layout'])}."
    best = near[0]
    where = option_of(inputs["layout"])
    if not inputs["is_layout_given"] and few is not None and few.num_tried > 1:
        where += f" (best of {few.num_tried} layouts)"
    if inputs["context_from"] and not inputs["is_layout_given"]:
        where += f", context {format_power_of_two(inputs['context'])}"
    time = f"about {format_seconds(best.mean_step_time_s)} a step"
    if best.step_time_interval_s is not None:
        time += f" ({format_interval(best.step_time_interval_s)})"
    time += f" in {format_bytes(best.peak_memory_bytes or 0)} of {format_bytes(inputs['memory_cap_bytes'])}"
    baseline, factor = evaluation.baseline, best.speedup_over_baseline
    gain = ""
    if baseline is not None and factor is not None and len(evaluation.results) > 1:
        other = "" if baseline.layout == best.layout else f" with {option_of(baseline.layout)}"
        is_same = abs(factor - 1) <= SAME_SHARE
        alone = ": on one device no strategy gains on it" if inputs["devices"] == 1 else ""
        gain = f", about as fast as best-fit packing{alone}" if is_same else f", {factor:.2f}× best-fit packing{other}"
    elif any(row.name == BEST_FIT.name and not row.feasible for row in evaluation.results):
        gain = "; best-fit packing does not fit in this layout"
    return f"Fastest with {where}: {_named(near)}, {time}{gain}."


def _savings(savings: TreeSavings, unit: str) -> str:
    computed = f"{savings.unique_tokens:,} {unit} are computed for {savings.path_tokens:,}"
    if savings.recomputed_tokens:
        computed += f", {savings.recomputed_tokens:,} of them again because trees were cut (data.max_tree_tokens)"
    if savings.speedup is None:
        return f"Shared prefixes: {computed}; without sharing {savings.alone.name} does not fit memory."
    held, alone = (format_bytes(one.peak_memory_bytes or 0) for one in (savings.shared, savings.alone))
    times = f"{savings.speedup:.2f}× the speed of the sequences one by one"
    return f"Shared prefixes: {times}, {held} a device instead of {alone}; {computed}."


def _other_layout(evaluation: Evaluation, inputs: Mapping[str, Any], few: FewLayouts | None) -> str:
    """Name the plainest layout that is faster than what was planned, where there is one, and the fastest."""
    faster = _faster_layouts(evaluation, inputs, few)
    if few is None or not faster:
        return ""
    fastest = faster[0]
    plainest = min(faster, key=lambda one: sum(one.layout[axis] > 1 for axis in ("cp", "pp", "tp")))
    verdict = "is faster" if equally_fast(evaluation) else "fits"
    text = f"{option_of(plainest.layout)} {verdict}: {format_seconds(_seconds_beside(evaluation, plainest))}"
    if plainest is not fastest:
        seconds = format_seconds(_seconds_beside(evaluation, fastest))
        text += f"; the fastest of {few.num_tried} layouts, {option_of(fastest.layout)}: {seconds}"
    return f"{text}."


def _faster_layouts(evaluation: Evaluation, inputs: Mapping[str, Any], few: FewLayouts | None) -> list[LayoutResult]:
    """Return those of a few layouts that are faster than all strategies in the one that was given, or, where none fits
    there, that fit; the one to take first."""
    if few is None or not inputs["is_layout_given"]:
        return []
    times_s = [_seconds(row) for row in equally_fast(evaluation)]
    others = [one for one in few.compared if one.layout != inputs["layout"]]
    limit_s = min(times_s, default=math.inf) / (1 + PLAINER_SHARE)
    return [one for one in others if _seconds_beside(evaluation, one) < limit_s]


def _seconds_beside(evaluation: Evaluation, other: LayoutResult) -> float:
    """Return the seconds of another layout over all batches, by its share of the fastest strategy's seconds on those
    that it was planned on."""
    rows = equally_fast(evaluation)
    if not rows:
        return _seconds(other)
    best = min(rows, key=_seconds)
    return _seconds(other) * _seconds(best) / float(np.mean(best.step_time_s[: other.num_batches]))


def _of_batches(inputs: Mapping[str, Any], batches: Sequence[SampledBatch]) -> str:
    remarks = []
    if (share := dropped_share(batches)) > 0:
        cut = {"truncate": "cut off by", "drop": "in documents left out by"}.get(str(inputs["overlong"]), "lost to")
        percent = f"{100 * share:.0f} %" if share >= 0.005 else "<1 %"
        kept = " (--overlong split keeps them)" if inputs["overlong"] == "truncate" else ""
        where = f"context {format_power_of_two(inputs['context'])}"
        remarks.append(f"{percent} of {inputs['unit']} are {cut} {where}{kept}")
    if inputs["unit"] == "tokens" and inputs["context"] > (limit := inputs["context_limit"] or math.inf):
        remarks.append(f"{inputs['model']} was made for {limit:,} tokens, a longer context needs rope_scaling")
    drawn = inputs["documents"] or max(len(batch.documents) + len(batch.left_out) for batch in batches)
    if drawn > inputs["data_documents"]:
        remarks.append(f"a batch of {drawn:,} documents is more than the data's {inputs['data_documents']:,}")
    if inputs["tokenizer"] == ESTIMATED:
        remarks.append("tokens are estimated, 4 bytes each: --tokenizer FOLDER counts them")
    if not remarks:
        return ""
    warning = "Warning: " if share >= WARNED_SHARE or len(remarks) > 1 or not share else ""
    text = ", and ".join(remarks)
    return f"{warning}{text if warning else text[0].upper() + text[1:]}."


def _seconds(row: StrategyResult | LayoutResult) -> float:
    return row.mean_step_time_s or 0.0
