"""What pipeline neighbours send each other in a step, and in which order: data that the runtime follows.

Made from a plan off the step (`stepplan.transfer_order`), because it takes a simulation of the pipeline.
"""

from dataclasses import dataclass
from typing import Literal

from evenload.types.layout import ParallelLayout

ChannelMode = Literal["directed", "fifo"]
"""Whether every channel has a process group of its own, or all channels between two ranks share one and its queue."""
Channel = tuple[str, int]
"""("F", stage that receives hidden states) or ("B", stage that receives gradients)."""
Receive = tuple[Channel, int]
"""(channel, pack)."""
FreedSends = tuple[tuple[tuple[Channel, int], ...], ...]
"""For every action of a rank the channels whose first so many sends to wait for before it, and to free."""


@dataclass(frozen=True, eq=False)
class TransferOrder:
    """One rank's transfers, an entry for each of its actions.

    Args:
        receives: those to post before the action, in this order; None = channels do not wait for each other, and each
            posts its receives ahead by itself.
        frees: sends to free before the action.
    """

    receives: tuple[tuple[Receive, ...], ...] | None
    frees: FreedSends


def sending_channels(layout: ParallelLayout, pp_rank: int) -> list[Channel]:
    """Channels on which a pipeline rank sends to another."""
    ranks = layout.stage_to_rank
    found: list[Channel] = []
    for stage, rank in enumerate(ranks):
        for kind, to in (("F", stage + 1), ("B", stage - 1)):
            if rank == pp_rank and 0 <= to < len(ranks) and ranks[to] != pp_rank:
                found.append((kind, to))
    return found
