"""FSDP2 (`fully_shard`) trained with Evenload's packs: a small random Llama learns this repository's documentation.

    torchrun --nproc-per-node 2 examples/engines/fsdp2_train.py                      # two CPU processes, seconds
    torchrun --nproc-per-node 8 examples/engines/fsdp2_train.py --device cuda \
        --model path/to/model --data 's3://bucket/corpus' --max-tokens 16384 --batch-tokens 1000000 --steps 1000

Run again with more --steps and the same --output, it goes on where it stopped, also with another number of ranks.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from evenload import PackedLoader
from evenload.integrations.fsdp2_loop import Fsdp2Loop

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="a transformers model's folder; default: a small random Llama on bytes")
parser.add_argument("--data", default=str(Path(__file__).parents[2] / "docs"))
parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
parser.add_argument("--max-tokens", type=int, default=1024, help="of a pack: what one forward pass can hold")
parser.add_argument("--batch-tokens", type=int, default=8192, help="of a step, over all ranks")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--output", type=Path, default=Path("runs/fsdp2"))
options = parser.parse_args()

if options.device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")

torch.manual_seed(0)  # the same weights on all ranks
if options.model:
    settings = {"attn_implementation": "flash_attention_2"} if options.device == "cuda" else {}
    # Weights stay float32: an update of 1e-5 is less than bfloat16 can add to most of them.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **settings)
else:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
mesh = init_device_mesh(options.device, (dist.get_world_size(),))
computed = torch.bfloat16 if options.device == "cuda" else torch.float32
precision = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=precision)
fully_shard(model, mesh=mesh, mp_policy=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if options.model is None else 1e-5)

loader = PackedLoader(
    options.data,
    include=["*.md"] if options.model is None else [],
    tokenizer=options.model or "bytes",
    max_tokens=options.max_tokens,
    batch_tokens=options.batch_tokens,
    overlong="split",
    model=model.config,
)
loop = Fsdp2Loop(model, optimizer, loader, max_grad_norm=1.0)
if any(options.output.glob("step-*")):
    loop.load(options.output)
for trained in loop.train(options.steps):
    loss = trained.loss.item()
    if dist.get_rank() == 0:
        print(
            f"step {trained.number}: loss {loss:.4f}, {trained.num_label_tokens} label tokens, "
            f"{trained.num_micro_batches} packs"
        )
loop.save(options.output)
loader.close()
dist.destroy_process_group()
