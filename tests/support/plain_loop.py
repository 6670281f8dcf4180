"""A plain training loop of transformers: the peer of `evenload train` in benchmarks/gpu_training.py.

    packed      documents packed by best-fit-decreasing into windows, as TRL packs, and computed without padding: some
                windows a micro-batch through FlashAttention 2, as torch has it (`torch.nn.attention.varlen`)
    rebalanced  transformers' `train_sampling_strategy = "batch_rebalance"`: padded micro-batches of about equal cost

Documents of a step are packed among themselves, so that every loop trains the same documents in the same steps (TRL
packs 1,000 at a time, and fills the last window of a step better). Weights, gradients and AdamW's moments are in the
model's own precision, as TRL trains a checkpoint in bf16; fp32 master weights, which Evenload has, cost it nothing.

    python tests/support/plain_loop.py MODEL CORPUS METRICS.jsonl --documents N --steps N --batches packed|rebalanced

MODEL without weights gets random ones and keeps them, so that whoever comes next starts from the same. A row a step
goes to METRICS.jsonl. Exit code 3 where the GPU has too little memory.
"""

import argparse
import inspect
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

WINDOW = 4096
WINDOWS_A_MICRO_BATCH = 2


def best_fit_decreasing(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Documents by falling length, each into the fullest window that has room for it; [] of their indices a window."""
    windows: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= lengths[index]]
        number = min(fitting)[1] if fitting else len(windows)
        if not fitting:
            windows.append([])
            rooms.append(window)
        windows[number].append(index)
        rooms[number] -= lengths[index]
    return windows


def packed(lengths: Sequence[int], at_once: int = WINDOWS_A_MICRO_BATCH) -> list[list[int]]:
    """Micro-batches of a step; longer documents than the window are windows of their own."""
    windows = best_fit_decreasing(lengths, max(WINDOW, *lengths))
    groups = (windows[first : first + at_once] for first in range(0, len(windows), at_once))
    return [list(itertools.chain(*group)) for group in groups]


def rebalanced(lengths: Sequence[int]) -> list[list[int]]:
    """As many micro-batches as `packed` has."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    parts = len(packed(lengths))
    return list(BatchRebalanceSampler(list(lengths), len(lengths), dp_size=1, grad_accum=parts, shuffle=False))


def packed_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None,
    scaling: float | None = None, cu_seq_lens_q: Any = None, max_length_q: Any = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention inside documents for transformers; query [1, heads, tokens, dim]."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    edges = (cu_seq_lens_q, cu_seq_lens_q, int(max_length_q), int(max_length_q))
    # Torch 2.11 takes fewer key heads as they are, later ones ask.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    out = varlen_attn(q, k, v, *edges, scale=scaling, window_size=(-1, 0), **grouped)
    return out[None], None


def batch_of(documents: Sequence[np.ndarray], *, is_packed: bool) -> dict[str, Any]:
    """A micro-batch as transformers' models take it."""
    ids = [torch.from_numpy(one.astype(np.int64)) for one in documents]
    if is_packed:
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
        return dict(collate([{"input_ids": one.tolist()} for one in ids]))
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(one) for one in ids], batch_first=True)
    padded = pad(ids, batch_first=True)
    return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}


def train(model: Any, steps: Sequence[Sequence[dict[str, Any]]], learning_rate: float) -> Iterator[dict[str, float]]:
    """Loss, tokens, seconds and bytes of every step, which is a list of micro-batches."""
    is_gpu = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), fused=is_gpu)
    for step in steps:
        batches = [
            {key: one.to(model.device) if isinstance(one, torch.Tensor) else one for key, one in batch.items()}
            for batch in step
        ]
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        tokens = sum(int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches)
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        loss = torch.zeros((), device=model.device)
        for batch in batches:
            part = model(**batch, use_cache=False, num_items_in_batch=labels).loss
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.item()  # waits for all of it
        seconds = time.perf_counter() - start_s
        peak = torch.cuda.max_memory_allocated() if is_gpu else 0
        yield {"loss": total, "tokens": tokens, "step_time_s": seconds, "peak_memory_bytes": peak}


def make_model(options: argparse.Namespace) -> Any:
    """The model on its device, with Liger's kernels or checkpointing where asked for."""
    AttentionInterface.register("torch_varlen", packed_attention)
    is_packed_gpu = options.batches == "packed" and options.device == "cuda"
    settings = {"attn_implementation": "torch_varlen" if is_packed_gpu else "sdpa", "dtype": options.dtype}
    if not (options.model / "model.safetensors").exists():
        torch.manual_seed(0)
        with torch.device(options.device):
            fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=options.dtype)
        fresh.save_pretrained(options.model, max_shard_size="100GB")
        del fresh
    model = AutoModelForCausalLM.from_pretrained(options.model, **settings).to(options.device).train()
    if options.liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def main() -> None:
    """Train, a row a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "corpus", "metrics"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--documents", type=int, required=True, help="of a step, in the order of the corpus")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batches", choices=("packed", "rebalanced"), required=True)
    parser.add_argument("--liger", action="store_true", help="with the kernels of liger-kernel")
    parser.add_argument("--checkpointing", action="store_true", help="compute every layer again in backward")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    tokens, index = np.fromfile(options.corpus / "tokens.bin", np.int32), (options.corpus / "tokens.idx").read_bytes()
    # Megatron's index: 34 bytes, of which the number of sequences begins at the 18th, then their lengths.
    edges = np.cumsum([0, *np.frombuffer(index, "<i4", int.from_bytes(index[18:26], "little"), 34)])
    micro_batches, steps = packed if options.batches == "packed" else rebalanced, []
    for first in range(0, options.documents * options.steps, options.documents):
        cuts = edges[first : first + options.documents + 1]
        documents = [tokens[start:stop] for start, stop in itertools.pairwise(cuts)]
        chosen = micro_batches([len(one) for one in documents])
        steps.append([batch_of([documents[i] for i in b], is_packed=options.batches == "packed") for b in chosen])
    try:
        with options.metrics.open("a") as file:
            for row in train(make_model(options), steps, options.learning_rate):
                file.write(json.dumps(row) + "\n")
                file.flush()
    except torch.OutOfMemoryError as error:
        print(error)
        sys.exit(3)


if __name__ == "__main__":
    main()
