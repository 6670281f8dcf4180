"""`flexpipe` inside one layout: what `plan.reconfiguration` plans every step with once the layout is chosen.

FlexPipe changes the pipeline, not the packing; the number of its micro-batches follows the batch (§7.1). So documents
stay whole, go to replicas and micro-batches of equal predicted time, longest first, and run in 1F1B: the micro-batches
of `balanced`. O(candidates · n log n).
"""

from evenload.plan.strategies.balanced import plan_balanced
from evenload.plan.strategies.strategy import Strategy

FLEXPIPE = Strategy(
    name="flexpipe",
    description="whole documents, packs of equal predicted seconds; the pipeline's depth follows the batch",
    plan=plan_balanced,
    changes_layout=True,
    ignores_memory=True,
)
