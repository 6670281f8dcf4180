"""GRPO with PPO's clipped loss in a loop of one's own: a group's prompt is computed once, by `TreePacker`.

    python examples/grpo.py

A small random Llama samples responses to made-up prompts and learns to sample even tokens.
"""

import argparse
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evenload import TreePacker

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--prompts", type=int, default=6, help="of a step")
parser.add_argument("--responses", type=int, default=8, help="to a prompt")
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, eos_token_id=None
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
PROMPT, RESPONSE, UPDATES, CLIP = 48, 16, 2, 0.2
packer = TreePacker(1024, model, min_shared_tokens=16)

for step in range(1, options.steps + 1):
    start_s = time.perf_counter()
    prompts = torch.randint(0, 64, (options.prompts, PROMPT)).repeat_interleave(options.responses, 0)
    with torch.no_grad(), packer.paused():  # its own attention, to sample
        rows = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=RESPONSE, do_sample=True, pad_token_id=0
        )
    sequences = list(rows.numpy())
    reward = (rows[:, PROMPT:] % 2 == 0).double().mean(1).view(options.prompts, -1)
    advantages = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
    groups = [place // options.responses for place in range(len(sequences))]
    # 1 for every label, because the loss reads its log-probability; advantages belong into the loss.
    batches = packer.pack(sequences, [np.arange(len(one)) >= PROMPT for one in sequences], groups)
    with torch.no_grad():  # through the same path as those of the update
        old = [batch.path_logps(model(**batch.inputs).logits) for batch in batches]
    for _ in range(UPDATES):
        for batch, before in zip(batches, old, strict=True):
            loss = torch.zeros(())
            for place, logps in batch.path_logps(model(**batch.inputs).logits).items():
                ratio = (logps - before[place])[PROMPT - 1 :].exp()  # the first entry is of the second token
                gain = torch.minimum(ratio * advantages[place], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[place])
                loss = loss - gain.mean() / len(sequences)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    unique, paths = (sum(getattr(one, name) for one in batches) for name in ("num_tokens", "num_path_tokens"))
    print(
        f"step {step}: reward {reward.mean():.3f}, {unique:,} tokens for {paths:,} of paths, "
        f"{len(batches)} micro-batches, {time.perf_counter() - start_s:.2f} s"
    )
