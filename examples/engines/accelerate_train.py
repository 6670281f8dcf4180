r"""Accelerate trained with Evenload's packs: a small random Llama learns this repository's documentation.

    torchrun --nproc-per-node 2 examples/engines/accelerate_train.py                 # two CPU processes, seconds
    torchrun --nproc-per-node 8 examples/engines/accelerate_train.py --device cuda \
        --model path/to/model --data 's3://bucket/corpus' --max-tokens 16384 --batch-tokens 1000000 --steps 1000

Run again with more --steps and the same --output, it goes on where it stopped, also with another number of ranks.
"""

import argparse
import contextlib
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

from evenload import PackedLoader
from evenload.integrations.engine_loop import hf_pack_loss

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="a transformers model's folder; default: a small random Llama on bytes")
parser.add_argument("--data", default=str(Path(__file__).parents[2] / "docs"))
parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
parser.add_argument("--max-tokens", type=int, default=1024, help="of a pack: what one forward pass can hold")
parser.add_argument("--batch-tokens", type=int, default=8192, help="of a step, over all ranks")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--output", type=Path, default=Path("runs/accelerate"))
options = parser.parse_args()

accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision="bf16" if options.device == "cuda" else "no")
torch.manual_seed(0)  # the same weights on all ranks
if options.model:
    settings = {"attn_implementation": "flash_attention_2"} if options.device == "cuda" else {}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **settings)
else:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
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
model, optimizer = accelerator.prepare(model, optimizer)  # not the loader: it has dealt the documents to ranks itself
accelerator.register_for_checkpointing(loader)
step_file = options.output / "step"
number = 0
if step_file.exists():
    number = int(step_file.read_text())
    accelerator.load_state(str(options.output / f"step-{number}"))

while number < options.steps:
    for step in loader.steps():
        total = torch.zeros((), device=accelerator.device)
        for index, batch in enumerate(step):
            inputs = {name: one.to(accelerator.device) if torch.is_tensor(one) else one for name, one in batch.items()}
            is_last = index == len(step) - 1
            with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                loss = hf_pack_loss(model, inputs)
                # Gradients are averaged over ranks; the loss is of the global batch's label tokens already.
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        loss = accelerator.reduce(total, "sum").item()
        accelerator.print(f"step {number}: loss {loss:.4f}, {step.num_label_tokens} label tokens, {len(step)} packs")
        if number >= options.steps:
            break
accelerator.save_state(str(options.output / f"step-{number}"))
if accelerator.is_main_process:
    step_file.write_text(str(number))
loader.close()
accelerator.end_training()
