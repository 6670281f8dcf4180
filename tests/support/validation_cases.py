"""Runs with `[validation]` as ranks of a `GlooPool`, and plain transformers' losses of the same documents."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dist_training import COSTS
from evenload.data.batch.loader import GlobalBatchLoader
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.config.run_layouts import layouts_of
from evenload.runtime.config.train_config import load_train_config
from evenload.runtime.config.validation_config import validation_data
from evenload.runtime.model.configured import load_config, model_spec
from evenload.runtime.trainer import Trainer
from evenload.types.sample import Sample
from evenload.types.validation import Validation
from gloo_pool import TIMEOUT_S
from switch_cases import whole_state


class ValidatedRun(NamedTuple):
    """Of a run, on rank 0: losses of its steps, passes over the validation data, layouts that ran; all tensors at the
    end, whole."""

    losses: list[float]
    validations: list[Validation]
    layouts: list[str]
    state: dict[str, np.ndarray]
    samples: list[Sample]


def validated_run(
    config_file: str, overrides: list[str], memory_cap_bytes: int, stop_after: int
) -> ValidatedRun | None:
    """Resume if there is a checkpoint, train until `stop_after` steps are done, save."""
    config = load_train_config(Path(config_file), overrides)
    layouts = layouts_of(config, model_spec(config).num_layers)
    meshes = create_meshes(layouts, torch.device("cpu"), TIMEOUT_S)
    trainer = Trainer(config, meshes.start, meshes)
    trainer.resume()
    reports = [report for report in trainer.train(COSTS, memory_cap_bytes, stop_after) if report is not None]
    trainer.save()
    state = whole_state(trainer)
    if trainer.mesh.rank != 0:
        return None
    return ValidatedRun(
        losses=[float(report.row["loss"] or 0.0) for report in reports],
        validations=[report.validation for report in reports if report.validation is not None],
        layouts=[str(report.row["layout"]) for report in reports],
        state=state,
        samples=[sample for report in reports for sample in report.samples],
    )


class PlainLoss(NamedTuple):
    """Of one document: its tokens and labels, the part of the mixture, and the sum of its losses."""

    tokens: int
    labels: int
    part: int
    loss: float


@torch.no_grad()
def plain_validation(config_file: Path, overrides: Iterable[str], state: dict[str, np.ndarray]) -> list[PlainLoss]:
    """The validation documents of a run, one after the other through transformers' model with these weights."""
    config = load_train_config(config_file, list(overrides))
    assert config.validation is not None
    hf = load_config(config.model.path)
    hf._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(hf).to(torch.float64)
    named = {name.removeprefix("model."): torch.from_numpy(value) for name, value in state.items()}
    names = set(model.state_dict())
    missing, _ = model.load_state_dict({n: v for n, v in named.items() if n in names}, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    loader = GlobalBatchLoader(validation_data(config.data, config.validation))
    found = []
    while (batch := loader.next_batch()) is not None:
        for doc_id, tokens in batch.tokens.items():
            labels = torch.from_numpy(batch.tokens.labels_of(doc_id)[1:]).long()
            logits = model(torch.from_numpy(tokens).long()[None]).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            found.append(PlainLoss(len(tokens), int((labels >= 0).sum()), batch.place(doc_id).part, loss))
    return found


def averaged_export(config_file: str, overrides: list[str]) -> tuple[str, bool]:
    """Of a run that goes on from its checkpoint: where the moving average is exported, and whether weights and state
    are the same to the bit afterwards."""
    config = load_train_config(Path(config_file), overrides)
    meshes = create_meshes(layouts_of(config, model_spec(config).num_layers), torch.device("cpu"), TIMEOUT_S)
    trainer = Trainer(config, meshes.start, meshes)
    trainer.resume()
    before = whole_state(trainer)
    path = trainer.export_average()
    after = whole_state(trainer)
    return str(path), all(np.array_equal(before[name], after[name]) for name in before)
