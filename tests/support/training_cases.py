"""A short training run, as a configuration file and as plain transformers and AdamW."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from evenload.config.train_config import TrainConfig
from evenload.data.loader import GlobalBatchLoader
from evenload.runtime.model.model_config import load_config
from reference_training import stage_model, tiny_config

STEPS = 4


UNEVEN_TEXTS = tuple(f"document {i} " * (1 + (i * 7) % 13 + (30 if i % 11 == 0 else 0)) for i in range(40))


def write_training_config(directory: Path, sources: Path | Iterable[str], data: str = "", num_layers: int = 2) -> Path:
    """A configuration of a few steps of a tiny Llama in float64.

    Its ranks read in a thread: a process of their own takes longer to start than all reading (tests/dist/
    test_training_data.py trains with both).

    Args:
        sources: of its data, or the texts of documents in a folder of their own.
        data: more lines of the data table.
    """
    if not isinstance(sources, Path):
        texts, sources = sources, directory / "corpus"
        sources.mkdir()
        for i, text in enumerate(texts):
            (sources / f"{i}.txt").write_text(text)
    model = directory / "model"
    tiny_config("llama", tied=True, vocab_size=257, num_hidden_layers=num_layers).save_pretrained(model)
    file = directory / "config.toml"
    file.write_text(
        f"""
        [model]
        path = "{model}"
        random_init = true
        dtype = "float64"
        [data]
        sources = ["{sources}"]
        max_document_tokens = 256
        overlong = "split"
        batch_documents = 7
        shuffle_window = 16
        workers = 0
        {data}
        [plan]
        options = {{ max_pack_tokens = 256 }}
        [optimizer]
        learning_rate = 1e-2
        clip_norm = 0.5
        warmup_steps = 2
        decay = "cosine"
        [train]
        output_dir = "{directory / "run"}"
        steps = {STEPS}
        """
    )
    return file


def write_phases(directory: Path, phases: Sequence[str]) -> Path:
    """A corpus whose batches of eight documents are short ("s") or hold two long ones ("l"), in this order."""
    directory.mkdir()
    for step, phase in enumerate(phases):
        for at in range(8):
            letters = 230 if phase == "l" and at < 2 else 12 + at
            (directory / f"{step:03}-{at}.txt").write_text("".join(chr(97 + (i * 7 + at) % 26) for i in range(letters)))
    return directory


def plain_losses(
    config: TrainConfig,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    precision: torch.dtype = torch.float64,
) -> list[float]:
    """The same batches by transformers and torch.optim, nothing of ours but the reader and the first weights.

    Args:
        after_step: told the model after every update; in bfloat16 its fp32 master weights.
        precision: of the model; bfloat16 has fp32 gradients and fp32 master weights.
    """
    model = plain_model(config, precision)
    kept = copy.deepcopy(model).float() if precision == torch.bfloat16 else model
    o, optimizers = config.optimizer, plain_optimizers(kept, config)
    loader, losses = GlobalBatchLoader(config.data), []
    for step in range(config.train.steps):
        batch = loader.next_batch()
        assert batch is not None
        num_label_tokens = sum(document.num_label_tokens for document in batch.documents)
        kept.zero_grad()
        total = 0.0
        for doc_id, tokens in batch.tokens.items():
            labels = torch.from_numpy(batch.tokens.labels_of(doc_id)[1:]).long()
            logits = model(torch.from_numpy(tokens).long()[None]).logits[0, :-1]
            logits = logits.float() if precision == torch.bfloat16 else logits
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_label_tokens
            loss.backward()
            total += loss.item()
            if kept is not model:
                _add_gradients(model, kept)
        nn.utils.clip_grad_norm_(kept.parameters(), o.clip_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = o.rate(step, config.train.steps)
            optimizer.step()
        if kept is not model:
            model.load_state_dict(kept.state_dict())
        after_step(kept)
        losses.append(total)
    return losses


def plain_model(config: TrainConfig, precision: torch.dtype) -> nn.Module:
    """transformers' model with the weights that a run begins with, whose own precision they have, in another one."""
    hf = load_config(config.model.path)
    own = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float64
    weights = {n: p.detach() for named in stage_model(hf, own, seed=0).unit_parameters() for n, p in named}
    hf._attn_implementation = "sdpa"
    if precision == torch.bfloat16:  # `to` would round the frequencies of positions, too
        model = AutoModelForCausalLM.from_config(hf, dtype=precision)
    else:
        model = AutoModelForCausalLM.from_config(hf).to(precision)
    model.load_state_dict(weights, strict=False)
    return model


def model_of_state(config: TrainConfig, state: Mapping[str, np.ndarray]) -> nn.Module:
    """transformers' model with the weights of a run's whole state, in float64."""
    hf = load_config(config.model.path)
    hf._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(hf).to(torch.float64)
    own = {name: torch.from_numpy(state[f"model.{name}"]) for name in model.state_dict() if f"model.{name}" in state}
    missing, _ = model.load_state_dict(own, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    return model


@torch.no_grad()
def loss_of(model: nn.Module, batch) -> float:
    """Mean over a batch whose every token but the first of a document has a label."""
    # transformers' grouped products have no float64.
    model.config._experts_implementation = "eager"
    rows = [torch.from_numpy(tokens).long() for tokens in batch.tokens.values()]
    logits = [model(row[None]).logits[0, :-1] for row in rows]
    losses = [nn.functional.cross_entropy(one, row[1:], reduction="sum") for one, row in zip(logits, rows, strict=True)]
    return sum(loss.item() for loss in losses) / sum(one.num_label_tokens for one in batch.documents)


def plain_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """torch's AdamW, and its Muon for matrices of layers where the run has that."""
    o = config.optimizer
    of_muon = [p for p in model.model.layers.parameters() if p.ndim == 2 and o.name == "muon"]
    taken = {id(p) for p in of_muon}
    decayed = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in taken]
    others = [p for p in model.parameters() if p.ndim < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(o.beta1, o.beta2), eps=o.eps, fused=True,
    )  # fmt: skip
    if not of_muon:
        return [adamw]
    settings = {"weight_decay": o.weight_decay, "momentum": o.momentum, "adjust_lr_fn": "match_rms_adamw"}
    return [adamw, torch.optim.Muon(of_muon, **settings)]


def _add_gradients(model: nn.Module, kept: nn.Module) -> None:
    for parameter, master in zip(model.parameters(), kept.parameters(), strict=True):
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad + gradient
        parameter.grad = None
