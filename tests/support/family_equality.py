"""Steps of tiny decoders of many families in real processes, as planned ones, against plain training."""

import itertools

import msgspec
import numpy as np
import pytest
import torch

from adapter_cases import adapter_loss_and_gradients
from context_plans import with_policies
from evenload.types.plan import seal
from matrix import Row
from matrix_plans import plan_of
from reference_training import plain_loss_and_gradients, relative_error
from tensor_families import run_families, weights_of, whole_model

LIMIT = 1e-9


def plan_for(layout, strategy="slimpack", *, policy=None, schedule="own", virtual="1", **more):
    """A plan of documents of 1 to 64 tokens, some of which `slimpack` cuts, in other places in backward. By turns they
    are kept, computed again and offloaded, unless a policy is named."""
    shared = "cp" in layout
    defaults = {"dp_merge": "off", "channels": "directed", "overlap": "on", "switch": "off", "model": "llama"}
    defaults |= {"sharding": "per_document" if shared else "none", "exchange": "all_gather" if shared else "none"}
    row = Row(
        strategy=strategy,
        layout=layout,
        virtual=virtual,
        policy=policy or "replay",
        schedule=schedule,
        **defaults | more,
    )
    plan = plan_of(row)
    if policy is None:
        turns = itertools.cycle(("recompute", "replay", "offload"))
        chosen = {document.doc_id: policy for document, policy in zip(plan.documents, turns, strict=False)}
        plan = seal(msgspec.structs.replace(plan, pack_plans=tuple(with_policies(p, chosen) for p in plan.pack_plans)))
    return plan, row.num_layers


def assert_equal_plain(pool, tasks, plan, adapter=None, limit=LIMIT):
    """`adapter`: a folder for the adapter of models that have one."""
    ranks = pool.run(plan.layout.world_size, run_families, tasks)
    for index, task in enumerate(tasks):
        config, weights = task.config(), weights_of(whole_model(task))
        if task.lora is None:
            loss, expected = plain_loss_and_gradients(config, weights, task.tokens(), torch.float64)
        else:
            named = {name.replace(".base_layer", ""): weight for name, weight in weights.items()}
            loss, expected = adapter_loss_and_gradients(config, named, adapter, task.tokens(), torch.float64)
        results = [rank[index] for rank in ranks]
        assert sum(one[0] for one in results) == pytest.approx(loss, rel=limit), f"{task.family}: loss"
        norm_of_all = np.sqrt(sum(gradient.square().sum().item() for gradient in expected.values()))
        seen = set()
        for _, own, norm, _ in results:
            for name, gradient in own.items():
                error = relative_error(torch.from_numpy(gradient), expected[name])
                assert error <= limit, f"{task.family}: {name} differs by {error:.1e}"
            assert norm == pytest.approx(norm_of_all, rel=limit)
            seen |= own.keys()
        assert seen == expected.keys(), task.family
