"""The fixed keys of `metrics.jsonl` (docs/architecture.md), computed from a plan and its measured timeline.

Tokens are without padding; FLOPs count the attention work that was really useful (per document, windows
included), so neither packing nor padding can inflate them.
"""

import numpy as np

from evenload.cost.flops import training_flops
from evenload.types.model import ModelSpec
from evenload.types.pack_times import pack_times, replica_imbalance
from evenload.types.plan import DEFERRED, StepPlan
from evenload.types.timeline import Timeline


def no_label_warning(plan: StepPlan) -> str:
    """What to say about a step of which no token has a loss."""
    return (
        f"step {plan.step}: none of its {len(plan.documents):,} documents has a token with a loss, so loss and "
        "gradient are 0, and only momentum and weight decay moved the weights; see data.record and data.loss_on"
    )


def step_row(
    plan: StepPlan,
    timeline: Timeline,
    model: ModelSpec,
    *,
    loss: float,
    grad_norm: float,
    learning_rate: float,
    peak_flops_per_s: float,
    plan_time_s: float,
    data_wait_s: float,
    peak_memory_bytes: int,
) -> dict[str, int | float | str | None]:
    """One row.

    Args:
        peak_flops_per_s: of one device.
        data_wait_s: seconds the step waited for its batch and plan.
        peak_memory_bytes: of the fullest rank.
    """
    lengths = np.array([d.num_tokens for d in plan.documents], dtype=np.int64)
    tokens = int(lengths.sum())
    padding = sum(pack.num_padding_tokens for packs in plan.pack_plans for pack in packs.forward)
    flops = float(training_flops(model, lengths).sum())
    deferred = [left for left in plan.left_out if left.reason == DEFERRED]
    return {
        "step": plan.step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": learning_rate,
        "tokens": tokens,
        "label_tokens": plan.num_label_tokens,
        "padding_tokens": padding,
        "documents": len(plan.documents),
        "step_time_s": timeline.step_time_s,
        "predicted_step_time_s": plan.predicted.step_time_s,
        "tokens_per_s": tokens / (timeline.step_time_s + data_wait_s),
        "mfu": flops / (timeline.step_time_s * peak_flops_per_s * plan.layout.world_size),
        "bubble_fraction": timeline.bubble_fraction(),
        "imbalance_forward": pack_times(timeline, "forward").imbalance(),
        "imbalance_backward": pack_times(timeline, "backward").imbalance(),
        "imbalance_dp": replica_imbalance(timeline),
        "pack_efficiency": tokens / (tokens + padding),
        "plan_time_s": plan_time_s,
        "data_wait_s": data_wait_s,
        "peak_memory_bytes": peak_memory_bytes,
        "predicted_peak_memory_bytes": plan.predicted.peak_memory_bytes,
        "deferred_documents": len(deferred),
        "mean_token_delay_steps": plan.mean_token_delay_steps,
        "layout": plan.layout.describe(),
    }
