"""The engines that train Evenload's plans: a typed record each (`EngineProfile`), and the refusals that follow from it.

Planning, projection and price read these facts; none of them reads an engine's name. docs/engines.md names the source
of each fact, and what a new engine needs.
"""

from collections.abc import Mapping
from typing import Literal, NoReturn

from evenload.errors import ConfigError, did_you_mean
from evenload.planning.problem import CHOOSE, PlanOptions
from evenload.planning.strategies.registry import STRATEGIES, strategy_named
from evenload.planning.strategies.strategy import LeftOutStrategy
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

BEST = "auto"
"""Under an engine: the fastest, by its price, of all strategies that it can run (`planner.EnginePlanner`)."""

Topic = Literal["slices", "sharing", "layouts", "pipeline", "virtual", "context", "mixed_context", "counts", "tensor"]
"""What a plan or a loader may need that an engine, or Evenload's adapter to it, lacks."""

_WHOLE = "Choose balanced, best_fit, fixed_greedy or wlb, or auto for the fastest of them by this engine's price"
_OF_EVERY_ENGINE: Mapping[Topic, str] = {
    "slices": "It keeps no keys and values of an earlier micro-batch, so a document has to be whole",
    "sharing": "Its data-parallel ranks have no collective in attention, so none of them sees another's tokens",
    "layouts": "Its ranks and stages are set up once, at its start",
    "virtual": "Its interleaved schedule needs a pipeline of several ranks",
}
_INSTEAD: Mapping[Topic, str] = {
    "slices": f"{_WHOLE}; 'evenload train' runs slices",
    "sharing": f"{_WHOLE}; a context-parallel group or 'evenload train' shares long documents",
    "layouts": "Plan in one even layout (evenload plan --search-layout finds one); 'evenload train' changes layouts",
    "pipeline": "Use a layout with pp=1, or engine megatron, or 'evenload train'",
    "virtual": "Use virtual=1, or 'evenload train'",
    "context": "Use cp=1; 'evenload train' shares long documents",
    "mixed_context": "Choose balanced, best_fit or wlb",
    "counts": "Leave equal_micro_batches out: ranks short of work get micro-batches of padding, whose gradient is 0",
    "tensor": "Use tp=1, or 'evenload train'",
}


class Limitation(Frozen):
    """Describes what an adapter refuses to run (`topic`), why, and what works instead."""

    topic: Topic
    why: str
    instead: str


class EngineProfile(Frozen):
    """Describes one engine, in one way of using it.

    Args:
        name: `--engine NAME`, `PackedLoader(engine=NAME)`.
        title: engine and versions that the facts were read from.
        formats: those of `batch_formats` that its model takes, the usual one first.
        equal_counts: data-parallel ranks run equally many micro-batches a step; ranks short of work get empty ones.
        constant_counts: every step of a run has as many micro-batches as any other; the user gives the number.
        static_pipeline: in a pipeline, `constant_counts` holds and all micro-batches of a step have one length.
        context_parallel: "fixed": a group cuts every document into equal chunks; "heads": a group splits rows outside
            of attention and heads inside (Ulysses); "none".
        document_chunks: chunks of a document on every rank of the group, under "fixed".
        schedules: names of `schedule.registry` in whose order it runs a pipeline; () = it has none.
        gathers: when sharded weights are all-gathered: "never" (ranks hold all), "step" (after the update), "pass"
            (unit by unit in every forward and backward, where ranks wait).
        reduces: when gradients are reduced: "step" (once), "pass" (after every backward, where ranks wait).
        overlaps_reduction: the reduction runs during the backward, unit by unit; else after it.
        reduction_bucket: parameters that are reduced at once in every pass; 0 = unit by unit.
        blocking_sends: a rank computes nothing while it sends activations, and sends their shape first.
        sharded_update: a rank updates its share of the weights; else every rank updates all of them.
        cannot: why it cannot run what a user may request.
        not_adapted: what the engine runs and is priced for, but Evenload's adapter refuses, and why.
    """

    name: str
    title: str
    formats: tuple[str, ...]
    equal_counts: bool
    constant_counts: bool = False
    static_pipeline: bool = False
    context_parallel: Literal["none", "fixed", "heads"] = "none"
    document_chunks: int = 1
    schedules: tuple[str, ...] = ()
    gathers: Literal["never", "step", "pass"]
    reduces: Literal["step", "pass"] = "step"
    overlaps_reduction: bool = False
    reduction_bucket: int = 0
    blocking_sends: bool = False
    sharded_update: bool = True
    cannot: Mapping[Topic, str] = {}
    not_adapted: Mapping[Topic, str] = {}

    def not_adapted_in(self, layout: ParallelLayout) -> tuple[Limitation, ...]:
        """Return what the adapter refuses to run in this layout, though the engine would."""
        stages = layout.num_stages
        needed = {
            "pipeline": stages > 1,
            "virtual": stages > layout.pp,
            "context": layout.cp > 1,
            "tensor": layout.tp > 1,
        }
        return tuple(
            Limitation(topic=topic, why=why, instead=_INSTEAD[topic])
            for topic, why in self.not_adapted.items()
            if needed[topic]
        )

    def gathers_in(self, layout: ParallelLayout) -> Literal["never", "step", "pass"]:
        """Return when sharded weights are gathered; a pipeline keeps them between micro-batches."""
        return "step" if self.gathers == "pass" and layout.num_stages > 1 else self.gathers

    def reduces_in(self, layout: ParallelLayout) -> Literal["step", "pass"]:
        """Return when gradients are reduced; a pipeline reduces them after its last micro-batch."""
        return "step" if layout.num_stages > 1 else self.reduces

    def waits_in(self, layout: ParallelLayout) -> bool:
        """Return whether ranks wait for each other in every micro-batch."""
        return "pass" in (self.gathers_in(layout), self.reduces_in(layout)) and layout.dp * layout.cp > 1

    def pads_in(self, layout: ParallelLayout) -> bool:
        """Return whether all micro-batches of a step have equally many tokens."""
        return self.static_pipeline and layout.num_stages > 1

    def is_constant_in(self, layout: ParallelLayout) -> bool:
        """Return whether every step has as many micro-batches as any other."""
        return self.constant_counts or self.pads_in(layout)

    def count_multiple_in(self, layout: ParallelLayout) -> int:
        """Return of what a rank's micro-batches are a multiple: with virtual stages, of the pipeline's ranks."""
        return layout.pp if layout.num_stages > layout.pp > 1 else 1

    def refuse(self, topic: Topic, request: str) -> NoReturn:
        """Raise a `ConfigError` that names the request, why the engine cannot, and the nearest thing that works."""
        why = self.cannot.get(topic) or _OF_EVERY_ENGINE.get(topic, "")
        raise ConfigError(f"engine {self.name}: {request}. {why}. {_INSTEAD[topic]}")


def require_layout(profile: EngineProfile, layout: ParallelLayout) -> None:
    """Raise a `ConfigError` for a layout that the engine does not have."""
    name = f"layout {layout.describe()}"
    if layout.has_replicated_stages:
        profile.refuse("layouts", f"{name} has stages with different numbers of devices")
    if layout.num_stages > 1 and not profile.schedules:
        profile.refuse("pipeline", f"{name} has a pipeline of {layout.num_stages} stages")
    if layout.num_stages > layout.pp and (layout.pp == 1 or "interleaved" not in profile.schedules):
        profile.refuse("virtual", f"{name} has {layout.num_stages} virtual stages on {layout.pp} pipeline ranks")
    if layout.cp > 1 and profile.context_parallel == "none":
        profile.refuse("context", f"{name} shares documents among {layout.cp} context-parallel ranks")


def require_heads(profile: EngineProfile, model: ModelSpec, layout: ParallelLayout) -> None:
    """Raise a `ConfigError` where ranks that share heads would have none or unequally many."""
    ranks = layout.cp * layout.tp
    for heads, kv_heads in dict.fromkeys((one.heads, one.kv_heads) for one in model.attentions):
        is_even = not heads % ranks and not (kv_heads % ranks and ranks % kv_heads)
        if profile.context_parallel != "heads" or is_even:
            continue
        request = f"layout {layout.describe()} shares heads among {ranks} ranks"
        has = f"{model.name} has {heads} query heads and {kv_heads} key/value heads"
        fix = f"Use as many ranks as divide both, or a multiple of {kv_heads} that divides {heads}"
        raise ConfigError(f"engine {profile.name}: {request}, and {has}. {fix}")


def require_strategy(profile: EngineProfile, name: str, options: PlanOptions, layout: ParallelLayout) -> None:
    """Raise a `ConfigError` for a strategy, layout, schedule or option that the engine does not have."""
    require_layout(profile, layout)
    _require_options(profile, options, layout)
    if name == BEST:
        return
    strategy = strategy_named(name)
    if strategy.changes_layout:
        profile.refuse("layouts", f"strategy {name} changes the layout between steps")
    if strategy.cuts_documents:
        profile.refuse("slices", f"strategy {name} cuts documents into slices")
    if strategy.shares_documents:
        profile.refuse("sharing", f"strategy {name} shares documents among replicas")
    if strategy.assigns_ranks and layout.cp > 1:
        request = f"strategy {name} keeps some documents of a micro-batch whole on one rank of {layout.cp}"
        profile.refuse("mixed_context", request)
    strategy.require_layout(layout)


def _require_options(profile: EngineProfile, options: PlanOptions, layout: ParallelLayout) -> None:
    def refuse(option: str, why: str) -> NoReturn:
        raise ConfigError(f"engine {profile.name}: plan.options.{option} is '{getattr(options, option)}'{why}")

    schedule = options.schedule
    if profile.context_parallel != "none" and options.cp_sharding not in ("mixed", "per_document"):
        refuse("cp_sharding", ". Its context-parallel group shares every document equally; set 'per_document'")
    if schedule != CHOOSE and schedule not in profile.schedules:
        if not profile.schedules:
            profile.refuse("pipeline", f"plan.options.schedule is '{schedule}'")
        refuse("schedule", f", which it does not have. Use one of {', '.join(profile.schedules)}, or leave it out")
    if schedule != CHOOSE and (schedule == "interleaved") != (layout.num_stages > layout.pp):
        why = "Ranks with several virtual stages run interleaved, others do not"
        refuse("schedule", f" on layout {layout.describe()}. {why}. Leave the schedule out, or change virtual")
    if options.policy not in ("choose", "replay"):
        refuse("policy", ". Plans do not change what it keeps; leave it out, and set the engine's checkpointing")


def require_auto(profile: EngineProfile, options: PlanOptions) -> None:
    """Raise a `ConfigError` for what an engine's `auto` ignores: it plans every global batch by itself."""
    if options.window > 1:
        request = f"plan.options.window is {options.window} with strategy {BEST}, which plans every batch by itself"
        fix = "Name fixed_greedy, which packs over several, or leave it out"
        raise ConfigError(f"engine {profile.name}: {request}. {fix}")


def runnable(
    profile: EngineProfile, options: PlanOptions, layout: ParallelLayout
) -> tuple[tuple[str, ...], tuple[LeftOutStrategy, ...]]:
    """Return the strategies that the engine can run in this layout, and why not the others: exact solvers, which take
    their time limit in every step, run only where they are named. Raises a `ConfigError` where nothing runs."""
    require_strategy(profile, BEST, options, layout)
    names: list[str] = []
    left_out: list[LeftOutStrategy] = []
    for name, one in STRATEGIES.items():
        if name == BEST:
            continue
        try:
            if one.solver_limit_s is not None:
                limit = f"its solver takes up to {one.solver_limit_s(options):g} s for every step"
                raise ConfigError(f"{limit}; --strategy {name} runs it")
            require_strategy(profile, name, options, layout)
            names.append(name)
        except ConfigError as error:
            why = str(error).removeprefix(f"engine {profile.name}: ").removeprefix(f"strategy {name}").lstrip(": ")
            left_out.append(LeftOutStrategy(name=name, why=why))
    return tuple(names), tuple(left_out)


_GATHERS = (
    "gathers a unit's weights in every forward and backward, so a rank with fewer micro-batches would let the others "
    "wait for ever"
)


def _deepspeed(stage: Literal[1, 2, 3]) -> EngineProfile:
    """ZeRO-1 and ZeRO-2 have whole weights on every rank, so a forward needs nobody else; ZeRO-3 has not."""
    is_sharded = stage == 3
    cannot: dict[Topic, str] = {
        "pipeline": "Its PipelineEngine takes micro-batches of one shape and one number, and no ZeRO-2 or ZeRO-3",
        "mixed_context": "Under Ulysses a rank has some heads of all documents",
    }
    if is_sharded:
        cannot["counts"] = f"ZeRO-3 {_GATHERS}; use engine deepspeed (ZeRO-1), where counts may differ"
    return EngineProfile(
        name="deepspeed" if stage == 1 else f"deepspeed-zero{stage}",
        title=f"DeepSpeed 0.19.8, ZeRO-{stage}",
        formats=("hf", "varlen", "pack"),
        equal_counts=is_sharded,
        context_parallel="heads",
        # What DeepSpeedLoop does by default; ZeRO-3 reduces during the backward, bucket by bucket (zero/config.py).
        gathers="pass" if is_sharded else "step",
        reduces="pass" if is_sharded else "step",
        overlaps_reduction=is_sharded,
        reduction_bucket=500_000_000 if is_sharded else 0,
        cannot=cannot,
    )


_ENGINES = (
    EngineProfile(
        name="megatron",
        title="Megatron-Core 0.16.1",
        formats=("megatron",),
        equal_counts=False,
        context_parallel="fixed",
        document_chunks=2,
        schedules=("1f1b", "interleaved"),
        gathers="step",
        blocking_sends=True,
        cannot={
            "mixed_context": "It has one context-parallel group for all micro-batches, over which every document is "
            "cut into 2 x cp chunks"
        },
        not_adapted={
            "virtual": "MegatronTrainStep refuses interleaved stages, whose schedule waits for ever for shapes",
            "context": "MegatronTrainStep refuses context parallelism: its packs are not cut for the ranks of a group",
        },
    ),
    EngineProfile(
        name="torchtitan",
        title="torchtitan 0.3.0",
        formats=("torchtitan",),
        equal_counts=True,
        static_pipeline=True,
        schedules=("1f1b", "interleaved", "gpipe"),
        # Its Trainer never turns FSDP2's set_requires_gradient_sync off; the stages of a pipeline do.
        gathers="pass",
        reduces="pass",
        overlaps_reduction=True,
        cannot={
            "context": "Its context parallelism cuts block masks of flex attention, and refuses VarlenMetadata",
            "counts": f"fully_shard {_GATHERS}",
        },
        not_adapted={
            "pipeline": "PackedTrainer refuses pipeline_parallel_degree above 1: not tested with padded packs",
            "tensor": "PackedTrainer refuses tensor_parallel_degree above 1: not tested with packs",
        },
    ),
    _deepspeed(1),
    _deepspeed(2),
    _deepspeed(3),
    EngineProfile(
        name="fsdp2",
        title="torch.distributed.fsdp.fully_shard of torch 2.11 to 2.13",
        formats=("hf", "varlen", "pack"),
        equal_counts=True,
        gathers="pass",
        overlaps_reduction=True,
        cannot={
            "pipeline": "fully_shard alone has no pipeline",
            "context": "fully_shard shards weights, not sequences, and torch's context parallelism knows no documents",
            "counts": f"FSDPParamGroup {_GATHERS}",
        },
    ),
    EngineProfile(
        name="trainer",
        title="Trainer of transformers 5, TRL's SFTTrainer and Accelerate, under DistributedDataParallel",
        formats=("hf",),
        equal_counts=True,
        constant_counts=True,
        gathers="never",
        overlaps_reduction=True,
        sharded_update=False,
        cannot={
            "pipeline": "The Trainer has no pipeline",
            "context": "Accelerate's context parallelism is that of scaled_dot_product_attention, without documents",
            "counts": "The Trainer makes gradient_accumulation_steps passes in every step; give micro_batches as many",
        },
    ),
)
ENGINES: dict[str, EngineProfile] = {one.name: one for one in _ENGINES}
"""By name. `deepspeed` is ZeRO-1."""

LOOP = EngineProfile(
    name="loop",
    title="a loop of the user's own over a PackedLoader",
    formats=("hf", "varlen", "torchtitan", "megatron", "pack"),
    equal_counts=False,
    gathers="never",
    sharded_update=False,
    cannot=dict.fromkeys(("pipeline", "context"), "A plain loop runs a whole model on every rank"),
)
"""The caller of a `PackedLoader` without an engine, of which nothing is known."""


def engine_named(name: str) -> EngineProfile:
    """Return the engine of a name; a `ConfigError` with the nearest names where there is none."""
    if name in ENGINES:
        return ENGINES[name]
    raise ConfigError(f"engine is '{name}'; {did_you_mean(name, ENGINES)}choose one of {', '.join(ENGINES)}")
