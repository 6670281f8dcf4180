"""`ParallelLayout`: how ranks, stages and layers are arranged.

Global rank order, slowest to fastest: pipeline rank, data rank, context rank, tensor rank. So
tensor and context groups are neighbours on a node, and a pipeline's stages lie far apart, where
the traffic is smallest.
"""

import itertools
from collections.abc import Sequence

import msgspec

from evenload.errors import ConfigError
from evenload.types.base import Frozen


class ParallelLayout(Frozen):
    """Sizes of the parallel dimensions and the split of layers into stages.

    Args:
        dp, cp, pp, tp: sizes of the data, context, pipeline and tensor dimensions.
        stage_layers: per virtual stage its layers as a half-open range; consecutive, covering all.
        stage_to_rank: per virtual stage the pipeline rank that runs it.
        generation: rises by one at every live reconfiguration.
        stage_recomputed: of every virtual stage how many of its layers, its first ones, make the products of their
            linear layers again in backward instead of keeping them, for all documents (FlexPipe's O_plan); left out of
            JSON where none does.
    """

    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1
    stage_layers: tuple[tuple[int, int], ...]
    stage_to_rank: tuple[int, ...]
    generation: int = 0
    stage_recomputed: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        for field in ("dp", "cp", "pp", "tp"):
            if getattr(self, field) < 1:
                raise ConfigError(f"layout: {field} is {getattr(self, field)}, must be at least 1")
        if len(self.stage_layers) != len(self.stage_to_rank) or len(self.stage_layers) % self.pp:
            raise ConfigError(
                f"layout: {len(self.stage_layers)} stages, {len(self.stage_to_rank)} stage ranks for pp={self.pp}; "
                "give every pipeline rank the same number of stages"
            )
        edge = 0
        for start, stop in self.stage_layers:
            if start != edge or stop <= start:
                raise ConfigError(f"layout: stage layers {self.stage_layers} are not consecutive non-empty ranges")
            edge = stop
        if sorted(set(self.stage_to_rank)) != list(range(self.pp)):
            raise ConfigError(f"layout: stages go to ranks {self.stage_to_rank}, expected each of 0..{self.pp - 1}")
        again = self.recomputed_counts
        if len(again) != self.num_stages or not all(
            0 <= some <= count for some, count in zip(again, self.stage_counts, strict=False)
        ):
            raise ConfigError(
                f"layout: {again} layers of the stages are recomputed, expected one number of each stage, at most its "
                f"layers {self.stage_counts}"
            )

    @property
    def recomputed_counts(self) -> tuple[int, ...]:
        """Of every virtual stage its layers that make products again, which are its first ones."""
        return (0,) * self.num_stages if isinstance(self.stage_recomputed, msgspec.UnsetType) else self.stage_recomputed

    def recomputed_layers(self, stage: int) -> range:
        """Of a virtual stage the layers of the model that make products again."""
        first, _ = self.stage_layers[stage]
        return range(first, first + self.recomputed_counts[stage])

    def recomputing(self, counts: Sequence[int]) -> "ParallelLayout":
        """The same places with so many layers of every virtual stage recomputed."""
        return msgspec.structs.replace(self, stage_recomputed=tuple(counts) if any(counts) else msgspec.UNSET)

    @property
    def num_stages(self) -> int:
        """Virtual stages in the pipeline (`pp` unless interleaved)."""
        return len(self.stage_layers)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.stage_layers[-1][1]

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.cp * self.pp * self.tp

    def global_rank(self, *, pp_rank: int, dp_rank: int, cp_rank: int = 0, tp_rank: int = 0) -> int:
        """The rank in `torch.distributed` order."""
        return ((pp_rank * self.dp + dp_rank) * self.cp + cp_rank) * self.tp + tp_rank

    def dp_rank(self, rank: int) -> int:
        """The replica that a global rank belongs to."""
        return rank // (self.tp * self.cp) % self.dp

    def replicas(self, num_ranks: int) -> tuple[int | None, ...]:
        """Of every one of so many ranks its replica; None for ranks beyond the layout, which are idle in it."""
        return tuple(self.dp_rank(rank) if rank < self.world_size else None for rank in range(num_ranks))

    @property
    def arrangement(self) -> "ParallelLayout":
        """This layout in generation 0 and without recomputed layers: equal for layouts that place everything alike."""
        if not self.generation and self.stage_recomputed is msgspec.UNSET:
            return self
        return msgspec.structs.replace(self, generation=0, stage_recomputed=msgspec.UNSET)

    @property
    def stage_counts(self) -> tuple[int, ...]:
        """Layers of every virtual stage."""
        return tuple(stop - start for start, stop in self.stage_layers)

    @property
    def is_even(self) -> bool:
        """Whether stages hold as many layers as `even_layout` gives them."""
        return self.stage_counts == even_layout(self.num_layers, pp=self.num_stages).stage_counts

    def describe(self) -> str:
        """Short form for tables and logs, for example `dp=2 pp=4`, with layers of stages that are not even."""
        parts = [f"{k}={getattr(self, k)}" for k in ("dp", "cp", "pp", "tp") if getattr(self, k) > 1]
        virtual = self.num_stages // self.pp
        if virtual > 1:
            parts.append(f"virtual={virtual}")
        if not self.is_even:
            parts.append(f"layers={'+'.join(map(str, self.stage_counts))}")
        if any(self.recomputed_counts):
            parts.append(f"recomputed={'+'.join(map(str, self.recomputed_counts))}")
        return " ".join(parts) or "single"


def even_layout(
    num_layers: int, *, dp: int = 1, cp: int = 1, pp: int = 1, tp: int = 1, virtual: int = 1, generation: int = 0
) -> ParallelLayout:
    """Split layers as evenly as possible; earlier stages take the remainder (the last carries the head).

    Raises:
        ConfigError: fewer layers than stages.
    """
    stages = pp * virtual
    if stages < 1 or num_layers < stages:
        raise ConfigError(
            f"layout: {num_layers} layers cannot fill {stages} stages (pp={pp} x virtual={virtual}); lower pp"
        )
    base, extra = divmod(num_layers, stages)
    counts = [base + (stage < extra) for stage in range(stages)]
    return split_layout(counts, dp=dp, cp=cp, pp=pp, tp=tp, generation=generation)


def split_layout(
    stage_counts: Sequence[int], *, dp: int = 1, cp: int = 1, pp: int = 1, tp: int = 1, generation: int = 0
) -> ParallelLayout:
    """Give every virtual stage so many layers; stages go round the pipeline's ranks.

    Raises:
        ConfigError: a stage without layers, or a number of stages that pp does not divide.
    """
    return ParallelLayout(
        dp=dp,
        cp=cp,
        pp=pp,
        tp=tp,
        stage_layers=tuple(itertools.pairwise(itertools.accumulate(stage_counts, initial=0))),
        stage_to_rank=tuple(stage % pp for stage in range(len(stage_counts))),
        generation=generation,
    )
