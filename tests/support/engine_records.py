"""What every rank of a conformance test trains and records (`engine_conformance`)."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from evenload import PackedLoader
from evenload.feed.collate import PackBatch
from evenload.integrations.batch_formats import format_pack
from evenload.integrations.packed_loader import PackedStep
from packed_cases import loader_of, tiny_model


def small_model() -> torch.nn.Module:
    """A Llama of two layers in float64, its weights so small that gradients in float32 are off by less than 1e-6."""
    return tiny_model(num_hidden_layers=2, initializer_range=0.05)


def plain_sgd(parameters: Iterable[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """Neither momentum nor clipping, so that weights tell the gradient."""
    return torch.optim.SGD(parameters, lr=learning_rate)


# Adam divides by the size of gradients, which would make rounding of the smallest ones as large as the largest.
BETAS, EPSILON = (0.9, 0.95), 0.01


def plain_adam(parameters: Iterable[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """For engines whose checkpoints know no other optimizer."""
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)


@dataclass(frozen=True)
class TrainOrder:
    """What a rank is to train: `num_steps` (None = one epoch), from a checkpoint in `load_from`, with one written to
    `save_to` after `save_after` steps. At a learning rate of 0 every step's gradients are those at the first weights.
    """

    corpus: Path
    learning_rate: float
    num_steps: int | None = None
    load_from: Path | None = None
    save_to: Path | None = None
    save_after: int = 0
    keep_gradients: bool = False


@dataclass
class RankRecord:
    """What a rank trained, by step.

    Args:
        replica: which share of the global batch this rank had; ranks of one replica (pipeline, tensor) name the same.
        documents: the tokens of every document of the share.
        counts: micro-batches of this rank; engines whose loop is their own leave it empty.
        losses: of the whole global batch.
        gradients, parameters: by name, whole and unsharded, on rank 0 at least; parameters after the last step.
    """

    replica: int
    documents: list[list[tuple[int, ...]]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


class Perturbed(NamedTuple):
    """Outputs of a pack, [T, vocabulary], before and after other tokens stood in [start, stop)."""

    before: torch.Tensor
    after: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True)
class EngineCase:
    """An engine with its settings, as tests name it. All functions are of modules in this folder: ranks import them.

    Args:
        train: on every rank, inside a gloo process group, train what is ordered.
        perturb: on every rank, outputs of a pack before and after one of its documents was another one; None where this
            rank has no pack of two documents.
        engine, loader: settings of the adapter and of the `PackedLoader`.
        reference: a model of float64 with the weights that training begins with and the names of `gradients`;
            `reference(ids[1, T])` gives logits [1, T, vocabulary], by itself or as `.logits`.
        optimizer: of the reference, as the engine's; one that divides by gradients (Adam) needs a large `eps`.
        learning_rate: with which the loss falls by a tenth within 20 steps, and does not explode.
        gradient_error: largest relative error of a step's gradient; a parameter alone may be off by four times as much.
        growth: the optimizer's relative error of weights over a gradient's: 1 for SGD, lr / eps times ten for Adam.
        output_error: largest difference that another document may make.
        uneven_counts: in some step one rank has more micro-batches than another, or the test shows nothing.
    """

    train: Callable[["EngineCase", TrainOrder], RankRecord]
    perturb: Callable[["EngineCase", Path], Perturbed | None]
    engine: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    reference: Callable[[], torch.nn.Module] = small_model
    optimizer: Callable[[Iterable[torch.Tensor], float], torch.optim.Optimizer] = plain_sgd
    learning_rate: float = 0.5
    gradient_error: float = 1e-6
    growth: float = 1.0
    output_error: float = 0.0
    uneven_counts: bool = False

    def training_error(self, num_steps: int) -> float:
        """Largest relative error of losses and weights after steps: that of every step's gradient, added up."""
        return num_steps * self.growth * self.gradient_error

    def open_loader(self, corpus: Path, **changes: Any) -> PackedLoader:
        """This rank's loader."""
        return loader_of(corpus, **({"max_tokens": 128} | self.loader | changes))


class EngineRun(Protocol):
    """Training on an engine whose loop is the caller's: `train_by_hand` and `perturb_by_hand` drive it."""

    loader: PackedLoader

    def accumulate(self, step: PackedStep) -> float: ...  # the loss of the global batch; gradients are not applied

    def gradients(self) -> dict[str, torch.Tensor]: ...  # whole, by the reference's names, on rank 0 at least

    def update(self) -> object: ...

    def parameters(self) -> dict[str, torch.Tensor]: ...  # as gradients

    def logits(self, batch: Any) -> torch.Tensor: ...  # [T, vocabulary] of a batch in the loader's format

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


def train_by_hand(run: EngineRun, order: TrainOrder) -> RankRecord:
    """Train what is ordered, step by step."""
    if order.load_from is not None:
        run.load(order.load_from)
    record = RankRecord(run.loader.rank)
    for step in itertools.islice(_steps(run.loader, order.num_steps), order.num_steps):
        record.documents.append([document for pack in step.packs for document in documents_of_pack(pack)])
        record.counts.append(len(step))
        record.losses.append(run.accumulate(step))
        if order.keep_gradients:
            record.gradients.append(_copied(run.gradients()))
        run.update()
        if order.save_to is not None and len(record.losses) == order.save_after:
            run.save(order.save_to)
    record.parameters = _copied(run.parameters())
    run.loader.close()
    return record


def _steps(loader: PackedLoader, num_steps: int | None) -> Iterator[PackedStep]:
    yield from loader.steps()
    while num_steps is not None:
        yield from loader.steps()


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def documents_of_pack(pack: PackBatch) -> list[tuple[int, ...]]:
    """The tokens of every document, padding left out."""
    edges = itertools.pairwise(pack.cu_seqlens_q.tolist())
    return [
        tuple(pack.token_ids[start:stop].tolist())
        for doc_id, (start, stop) in zip(pack.doc_ids.tolist(), edges, strict=True)
        if doc_id >= 0
    ]


def perturb_by_hand(run: EngineRun) -> Perturbed | None:
    """Outputs of this rank's first pack of two documents (else of its first one) before and after another first one."""
    step = next(run.loader.steps())
    run.loader.close()
    pack = next((one for one in step.packs if len(documents_of_pack(one)) > 1), step.packs[0])
    stop = int(pack.cu_seqlens_q[1])
    token_ids = pack.token_ids.copy()
    token_ids[:stop] = (token_ids[:stop] + 1) % 256
    before, after = (
        run.logits(format_pack(one, run.loader.options.format, step.num_label_tokens)).detach().clone()
        for one in (pack, replace(pack, token_ids=token_ids))
    )
    return Perturbed(before, after, 0, stop) if len(documents_of_pack(pack)) > 1 else None
