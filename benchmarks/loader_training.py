"""Effective tokens a second of packed against padded training, beside TRL's packing, on the CPU.

One tiny Llama of 2 layers and 3.6 M parameters, the same weights and the same documents for all; every variant runs
forward and backward over all documents once (the optimizer is the same for all and left out), and its loss and gradient
norm must equal those of the first. Lengths are `examples/lengths/github_dirs.npy.gz`, of the tables there the most
skewed (mean over median), divided by 32 for a CPU: a context of 2,048 tokens stands for 64K. Tokens a second count real
tokens, not padding.

    padded             transformers, 8 documents a batch in order of arrival, padded to the longest; sdpa, padding mask
    trl bfd            TRL's `pack_dataset` (bfd, 1,000 documents at a time, beforehand and not timed) and its collator
    PackedLoader       best_fit, from the memmap; reading, planning and collating inside the time
    runtime            Evenload's own stage (replayed backward), slimpack, the same loader

A packed row on the CPU: transformers makes a block-diagonal mask from positions that restart, and sdpa computes whole
squares of the row under it. "per document" instead calls sdpa once for every document, which an attention with
cumulative lengths does on a GPU; it is registered in transformers for TRL's batches and for ours alike.

    python benchmarks/loader_training.py [--quick] [--append]
"""

# pyright: reportMissingImports=false
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

from cpu_ranks import llama
from evenload.data.config import DataConfig
from evenload.data.loader import GlobalBatchLoader
from evenload.feed.step_maker import documents_by_replica, exchange_tokens
from evenload.integrations.packed_loader import PackedLoader
from evenload.integrations.planner import make_planner
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from harness import Row, median_and_spread, ratio_row, run
from loader_peers import TokenFile
from loader_sources import write_tokens
from replay import StageSteps
from setups import table_lengths

SCALE, CONTEXT, LEAST = 32, 2_048, 8
DOCUMENTS, QUICK_DOCUMENTS = 64, 8
ROW_DOCUMENTS = 8
ROUNDS, QUICK_ROUNDS = 4, 1
PER_DOCUMENT = "per_document"

Batches = Iterable[dict[str, Any]]


class Outcome(NamedTuple):
    """What a variant computed, to compare: it trained the same documents with the same weights, or the row is void."""

    loss: float
    gradient_norm: float
    label_tokens: int


class Variant(NamedTuple):
    """One way to train all documents once.

    Args:
        run: forward and backward over everything.
        tokens: rows that the model computed, padding included.
    """

    run: Callable[[], Outcome]
    tokens: int


def per_document_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Causal attention inside every document of one row: [1, H, T, D] -> [1, T, H, D]."""
    del module, attention_mask
    edges = arguments["cu_seq_lens_q"].tolist()
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    parts = [
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=arguments["scaling"], enable_gqa=True)
        for q, k, v in zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(PER_DOCUMENT, per_document_attention)


def tiny_config() -> LlamaConfig:
    """The model of benchmarks/replay.py with two of its layers."""
    return llama(256, 2, heads=4, key_heads=2)


def read_scaled_lengths(count: int) -> NDArray[np.int64]:
    """The first lengths of github_dirs (it is shuffled), scaled and cut."""
    return np.clip(table_lengths("github_dirs")[:count] // SCALE, LEAST, CONTEXT).astype(np.int64)


class TransformersModel:
    """The model as transformers has it."""

    def __init__(self, weights: Path, label_tokens: int) -> None:
        self._label_tokens = label_tokens
        self._models = {name: self._load(weights, name) for name in ("sdpa", PER_DOCUMENT)}

    def _load(self, weights: Path, attention: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(weights, attn_implementation=attention, dtype=torch.float32)

    def train(self, batches: Batches, attention: str = "sdpa") -> Outcome:
        """Forward and backward of every batch; the sum of all losses over all label tokens."""
        model = self._models[attention]
        model.zero_grad(set_to_none=False)
        loss, labels = 0.0, 0
        for batch in batches:
            batch["num_items_in_batch"] = torch.tensor(self._label_tokens)
            batch["use_cache"] = False  # with a cache, transformers does not look for restarting positions
            part = model(**batch).loss
            part.backward()
            loss += part.item()
            labels += int((batch["labels"][:, 1:] != -100).sum())
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        return Outcome(loss, torch.stack(norms).norm().item(), labels)


class StageRuntime:
    """Evenload's own stage with all layers, one rank."""

    def __init__(self, weights: Path) -> None:
        self._steps = StageSteps(tiny_config(), str(weights))

    def train(self, config: DataConfig, planner: StepPlanner, strategy: str) -> Outcome:
        """The only step: read, plan, exchange, run the packs in their order."""
        self._steps.zero_gradients()
        loader = GlobalBatchLoader(config)
        batch = loader.next_batch()
        assert batch is not None
        plan = planner.plan(batch.step, batch.documents, strategy)
        tokens = exchange_tokens(batch, documents_by_replica(plan), loader.peers)
        loss = self._steps.add_gradients(plan.pack_plans[0], tokens)
        assert loader.next_batch() is None, "all documents are one batch"
        norms = [buffer.grads.norm() for buffer in self._steps.buffers]
        return Outcome(loss, torch.stack(norms).norm().item(), plan.num_label_tokens)


def padded_batches(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As transformers' language-modelling collator pads: to the longest of a batch, labels -100."""
    for start in range(0, len(rows), ROW_DOCUMENTS):
        ids = [torch.tensor(row["input_ids"], dtype=torch.int64) for row in rows[start : start + ROW_DOCUMENTS]]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
        yield {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}


def trl_batches(rows: list[dict[str, Any]]) -> Callable[[], Batches]:
    """One pack a pass: more of them in one row would only widen the mask."""
    from datasets import Dataset
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    packs = list(pack_dataset(Dataset.from_list(rows), CONTEXT, "bfd"))
    return lambda: (collate([one]) for one in packs)


def make_variants(directory: Path, lengths: NDArray[np.int64]) -> dict[str, Variant]:
    """All of them, on the same documents."""
    weights = directory / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(weights)
    path = directory / "documents"
    write_tokens(path, lengths, vocab_size=tiny_config().vocab_size)
    file = TokenFile(path, lengths)
    edges, tokens = file.edges().tolist(), file.tokens()
    rows = [{"input_ids": tokens[lo:hi].tolist()} for lo, hi in itertools.pairwise(edges)]
    real = int(lengths.sum())
    model = TransformersModel(weights, real - len(lengths))
    config = DataConfig(
        sources=(str(path.with_suffix(".bin")),),
        format="memmap",
        record="tokens",
        batch_documents=len(lengths),
        max_document_tokens=CONTEXT,
        epochs=1,
        workers=0,
    )
    padded_tokens = sum(
        ROW_DOCUMENTS * int(lengths[start : start + ROW_DOCUMENTS].max())
        for start in range(0, len(lengths), ROW_DOCUMENTS)
    )
    variants = {"padded": Variant(lambda: model.train(padded_batches(rows)), padded_tokens)}
    try:
        batches = trl_batches(rows)
        for label, attention in (("trl bfd", "sdpa"), ("trl bfd, per document", PER_DOCUMENT)):
            variants[label] = Variant(lambda a=attention: model.train(batches(), a), real)
    except ImportError as error:
        print(f"left out: trl: {error}")

    def packed_batches() -> Iterator[dict[str, Any]]:
        with PackedLoader(config, max_tokens=CONTEXT, strategy="best_fit") as loader:
            yield from loader

    for label, attention in (("best_fit", "sdpa"), ("best_fit, per document", PER_DOCUMENT)):
        variants[f"PackedLoader {label}"] = Variant(lambda a=attention: model.train(packed_batches(), a), real)
    runtime = StageRuntime(weights)
    planner = make_planner(tiny_config(), None, PlanOptions(max_pack_tokens=CONTEXT), dp=1)
    variants["runtime slimpack"] = Variant(lambda: runtime.train(config, planner, "slimpack"), real)
    return variants


def check_equal(name: str, outcome: Outcome, expected: Outcome) -> None:
    """The same training, or the comparison means nothing."""
    for what, ours, theirs in zip(Outcome._fields, outcome, expected, strict=True):
        if abs(ours - theirs) > 1e-3 * abs(theirs):
            raise ValueError(f"{name}: {what} is {ours}, of the first variant {theirs}")


def measure(quick: bool) -> Iterator[Row]:
    """Every variant in turn in every round, after one that does not count."""
    lengths = read_scaled_lengths(QUICK_DOCUMENTS if quick else DOCUMENTS)
    real = int(lengths.sum())
    with TemporaryDirectory() as directory:
        variants = make_variants(Path(directory), lengths)
        expected: Outcome | None = None
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in range(1 + (QUICK_ROUNDS if quick else ROUNDS)):
            for name, variant in variants.items():
                start_s = time.perf_counter()
                outcome = variant.run()
                taken_s = time.perf_counter() - start_s
                expected = expected or outcome
                check_equal(name, outcome, expected)
                if repeat:
                    seconds[name].append(taken_s)
    about = f"{len(lengths)} documents of {real:,} tokens"
    for name, taken_s in seconds.items():
        case = f"{name}, {about}"
        value, spread = median_and_spread([real / one for one in taken_s])
        yield Row("training", case, "effective tokens per second", value, "1/s", "", spread)
        yield Row("training", case, "real tokens", real / variants[name].tokens, "share", "computed")
        for base in ("padded", "trl bfd", "trl bfd, per document"):
            if base in seconds and base != name:
                yield ratio_row("training", case, "effective tokens per second", seconds[base], taken_s, base)


PARTS = {"training": measure}

if __name__ == "__main__":
    run(PARTS)
