"""`EngineProfile`: what a training engine can run of a plan, and how it runs it, in one frozen record.

Evenload's own runtime runs every plan. An engine of someone else runs forward and backward of a micro-batch of whole
documents, in its own order, with its own waiting. What follows from that stands here as facts that planning,
projection, price and refusals read; nothing asks for an engine's name.
"""

from typing import Literal, NoReturn

from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout

Sharding = Literal["nothing", "optimizer", "gradients", "parameters"]
Topic = Literal[
    "slices",
    "sharing",
    "layouts",
    "pipeline",
    "virtual",
    "context",
    "mixed_context",
    "counts",
    "loader",
    "tensor",
    "scheduler",
]
"""What a user may ask of an engine that it, or Evenload's adapter to it, cannot do."""


class Limitation(Frozen):
    """What an engine cannot do.

    Args:
        topic: which question this answers.
        why: the reason, with the place in the engine's source from which it is known.
        instead: the nearest thing that works.
    """

    topic: Topic
    why: str
    instead: str


class EngineTiming(Frozen):
    """How an engine's step differs in time from that of Evenload's runtime, for its price (`engines.price`).

    Args:
        weights: when sharded weights are gathered: "never" (every rank has them), "step" (after the update, before the
            next step), "pass" (before every forward and every backward of a micro-batch, unit by unit; then ranks wait
            for each other in every micro-batch).
        sums: when gradients are summed over ranks: "step" (once), "pass" (after every backward of a micro-batch, for
            which ranks wait for each other).
        sums_beside: they are summed beside the backward, unit by unit; else after it.
        sum_bucket_parameters: with sums in every pass, gradients are summed whenever so many of them have gathered, and
            what is left after the backward; 0 = unit by unit.
        sends_block: a rank computes nothing while it sends activations to the next stage.
        shape_exchange: before every transfer between stages the ranks tell each other its shape.
        sharded_update: a rank updates its share of the weights; else every rank updates all.
    """

    weights: Literal["never", "step", "pass"]
    sums: Literal["step", "pass"] = "step"
    sums_beside: bool = False
    sum_bucket_parameters: int = 0
    sends_block: bool = False
    shape_exchange: bool = False
    sharded_update: bool = True


class EngineProfile(Frozen):
    """One engine, in one way of using it.

    Args:
        name: `--engine NAME`, `PackedLoader(engine=NAME)`.
        title: as people write it, with the versions that this was read or run with.
        formats: of `integrations.batch_formats` that its model takes, the usual one first.
        equal_counts: data-parallel ranks make equally many micro-batches a step; ranks short of work get empty ones.
        constant_counts: a step of a run has as many micro-batches as any other, which the user says.
        fixed_shapes: all micro-batches of a step have equally many tokens, by padding.
        pipeline_fixed_shapes: the same, where the layout has a pipeline.
        pipeline_constant_counts: `constant_counts`, where the layout has a pipeline.
        count_multiple: the micro-batches of a rank are a multiple of it.
        virtual_count_multiple: where a rank has several virtual stages they are a multiple of the pipeline's ranks.
        context_parallel: "none"; "fixed": the whole context-parallel group shares every document; "group": the group
            shares a micro-batch, or each of its ranks has one of its own, documents of one micro-batch all alike;
            "heads": the whole group shares every micro-batch, its rows outside of attention and its heads inside
            (Ulysses), so that a micro-batch is padded and not its documents.
        document_chunks: documents that a group shares are padded to a multiple of so many tokens a rank.
        schedules: names of `schedule.registry` in whose order it can run a pipeline; () = it has none.
        shards: what data-parallel ranks hold a part of only.
        timing: for its price.
        slices: it can run packs of parts of documents.
        limits: what it cannot do.
        not_adapted: what it can do, and is planned and priced, but Evenload's adapter to it refuses to run.
    """

    name: str
    title: str
    formats: tuple[str, ...]
    equal_counts: bool
    constant_counts: bool = False
    fixed_shapes: bool = False
    pipeline_fixed_shapes: bool = False
    pipeline_constant_counts: bool = False
    count_multiple: int = 1
    virtual_count_multiple: bool = False
    context_parallel: Literal["none", "fixed", "group", "heads"] = "none"
    document_chunks: int = 1
    schedules: tuple[str, ...] = ()
    shards: Sharding
    timing: EngineTiming
    slices: bool = False
    limits: tuple[Limitation, ...] = ()
    not_adapted: tuple[Limitation, ...] = ()

    def not_adapted_in(self, layout: ParallelLayout) -> tuple[Limitation, ...]:
        """What of a plan in this layout Evenload's adapter refuses to run, though the engine would."""
        asked = {
            "pipeline": layout.num_stages > 1,
            "virtual": layout.num_stages > layout.pp,
            "context": layout.cp > 1,
            "tensor": layout.tp > 1,
            "scheduler": True,
        }
        return tuple(one for one in self.not_adapted if asked[one.topic])

    def weights_in(self, layout: ParallelLayout) -> Literal["never", "step", "pass"]:
        """When sharded weights are gathered in this layout; in a pipeline they are kept between micro-batches."""
        weights = self.timing.weights
        return "step" if weights == "pass" and layout.num_stages > 1 else weights

    def sums_in(self, layout: ParallelLayout) -> Literal["step", "pass"]:
        """When gradients are summed in this layout; in a pipeline after the last micro-batch."""
        return "step" if layout.num_stages > 1 else self.timing.sums

    def waits_in(self, layout: ParallelLayout) -> bool:
        """Whether ranks wait for each other in every micro-batch, for weights or to sum gradients."""
        return "pass" in (self.weights_in(layout), self.sums_in(layout)) and layout.dp * layout.cp > 1

    def pads_in(self, layout: ParallelLayout) -> bool:
        """Whether all micro-batches of a step have equally many tokens in this layout."""
        return self.fixed_shapes or (self.pipeline_fixed_shapes and layout.num_stages > 1)

    def is_constant_in(self, layout: ParallelLayout) -> bool:
        """Whether every step has as many micro-batches as any other in this layout."""
        return self.constant_counts or (self.pipeline_constant_counts and layout.num_stages > 1)

    def count_multiple_in(self, layout: ParallelLayout) -> int:
        """Of which number a rank's micro-batches are a multiple in this layout."""
        is_virtual = self.virtual_count_multiple and layout.num_stages > layout.pp > 1
        return max(self.count_multiple, layout.pp if is_virtual else 1)

    def limit(self, topic: Topic) -> Limitation | None:
        """What is known of something that the engine cannot do; None = it can."""
        return next((one for one in self.limits if one.topic == topic), None)

    def refuse(self, topic: Topic, asked: str) -> NoReturn:
        """A `ConfigError` with what was asked for, why the engine cannot and the nearest thing that works."""
        found = self.limit(topic)
        assert found is not None, f"profile {self.name} cannot do '{topic}' and does not say why"
        raise ConfigError(f"engine {self.name}: {asked}. {found.why}. {found.instead}")
