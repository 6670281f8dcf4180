r"""TRL's SFTTrainer with LoRA and Evenload's packs: a small random Llama learns this repository's documentation.

    torchrun --nproc-per-node 2 examples/engines/trl_sft.py                          # two CPU processes, seconds
    torchrun --nproc-per-node 8 examples/engines/trl_sft.py --device cuda \
        --model path/to/model --data chats.jsonl --max-tokens 16384 --micro-batches 4 --epochs 3

Run again with more --steps and the same --output, it goes on from the last checkpoint. Chats (records with `messages`)
are rendered by the model's template, with a loss on the assistant's tokens. The plain Trainer: ../hf_trainer.py.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig

from evenload import PackedLoader, PackedSFTTrainer
from evenload.data.tokenize import train_byte_pair_tokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="a transformers model's folder; default: a small random Llama")
parser.add_argument("--data", default=str(Path(__file__).parents[2] / "docs"))
parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
parser.add_argument("--max-tokens", type=int, default=1024, help="of a pack: what one forward pass can hold")
parser.add_argument("--batch-tokens", type=int, help="of a step, over all ranks; default: as many as fill its packs")
parser.add_argument("--micro-batches", type=int, default=4, help="of every rank and step")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--epochs", type=float, help="instead of --steps")
parser.add_argument("--output", type=Path, default=Path("runs/trl"))
options = parser.parse_args()

args = SFTConfig(
    output_dir=str(options.output),
    max_steps=-1 if options.epochs else options.steps,
    num_train_epochs=options.epochs or 1,
    gradient_accumulation_steps=options.micro_batches,
    learning_rate=1e-2 if options.model is None else 2e-4,
    lr_scheduler_type="constant",
    logging_strategy="no",
    save_strategy="steps",
    save_steps=options.steps,
    use_cpu=options.device == "cpu",
    bf16=options.device == "cuda",
    report_to=[],
    dataloader_pin_memory=False,
)
torch.manual_seed(0)  # the same weights on all ranks
if options.model:
    settings = {"attn_implementation": "flash_attention_2"} if options.device == "cuda" else {}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **settings)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
else:
    texts = [path.read_text() for path in sorted(Path(options.data).glob("*.md"))]
    with tempfile.TemporaryDirectory() as folder:
        train_byte_pair_tokenizer(texts, 512, Path(folder, "tokenizer.json"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(Path(folder, "tokenizer.json")), eos_token="<|endoftext|>"
        )
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )

# After SFTConfig, which starts torch.distributed under torchrun.
loader = PackedLoader(
    options.data,
    engine="trainer",
    include=["*.md"] if options.model is None else [],
    tokenizer=tokenizer,
    max_tokens=options.max_tokens,
    batch_tokens=options.batch_tokens,
    overlong="split",
)


class Losses(PackedSFTTrainer):
    """Prints the loss of every global batch; TRL logs the means of its ranks."""

    def training_step(self, *arguments, **settings):
        loss = super().training_step(*arguments, **settings)
        self.total = getattr(self, "total", 0.0) + loss.detach() / self.accelerator.num_processes
        if self.accelerator.sync_gradients:
            whole = self.accelerator.reduce(self.total, "sum").item()
            self.accelerator.print(f"step {self.state.global_step + 1}: loss {whole:.4f}")
            self.total = 0.0
        return loss


lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
trainer = Losses(model, args, train_loader=loader, processing_class=tokenizer, peft_config=lora)
last = get_last_checkpoint(options.output) if options.output.is_dir() else None
trainer.train(resume_from_checkpoint=last)
loader.close()
if dist.is_initialized():
    dist.destroy_process_group()
