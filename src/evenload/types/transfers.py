"""What pipeline neighbours send each other in a step, and in which order: data that the runtime follows.

Made from a plan off the step (`stepplan.transfer_order`), because it takes a simulation of the pipeline.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from evenload.types.cluster import DeviceKind
from evenload.types.layout import ParallelLayout

ChannelMode = Literal["directed", "fifo"]
"""Whether every channel has a process group of its own, or all channels between two ranks share one and its queue."""
ChannelChoice = Literal["auto", "directed", "fifo"]
"""What a run asks for; see `channel_mode`."""
Channel = tuple[str, int] | tuple[str, int, int]
"""("F", stage that receives hidden states) or ("B", stage that receives gradients). Where stages have several ranks, a
rank has a channel for each rank at the other end: then that pipeline rank is the third."""
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


def channel_mode(choice: ChannelChoice, device: DeviceKind, layouts: Iterable[ParallelLayout]) -> ChannelMode:
    """How channels share the way between two ranks where a run leaves it open: in one order on GPUs, whose streams are
    not promised to go on beside each other (NVIDIA/nccl issue 783), so that transfers of different groups may wait for
    each other in a circle; else each by itself. Layouts whose stages have different numbers of devices have no one
    order."""
    if choice != "auto":
        return choice
    return "fifo" if device == "cuda" and not any(layout.has_wide_stages for layout in layouts) else "directed"


def sending_channels(layout: ParallelLayout, pp_rank: int) -> list[Channel]:
    """Channels on which a pipeline rank sends to another."""
    found: list[Channel] = []
    for stage in layout.stages_of_rank(pp_rank):
        for kind, to in (("F", stage + 1), ("B", stage - 1)):
            if not 0 <= to < layout.num_stages or pp_rank in layout.ranks_of_stage(to):
                continue
            if not layout.has_wide_stages:
                found.append((kind, to))
                continue
            pairs = layout.linked_ranks(min(stage, to))
            ends = pairs if kind == "F" else [(sender, receiver) for receiver, sender in pairs]
            found += [(kind, to, receiver) for sender, receiver in ends if sender == pp_rank]
    return found


def channel_of(layout: ParallelLayout, pp_rank: int, kind: str, stage: int, pack: int) -> Channel:
    """The channel on which a pipeline rank sends or receives a pack's tensor for a stage.

    Args:
        kind: "F" or "B"; stage: that receives.
    """
    if not layout.has_wide_stages:
        return kind, stage
    other = stage
    if pp_rank in layout.ranks_of_stage(stage):
        other = min(max(stage - 1 if kind == "F" else stage + 1, 0), layout.num_stages - 1)
    return kind, stage, layout.rank_of_pack(other, pack)
