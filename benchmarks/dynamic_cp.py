"""NVIDIA's example of dynamic context parallelism, planned by us and by Megatron's schedulers, under one cost model.

The setting of examples/dynamic_context_parallel of NVIDIA/Megatron-LM (branch dev): lengths lognormal with mean 1,024
and σ = 1.5, clipped to 128 .. 8,192 tokens; 8 documents a data-parallel rank and step, cp=4, a rank holds 2,048 tokens
of a micro-batch; 12 layers of width 2,048 with 16 heads, vocabulary 131,072; nodes of four GPUs. NVIDIA names no GPU;
here it is the H100 of the catalogue, from its data sheet.

    dp_balanced          Megatron's packs in arrival order, cp=4 for all: the baseline of the example
    default_dynamic_cp   Megatron's dynamic groups (both: `dynamic_cp_peer`)
    ours                 `engines.placed_groups.fastest_groups`, or default_dynamic_cp where that is faster: what
                         `integrations.engines.megatron_dynamic_cp` gives Megatron

A step is its micro-batches by `context_groups.step_seconds`, where a group begins when its last rank has come, then
gradients are summed, weights updated and gathered, the same after every plan. Nothing is run: predicted, all of it.

    python benchmarks/dynamic_cp.py [--quick] [--append]
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from dynamic_cp_peer import default_dynamic_cp, dp_balanced
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.unit_transfers import unit_transfers
from evenload.engines.context_groups import (
    RankDocuments,
    group_prices,
    group_sizes,
    groups_of,
    step_seconds,
)
from evenload.engines.placed_groups import fastest_groups
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec
from harness import Row, run

MODEL = ModelSpec(
    name="gpt-12-layers",
    num_layers=12,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    ffn_hidden_size=8192,
    vocab_size=131_072,
    gated_ffn=False,
    tied_embeddings=True,
)
GPUS = (4, 8, 16, 32)
NVIDIA_MEASURED = {4: 1.285, 8: 1.412, 16: 1.212, 32: 1.375}
"""Speed-up of default_dynamic_cp over dp_balanced in that README: one run of 30 steps each, 9 June 2026."""
CP, ROOM_TOKENS, DOCUMENTS_A_RANK = 4, 2048, 8
MEAN_TOKENS, SIGMA, LEAST_TOKENS, MOST_TOKENS = 1024, 1.5, 128, 8192
GPUS_A_NODE = 4
STEPS, QUICK_STEPS = 30, 2
PLANS = ("dp_balanced", "default_dynamic_cp", "ours")


def measure(quick: bool) -> list[Row]:
    """Speed-ups of all steps together, that of the worst step, and how often Megatron's answer is the faster."""
    rows = []
    for num_gpus in GPUS:
        costs = costs_of(num_gpus)
        end_s = step_end_seconds(costs)
        found = np.array(
            [step_of_plans(costs, lengths) for lengths in batches(num_gpus, QUICK_STEPS if quick else STEPS)]
        )
        theirs_taken = float((found[:, 2] > found[:, 1]).mean())
        found[:, 2] = found[:, 1:].min(axis=1)
        total_s = dict(zip(PLANS, (found + end_s).sum(axis=0).tolist(), strict=True))
        steps_s = found + end_s
        least = float((steps_s[:, 1] / steps_s[:, 2]).min())
        case = f"{num_gpus} GPUs, lognormal mean 1024 sigma 1.5"

        def ratio(metric: str, over: str, under: str, case: str = case, total_s: dict[str, float] = total_s) -> Row:
            return Row("dynamic_cp", case, metric, total_s[over] / total_s[under], "x", over)

        rows += [
            ratio("default_dynamic_cp", "dp_balanced", "default_dynamic_cp"),
            ratio("ours", "dp_balanced", "ours"),
            ratio("ours over default_dynamic_cp", "default_dynamic_cp", "ours"),
            Row("dynamic_cp", case, "ours over default_dynamic_cp, worst step", least, "x", "default_dynamic_cp"),
            Row("dynamic_cp", case, "steps that take Megatron's answer", 100 * theirs_taken, "%", ""),
            Row("dynamic_cp", case, "measured by NVIDIA", NVIDIA_MEASURED[num_gpus], "x", "dp_balanced"),
        ]
    return rows


def batches(num_gpus: int, steps: int) -> list[list[int]]:
    """Lengths of the documents of every step, in arrival order; the same for the same number of GPUs."""
    random = np.random.default_rng(num_gpus)
    count = num_gpus // CP * DOCUMENTS_A_RANK
    drawn = random.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, (steps, count))
    return np.clip(drawn, LEAST_TOKENS, MOST_TOKENS).astype(int).tolist()


def costs_of(num_gpus: int) -> PackCosts:
    """From the data sheet, all GPUs as data-parallel ranks that may share documents."""
    cluster = msgspec.structs.replace(
        cluster_from("h100x4"), name=f"h100x{num_gpus}", num_nodes=num_gpus // GPUS_A_NODE
    )
    layout = even_layout(MODEL.num_layers, dp=num_gpus)
    return PackCosts(MODEL, analytic_coefficients(MODEL, cluster, layout), layout, keeps_short_whole=False)


def step_of_plans(costs: PackCosts, lengths: Sequence[int]) -> list[float]:
    """Seconds of the micro-batches of each of `PLANS`."""
    num_gpus = costs.layout.dp
    sizes = group_sizes(num_gpus)
    prices = group_prices(costs, lengths, sizes, ROOM_TOKENS)
    answers = (
        dp_balanced(lengths, num_gpus // CP, CP, ROOM_TOKENS),
        default_dynamic_cp(lengths, num_gpus, ROOM_TOKENS),
        fastest_groups(prices),
    )
    for answer in answers:
        require_valid(answer, lengths, num_gpus)
    return [step_seconds(prices, answer) for answer in answers]


def require_valid(answer: Sequence[RankDocuments], lengths: Sequence[int], num_gpus: int) -> None:
    """Every document once, every rank with work in every micro-batch and within its room; shares are rounded up to
    whole chunks, two a rank."""
    found = [document for ranks in answer for _, _, documents in groups_of(ranks) for document in documents]
    assert sorted(found) == list(range(len(lengths))), "documents are lost or doubled"
    for ranks in answer:
        assert len(ranks) == num_gpus
        assert all(ranks), "a rank without work"
        for _, size, documents in groups_of(ranks):
            assert sum(lengths[document] for document in documents) <= size * ROOM_TOKENS, "beyond a rank's room"


def step_end_seconds(costs: PackCosts) -> float:
    """Sums of gradients, update, gather of weights, one after the other (`engines.catalog.MEGATRON`)."""
    transfers = unit_transfers(costs.model, costs.coefficients, costs.layout, 0)
    return float(transfers.sum_s.sum() + transfers.gather_s.sum()) + costs.optimizer_seconds()


if __name__ == "__main__":
    run({"dynamic_cp": measure})
