"""Models with layers that carry a state, in real processes: pipelines (some of whose stages have no attention layer),
virtual stages, replicas, split backwards, adapters, every activation policy; and a run that was interrupted."""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from adapter_cases import LORA
from dist_training import assert_same_training, train_steps
from evenload.types.layout import even_layout
from evenload.types.plan import encode_plan, seal
from family_equality import assert_equal_plain, plan_for
from reference_training import RECURRENT_KINDS, relative_error
from small_run import LONG_TAILED_TEXTS, write_small_run
from sweeps import sweep
from switch_cases import scripted_run
from tensor_families import FamilyTask, run_families

DIVIDED = ("qwen3_next", "falcon_h1", "jamba", "lfm2", "qwen3_5_text", "bamba", "granitemoehybrid", "nemotron_h",
           "mamba2")  # fmt: skip
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
    tasks = [FamilyTask(kind, num_layers, encode_plan(plan)) for kind in (*DIVIDED, "qwen3_5_moe_text")]
    assert_equal_plain(gloo_pool, tasks, plan, limit=1e-10)


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
    tasks = [FamilyTask(kind, num_layers, encode_plan(plan)) for kind in sweep(DIVIDED, 4)]
    assert_equal_plain(gloo_pool, tasks, plan, limit=1e-10)


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
        "jamba": ("in_proj", "x_proj", "out_proj"),
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


def _run_file(tmp_path, kind):
    settings = "max_document_tokens = 1024\nbatch_documents = 6\n[optimizer]\nlearning_rate = 1e-3\n[train]\nsteps = 6"
    file = write_small_run(tmp_path, LONG_TAILED_TEXTS, settings, kind)
    more = ["model.router_aux_loss_coef=0"] if kind == "qwen3_next" else []
    return str(file), ["model.dtype=float64", "plan.strategy=slimpack", *more]


PACKED = sweep(DIVIDED, 2)
AFTER_STEPS = 1e-8
"""AdamW blows rounding of gradients up, most in norms that begin with zeros (Qwen3-Next)."""


@pytest.mark.parametrize("kind", PACKED)
def test_a_checkpoint_of_packed_weights_goes_on_on_other_numbers_of_ranks(gloo_pool, tmp_path, kind):
    """Weights and optimizer state by whole tensors: saved in parts, read whole, saved so, read in parts of shards."""
    file, base = _run_file(tmp_path, kind)
    alone = gloo_pool.run(1, scripted_run, file, [*base, f"train.output_dir={tmp_path}/alone"], [0], 6)[0]
    here, losses = [*base, f"train.output_dir={tmp_path}/parts"], []
    for layout, stop in ((["tp=2"], 2), ([], 3), (["tp=2", "dp=2"], 4), (["tp=2", "pp=2"], 6)):
        sizes = [f"parallel.{size}" for size in layout]
        result = gloo_pool.run(2 ** len(layout), scripted_run, file, [*here, *sizes], [0], stop)[0]
        losses += result.losses
    assert losses == pytest.approx(alone.losses, rel=AFTER_STEPS)
    assert_same_training(result._replace(losses=alone.losses, norms=alone.norms), alone, AFTER_STEPS)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_exported_whole(gloo_pool, tmp_path, kind):
    """What two ranks write is what one writes."""
    file, base = _run_file(tmp_path, kind)
    found = []
    for tp in (1, 2):
        here = [*base, f"train.output_dir={tmp_path}/{tp}", f"parallel.tp={tp}"]
        gloo_pool.run(tp, train_steps, file, here, 2, True)
        found.append(AutoModelForCausalLM.from_pretrained(tmp_path / str(tp) / "model", dtype=torch.float64))
    one, two = (model.state_dict() for model in found)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert relative_error(two[name], tensor) <= AFTER_STEPS, name


@pytest.mark.parametrize("kind", PACKED)
def test_packed_parts_move_when_the_layout_changes(gloo_pool, tmp_path, kind):
    file, base = _run_file(tmp_path, kind)
    chosen = [
        "parallel.tp=2",
        "parallel.pp=2",
        'plan.layouts=["dp=2", "pp=1,dp=1"]',
        f"train.output_dir={tmp_path}/moved",
    ]
    moved = gloo_pool.run(4, scripted_run, file, [*base, *chosen], [0, 1, 2, 0], 5)[0]
    alone = gloo_pool.run(1, scripted_run, file, [*base, f"train.output_dir={tmp_path}/alone"], [0], 5)[0]
    assert moved.layouts == ["pp=2 tp=2", "dp=2 tp=2", "tp=2", "pp=2 tp=2", "pp=2 tp=2"]
    assert_same_training(moved, alone, AFTER_STEPS)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "jamba"])
def test_two_ranks_hold_half_the_states_each(gloo_pool, kind):
    plan, num_layers = plan_for("tp2", policy="replay")
    alone = seal(msgspec.structs.replace(plan, layout=even_layout(num_layers)))
    held = [
        rank[0][3].after_kinds["states"]
        for one in (alone, plan)
        for rank in gloo_pool.run(one.layout.world_size, run_families, [FamilyTask(kind, num_layers, encode_plan(one))])
    ]
    assert max(held[0]) > 0
    assert held[1] == held[2] == [bytes_alone // 2 for bytes_alone in held[0]]
