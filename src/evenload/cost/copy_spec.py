"""`CopySpec`: what a change of the layout takes between processes of a machine that read each other's memory."""

from collections.abc import Mapping

from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout


class CopySpec(Frozen):
    """Measured between the ranks of a machine.

    Args:
        rank_bytes_per_s: of one rank that reads alone.
        machine_bytes_per_s: of all ranks of a machine together when all read at once; they share its cores and memory.
        taken_bytes_per_s: the same, of memory that is touched for the first time.
        fixed_s: what a switch takes whatever moves: ranks meet, and know what moves.
        layer_s: for each layer that a rank holds in the new layout: stages are arranged anew.
        gained_s, left_s: for each piece of the model that a rank comes to hold, beside its bytes, and that it holds no
            more.
        num_ranks: of the run that measured: with another number others share cores and memory; 0 = unknown.

    Raises:
        ConfigError: a rate that is not above 0, or negative seconds or ranks.
    """

    rank_bytes_per_s: float
    machine_bytes_per_s: float
    taken_bytes_per_s: float
    fixed_s: float
    layer_s: float = 0.0
    gained_s: float = 0.0
    left_s: float = 0.0
    num_ranks: int = 0

    def __post_init__(self) -> None:
        for field in ("rank_bytes_per_s", "machine_bytes_per_s", "taken_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"copies of a cost file: {field} is {getattr(self, field)}, must be > 0")
        for field in ("fixed_s", "layer_s", "gained_s", "left_s"):
            if not getattr(self, field) >= 0:
                raise ConfigError(f"copies of a cost file: {field} is {getattr(self, field)}, must be >= 0 seconds")
        if self.num_ranks < 0:
            raise ConfigError(f"copies of a cost file: num_ranks is {self.num_ranks}, must be >= 0; 0 = unknown")

    def arranging_seconds(self, num_layers: int, num_gained: int, num_left: int) -> float:
        """What a switch takes whatever moves, on a rank that holds so many layers afterwards, and comes to hold and
        leaves so many pieces."""
        return self.fixed_s + self.layer_s * num_layers + self.gained_s * num_gained + self.left_s * num_left

    def seconds(self, read_bytes: Mapping[int, float], ranks_per_machine: int, tp: int) -> float:
        """Until every rank has read what it lacks; without `arranging_seconds`.

        Args:
            read_bytes: by rank, of one tensor-parallel place; each of the `tp` reads as much beside it.
        """
        machines: dict[int, float] = {}
        for rank, count in read_bytes.items():
            machines[rank // ranks_per_machine] = machines.get(rank // ranks_per_machine, 0.0) + count
        alone_s = max(read_bytes.values(), default=0.0) / self.rank_bytes_per_s
        return max(alone_s, tp * max(machines.values(), default=0.0) / self.machine_bytes_per_s)


def most_layers(layout: ParallelLayout) -> int:
    """That one pipeline rank holds."""
    held: dict[int, int] = {}
    for (first, last), rank in zip(layout.stage_layers, layout.stage_to_rank, strict=True):
        held[rank] = held.get(rank, 0) + last - first
    return max(held.values())
