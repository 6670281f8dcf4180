"""Trees of sequences that share prefixes beside plain documents in real processes: replicas, pipelines, virtual stages,
tensor parallelism, adapters, split backwards, every activation policy; also by forwards alone."""

import msgspec
import numpy as np
import pytest
import torch

from adapter_cases import LORA, peft_model
from evenload.types.plan import encode_plan
from family_equality import plan_for
from reference_training import plain_model, relative_error
from tensor_families import FamilyTask, weights_of, whole_model
from tree_cases import plain_paths, train_trees, trees_of_lengths, with_trees

LIMIT = 1e-9


def _tree_plan(layout, **options):
    plan, num_layers = plan_for(layout, **options)
    batch = trees_of_lengths([one.num_tokens for one in plan.documents], seed=4)
    return with_trees(plan, batch), batch, num_layers


def _assert_equal_every_sequence(pool, tasks, plan, batch, adapter=None):
    ranks = pool.run(plan.layout.world_size, train_trees, tasks, batch.tokens)
    for index, task in enumerate(tasks):
        config, weights = task.config(), weights_of(whole_model(task))
        if task.lora is None:
            model = plain_model(config, weights, torch.float64)
        else:
            named = {name.replace(".base_layer", ""): weight for name, weight in weights.items()}
            model = peft_model(config, named, adapter, torch.float64)
        loss, plain = plain_paths(model, batch)
        plain = {name.removeprefix("base_model.model."): gradient for name, gradient in plain.items()}
        results = [rank[index] for rank in ranks]
        assert sum(one[0] for one in results) == pytest.approx(loss, rel=LIMIT)
        of_forwards = np.sum([one[3] for one in results], axis=0)
        assert of_forwards.sum() / batch.num_labels == pytest.approx(loss, rel=LIMIT)
        norm = np.sqrt(sum(gradient.square().sum().item() for gradient in plain.values()))
        for _, own, own_norm, _ in results:
            for name, gradient in own.items():
                assert relative_error(torch.from_numpy(gradient), plain[name]) <= LIMIT, f"{task.family}: {name}"
            assert own_norm == pytest.approx(norm, rel=LIMIT)
        assert set().union(*(one[1] for one in results)) == plain.keys()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2", {}),
        ("pp2", {}),
        ("pp2", {"virtual": "2", "schedule": "list_split"}),
        ("pp2", {"schedule": "zb_h1"}),
        ("tp2", {}),
        ("pp2 tp2", {}),
    ],
    ids=["dp2", "pp2", "virtual stages, split backwards", "zero bubble", "tp2", "pp2 tp2"],
)
def test_gradients_equal_every_sequences(gloo_pool, layout, options):
    plan, batch, num_layers = _tree_plan(layout, **options)
    tasks = [FamilyTask(family, num_layers, encode_plan(plan)) for family in ("llama", "gemma3_text")]
    _assert_equal_every_sequence(gloo_pool, tasks, plan, batch)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_equal_peft(gloo_pool, tmp_path):
    plan, batch, num_layers = _tree_plan("pp2")
    lora = msgspec.structs.replace(LORA, target_modules=("q_proj", "down_proj"))
    tasks = [FamilyTask("llama", num_layers, encode_plan(plan), lora)]
    _assert_equal_every_sequence(gloo_pool, tasks, plan, batch, tmp_path)


def test_a_model_that_knows_no_branches_is_refused_before_it_runs(gloo_pool):
    plan, batch, num_layers = _tree_plan("single")
    tasks = [FamilyTask("qwen3_moe", num_layers, encode_plan(plan))]
    with pytest.raises(RuntimeError, match=r"its load-balancing loss .* set model\.router_aux_loss_coef = 0"):
        gloo_pool.run(1, train_trees, tasks, batch.tokens)
