"""Which layouts a run may take that declares none: a few depths of its processes, within a number of process groups.

Groups are made before anything is measured or read, and on every process alike, so lengths, costs and memory cannot
choose here: the number of processes and of layers does. What a layout is worth is asked before every step, by the
search that orders declared layouts, too (`layout_candidates`). Layers are split evenly, one stage a rank; uneven splits
and virtual stages are what `plan.layouts` declares.

Depths that leave no process idle come first, of these the nearest to the depth in which the run starts, as ratios;
a layout whose groups are too many is left out. Price: O(processes · layouts).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from evenload.types.layout import ParallelLayout, even_layout

Ranks = tuple[int, ...]


def enumerated_layouts(start: ParallelLayout, most_layouts: int, most_groups: int) -> tuple[ParallelLayout, ...]:
    """Other layouts of the same processes, cp and tp, the first worth most; none where there is one depth only.

    Args:
        start: in which the run starts.
        most_layouts: with that one.
        most_groups: process groups that the others need on top of those of `start`.
    """
    devices = start.dp * start.pipeline_ranks
    depths = range(1, min(devices, start.num_layers) + 1)
    order = sorted(depths, key=lambda pp: (devices % pp, abs(math.log(pp / start.pp)), pp))
    found = [start.arrangement]
    own_groups = num_groups(found)
    for pp in order:
        layout = even_layout(start.num_layers, dp=devices // pp, pp=pp, cp=start.cp, tp=start.tp)
        if len(found) == most_layouts:
            break
        if layout not in found and num_groups([*found, layout]) - own_groups <= most_groups:
            found.append(layout)
    return tuple(found[1:])


def num_groups(layouts: Iterable[ParallelLayout]) -> int:
    """Process groups that layouts need together, directed channels; `runtime.comm.mesh` makes the n-th group of
    the same ranks once for all of them."""
    most: Counter[Ranks] = Counter()
    layouts = list(layouts)
    processes = max(layout.world_size for layout in layouts)
    for layout in layouts:
        most |= Counter(_groups_of(layout, processes))
    return most.total()


def _groups_of(layout: ParallelLayout, processes: int) -> list[Ranks]:
    """The ranks of every group of one layout, as `runtime.comm.mesh` makes them."""
    grid = np.arange(layout.world_size).reshape(layout.pipeline_ranks, layout.dp, layout.cp, layout.tp)
    groups: list[list[int]] = [[idle] for idle in range(layout.world_size, processes)]
    for first, t in itertools.product(dict.fromkeys(layout.leading_ranks), range(layout.tp)):
        same = [rank for rank, leading in enumerate(layout.leading_ranks) if leading == first]
        groups.append(grid[same, :, :, t].ravel().tolist())
    for p, t in np.ndindex(layout.pipeline_ranks, layout.tp):
        for size in (2**k for k in range(layout.dp.bit_length())):
            if layout.dp % size == 0 and size * layout.cp > 1:
                blocks = range(0, layout.dp, size)
                groups += [grid[p, first : first + size, :, t].ravel().tolist() for first in blocks]
    for d, c in np.ndindex(layout.dp, layout.cp):
        if layout.tp > 1:
            groups += [grid[p, d, c].tolist() for p in range(layout.pipeline_ranks)]
        for t in range(layout.tp):
            holders = grid[:, d, c, t].tolist()
            for stage in range(layout.num_stages - 1):
                pairs = [sorted((holders[a], holders[b])) for a, b in layout.linked_ranks(stage) if a != b]
                groups += [pair for pair in pairs for _ in ("forward", "backward")]
            ends = layout.ranks_of_stage(0), layout.ranks_of_stage(layout.num_stages - 1)
            groups += [sorted({holders[rank] for rank in itertools.chain(*ends)})] if ends[0] != ends[1] else []
    return [tuple(ranks) for ranks in groups]
