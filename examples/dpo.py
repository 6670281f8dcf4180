"""Direct preference optimisation in a loop of one's own: the prompt of a pair is computed once, by `TreePacker`.

    python examples/dpo.py

A small random Llama learns from made-up pairs to go on with even tokens. The reference is a copy of it.
"""

import argparse
import copy
import time

import numpy as np
import torch
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

from evenload import TreePacker

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--pairs", type=int, default=16, help="of a step")
options = parser.parse_args()

torch.manual_seed(0)
rng = np.random.default_rng(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip
model = LlamaForCausalLM(config)
reference = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
BETA = 0.1


def make_pairs() -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """Sequences at places 2i (chosen) and 2i + 1 (rejected), weights of their tokens, and the pair of each."""
    sequences, weights = [], []
    for _ in range(options.pairs):
        prompt = rng.integers(0, 64, rng.integers(40, 80))
        for odd in (0, 1):
            response = 2 * rng.integers(0, 32, rng.integers(8, 24)) + odd
            sequences.append(np.concatenate([prompt, response]))
            weights.append(np.arange(len(sequences[-1])) >= len(prompt))  # the response is a label
    return sequences, weights, [place // 2 for place in range(len(sequences))]


packer = TreePacker(1024, model, min_shared_tokens=16)
TreePacker(1024, reference)  # the same micro-batches can be run by every model that has been given to one

for step in range(1, options.steps + 1):
    start_s, total, num_right = time.perf_counter(), 0.0, 0
    batches = packer.pack(*make_pairs(), whole_groups=True)  # a margin needs both of a pair
    for batch in batches:
        logps = batch.path_logps(model(**batch.inputs).logits)
        with torch.no_grad():
            before = batch.path_logps(reference(**batch.inputs).logits)
        gain = {place: (logps[place] - before[place]).sum() for place in logps}
        margins = torch.stack([gain[place] - gain[place + 1] for place in gain if place % 2 == 0])
        loss = -logsigmoid(BETA * margins).sum() / options.pairs
        loss.backward()
        total += loss.item()
        num_right += int((margins > 0).sum())
    optimizer.step()
    optimizer.zero_grad()
    unique, paths = (sum(getattr(one, name) for one in batches) for name in ("num_tokens", "num_path_tokens"))
    print(
        f"step {step}: loss {total:.4f}, {num_right / options.pairs:.0%} right, "
        f"{unique:,} tokens for {paths:,} of paths, {len(batches)} micro-batches, {time.perf_counter() - start_s:.2f} s"
    )
