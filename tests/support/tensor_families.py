"""Tiny decoders of families that are cut over a tensor-parallel group, as ranks of a `GlooPool`; plans are of any model
with as many layers."""

from collections import Counter
from typing import NamedTuple

import torch
from transformers import AutoConfig, PretrainedConfig

from adapter_cases import make_adapters_matter
from dist_cases import RankUnderTest, StoredBytes
from evenload.attention.backends import select_backend
from evenload.config.sections import LoraConfig
from evenload.runtime.comm.collectives import Transfer
from evenload.runtime.comm.mesh import Mesh, create_meshes
from evenload.runtime.executor import Executor
from evenload.runtime.model.hf_model import StageModel, build_rank_models
from evenload.runtime.model.tensor_weights import tensor_split
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.plan import decode_plan
from gloo_pool import TIMEOUT_S
from reference_training import RECURRENT_KINDS, balance_factor, make_tokens, stage_model, tiny_config

_COMMON = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True}
_GROUPS = {**_EXPERTS, "n_routed_experts": 12, "n_group": 2, "topk_group": 1}
_GEMMA = {"query_pre_attn_scalar": 20, "sliding_window": 9}
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
_RANKS = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_OWN: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma": {},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": {**_GEMMA, "sliding_window_pattern": 2},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    "ministral3": {},
    "smollm3": {},
    "cohere2": {"sliding_window": 9, "layer_norm_eps": 1e-5},
    "granite_swa": {"sliding_window": 9},
    "qwen3_moe": {**_EXPERTS, **_BALANCED, "num_experts": 6},
    "mixtral": {**_BALANCED, "num_local_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {**_GROUPS, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 1},
    "qwen3_5_moe_text": {
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 20,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    # Refused under tensor parallelism.
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "intermediate_size": 24},
    "gemma4_text": {
        "sliding_window": 9,
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "deepseek_v3": {**_GROUPS, **_RANKS, "head_dim": 8, "num_key_value_heads": 4},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    "olmo2": {},
    "olmo3": {"sliding_window": 9},
    "minimax": {"num_local_experts": 6, "num_experts_per_tok": 2},
}
FAMILIES = tuple(_OWN)


def family_config(family: str, num_layers: int, **changes) -> PretrainedConfig:
    if family in RECURRENT_KINDS:
        return tiny_config(family, num_hidden_layers=num_layers, **changes)
    return AutoConfig.for_model(family, **_COMMON | {"num_hidden_layers": num_layers} | _OWN[family] | changes)


class FamilyTask(NamedTuple):
    """A model and an encoded plan; its tokens are random."""

    family: str
    num_layers: int
    plan: bytes
    lora: LoraConfig | None = None

    def config(self) -> PretrainedConfig:
        # peft's training, with which adapters are compared, balances no routers.
        changes = {} if self.lora is None else {"output_router_logits": False}
        return family_config(self.family, self.num_layers, **changes)

    def tokens(self) -> dict[int, torch.Tensor]:
        plan = decode_plan(self.plan)
        return make_tokens([one.num_tokens for one in plan.documents], self.config().vocab_size, seed=1)


def whole_model(task: FamilyTask) -> StageModel:
    """With the weights that every layout begins with."""
    model = stage_model(task.config(), lora=task.lora)
    if task.lora is not None:
        make_adapters_matter(model)
    return model


def weights_of(model: StageModel) -> dict[str, torch.Tensor]:
    """Of a stage with the whole model, of all that is stored, by name."""
    named = {name: one for unit in model.named_units() for name, one in unit} | model.constants()
    return {name: one.detach().clone() for name, one in named.items()}


class FamilyRank(RankUnderTest):
    """One rank's part of a model."""

    def __init__(self, mesh: Mesh, task: FamilyTask) -> None:
        def build(layers: tuple[int, int], tp: int) -> StageModel:
            more = {"router_aux_loss_coef": balance_factor(config), "tp_rank": mesh.tp_rank, "tp": tp}
            return stage_model(config, layers=layers, lora=task.lora, **more)

        config, self._mesh = task.config(), mesh
        models = build_rank_models(mesh.layout, mesh.pp_rank, build)
        if task.lora is not None:
            _load_adapters(models, task, mesh)
        self.buffers = flatten_units(list(models.values()), mesh.data_size)
        backend = select_backend("auto", "cpu")
        self.stages = {index: PipelineStage(model, backend, mesh.tensor) for index, model in models.items()}
        self._executor = Executor(self.stages, mesh)


def _load_adapters(models: dict[int, StageModel], task: FamilyTask, mesh: Mesh) -> None:
    """Give adapters the values of `whole_model`, whose B are not zeros."""
    whole = weights_of(whole_model(task))
    for model in models.values():
        for unit in model.unit_parameters():
            for name, parameter in unit:
                split = tensor_split(parameter)
                parameter.data.copy_(whole[name] if split is None else split.take(whole[name]))


def expert_rows_sent(task: FamilyTask) -> dict[str, int]:
    """Numbers that this rank sends in a layer's experts, by direction: rows' elements, and one a row in all."""
    plan, sent = decode_plan(task.plan), Counter()
    mesh = create_meshes([plan.layout], torch.device("cpu"), timeout_s=TIMEOUT_S).start
    rank, group = FamilyRank(mesh, task), mesh.tensor
    assert group is not None
    send, (stage,) = group.all_to_all, rank.stages.values()

    def counted(rows: torch.Tensor, to: list[int], come: list[int], what: str) -> Transfer:
        if "experts" in what:
            sent[f"{stage._state.direction} {'rows' if rows.ndim == 2 else 'numbers'}"] += rows.numel()
        return send(rows, to, come, what)

    group.all_to_all = counted  # type: ignore[method-assign]
    rank.run(plan, task.tokens(), "all_gather")
    return dict(sent)


def run_families(tasks: list[FamilyTask], exchange: str = "all_gather") -> list[tuple[float, dict, float, StoredBytes]]:
    """Steps of one layout, one after the other, on the same process groups."""
    plans = [decode_plan(task.plan) for task in tasks]
    mesh = create_meshes([plans[0].layout], torch.device("cpu"), timeout_s=TIMEOUT_S).start
    if mesh.tensor is not None:
        mesh.tensor.chunk_rows = 3
    return [FamilyRank(mesh, task).run(plan, task.tokens(), exchange) for task, plan in zip(tasks, plans, strict=True)]
