"""transformers' Trainer with Evenload's packs: a small random Llama learns this repository's documentation.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

Run again with more --steps and the same --output, it goes on from the last checkpoint; --epochs trains epochs. With TRL
it is the same: `from evenload import PackedSFTTrainer`.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from evenload import PackedLoader, PackedTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--epochs", type=float, help="instead of --steps")
parser.add_argument("--data", default=str(Path(__file__).parents[1] / "docs"))
parser.add_argument("--output", type=Path, default=Path("runs/hf_trainer"))
options = parser.parse_args()

args = TrainingArguments(
    output_dir=str(options.output),
    max_steps=-1 if options.epochs else options.steps,
    num_train_epochs=options.epochs or 1,
    gradient_accumulation_steps=8,
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_steps=5,
    eval_strategy="steps",
    eval_steps=5,
    use_cpu=True,
    dataloader_pin_memory=False,
    report_to=[],
)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip
model = LlamaForCausalLM(config)

# After TrainingArguments, which starts torch.distributed under torchrun.
settings = {"include": ["*.md"], "max_tokens": 1024, "overlong": "split"}
train_loader = PackedLoader(options.data, **settings)  # batches that fill 8 packs a rank
eval_loader = PackedLoader(options.data, evaluation=True, **settings)

trainer = PackedTrainer(model, args, train_loader=train_loader, eval_loader=eval_loader)
last = get_last_checkpoint(options.output) if options.output.is_dir() else None
trainer.train(resume_from_checkpoint=last)
if trainer.is_world_process_zero():
    print("\n".join(train_loader.ledger_lines))
train_loader.close()
eval_loader.close()
