"""What of a training state lives on when ranks are lost: weights, optimizer shards, and their copies on buddies.

    weights     of a unit, one tensor-parallel part: held by every replica and context rank of its stage
    shard       of its optimizer state, with the weights it updates: one data rank each, and the owner's buddies
    buddies     the ranks `spacing`, 2 · `spacing`, ... after the owner, round the world; a copy of the whole state that
                nobody else holds, as of the last finished step

A shard brings its part of the weights along (fp32 masters, or the weights themselves), so weights live on if one
replica does, or all shards do. With `spacing` = ranks of a machine, copies lie on other machines.

Without buddies nothing survives but what several ranks hold anyway: replicas have the same weights, and every shard of
the optimizer's state is lost with its owner. The price of `copies` buddies is `buddy_bytes` on every rank, and as much
to send after every step.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import optimizer_bytes_per_parameter, trained_parameters_per_rank
from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


@dataclass(frozen=True)
class Buddies:
    """How many copies of every rank's own state other ranks hold, and how far away."""

    copies: int = 0
    spacing: int = 1

    def of(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Ranks that hold copies of a rank's state; never itself."""
        found = dict.fromkeys((rank + number * self.spacing) % world_size for number in range(1, self.copies + 1))
        return tuple(buddy for buddy in found if buddy != rank)


@dataclass(frozen=True)
class Held:
    """Who of the survivors holds a stage's state; a stage has one place for each tensor-parallel rank.

    Args:
        pp_rank, tp_rank: of the place.
        weights: survivors with all weights of the place.
        shards: by data rank, survivors with that shard; the owner first.
    """

    pp_rank: int
    tp_rank: int
    weights: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]

    @property
    def lost_shards(self) -> tuple[int, ...]:
        """Data ranks whose optimizer state nobody holds."""
        return tuple(data_rank for data_rank, holders in enumerate(self.shards) if not holders)

    @property
    def has_weights(self) -> bool:
        """Whether the survivors together hold all weights of the place."""
        return bool(self.weights) or not self.lost_shards


@dataclass(frozen=True)
class Survivors:
    """What survivors hold; `places` by pipeline and tensor-parallel rank."""

    layout: ParallelLayout
    dead: tuple[int, ...]
    places: tuple[Held, ...]

    @property
    def hold_everything(self) -> bool:
        """Whether training can go on from the last finished step without a checkpoint."""
        return not any(place.lost_shards for place in self.places)

    def lost(self) -> Iterator[str]:
        """In words, what no survivor holds, a line a place."""
        for place in self.places:
            if not place.lost_shards:
                continue
            layers = ", ".join(
                f"{first}-{last - 1}"
                for (first, last), rank in zip(self.layout.stage_layers, self.layout.stage_to_rank, strict=True)
                if rank == place.pp_rank
            )
            part = f" (tensor-parallel rank {place.tp_rank})" if self.layout.tp > 1 else ""
            if not place.has_weights:
                yield f"weights and optimizer state of layers {layers}{part}"
            else:
                lost = f"{len(place.lost_shards)} of {len(place.shards)} shards"
                yield f"{lost} of the optimizer of layers {layers}{part}"


def surviving_holders(layout: ParallelLayout, dead: Collection[int], buddies: Buddies = Buddies()) -> Survivors:
    """What is left of a state when ranks of a layout are gone.

    Args:
        dead: global ranks.

    Raises:
        ConfigError: a rank that the layout does not have, or a spacing below 1.
    """
    strange = [rank for rank in dead if not 0 <= rank < layout.world_size]
    if strange or buddies.spacing < 1 or buddies.copies < 0:
        raise ConfigError(
            f"dead ranks {sorted(dead)} of layout {layout.describe()} with {layout.world_size} ranks, {buddies.copies} "
            f"copies {buddies.spacing} ranks apart: ranks are 0..{layout.world_size - 1}, copies 0 or more, spacing 1 "
            "or more"
        )
    gone = set(dead)

    def alive(ranks: Collection[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank not in gone)

    places = []
    for pp_rank in range(layout.pp):
        for tp_rank in range(layout.tp):
            owners = [
                layout.global_rank(pp_rank=pp_rank, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank)
                for dp_rank in range(layout.dp)
                for cp_rank in range(layout.cp)
            ]
            shards = tuple(alive((owner, *buddies.of(owner, layout.world_size))) for owner in owners)
            places.append(Held(pp_rank, tp_rank, alive(owners), shards))
    return Survivors(layout, tuple(sorted(gone)), tuple(places))


def buddy_bytes(model: ModelSpec, layout: ParallelLayout, copies: int) -> NDArray[np.int64]:
    """Bytes that the copies of one rank's state take in all, by pipeline rank; int64[pp]. A shard's copy is its
    optimizer state and, where that has no masters of them, its weights."""
    per_parameter = optimizer_bytes_per_parameter(model)
    if model.bytes_per_element >= 4:
        per_parameter += model.bytes_per_element
    shard = -(-trained_parameters_per_rank(model, layout) // (layout.dp * layout.cp))
    return copies * per_parameter * shard
