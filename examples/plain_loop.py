"""A training loop of one's own with Evenload's packs: a small random Llama learns this repository's documentation.

    python examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py        # same batches, same losses, two ranks

Run again with more --steps and the same --output, it goes on where it stopped, also with another number of ranks.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from evenload import PackedLoader
from evenload.integrations.batch_formats import move_batch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--data", default=str(Path(__file__).parents[1] / "docs"))
parser.add_argument("--output", type=Path, default=Path("runs/plain_loop"))
options = parser.parse_args()

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

loader = PackedLoader(
    options.data,
    include=["*.md"],
    max_tokens=1024,  # of a pack: what one forward and backward pass can hold
    overlong="split",
    batch_tokens=8192,  # of a step, over all ranks
    model=config,
)

done = 0
checkpoint = options.output / "checkpoint.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    done = saved["step"]

wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
while done < options.steps:
    for step in loader.steps():  # one epoch
        loss_sum = torch.zeros(())
        for batch in step:
            loss = wrapped(
                **move_batch(batch, model.device)
            ).loss  # already divided by the label tokens of all ranks ...
            (loss * world_size).backward()  # ... and DistributedDataParallel takes the mean over ranks
            loss_sum += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if dist.is_initialized():
            dist.all_reduce(loss_sum)
        done += 1
        if rank == 0:
            print(f"step {done}: loss {loss_sum.item():.4f}, {step.num_label_tokens} label tokens, {len(step)} packs")
        if done == options.steps:
            break

if rank == 0:
    print("\n".join(loader.ledger_lines))
    options.output.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()},
        checkpoint,
    )
loader.close()
if dist.is_initialized():
    dist.destroy_process_group()
