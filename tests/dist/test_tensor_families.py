"""Tensor parallelism of families with experts and without, against plain training: see docs/tested.md for others."""

import msgspec
import numpy as np
import pytest
import torch

from adapter_cases import LORA
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.model.hf_model import require_layout
from evenload.runtime.model.model_config import TESTED
from evenload.types.layout import even_layout
from evenload.types.plan import encode_plan, seal
from family_equality import assert_equal_plain, plan_for
from reference_training import stage_model
from tensor_families import FamilyTask, expert_rows_sent, family_config, run_families

DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "granite", "ministral3", "smollm3",
         "cohere2", "granite_swa")  # fmt: skip
WITH_EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe")


@pytest.mark.parametrize("strategy", ["slimpack", "balanced"])
@pytest.mark.parametrize("family", [*DENSE, *WITH_EXPERTS])
def test_gradients_equal_plain_training(gloo_pool, family, strategy):
    """Of documents that are cut, elsewhere in backward, and whole; under every activation policy."""
    plan, num_layers = plan_for("tp2", strategy)
    assert_equal_plain(gloo_pool, [FamilyTask(family, num_layers, encode_plan(plan))], plan)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2 tp2", {}),
        ("pp2 tp2", {"virtual": "2", "schedule": "list_split"}),
        ("pp2 tp2", {"schedule": "zb_h1", "strategy": "balanced"}),
        ("cp2 tp2", {}),
    ],
    ids=["dp2", "virtual stages, split backwards", "zero bubble", "cp2"],
)
def test_experts_with_every_dimension(gloo_pool, layout, options):
    plan, num_layers = plan_for(layout, **options)
    tasks = [FamilyTask(family, num_layers, encode_plan(plan)) for family in WITH_EXPERTS]
    assert_equal_plain(gloo_pool, tasks, plan)


TWELVE = ("qwen3", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "minimax_m2", "gemma3_text", "gemma4_text",
          "ministral3", "olmo3", "smollm3", "granite")  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2", {}),
        ("cp2", {}),
        ("pp2", {"virtual": "2", "schedule": "list_split"}),
        ("pp2", {"schedule": "zb_h1", "strategy": "balanced"}),
        ("pp2 cp2", {"dp_merge": "off"}),
    ],
    ids=["dp2", "cp2", "virtual stages, split backwards", "zero bubble", "pp2 cp2"],
)
def test_families_without_tensor_parallelism(gloo_pool, layout, options):
    plan, num_layers = plan_for(layout, **options)
    assert_equal_plain(gloo_pool, [FamilyTask(family, num_layers, encode_plan(plan)) for family in TWELVE], plan)


def test_start_lines_call_these_families_tested():
    assert {*DENSE, *WITH_EXPERTS, *TWELVE} <= TESTED


ATTENTION = msgspec.structs.replace(LORA, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "lora"),
    # Where MLPs of GLM-4.5 get adapters, peft gives some to experts, too.
    [("llama", LORA), ("qwen3_moe", LORA), ("qwen2_moe", LORA), ("glm4_moe", ATTENTION)],
)
def test_adapters_equal_peft(gloo_pool, tmp_path, family, lora):
    """Of attention, of a shared expert and of its gate; experts and routers are frozen."""
    plan, num_layers = plan_for("tp2")
    assert_equal_plain(gloo_pool, [FamilyTask(family, num_layers, encode_plan(plan), lora)], plan, tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_all_families_equal_peft(gloo_pool, tmp_path):
    plan, num_layers = plan_for("pp2")
    lora = msgspec.structs.replace(LORA, target_modules=("o_proj",))
    tasks = [FamilyTask(family, num_layers, encode_plan(plan), lora) for family in TWELVE]
    assert_equal_plain(gloo_pool, tasks, plan, tmp_path)


def test_a_rank_stores_nothing_of_other_ranks_tokens(gloo_pool):
    """All ranks together hold what one rank alone holds but the experts' products, which are computed again."""
    plan, num_layers = plan_for("tp2", "balanced", policy="replay")
    alone = seal(msgspec.structs.replace(plan, layout=even_layout(num_layers)))
    config = family_config("qwen3_moe", num_layers)
    ((whole,),) = gloo_pool.run(1, run_families, [FamilyTask("qwen3_moe", num_layers, encode_plan(alone))])
    ranks = gloo_pool.run(2, run_families, [FamilyTask("qwen3_moe", num_layers, encode_plan(plan))])
    kind = "activations_replay"
    held = np.sum([rank[0][3].after_kinds[kind] for rank in ranks], axis=0)
    saved = np.array(whole[3].after_kinds[kind]) - held
    per_token = config.num_experts_per_tok * 2 * config.moe_intermediate_size * 8 * num_layers
    largest = max(sum(one.num_tokens for one in pack.slices) for pack in plan.pack_plans[0].forward)
    assert saved.max() == per_token * largest
    for kind in ("keys_and_values", "weight_gradient_inputs"):
        assert sum(rank[0][3].peak_by_kind[kind] for rank in ranks) == whole[3].peak_by_kind[kind]


def test_experts_rows_travel_as_often_as_said(gloo_pool):
    """Twice forward, three times backward, and two numbers a row: what a price of it must charge."""
    plan, num_layers = plan_for("tp2", "balanced", policy="replay")
    config = family_config("mixtral", num_layers)
    ranks = gloo_pool.run(2, expert_rows_sent, FamilyTask("mixtral", num_layers, encode_plan(plan)))
    copies = sum(one.num_tokens for one in plan.documents) * config.num_experts_per_tok * num_layers
    assert {key: sum(rank[key] for rank in ranks) for key in ranks[0]} == {
        "forward rows": 2 * copies * config.hidden_size,
        "backward rows": 3 * copies * config.hidden_size,
        "backward numbers": 2 * copies,
    }


def test_a_rank_holds_whole_experts():
    config = family_config("glm4_moe", 2)
    whole, part = stage_model(config), stage_model(config, tp=2, tp_rank=1)
    ours, theirs = (model.layers[1].mlp.experts for model in (part, whole))
    assert torch.equal(ours.gate_up_proj, theirs.gate_up_proj[6:])
    assert torch.equal(ours.down_proj, theirs.down_proj[6:])
    assert torch.equal(part.layers[1].mlp.gate.weight, whole.layers[1].mlp.gate.weight)


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("deepseek_v3", {}, UnsupportedModelError, "attends in self_attn, whose linears its plan .* does not cut"),
        ("gpt_oss", {}, UnsupportedModelError, "has no plan for tensor parallelism in transformers"),
        ("minimax_m2", {}, UnsupportedModelError, "needs self_attn.k_proj, .* whole on one rank"),
        ("olmo2", {}, UnsupportedModelError, "as norms of all heads"),
        ("olmo3", {}, UnsupportedModelError, "as norms of all heads"),
        ("minimax", {}, UnsupportedModelError, "mixes tokens in self_attn, which needs all of them"),
        ("qwen3_moe", {"num_experts": 5}, ConfigError, "number of mlp.experts of the model is 5"),
        ("glm4_moe", {"moe_intermediate_size": 21}, ConfigError, "mlp.shared_experts.gate_proj of the model is 21"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_cannot_be_cut_is_refused_at_start(family, changes, error, message):
    config = family_config(family, 2, **changes)
    with pytest.raises(error, match=f"parallel.tp is 2.*{message}"):
        require_layout(config, even_layout(2, tp=2))
    require_layout(config, even_layout(2))
