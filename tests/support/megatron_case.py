"""Megatron-Core as the conformance suite drives it (`engine_conformance`): a GPT with a tiny Llama's weights."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine_records import (
    BETAS,
    EPSILON,
    EngineCase,
    Perturbed,
    RankRecord,
    TrainOrder,
    perturb_by_hand,
    plain_adam,
    small_model,
    train_by_hand,
)
from evenload.integrations.batch_formats import megatron_packed_seq_params
from evenload.integrations.megatron_step import MegatronTrainStep, document_layer_spec, gpt_forward_step
from evenload.integrations.packed_loader import PackedStep
from megatron_shim import megatron_on_cpu
from packed_cases import error_of, loader_of

Rows = list[tuple[str, slice]]
"""Parameters of the reference, and their rows in one of Megatron's."""


def llama_of_plain_norms() -> torch.nn.Module:
    """The small Llama, its norms in float64: those of transformers are computed in float32."""
    model = small_model()
    for name, norm in list(model.named_modules()):
        if type(norm).__name__ == "LlamaRMSNorm":
            plain = torch.nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon, dtype=torch.float64)
            plain.load_state_dict(norm.state_dict())
            model.set_submodule(name, plain)
    return model


class MegatronRun:
    def __init__(self, case: EngineCase, corpus: Path, learning_rate: float) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        settings = dict(case.engine)
        self.stages = settings.pop("pp", 1)
        settings.setdefault("params_dtype", torch.float32)
        overlap = settings.pop("overlap", False)
        loss_scale = settings.pop("loss_scale", None)
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=self.stages)
        self._state = parallel_state
        self.reference = case.reference()
        self.config = transformer_config(self.reference.config, self.stages, **settings)
        self.model = self._stage()
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
        wrapped = DistributedDataParallel(self.config, ddp, self.model)
        optimizer = OptimizerConfig(
            optimizer="adam", lr=learning_rate, min_lr=learning_rate, weight_decay=0.0, clip_grad=0.0,
            adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPSILON,
            params_dtype=self.config.params_dtype,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(optimizer, [wrapped])
        if loss_scale is not None:
            # What an optimizer of fp16 has, which Megatron-Core makes of tensors on GPUs only.
            self.optimizer.get_loss_scale = lambda: torch.tensor([loss_scale])
        group = parallel_state.get_data_parallel_group()
        self.loader = case.open_loader(corpus, engine="megatron", group=group)
        self.wrapped = wrapped
        self._step = MegatronTrainStep(wrapped, self.optimizer, self.loader)

    def _stage(self) -> torch.nn.Module:
        from megatron.core.models.gpt import GPTModel

        vocabulary = self.reference.config.vocab_size
        model = GPTModel(
            self.config,
            document_layer_spec(self.config),
            vocab_size=vocabulary,
            max_sequence_length=512,
            pre_process=self._state.is_pipeline_first_stage(),
            post_process=self._state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=int(self.reference.config.rope_parameters["rope_theta"]),
        )
        weights = dict(self.reference.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                for of_reference, rows in _rows(name, parameter, self.reference.config, _first_layer(model)):
                    parameter[rows] = weights[of_reference].to(parameter.dtype)
        return model

    def accumulate(self, step: PackedStep) -> float:
        return self._step.accumulate(step)

    def update(self) -> None:
        self._step.update()

    def gradients(self) -> dict[str, torch.Tensor]:
        """As the optimizer will take them: its loss scale is divided out."""
        return self._whole(lambda parameter: parameter.main_grad / self.optimizer.get_loss_scale())

    def parameters(self) -> dict[str, torch.Tensor]:
        return self._whole(lambda parameter: parameter.detach())

    def _whole(self, value: Any) -> dict[str, torch.Tensor]:
        """By names of the reference, of all stages of rank 0's replica."""
        own = {
            of_reference: value(parameter)[rows].clone()
            for name, parameter in self.model.named_parameters()
            for of_reference, rows in _rows(name, parameter, self.reference.config, _first_layer(self.model))
        }
        gathered: list[Any] = [None] * self.stages
        dist.all_gather_object(gathered, own, group=self._state.get_pipeline_model_parallel_group())
        return {name: tensor for stage in gathered for name, tensor in stage.items()}

    def logits(self, batch: dict) -> torch.Tensor:
        packed = megatron_packed_seq_params(batch)
        output = self.model(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed)
        return output[0] if output.shape[0] == 1 else output[:, 0]

    def save(self, directory: Path) -> None:
        from megatron.core import dist_checkpointing

        if dist.get_rank() == 0:
            directory.mkdir()
        dist.barrier()
        dist_checkpointing.save(self._sharded_state() | {"loader": self.loader.state_dict()}, str(directory))

    def load(self, directory: Path) -> None:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._sharded_state(is_loading=True), str(directory))
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.loader.load_state_dict(loaded["loader"])

    def _sharded_state(self, is_loading: bool = False) -> dict[str, Any]:
        model = {"model": self.model.sharded_state_dict()}
        return model | {"optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading)}


def transformer_config(llama: Any, stages: int, **changes: Any) -> Any:
    """Megatron's settings of a Llama, in float32 on the CPU."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    on = ("gated_linear_unit", "use_cpu_initialization", "variable_seq_lengths", "calculate_per_token_loss")
    off = ("add_bias_linear", "bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
    settings = {
        **dict.fromkeys(on, True),
        **dict.fromkeys((*off, "persist_layer_norm"), False),
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
        "num_layers": llama.num_hidden_layers,
        "hidden_size": llama.hidden_size,
        "ffn_hidden_size": llama.intermediate_size,
        "num_attention_heads": llama.num_attention_heads,
        "num_query_groups": llama.num_key_value_heads,
        "kv_channels": llama.hidden_size // llama.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": llama.rms_norm_eps,
        "activation_func": torch.nn.functional.silu,
        "pipeline_dtype": changes["params_dtype"],
        "pipeline_model_parallel_size": stages,
        "moe_token_dispatcher_type": "alltoall",  # the default does not go with variable lengths, even without experts
        "finalize_model_grads_func": finalize_model_grads,
    }
    return TransformerConfig(**(settings | changes))


def _first_layer(model: torch.nn.Module) -> int:
    layers = model.decoder.layers
    return layers[0].layer_number - 1 if len(layers) else 0


def _rows(name: str, parameter: torch.Tensor, llama: Any, first_layer: int) -> Iterator[tuple[str, Any]]:
    """Which parameters of the reference lie in which rows of one of Megatron's (one tensor-parallel rank)."""
    everything = slice(None)
    outside = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if name in outside:
        yield outside[name], everything
        return
    _, _, number, part = name.split(".", 3)
    layer = f"model.layers.{int(number) + first_layer}."
    whole = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    if part in whole:
        yield layer + whole[part], everything
    elif part == "mlp.linear_fc1.weight":
        yield layer + "mlp.gate_proj.weight", slice(0, llama.intermediate_size)
        yield layer + "mlp.up_proj.weight", slice(llama.intermediate_size, None)
    else:
        assert part == "self_attention.linear_qkv.weight", part
        width = llama.hidden_size // llama.num_attention_heads
        repeat = llama.num_attention_heads // llama.num_key_value_heads
        # Group by group: its query heads, its key head, its value head.
        heads = torch.arange(parameter.shape[0]).view(llama.num_key_value_heads, repeat + 2, width)
        of_groups = {"q": slice(0, repeat), "k": slice(repeat, repeat + 1), "v": slice(-1, None)}
        for of_reference, of_group in of_groups.items():
            yield f"{layer}self_attn.{of_reference}_proj.weight", heads[:, of_group].flatten()


@contextlib.contextmanager
def _megatron() -> Iterator[None]:
    """Megatron-Core on the CPU, whose groups are gone afterwards."""
    with megatron_on_cpu():
        from megatron.core import parallel_state

        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def train_megatron(case: EngineCase, order: TrainOrder) -> RankRecord:
    with _megatron():
        return train_by_hand(MegatronRun(case, order.corpus, order.learning_rate), order)


def perturb_megatron(case: EngineCase, corpus: Path) -> Perturbed | None:
    with _megatron():
        return perturb_by_hand(MegatronRun(case, corpus, 0.0))


def refusals_of_megatron(corpus: Path) -> list[str]:
    """What every rank of a pipeline of two says of a loader without a group, and of a loss that tells nothing."""

    def untold(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        output, loss = gpt_forward_step(batches, model)
        return output, lambda losses: (*loss(losses)[:2], {"another": losses.sum()})

    with _megatron():
        run = MegatronRun(megatron_case({"pp": 2}), corpus, 0.0)
        other = loader_of(corpus, engine="megatron")
        place = error_of(MegatronTrainStep, run.wrapped, run.optimizer, other)
        train_step = MegatronTrainStep(run.wrapped, run.optimizer, run.loader, forward_step=untold)
        return [place, error_of(train_step, next(iter(run.loader.steps())))]


def megatron_case(engine: dict | None = None, loader: dict | None = None, **changes) -> EngineCase:
    """Megatron-Core in float32, computed in float32 as it trains on GPUs without bf16. Its optimizer is Adam: it has no
    checkpoints of others."""
    settings = {"reference": llama_of_plain_norms, "optimizer": plain_adam, "learning_rate": 0.01} | changes
    return EngineCase(train_megatron, perturb_megatron, engine or {}, loader or {}, **settings)
