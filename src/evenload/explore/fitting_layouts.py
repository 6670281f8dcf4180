"""`fitting_layouts`: a few layouts that hold a batch, by prediction, where the asked one does not.

A look, no search: of the layouts whose weights and optimizer state leave room, at most `MOST_TRIED` are planned on the
first batch with little search. They are spread evenly over the sorted static bytes, because the leanest layouts hold
every batch and are slow, and the others are fast and may not hold it. Price: `MOST_TRIED` x 0.05-0.5 s.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import static_bytes
from evenload.errors import ConfigError
from evenload.explore.default_layout import usable_bytes
from evenload.explore.layout_search import QUICK_CANDIDATES, LayoutResult, layouts_of, planned_layout
from evenload.explore.progress import OnProgress, no_progress
from evenload.explore.sampled_batches import SampledBatch
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.auto import AutoOptions
from evenload.types.base import Frozen
from evenload.types.cluster import ClusterSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

MOST_TRIED = 12


class FittingLayouts(Frozen):
    """Layouts that fit, the fastest on the first batch first, and how many were tried of how many the model allows."""

    layouts: tuple[LayoutResult, ...]
    num_tried: int
    num_all: int


def fitting_layouts(
    model: ModelSpec,
    cluster: ClusterSpec,
    batch: SampledBatch,
    coefficients_of: Callable[[ParallelLayout], CostCoefficients],
    *,
    strategy: str,
    options: PlanOptions,
    on_progress: OnProgress = no_progress,
) -> FittingLayouts:
    """Look for layouts that hold a batch; the strategy "auto" is best at fitting memory."""
    every, room_bytes = layouts_of(model, cluster), usable_bytes(cluster)
    held_bytes = {layout: int(static_bytes(model, layout).max()) for layout in every}
    roomy = sorted((layout for layout in every if held_bytes[layout] < room_bytes), key=held_bytes.__getitem__)
    search = options.own(AutoOptions)
    quick = options.with_own(
        msgspec.structs.replace(search, max_candidates=min(search.max_candidates, QUICK_CANDIDATES))
    )
    at = np.unique(np.linspace(0, len(roomy) - 1, MOST_TRIED).round().astype(int)) if roomy else ()
    tried = [roomy[i] for i in at]
    found = []
    for done, layout in enumerate(tried):
        on_progress(done, len(tried), f"looking for layouts that fit: {layout.describe()}")
        try:
            result = planned_layout(model, cluster, layout, [batch], coefficients_of, strategy, quick)
        except ConfigError:
            continue  # a layout that this strategy or these costs do not know
        if result.feasible:
            found.append(result)
    found.sort(key=lambda result: result.mean_step_time_s or 0.0)
    return FittingLayouts(layouts=tuple(found), num_tried=len(tried), num_all=len(every))
