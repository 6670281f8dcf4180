"""Plans through the real executor, compared with plain training."""

import numpy as np
import pytest
import torch

from dist_cases import gradients_of_plans
from evenload.types.plan import encode_plan
from reference_training import (
    embedding_name,
    make_tokens,
    plain_error,
    plain_loss_and_gradients,
    relative_error,
    tiny_config,
)


def assert_plans_equal_plain(
    pool,
    plans,
    *,
    kind="llama",
    changes=None,
    dtype=torch.float64,
    channels="directed",
    exchange="all_gather",
    staged_on=None,
    before=None,
    kernels="auto",
):
    """Run the plans in one process group and compare each with transformers: in float64 to 1e-10, elsewhere to twice
    what that precision costs plain training (`plain_error`).

    Args:
        exchange: how keys and values of shared documents travel.
        staged_on: a device on which all ranks are (`staged_group`); None = on the CPU, over gloo.
        before: the layout from which the run changes to that of the plans; None = it begins there.
        kernels: as `train.kernels`, "liger" also on a CPU.

    Returns:
        `StoredBytes`, [plan][rank].
    """
    config = tiny_config(kind, **(changes or {}))
    lengths = [[document.num_tokens for document in plan.documents] for plan in plans]
    tokens = [make_tokens(of_plan, config.vocab_size, seed) for seed, of_plan in enumerate(lengths)]
    layout = plans[0].layout
    encoded = [encode_plan(p) for p in plans]
    case = kind, changes or {}, encoded, tokens, dtype, exchange, channels, staged_on, before, kernels
    ranks = pool.run(layout.world_size, gradients_of_plans, *case)
    for index, batch in enumerate(tokens):
        results = [rank[index] for rank in ranks]
        weights = {n: torch.from_numpy(w) for r in results for n, w in r[3].items()}
        if config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        loss, plain = plain_loss_and_gradients(config, weights, batch, dtype)
        limit = 1e-10 if dtype == torch.float64 else 2 * plain_error(config, weights, batch, dtype)
        assert_ranks_equal(f"plan {index}", config, [r[:3] for r in results], loss, plain, limit)
    return [[rank[index][4] for rank in ranks] for index in range(len(plans))]


def assert_ranks_equal(what, config, ranks, loss, gradients, limit):
    """Of each rank its share of the loss, its gradients and the whole gradient's norm, against plain training's."""
    assert abs(sum(share for share, _, _ in ranks) - loss) <= limit * max(abs(loss), 1e-12), f"{what}: loss"
    tied, seen = config.tie_word_embeddings, set()
    norm = np.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
    for _, own, own_norm in ranks:
        for name, gradient in own.items():
            name = embedding_name(config) if tied and name == "lm_head.weight" else name
            seen.add(name)
            error = relative_error(torch.from_numpy(gradient), gradients[name])
            assert error <= limit, f"{what}: {name} differs by {error:.1e}"
        assert own_norm == pytest.approx(norm, rel=max(limit, 1e-9)), what
    assert seen == set(gradients), what
