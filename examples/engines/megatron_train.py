"""Megatron-Core trained with Evenload's packs: a small random GPT learns this repository's documentation.

    torchrun --nproc-per-node 8 examples/engines/megatron_train.py --pipeline 4     # 8 GPUs: 4 stages, 2 replicas
    torchrun --nproc-per-node 8 examples/engines/megatron_train.py --pipeline 4 --layers 32 --width 4096 --heads 32 \
        --data 's3://bucket/corpus' --tokenizer path/to/tokenizer --max-tokens 16384 --batch-tokens 1000000 --steps 1000

Needs GPUs: Megatron-Core itself runs nowhere else (tests/engines/test_megatron_example.py runs this file on two CPU
processes, with CUDA's place taken by the CPU; it has not run on GPUs yet). Layers are Transformer Engine's where
that is installed, else Evenload's, which need only torch (`megatron_attention`).

Run again with more --steps and the same --output, it goes on where it stopped, also with other numbers of ranks.
"""

import argparse
import importlib.util
import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from evenload import PackedLoader
from evenload.integrations.engines.megatron_attention import document_layer_spec
from evenload.integrations.engines.megatron_step import MegatronTrainStep

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--pipeline", type=int, default=2, help="stages; the other ranks are replicas")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
parser.add_argument("--data", default=str(Path(__file__).parents[2] / "docs"))
parser.add_argument("--tokenizer", default="bytes")
parser.add_argument("--vocabulary", type=int, default=257)
parser.add_argument("--max-tokens", type=int, default=1024, help="of a pack: what one forward pass can hold")
parser.add_argument("--batch-tokens", type=int, default=8192, help="of a step, over all ranks")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--output", type=Path, default=Path("runs/megatron"))
options = parser.parse_args()

has_gpu = torch.cuda.is_available()
if has_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if not dist.is_initialized():
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=options.pipeline)
torch.manual_seed(0)
if has_gpu:
    model_parallel_cuda_manual_seed(0)

precision = getattr(torch, options.precision)
config = TransformerConfig(
    num_layers=options.layers,
    hidden_size=options.width,
    num_attention_heads=options.heads,
    normalization="RMSNorm",
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=not has_gpu,
    params_dtype=precision,
    pipeline_dtype=precision,
    bf16=precision == torch.bfloat16,
    pipeline_model_parallel_size=options.pipeline,
    # The three settings that uneven packs need, and one that the second asks for even without experts.
    calculate_per_token_loss=True,
    variable_seq_lengths=True,
    finalize_model_grads_func=finalize_model_grads,
    moe_token_dispatcher_type="alltoall",
)
has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
model = GPTModel(
    config,
    get_gpt_layer_with_transformer_engine_spec() if has_transformer_engine else document_layer_spec(config),
    vocab_size=options.vocabulary,
    max_sequence_length=options.max_tokens,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
    share_embeddings_and_output_weights=False,
    position_embedding_type="rope",
)
model = model.cuda() if has_gpu else model
wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=3e-3, min_lr=3e-3, params_dtype=precision, bf16=config.bf16), [wrapped]
)

loader = PackedLoader(
    options.data,
    include=["*.md"] if options.tokenizer == "bytes" else [],
    tokenizer=options.tokenizer,
    max_tokens=options.max_tokens,
    batch_tokens=options.batch_tokens,
    overlong="split",
    engine="megatron",
    group=parallel_state.get_data_parallel_group(),
)
train_step = MegatronTrainStep(wrapped, optimizer, loader)


def state(*, is_loading: bool) -> dict:
    """What a checkpoint holds, as Megatron-Core shards it; the loader's part is the same on every rank."""
    weights = {"model": model.sharded_state_dict()}
    return weights | {"optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading)}


done = 0
checkpoints = sorted(options.output.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
if checkpoints:
    saved = dist_checkpointing.load(state(is_loading=True), str(checkpoints[-1]))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    done = saved["step"]

while done < options.steps:
    for step in loader.steps():  # one epoch
        report = train_step(step)
        done += 1
        if dist.get_rank() == 0:
            print(
                f"step {done}: loss {report.loss:.4f}, {report.num_label_tokens} label tokens, "
                f"{report.num_micro_batches} packs on this replica"
            )
        if done == options.steps:
            break

folder = options.output / f"step-{done}"
if folder not in checkpoints:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state(is_loading=False) | {"loader": loader.state_dict(), "step": done}, str(folder))
loader.close()
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
