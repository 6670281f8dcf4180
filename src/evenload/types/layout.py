"""Arrange ranks, stages and layers: `ParallelLayout`, how it is written (`dp=4,pp=8`), and the channels between ranks.

Global rank order, slowest to fastest: pipeline, data, context, tensor rank, so tensor and context groups are neighbours
on a node. Stages of one pipeline may have different numbers of devices (FlexPipe's part-pipeline data parallelism):
each is a pipeline rank of its own, and all devices of a stage hold its layers and take its packs in turn: with 1 + 2 +
1 devices pack k runs on ranks 0, 1 + k % 2 and 3.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from evenload.errors import ConfigError, did_you_mean
from evenload.types.base import Frozen, require_at_least_one
from evenload.types.cluster import DeviceKind
from evenload.types.text import counted

MOST_ANY_SIZE = 8  # Replicas of which groups of any size are made, not only of sizes that divide them


class ParallelLayout(Frozen):
    """Sizes of the parallel dimensions and the split of layers into stages.

    Args:
        dp, cp, pp, tp: sizes of the data, context, pipeline and tensor dimensions.
        stage_layers: layers `[first, last)` of every virtual stage; consecutive, covering all.
        stage_to_rank: pipeline rank of every virtual stage, the first of several.
        generation: rises by one at every live reconfiguration.
        stage_recomputed: how many of every virtual stage's layers, the first ones, recompute the outputs of their
            linear layers in backward, for all documents (FlexPipe's O_plan); left out of JSON where none does.
        stage_devices: pipeline ranks of every stage; left out of JSON where all have one.
    """

    dp: int = 1
    cp: int = 1
    pp: int = 1
    tp: int = 1
    stage_layers: tuple[tuple[int, int], ...]
    stage_to_rank: tuple[int, ...]
    generation: int = 0
    stage_recomputed: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    stage_devices: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        require_at_least_one("layout: ", self, "dp", "cp", "pp", "tp")
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
        if self.has_replicated_stages:
            self._check_devices()
        elif sorted(set(self.stage_to_rank)) != list(range(self.pp)):
            raise ConfigError(f"layout: stages go to ranks {self.stage_to_rank}, expected each of 0..{self.pp - 1}")
        recomputed, counts = self.recomputed_counts, self.stage_counts
        if len(recomputed) != len(counts) or not all(
            0 <= some <= count for some, count in zip(recomputed, counts, strict=True)
        ):
            raise ConfigError(
                f"layout: {recomputed} layers of the stages are recomputed, expected one number of each stage, at most "
                f"its layers {counts}"
            )

    @property
    def recomputed_counts(self) -> tuple[int, ...]:
        """How many of every virtual stage's layers, the first ones, are recomputed in backward."""
        return (0,) * self.num_stages if isinstance(self.stage_recomputed, msgspec.UnsetType) else self.stage_recomputed

    def recomputed_layers(self, stage: int) -> range:
        """Return the layers of the model that a virtual stage recomputes in backward."""
        first, _ = self.stage_layers[stage]
        return range(first, first + self.recomputed_counts[stage])

    def recomputing(self, counts: Sequence[int]) -> "ParallelLayout":
        """Return the layout with so many layers of every virtual stage recomputed."""
        return msgspec.structs.replace(self, stage_recomputed=tuple(counts) if any(counts) else msgspec.UNSET)

    def _check_devices(self) -> None:
        devices = self.devices
        written = "+".join(map(str, devices))
        if len(devices) != self.pp or min(devices) < 1:
            raise ConfigError(f"layout: devices={written} must be {self.pp} numbers of at least 1, one for each stage")
        if len(set(devices)) == 1:
            raise ConfigError(f"layout: devices={written} are as many for every stage; write dp={devices[0]} instead")
        if self.num_stages != self.pp or max(self.dp, self.cp, self.tp) > 1:
            raise ConfigError(
                f"layout: devices={written} with dp={self.dp} cp={self.cp} tp={self.tp} virtual="
                f"{self.num_stages // self.pp}: stages with different numbers of devices are of one pipeline, without "
                "context and tensor parallelism and virtual stages; nothing else is tested with them"
            )
        if self.stage_to_rank != first_ranks(devices):
            raise ConfigError(
                f"layout: stages begin at ranks {self.stage_to_rank}, with devices={written} at {first_ranks(devices)}"
            )

    @property
    def has_replicated_stages(self) -> bool:
        """Whether stages have different numbers of devices."""
        return self.stage_devices is not msgspec.UNSET

    @property
    def devices(self) -> tuple[int, ...]:
        """Pipeline ranks of every virtual stage."""
        return (1,) * self.num_stages if isinstance(self.stage_devices, msgspec.UnsetType) else self.stage_devices

    @property
    def pipeline_ranks(self) -> int:
        """Ranks of one pipeline: `pp`, or more where stages have several devices."""
        return self.pp if isinstance(self.stage_devices, msgspec.UnsetType) else sum(self.stage_devices)

    def stages_of_rank(self, pp_rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a pipeline rank, ascending; none of an idle rank (-1)."""
        pairs = enumerate(zip(self.stage_to_rank, self.devices, strict=True))
        return tuple(stage for stage, (first, count) in pairs if first <= pp_rank < first + count)

    def ranks_of_stage(self, stage: int) -> range:
        """Return the pipeline ranks of a virtual stage."""
        return range(self.stage_to_rank[stage], self.stage_to_rank[stage] + self.devices[stage])

    def rank_of_pack(self, stage: int, pack: int) -> int:
        """Return the pipeline rank that runs a pack on a virtual stage, forward and backward."""
        return self.stage_to_rank[stage] + pack % self.devices[stage]

    def linked_ranks(self, stage: int) -> list[tuple[int, int]]:
        """Return the pairs of pipeline ranks of a stage and of the next one that some pack passes."""
        from_, to = self.ranks_of_stage(stage), self.ranks_of_stage(stage + 1)
        common = math.gcd(len(from_), len(to))
        pairs = itertools.product(enumerate(from_), enumerate(to))
        return [(sender, receiver) for (i, sender), (j, receiver) in pairs if (i - j) % common == 0]

    @property
    def leading_ranks(self) -> tuple[int, ...]:
        """The first pipeline rank with the same layers as each: itself, unless its stage has several devices."""
        if not self.has_replicated_stages:
            return tuple(range(self.pp))
        return tuple(first for first, count in zip(self.stage_to_rank, self.devices, strict=True) for _ in range(count))

    @property
    def data_sizes(self) -> tuple[int, ...]:
        """How many ranks hold the same weights as each pipeline rank; each owns a shard of the optimizer's state."""
        if not self.has_replicated_stages:
            return (self.dp * self.cp,) * self.pp
        return tuple(count * self.dp * self.cp for count in self.devices for _ in range(count))

    def data_rank(self, *, pp_rank: int, dp_rank: int, cp_rank: int = 0) -> int:
        """Return a rank's place among those that hold the same weights."""
        twin = pp_rank - self.leading_ranks[pp_rank] if self.has_replicated_stages and pp_rank >= 0 else 0
        return (twin * self.dp + dp_rank) * self.cp + cp_rank

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Return the sizes of groups that replicas can form, ascending: all divisors of dp but 1, and every other size
        where these are few, because each takes process groups on every rank."""
        return tuple(size for size in range(2, self.dp + 1) if self.has_blocks_of_any_size or self.dp % size == 0)

    @property
    def has_blocks_of_any_size(self) -> bool:
        """Whether replicas can form groups of sizes that do not divide them."""
        return self.dp <= MOST_ANY_SIZE

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
        return self.dp * self.cp * self.pipeline_ranks * self.tp

    def global_rank(self, *, pp_rank: int, dp_rank: int, cp_rank: int = 0, tp_rank: int = 0) -> int:
        """Return the rank in `torch.distributed` order."""
        return ((pp_rank * self.dp + dp_rank) * self.cp + cp_rank) * self.tp + tp_rank

    def replicas(self, num_ranks: int) -> tuple[int | None, ...]:
        """Return the replica of each of so many ranks; None for idle ones, which are beyond the layout."""
        size = self.tp * self.cp
        return tuple(rank // size % self.dp if rank < self.world_size else None for rank in range(num_ranks))

    @property
    def arrangement(self) -> "ParallelLayout":
        """The layout in generation 0 and without recomputed layers: equal for layouts that place everything alike."""
        if not self.generation and self.stage_recomputed is msgspec.UNSET:
            return self
        return msgspec.structs.replace(self, generation=0, stage_recomputed=msgspec.UNSET)

    @property
    def shape(self) -> "ParallelLayout":
        """The arrangement with layers split evenly: equal for layouts that need the same process groups."""
        devices = self.devices if self.has_replicated_stages else None
        even = even_layout(self.num_layers, pp=self.num_stages, devices=devices)
        return msgspec.structs.replace(self.arrangement, stage_layers=even.stage_layers)

    @property
    def stage_counts(self) -> tuple[int, ...]:
        """Layers of every virtual stage."""
        return tuple(stop - start for start, stop in self.stage_layers)

    @property
    def is_even(self) -> bool:
        """Whether stages hold as many layers as `even_layout` gives them."""
        return self.stage_layers == self.shape.stage_layers

    def describe(self) -> str:
        """Return a short form such as `dp=2 pp=4`, with devices and layers of stages where uneven."""
        parts = [f"{k}={getattr(self, k)}" for k in ("dp", "cp", "pp", "tp") if getattr(self, k) > 1]
        virtual = self.num_stages // self.pp
        if virtual > 1:
            parts.append(f"virtual={virtual}")
        of_stages = (
            ("devices", self.devices, self.has_replicated_stages),
            ("layers", self.stage_counts, not self.is_even),
            ("recomputed", self.recomputed_counts, any(self.recomputed_counts)),
        )
        parts += [f"{name}={'+'.join(map(str, counts))}" for name, counts, is_shown in of_stages if is_shown]
        return " ".join(parts) or "single"


def first_ranks(devices: Sequence[int]) -> tuple[int, ...]:
    """Return the first pipeline rank of every stage, which have so many each."""
    return tuple(itertools.accumulate(devices[:-1], initial=0))


def even_layout(
    num_layers: int,
    *,
    dp: int = 1,
    cp: int = 1,
    pp: int = 1,
    tp: int = 1,
    virtual: int = 1,
    devices: Sequence[int] | None = None,
) -> ParallelLayout:
    """Split layers as evenly as possible, a device where stages have different numbers of `devices`; earlier stages
    take the remainder (the last has the head). `ConfigError` where there are fewer layers than stages."""
    stages = pp * virtual
    if stages < 1 or num_layers < stages:
        raise ConfigError(
            f"layout: {num_layers} layers cannot fill {stages} stages (pp={pp} x virtual={virtual}); lower pp"
        )
    base, extra = divmod(num_layers, stages)
    counts = [base + (stage < extra) for stage in range(stages)]
    if devices is not None and len(devices) == stages and min(devices) > 0:
        counts = _even_by_device(num_layers, devices)
    return split_layout(counts, dp=dp, cp=cp, pp=pp, tp=tp, devices=devices)


def _even_by_device(num_layers: int, devices: Sequence[int]) -> list[int]:
    """Give layer after layer to the stage that then has the fewest a device; the first of equals."""
    counts = [1] * len(devices)
    for _ in range(num_layers - len(devices)):
        counts[min(range(len(devices)), key=lambda stage: (counts[stage] + 1) / devices[stage])] += 1
    return counts


def split_layout(
    stage_counts: Sequence[int],
    *,
    dp: int = 1,
    cp: int = 1,
    pp: int = 1,
    tp: int = 1,
    devices: Sequence[int] | None = None,
) -> ParallelLayout:
    """Give every virtual stage so many layers; stages go round the pipeline's ranks, or have `devices` each.
    `ConfigError` as of `ParallelLayout`."""
    return ParallelLayout(
        dp=dp,
        cp=cp,
        pp=pp,
        tp=tp,
        stage_layers=tuple(itertools.pairwise(itertools.accumulate(stage_counts, initial=0))),
        stage_to_rank=tuple(stage % pp for stage in range(len(stage_counts)))
        if devices is None or len(devices) != len(stage_counts)
        else first_ranks(devices),
        stage_devices=msgspec.UNSET if devices is None else tuple(devices),
    )


_AXES = ("dp", "cp", "pp", "tp", "virtual")
_OF_STAGES = ("layers", "devices")


class LayoutText(Frozen):
    """A layout as written: sizes of the axes that are named, layers of every virtual stage (None = split evenly), and
    devices of every stage (None = dp x cp x tp each)."""

    text: str
    sizes: dict[str, int]
    layers: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None

    def size(self, axis: str) -> int:
        """Return the size of an axis, 1 where it is not named."""
        return self.sizes.get(axis, 1)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that one replica takes."""
        pipeline_ranks = self.size("pp") if self.devices is None else sum(self.devices)
        return self.size("cp") * pipeline_ranks * self.size("tp")

    def layout(self, num_layers: int, **sizes: int) -> ParallelLayout:
        """Return the layout with `sizes` for axes that are not named; `ConfigError` where layers or devices do not
        suit the stages or the model."""
        all_sizes = sizes | self.sizes
        if self.layers is None:
            return even_layout(num_layers, devices=self.devices, **all_sizes)
        virtual = all_sizes.pop("virtual", 1)
        stages = all_sizes.get("pp", 1) * virtual
        if len(self.layers) != stages or sum(self.layers) != num_layers:
            raise ConfigError(
                f"layout '{self.text}': layers={'+'.join(map(str, self.layers))} gives {sum(self.layers)} layers to "
                f"{counted(len(self.layers), 'stage')}, the layout has {counted(stages, 'stage')} and the model "
                f"{num_layers} layers"
            )
        return split_layout(self.layers, devices=self.devices, **all_sizes)


def read_layout_text(text: str) -> LayoutText:
    """Read sizes of axes, layers and devices of stages; `ConfigError` for anything else, or the same twice."""
    sizes: dict[str, int] = {}
    of_stages: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if key in sizes or key in of_stages:
            raise ConfigError(f"layout '{text}': {key} is given twice")
        counts = value.split("+") if key in _OF_STAGES else [value]
        is_known, are_sizes = key in (*_AXES, *_OF_STAGES), all(one.isdecimal() and int(one) > 0 for one in counts)
        if not separator or not is_known or not are_sizes:
            hint = "" if is_known else f"; {did_you_mean(key, _AXES)}".rstrip("; ")
            raise ConfigError(
                f"layout '{text}': '{part.strip()}' is not one of dp cp pp tp virtual with a size, as dp=8,pp=4, nor "
                f"layers or devices of all stages, as pp=3,layers=3+3+2 or pp=3,devices=1+2+1{hint}"
            )
        if key in _OF_STAGES:
            of_stages[key] = tuple(map(int, counts))
        else:
            sizes[key] = int(value)
    return LayoutText(text=text, sizes=sizes, layers=of_stages.get("layers"), devices=of_stages.get("devices"))


ChannelMode = Literal["directed", "fifo"]
"""Whether every channel has a process group of its own, or all channels between two ranks share one and its queue."""
ChannelChoice = Literal["auto", "directed", "fifo"]
"""The setting; see `channel_mode`."""
Channel = tuple[str, int] | tuple[str, int, int]
"""("F", stage that receives hidden states) or ("B", stage that receives gradients), and, where stages have several
ranks, the pipeline rank at the other end."""
Receive = tuple[Channel, int]
"""(channel, pack)."""
FreedSends = tuple[tuple[tuple[Channel, int], ...], ...]
"""For every action of a rank (channel, how many of its first sends to wait for before the action, and to free)."""


@dataclass(frozen=True, eq=False)
class TransferOrder:
    """One rank's receives to post, in this order (None = every channel posts its own early), and sends to free before
    each of its actions; and how many actions it runs before it may sum gradients (`schedule.step_collectives`)."""

    receives: tuple[tuple[Receive, ...], ...] | None
    frees: FreedSends
    num_before_sums: int


def channel_mode(choice: ChannelChoice, device: DeviceKind, layouts: Iterable[ParallelLayout]) -> ChannelMode:
    """Choose how channels share the link between two ranks where the setting is "auto": in one order on GPUs, where
    collectives of two streams may block each other (NVIDIA/nccl issue 783), else each by itself, as always where stages
    have different numbers of devices, for which there is no one order."""
    if choice != "auto":
        return choice
    return "fifo" if device == "cuda" and not any(layout.has_replicated_stages for layout in layouts) else "directed"


def sending_channels(layout: ParallelLayout, pp_rank: int) -> list[Channel]:
    """Return the channels on which a pipeline rank sends to another."""
    channels: list[Channel] = []
    for stage in layout.stages_of_rank(pp_rank):
        for kind, to in (("F", stage + 1), ("B", stage - 1)):
            if not 0 <= to < layout.num_stages or pp_rank in layout.ranks_of_stage(to):
                continue
            if not layout.has_replicated_stages:
                channels.append((kind, to))
                continue
            pairs = layout.linked_ranks(min(stage, to))
            ends = pairs if kind == "F" else [(sender, receiver) for receiver, sender in pairs]
            channels += [(kind, to, receiver) for sender, receiver in ends if sender == pp_rank]
    return channels


def channel_of(layout: ParallelLayout, pp_rank: int, kind: str, stage: int, pack: int) -> Channel:
    """Return the channel on which a pipeline rank sends or receives a pack's tensor; `kind` is "F" or "B", `stage` the
    one that receives."""
    if not layout.has_replicated_stages:
        return kind, stage
    other = stage
    if pp_rank in layout.ranks_of_stage(stage):
        other = min(max(stage - 1 if kind == "F" else stage + 1, 0), layout.num_stages - 1)
    return kind, stage, layout.rank_of_pack(other, pack)
