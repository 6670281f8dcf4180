"""Recurrent layers in slices against plain autograd: time and memory of one document's loss and gradients, one thread.

    1, 4, 16 slices   forward and backward in as many slices, cut in other places in backward, through `PipelineStage`:
                      all forwards, then all backwards
    plain             transformers' own model and autograd, the document whole

Small models of three families, four layers of which the second attends: Gated DeltaNet with experts (Qwen3-Next),
Mamba-2 (Bamba), short convolutions (LFM2), by the functions of transformers in torch, as no kernel runs on a CPU. Time
is the median over interleaved rounds of each over plain; memory as in `replay.py`, every variant in its own process.

    python benchmarks/recurrent.py [--quick] [--append]
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig

from evenload.types.document import PackPlan
from harness import Row, alternate, median_ratio, run
from replay import Step, growth_bytes, make_plain, make_replay, make_tokens  # puts tests/support on the path

from plan_building import pack_plan  # isort: skip

REPEATS, QUICK_REPEATS = 5, 1
TOKENS, QUICK_TOKENS = 2048, 256
SLICES = (1, 4, 16)
BASELINE = "plain transformers autograd"
_COMMON = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
FAMILIES: dict[str, dict] = {
    "qwen3_next": {
        "layer_types": _LINEAR, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "bamba": {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64,
        "mamba_chunk_size": 64,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
}  # fmt: skip


def config_of(family: str) -> PretrainedConfig:
    """A small model of a family."""
    return AutoConfig.for_model(family, **_COMMON | FAMILIES[family])


def plan_of(tokens: int, slices: int) -> PackPlan:
    """One document in equal slices; those of backward begin a third of a slice later."""

    def packs(shift: int) -> list[list[tuple[int, int, int]]]:
        edges = [0, *(at * tokens // slices + shift for at in range(1, slices)), tokens]
        return [[(0, start, stop)] for start, stop in itertools.pairwise(edges)]

    return pack_plan(0, packs(0), packs(tokens // slices // 3)[::-1])


def step_of(family: str, variant: str) -> Step:
    """A step of a family by plain autograd, or by slices."""
    config = config_of(family)
    return make_plain(config) if variant == "plain" else make_replay(config=config)


def peak_growth_bytes(family: str, variant: str, slices: int, tokens: int) -> int:
    """Measured in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--child", json.dumps([family, variant, slices, tokens])]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def measure_in_child(family: str, variant: str, slices: int, tokens: int) -> None:
    """Print the peak of one step over what the process held before it, in bytes."""
    torch.set_num_threads(1)
    step = step_of(family, variant)
    step(plan_of(8, 1), make_tokens(np.array([8])))
    plan, batch = plan_of(tokens, slices), make_tokens(np.array([tokens]))
    print(growth_bytes(lambda: step(plan, batch), f"{family} {variant} {slices}"))


def measure(quick: bool) -> list[Row]:
    """Every family in every number of slices."""
    torch.set_num_threads(1)
    tokens, rows = QUICK_TOKENS if quick else TOKENS, []
    batch = make_tokens(np.array([tokens]))
    for family in FAMILIES:
        plain, sliced = step_of(family, "plain"), step_of(family, "sliced")
        steps = {"plain": lambda step=plain: step(plan_of(tokens, 1), batch)}
        plans = {n: plan_of(tokens, n) for n in SLICES}
        steps |= {f"{n}": lambda step=sliced, plan=plan: step(plan, batch) for n, plan in plans.items()}
        seconds = alternate(steps, QUICK_REPEATS if quick else REPEATS)
        whole = peak_growth_bytes(family, "plain", 1, tokens)
        for n in SLICES:
            case = f"{family}, {tokens:,} tokens, {n} slices"
            rows.append(Row("recurrent", case, "time", median_ratio(seconds[f"{n}"], seconds["plain"]), "x", BASELINE))
            held = peak_growth_bytes(family, "sliced", n, tokens) / whole
            rows.append(Row("recurrent", case, "peak memory", held, "x", BASELINE))
    return rows


PARTS = {"recurrent": measure}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure_in_child(*json.loads(sys.argv[2]))
    else:
        run(PARTS)
