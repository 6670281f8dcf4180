"""Corpora, reference training and loops for the tests of `PackedLoader`."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from evenload import PackedLoader
from evenload.errors import EvenloadError
from evenload.integrations.engine_loop import model_inputs
from reference_training import tiny_config

EOS = 256


def write_texts(
    root: Path, num_documents: int = 40, longest: int = 60, seed: int = 0, spread=(2.5, 1.0), first=()
) -> list[str]:
    """A jsonl file of random texts of very different lengths, the first of given ones; returns the texts."""
    random = np.random.default_rng(seed)
    sizes = np.clip(random.lognormal(*spread, num_documents), 1, longest - 1).astype(int)
    sizes[: len(first)] = first
    texts = ["".join(chr(97 + letter) for letter in random.integers(0, 26, size)) for size in sizes]
    root.mkdir(parents=True, exist_ok=True)
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def tokens_of(text: str) -> tuple[int, ...]:
    """A document as the byte tokeniser reads it."""
    return (*text.encode(), EOS)


def loader_of(root: Path, **changes) -> PackedLoader:
    """A loader of small packs, in this process, without workers."""
    settings = {"max_tokens": 64, "workers": 0, "seed": 3, "shuffle_window": 16}
    if "batch_tokens" not in changes and not changes.get("evaluation"):
        settings["batch_documents"] = 8
    return PackedLoader(str(root), **(settings | changes))


def epoch_of_ranks(root: Path, world_size: int, **changes) -> list[list]:
    """Batches of an epoch by rank; ranks that read alone plan the same."""
    return [list(loader_of(root, rank=rank, world_size=world_size, **changes)) for rank in range(world_size)]


def documents_of(batch: dict) -> list[tuple[int, ...]]:
    """The documents of an `hf` batch, by its cumulative lengths; zero-weight packs have none."""
    edges = batch["cu_seq_lens_q"].tolist()
    tokens = batch["input_ids"][0].tolist()
    documents = [tuple(tokens[start:stop]) for start, stop in itertools.pairwise(edges)]
    return [] if documents == [(0,)] else documents


def all_documents(batches) -> Counter:
    """Every document of many batches, and how often."""
    return Counter(document for batch in batches for document in documents_of(batch))


def tiny_model(**changes) -> torch.nn.Module:
    """A small Llama in float64 with weights that are the same in every process."""
    torch.manual_seed(0)
    config = tiny_config("llama", **({"vocab_size": 257} | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().train()


def plain_loss(model: torch.nn.Module, documents, **settings) -> float:
    """Run documents one by one, backward too; the mean loss over all their label tokens."""
    model.zero_grad()
    count, total = sum(len(document) - 1 for document in documents), 0.0
    for document in documents:
        if len(document) < 2:
            continue
        ids = torch.tensor([document])
        output = model(ids, **settings)
        logits = getattr(output, "logits", output)[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


def reference_gradient(model: torch.nn.Module, documents) -> tuple[float, torch.Tensor]:
    """Loss and gradient of documents run one by one."""
    return plain_loss(model, documents, use_cache=False), gradient_of(model)


def error_of(function: Callable[..., object], *arguments, **settings) -> str:
    """Type and message of the error of ours that a call raises; "" where it raises none."""
    try:
        function(*arguments, **settings)
    except EvenloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def packed_loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The loss that transformers computes for an `hf` batch, in the model's own precision."""
    logits = model(**model_inputs(batch)).logits[0, :-1]
    labels = batch["labels"][0, 1:]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / batch["num_items_in_batch"]


def batch_fingerprint(batch: dict) -> tuple:
    """Everything in an `hf` batch."""
    return tuple(
        (key, value.dtype, value.shape, value.numpy().tobytes()) if torch.is_tensor(value) else (key, value)
        for key, value in batch.items()
    )
