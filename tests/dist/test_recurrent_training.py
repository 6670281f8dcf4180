"""Models with layers that carry a state, in real processes: pipelines (some of whose stages have no attention layer),
virtual stages, replicas, split backwards, adapters, every activation policy; and a run that was interrupted."""

import msgspec
import pytest

from adapter_cases import LORA
from dist_training import train_steps
from evenload.types.plan import encode_plan
from family_equality import assert_equal_plain, plan_for
from reference_training import RECURRENT_KINDS
from small_run import LONG_TAILED_TEXTS, write_small_run
from tensor_families import FamilyTask

DIVIDED = ("qwen3_next", "qwen3_5_text", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2", "mamba2")
"""Whose layers with a state tensor ranks divide by heads, groups or channels."""


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2", {}),
        ("pp4", {}),
        ("pp2", {"virtual": "2", "schedule": "list_split"}),
        ("pp2", {"schedule": "zb_h1", "strategy": "balanced"}),
    ],
    ids=["dp2", "a layer a stage", "virtual stages, split backwards", "zero bubble"],
)
def test_gradients_equal_plain_training(gloo_pool, layout, options):
    plan, num_layers = plan_for(layout, **options)
    assert_equal_plain(gloo_pool, [FamilyTask(kind, num_layers, encode_plan(plan)) for kind in RECURRENT_KINDS], plan)


@pytest.mark.parametrize("strategy", ["slimpack", "balanced"])
def test_tensor_ranks_with_their_heads_equal_plain_training(gloo_pool, strategy):
    """Of documents that are cut, elsewhere in backward, and whole; under every activation policy."""
    plan, num_layers = plan_for("tp2", strategy)
    assert_equal_plain(gloo_pool, [FamilyTask(kind, num_layers, encode_plan(plan)) for kind in DIVIDED], plan)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2 tp2", {}),
        ("pp2 tp2", {}),
        ("pp2 tp2", {"virtual": "2", "schedule": "list_split"}),
        ("pp2 tp2", {"schedule": "zb_h1", "strategy": "balanced"}),
        ("cp2 tp2", {}),
    ],
    ids=["dp2", "a layer a stage", "virtual stages, split backwards", "zero bubble", "cp2"],
)
def test_tensor_ranks_with_every_dimension(gloo_pool, layout, options):
    plan, num_layers = plan_for(layout, **options)
    assert_equal_plain(gloo_pool, [FamilyTask(kind, num_layers, encode_plan(plan)) for kind in DIVIDED], plan)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_equal_peft(gloo_pool, tmp_path):
    """Of projections before and behind the scan, and of the attention beside it."""
    plan, num_layers = plan_for("pp2")
    lora = msgspec.structs.replace(LORA, target_modules=("in_proj", "out_proj", "q_proj"))
    tasks = [FamilyTask(kind, num_layers, encode_plan(plan), lora) for kind in ("bamba", "lfm2")]
    assert_equal_plain(gloo_pool, tasks, plan, tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_on_tensor_ranks_equal_peft(gloo_pool, tmp_path):
    """B of a packed projection is cut as the projection is."""
    plan, num_layers = plan_for("tp2")
    of_kinds = {
        "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
        "qwen3_5_text": ("in_proj_qkv", "out_proj"),
        "bamba": ("in_proj", "out_proj", "q_proj"),
    }
    tasks = [
        FamilyTask(kind, num_layers, encode_plan(plan), msgspec.structs.replace(LORA, target_modules=modules))
        for kind, modules in of_kinds.items()
    ]
    assert_equal_plain(gloo_pool, tasks, plan, tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1"])
def test_an_interrupted_run_goes_on_to_the_bit(gloo_pool, tmp_path, kind):
    """With weights that no linear has: of convolutions, gates and decays."""
    losses = []
    for name, parts in (("whole", [4]), ("interrupted", [1, 3, 4])):
        directory = tmp_path / name
        directory.mkdir()
        settings = """
            max_document_tokens = 1024
            batch_documents = 6
            [train]
            steps = 4
        """
        file = write_small_run(directory, LONG_TAILED_TEXTS, settings, kind)
        more = ["parallel.pp=2", "plan.strategy=slimpack"]
        more += ["model.router_aux_loss_coef=0"] if kind == "qwen3_next" else []
        losses.append([loss for part in parts for loss in gloo_pool.run(2, train_steps, str(file), more, part)[0]])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4
