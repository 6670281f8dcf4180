"""What a `PackedLoader` is about to do, and what it does not do, in lines for a log."""

import msgspec

from evenload.cost.pack_cost import PackCosts
from evenload.data.config import DataConfig
from evenload.engines.engine_planner import ENGINES_AUTO
from evenload.engines.refusals import BEST
from evenload.integrations.batch_formats import METADATA
from evenload.integrations.loader_options import LoaderOptions
from evenload.integrations.loader_peers import LoaderPlace
from evenload.integrations.packed_step import PackedStep
from evenload.plan.strategies.registry import strategy_named
from evenload.types.counted import counted


def start_lines(
    config: DataConfig, tokenizer: str, options: LoaderOptions, place: LoaderPlace, costs: PackCosts
) -> list[str]:
    """One line a subject, `balance_line` first; `tokenizer` = what is said about it."""
    planning, strategy = options.planning(), strategy_named(options.strategy)
    batch = (
        counted(config.batch_documents, "document") if config.batch_documents else f"up to {config.batch_tokens} tokens"
    )
    most = f"at most {options.max_tokens} tokens"
    packs = "as many packs as needed" + (", equally many on all ranks" if options.equal_micro_batches else "")
    if options.micro_batches is not None:
        packs = f"exactly {counted(options.micro_batches, 'pack')} a rank"
    if options.fixed_shapes:
        packs += f", each padded to {options.max_tokens} tokens"
    elif options.row_multiple > 1:
        packs += f", each padded to a multiple of {options.row_multiple} tokens"
    if options.sequence_ranks > 1:
        packs += f", each shared by {counted(options.sequence_ranks, 'rank')}"
    reading = "alone" if place.reads_alone else f"together with {place.peers.size - 1} others"
    workers = counted(config.workers, "process") if config.workers else "a thread"
    order = f"shuffled within {counted(config.shuffle_window, 'document')}, seed {config.seed}"
    not_done = [
        "no document attends to another" + (", and none is cut" if options.keeps_whole else ""),
        "no attention mask is made",
        "no special tokens but the end of a document",
        "tensors stay on the CPU",
    ]
    is_engines_auto = options.engine is not None and options.strategy == BEST
    description = ENGINES_AUTO if is_engines_auto else strategy.description
    delays = strategy.delays(planning) and not is_engines_auto
    # Other strategies that put documents off do not read the window.
    packs_windows = delays and not strategy.delays(msgspec.structs.replace(planning, window=1))
    if delays and not options.evaluation and config.epochs is None:
        not_done.append("documents that wait when you stop are not trained (set epochs)")
    cuts = "" if options.keeps_whole else "; the loop must follow step.plan"
    lines = [
        balance_line(costs, assumed=options.model is None),
        *([] if options.engine is None else [f"engine        {options.engine}: {options.profile.title}"]),
        f"strategy      {options.strategy}: {description}{cuts}",
        f"global batch  {batch}, rank {place.rank} of {place.world_size}, {packs} of {most}",
        f"tokenizer     {tokenizer}",
        f"boundaries    format {options.format}: {METADATA[options.batch_format]}",
        f"order         {order if config.shuffle_window > 1 else 'as in the files'}"
        + (f", packed over {counted(planning.window, 'batch')}" if packs_windows else ""),
        f"reading       {reading}, {workers}, {counted(config.prefetch_steps, 'step')} ahead; longer documents: "
        f"{config.overlong}",
        f"not done      {'; '.join(not_done)}",
    ]
    if options.evaluation:
        lines.append("evaluation    every document once an iteration, none dropped, the last batch short")
    return lines


def balance_line(costs: PackCosts, *, assumed: bool) -> str:
    """By whose times packs are balanced."""
    line = f"balance       packs of equal time for {costs.model.name}"
    if assumed:
        line += ", which is assumed: give the model you train as PackedLoader(model=...), since the share of attention"
        line += " in a document's time depends on it"
    return f"{line}; times from {costs.coefficients.source} ({costs.coefficients.device})"


def first_step_line(step: PackedStep, options: LoaderOptions) -> str:
    """How well the first step's packs are filled and balanced."""
    plan = step.plan
    packs = [pack for packs in plan.pack_plans for pack in packs.forward]
    tokens = sum(pack.num_tokens for pack in packs)
    computed = sum(options.computed_tokens(pack.num_tokens + pack.num_padding_tokens) for pack in packs)
    times = [sum(sum(row) for row in (*times.forward_s, *times.backward_s)) for times in plan.times]
    mean_s = sum(times) / len(times)
    uneven = max(times) / mean_s if mean_s else 1.0
    return (
        f"first step    {counted(len(plan.documents), 'document')}, {tokens} tokens in {counted(len(packs), 'pack')} "
        f"({tokens / (len(packs) * options.max_tokens):.0%} of max_tokens), {tokens / computed:.1%} not "
        f"padding, slowest rank {uneven:.3f} of the mean by prediction"
    )
