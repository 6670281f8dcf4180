r"""Megatron-Core trained with Evenload's packs: a small random GPT learns this repository's documentation.

    torchrun --nproc-per-node 2 examples/engines/megatron_train.py                   # two CPU processes, seconds
    torchrun --nproc-per-node 4 examples/engines/megatron_train.py --pipeline 2      # two stages, two replicas
    torchrun --nproc-per-node 8 examples/engines/megatron_train.py --pipeline 2 --layers 24 --width 2048 \
        --data 's3://bucket/corpus' --max-tokens 16384 --batch-tokens 1000000 --steps 1000   # eight GPUs

Run again with more --steps and the same --output, it goes on where it stopped, also with another number of replicas.
Without a GPU Megatron-Core runs on what its tests put in CUDA's place (tests/support/megatron_shim.py). With
Transformer Engine take its layers: `get_gpt_layer_with_transformer_engine_spec`. Nothing here has run on GPUs.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    from megatron_shim import megatron_on_cpu

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", default=str(Path(__file__).parents[2] / "docs"))
parser.add_argument("--pipeline", type=int, default=1, help="stages")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--max-tokens", type=int, default=1024, help="of a pack: what one forward pass can hold")
parser.add_argument("--batch-tokens", type=int, default=8192, help="of a step, over all replicas")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--output", type=Path, default=Path("runs/megatron"))


def build(options):
    """Model, optimizer and loader of this rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    from evenload import PackedLoader
    from evenload.integrations.megatron_step import document_layer_spec

    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.width,
        num_attention_heads=max(4, options.width // 128),
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=not ON_GPU,
        bf16=ON_GPU,
        params_dtype=torch.bfloat16 if ON_GPU else torch.float32,
        pipeline_dtype=torch.bfloat16 if ON_GPU else torch.float32,
        pipeline_model_parallel_size=options.pipeline,
        calculate_per_token_loss=True,  # sums; not means of means
        variable_seq_lengths=True,  # packs of any length through the pipeline
        moe_token_dispatcher_type="alltoall",  # what variable_seq_lengths asks for, even without experts
        finalize_model_grads_func=finalize_model_grads,
    )
    torch.manual_seed(0)  # the same weights on all replicas
    if ON_GPU:
        model_parallel_cuda_manual_seed(0)
    model = GPTModel(
        config,
        document_layer_spec(config),
        vocab_size=320,
        max_sequence_length=options.max_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    inner = Float16Module(config, model.cuda()) if ON_GPU else model
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), inner)
    settings = OptimizerConfig(
        optimizer="adam", lr=3e-3, min_lr=3e-3, weight_decay=0.1, bf16=ON_GPU, params_dtype=config.params_dtype,
        clip_grad=1.0 if ON_GPU else 0.0,  # Megatron-Core clips tensors on GPUs only
    )  # fmt: skip
    loader = PackedLoader(
        options.data,
        include=["*.md"],
        tokenizer="bytes",
        engine="megatron",
        group=parallel_state.get_data_parallel_group(),
        max_tokens=options.max_tokens,
        batch_tokens=options.batch_tokens,
        overlong="split",
    )
    return model, wrapped, get_megatron_optimizer(settings, [wrapped]), loader


def train(options):
    """Train, from the last checkpoint on."""
    from megatron.core import dist_checkpointing

    from evenload.integrations.megatron_step import MegatronTrainStep

    model, wrapped, optimizer, loader = build(options)
    train_step = MegatronTrainStep(wrapped, optimizer, loader)

    def state(is_loading=False):
        sharded = {"model": model.sharded_state_dict()}
        return sharded | {"optimizer": optimizer.sharded_state_dict(sharded, is_loading=is_loading)}

    number, last = 0, options.output / "step"
    if last.exists():
        number = int(last.read_text())
        loaded = dist_checkpointing.load(state(is_loading=True), str(options.output / f"step-{number}"))
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        loader.load_state_dict(loaded["loader"])
    while number < options.steps:
        for step in loader.steps():
            report = train_step(step)
            number += 1
            if dist.get_rank() == 0:
                print(
                    f"step {number}: loss {report.loss:.4f}, {report.num_label_tokens} label tokens, "
                    f"{report.num_micro_batches} packs",
                    flush=True,
                )
            if number >= options.steps:
                break
    folder = options.output / f"step-{number}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    # The loader's state is the same on every rank, and of no layout.
    dist_checkpointing.save(state() | {"loader": loader.state_dict()}, str(folder))
    if dist.get_rank() == 0:
        last.write_text(str(number))
    loader.close()


if __name__ == "__main__":
    arguments = parser.parse_args()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    with contextlib.nullcontext() if ON_GPU else megatron_on_cpu():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=arguments.pipeline)
        train(arguments)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
