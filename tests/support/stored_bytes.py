"""What the ranks' stores counted against what the simulator expects of the plan: to the byte."""

import numpy as np

from dist_cases import StoredBytes
from evenload.runtime.replay.held_bytes import STORE_KINDS
from evenload.types.model import ModelSpec
from evenload.types.plan import StepPlan
from varied_plans import predicted_host_bytes, predicted_kind_bytes


def assert_bytes_match_the_memory_model(plan: StepPlan, model: ModelSpec, measured: list[StoredBytes]) -> None:
    """After every action and at the peak, kind by kind; for plans without shared documents.

    With tensor parallelism rows of a slice do not always divide: the ranks of a group together hold what the model says
    of each, and no rank is more than one row a slice and tensor above it, but for rows that tokens have sent to its
    experts.
    """
    layout, hidden_bytes = plan.layout, 8 * model.hidden_size
    for dp_rank in range(layout.dp):
        num_slices = sum(len(pack.slices) for pack in plan.pack_plans[dp_rank].forward)
        for pp_rank, predicted in enumerate(predicted_kind_bytes(plan, model, dp_rank)):
            place = {"pp_rank": pp_rank, "dp_rank": dp_rank}
            ranks = [measured[layout.global_rank(**place, tp_rank=t)] for t in range(layout.tp)]
            for name in STORE_KINDS:
                after, running = predicted[name]["after"], predicted[name]["running"]
                together = [sum(held) for held in zip(*(rank.after_kinds[name] for rank in ranks), strict=True)]
                assert together == [layout.tp * held for held in after], (pp_rank, name)
                highest = max([*running, *after], default=0)
                slack = num_slices * 6 * model.num_layers * hidden_bytes if layout.tp > 1 else 0
                if not (layout.tp > 1 and name == "weight_gradient_inputs" and any(one.experts for one in model.kinds)):
                    assert all(abs(rank.peak_by_kind[name] - highest) <= slack for rank in ranks), (pp_rank, name)
            if layout.tp == 1:
                assert ranks[0].peak_host == predicted_host_bytes(plan, model, dp_rank)[pp_rank]
                kinds = [predicted[name] for name in STORE_KINDS]
                total = np.sum([[*one["running"], *one["after"]] for one in kinds], axis=0)
                # A forward's final hidden states come after its offloaded layers have left, so its peak may be lower.
                is_offloaded = ranks[0].peak_host > 0
                # States that a forward takes are gone when its last layer's products come.
                taken = max((a - b for a, b in zip(*predicted["states"].values(), strict=True)), default=0)
                missing = total.max(initial=0) - ranks[0].peak
                assert missing == 0 or (is_offloaded and missing > 0) or 0 < missing <= taken
