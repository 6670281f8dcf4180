"""Rows of tests/support/matrix.py as one rank of a `GlooPool`, and what plain training makes of the same batch."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig

from adapter_cases import LORA, adapter_loss_and_gradients, adapter_tensors, peft_model
from cost_samples import documents
from dist_cases import RankUnderTest, StoredBytes
from evenload.config.sections import LoraConfig
from evenload.data.blocks import TokenTable
from evenload.runtime.comm.mesh import ChannelMode, Meshes, create_meshes
from evenload.runtime.comm.tensor_group import CHUNK_ROWS
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout
from evenload.types.plan import decode_plan
from gloo_pool import TIMEOUT_S
from matrix import MODELS
from reference_training import (
    make_tokens,
    plain_document_losses,
    plain_loss_and_gradients,
    plain_model,
    stage_model,
    tiny_config,
)
from tree_cases import TreeBatch, plain_paths, trees_of_lengths


class MatrixCase(NamedTuple):
    """A model, by its name in `MODELS`, with so many layers, and the lengths of its batch's documents, of which some
    may be trees."""

    model: str
    num_layers: int
    lengths: tuple[int, ...]
    has_trees: bool = False

    @property
    def kind(self) -> str:
        return MODELS[self.model].kind

    @property
    def has_adapter(self) -> bool:
        return MODELS[self.model].lora

    @property
    def changes(self) -> Mapping[str, object]:
        """Of the configuration of its kind."""
        return {**MODELS[self.model].changes, "num_hidden_layers": self.num_layers}

    def config(self) -> PretrainedConfig:
        return tiny_config(self.kind, **self.changes)

    def batch(self) -> dict[int, torch.Tensor] | TokenTable:
        """Tokens by document."""
        if self.has_trees:
            return self.trees().tokens
        return make_tokens(list(self.lengths), self.config().vocab_size, seed=1)

    def trees(self) -> TreeBatch:
        return trees_of_lengths(self.lengths, seed=1)

    def documents(self) -> tuple[Document, ...]:
        return self.trees().documents if self.has_trees else documents(self.lengths)


class RowTask(NamedTuple):
    """What a rank must know of a row.

    Args:
        plan: encoded.
        adapter: holds the PEFT directories of the row's model, one a precision; or None.
        exchange: how keys and values of shared documents travel.
        channels: between pipeline ranks.
        is_overlapped: gradients are summed while packs are computed, and tensor-parallel transfers are in chunks.
        before: the layout from which the run changes to that of the plan; None = it begins there.
    """

    case: MatrixCase
    plan: bytes
    adapter: str | None
    exchange: str
    channels: ChannelMode
    is_overlapped: bool
    before: ParallelLayout | None


class RankResult(NamedTuple):
    """Of one row on one rank: its share of the loss, its gradients by name, the norm of the whole gradient, bytes of
    stored activations; loss and gradients in bfloat16, where asked for; its share of every document's label losses,
    by forwards alone, where asked for."""

    loss: float
    gradients: dict
    norm: float
    stored: StoredBytes
    bf16: tuple[float, dict] | None
    document_losses: np.ndarray | None


def run_rows(tasks: list[RowTask], in_bf16: list[bool], with_forwards: list[bool]) -> list[RankResult]:
    """Rows of one layout, one after the other, on the same process groups; some in bfloat16 too, some by forwards alone
    too."""
    plans = [decode_plan(task.plan) for task in tasks]
    made: dict[tuple[str, ParallelLayout | None], Meshes] = {}
    results = []
    for task, plan, twice, alone in zip(tasks, plans, in_bf16, with_forwards, strict=True):
        key = task.channels, task.before
        if key not in made:
            layouts = [plan.layout] if task.before is None else [task.before, plan.layout]
            made[key] = create_meshes(layouts, torch.device("cpu"), timeout_s=TIMEOUT_S, channels=task.channels)
        meshes, mesh = made[key], made[key].of(plan.layout)
        if mesh.tensor is not None:
            mesh.tensor.chunk_rows = CHUNK_ROWS if not task.is_overlapped else 3
        case, batch = task.case, task.case.batch()

        def rank_in(dtype: torch.dtype, case=case, task=task, meshes=meshes, layout=plan.layout) -> RankUnderTest:
            lora = None
            if task.adapter is not None:
                path = adapter_path(Path(task.adapter), case, dtype)
                lora = LoraConfig(rank=LORA.rank, alpha=LORA.alpha, path=str(path))
            return RankUnderTest(meshes, layout, case.kind, case.changes, dtype, lora)

        rank = rank_in(torch.float64)
        loss, gradients, norm, stored = rank.run(plan, batch, task.exchange, is_overlapped=task.is_overlapped)
        losses = rank.losses(plan, batch, task.exchange) if alone else None
        bf16 = None
        if twice:
            rank = rank_in(torch.bfloat16)
            bf16 = rank.run(plan, batch, task.exchange, is_overlapped=task.is_overlapped)[:2]
        results.append(RankResult(loss, gradients, norm, stored, bf16, losses))
    return results


class Expected(NamedTuple):
    """Plain training of a model's batch."""

    loss: float
    gradients: dict[str, torch.Tensor]
    document_losses: dict[int, float] | None = None
    """Sums over labels by document, without the load-balancing loss; None of an adapter or of trees."""


def adapter_path(directory: Path, case: MatrixCase, dtype: torch.dtype) -> Path:
    return directory / str(case.num_layers) / str(dtype).removeprefix("torch.")


@cache
def expected_of(case: MatrixCase, adapter: Path) -> Expected:
    """In float64.

    Args:
        adapter: directory that gets the model's adapter (`adapter_path`), where it has one.
    """
    weights = _weights(case, torch.float64)
    expected = _trained(case, weights, adapter_path(adapter, case, torch.float64), torch.float64)
    if case.has_adapter or case.has_trees:
        return expected
    return expected._replace(document_losses=plain_document_losses(case.config(), weights, case.batch(), torch.float64))


@cache
def expected_in_bf16(case: MatrixCase, adapter: Path) -> tuple[Expected, Expected]:
    """Of the weights rounded to bfloat16: in float64, and as plain bfloat16 autograd computes it."""
    weights, path = _weights(case, torch.bfloat16), adapter_path(adapter, case, torch.bfloat16)
    doubles = {name: weight.double() for name, weight in weights.items()}
    exact = _trained(case, doubles, path / "exact", torch.float64)
    return exact, _trained(case, weights, path, torch.bfloat16)


def _trained(case: MatrixCase, weights: dict[str, torch.Tensor], directory: Path, dtype: torch.dtype) -> Expected:
    """Plain training; of trees of every sequence by itself."""
    config = case.config()
    if case.has_trees:
        make = partial(peft_model, directory=directory) if case.has_adapter else plain_model
        model = make(config, weights, dtype=dtype)
        loss, gradients = plain_paths(model, case.trees())
        return Expected(loss, {name.removeprefix("base_model.model."): one for name, one in gradients.items()})
    if case.has_adapter:
        return Expected(*adapter_loss_and_gradients(config, weights, directory, case.batch(), dtype))
    return Expected(*plain_loss_and_gradients(config, weights, case.batch(), dtype))


def _weights(case: MatrixCase, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every layout's random weights are those of one rank."""
    config = case.config()
    if case.has_adapter:
        return adapter_tensors(config, dtype)
    model = stage_model(config, dtype)
    weights = {name: p.detach().clone() for named in model.unit_parameters() for name, p in named}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights
