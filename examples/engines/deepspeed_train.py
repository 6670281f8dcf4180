r"""DeepSpeed (ZeRO-1, 2, 3) trained with Evenload's packs: a small random Llama learns this repository's documentation.

    torchrun --nproc-per-node 2 examples/engines/deepspeed_train.py --stage 2        # two CPU processes, seconds
    torchrun --nproc-per-node 2 examples/engines/deepspeed_train.py --sequence-ranks 2  # both share every pack
    torchrun --nproc-per-node 8 examples/engines/deepspeed_train.py --stage 3 --device cuda \
        --model path/to/model --data 's3://bucket/corpus' --max-tokens 16384 --batch-tokens 1000000 --steps 1000

Run again with more --steps and the same --output, it goes on where it stopped, with the same number of ranks.
"""

import argparse
import os
from collections import defaultdict
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
parser.add_argument("--sequence-ranks", type=int, default=1, help="ranks that share every pack: Ulysses")
parser.add_argument("--model", help="a transformers model's folder; default: a small random Llama on bytes")
parser.add_argument("--data", default=str(Path(__file__).parents[2] / "docs"))
parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
parser.add_argument("--max-tokens", type=int, default=1024, help="of a pack: what one forward pass can hold")
parser.add_argument("--batch-tokens", type=int, default=8192, help="of a step, over all ranks")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--output", type=Path, default=Path("runs/deepspeed"))
options = parser.parse_args()
if options.device == "cpu":
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported

import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from evenload import PackedLoader  # noqa: E402
from evenload.integrations.deepspeed_loop import DeepSpeedLoop, share_sequences  # noqa: E402

if options.device == "cpu":
    # Or it compiles an all-reduce in shared memory, which its inference uses, for two minutes.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
deepspeed.init_distributed(dist_backend="gloo" if options.device == "cpu" else "nccl")
torch.manual_seed(0)  # the same weights on all ranks
if options.model:
    settings = {"dtype": torch.bfloat16, "attn_implementation": "flash_attention_2"} if options.device == "cuda" else {}
    model = AutoModelForCausalLM.from_pretrained(options.model, **settings)
else:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,  # the plan says how many micro-batches a step has
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": options.stage},
    "bf16": {"enabled": model.dtype == torch.bfloat16},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3 if options.model is None else 1e-5, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, config=config, mpu=share_sequences(model, options.sequence_ranks))

loader = PackedLoader(
    options.data,
    include=["*.md"] if options.model is None else [],
    tokenizer=options.model or "bytes",
    max_tokens=options.max_tokens,
    batch_tokens=options.batch_tokens,
    overlong="split",
    model=model.config,
    engine="deepspeed" if options.stage == 1 else f"deepspeed-zero{options.stage}",
    sequence_ranks=options.sequence_ranks,
)
loop = DeepSpeedLoop(engine, loader)
if (options.output / "latest").exists():
    loop.load(options.output)
for trained in loop.train(options.steps):
    loss = trained.loss.item()
    if engine.global_rank == 0:
        print(
            f"step {trained.number}: loss {loss:.4f}, {trained.num_label_tokens} label tokens, "
            f"{trained.num_micro_batches} packs"
        )
loop.save(options.output, tag=f"step-{loop.num_steps}")
loader.close()
engine.destroy()
torch.distributed.destroy_process_group()
