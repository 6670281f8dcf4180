"""Runs with `[validation]` as ranks of a `GlooPool`, and plain transformers' losses of the same documents."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dist_training import COSTS, make_trainer, whole_state
from evenload.config.sections import validation_data
from evenload.config.train_config import load_train_config
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import DataError
from evenload.runtime.checkpoint.directory import checkpoints_of, latest_checkpoint, steps_in_name
from evenload.runtime.trainer import Trainer
from training_cases import model_of_state


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
    model = model_of_state(config, state)
    loader = GlobalBatchLoader(validation_data(config.data, config.validation))
    result = []
    while (batch := loader.next_batch()) is not None:
        for doc_id, tokens in batch.tokens.items():
            labels = torch.from_numpy(batch.tokens.labels_of(doc_id)[1:]).long()
            logits = model(torch.from_numpy(tokens).long()[None]).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            result.append(PlainLoss(len(tokens), int((labels >= 0).sum()), batch.place(doc_id).part, loss))
    return result


def averaged_export(config_file: str, overrides: list[str]) -> tuple[str, bool]:
    """Where a run that goes on exports its moving average, and whether its state is the same to the bit afterwards."""
    trainer = make_trainer(config_file, overrides)
    trainer.resume()
    before = whole_state(trainer.state)
    path = trainer.export_average()
    after = whole_state(trainer.state)
    return str(path), all(np.array_equal(before[name], after[name]) for name in before)


class LeftOutPasses(NamedTuple):
    """Of runs in which passes are left out, steps of the passes made; and errors.

    Args:
        leaving_off: of a start that ends before the run does; in_last_step: of one stopped in the last step.
        abandoned: steps done, signal and passes of a start in whose first pass one rank is asked to stop.
        failed: what ended a pass, and the steps of the newest checkpoint then.
        forgotten: what a start with other validation data says.
    """

    leaving_off: list[int]
    in_last_step: list[int]
    abandoned: tuple[int, int, list[int]]
    failed: tuple[str, int]
    forgotten: str
    is_forgotten: bool


def left_out_passes(config_file: str, overrides: list[str], directory: str, last_step: int) -> LeftOutPasses:
    at_end = [*overrides, "validation.every_steps=0", f"train.output_dir={directory}/at_end"]

    def start(settings: list[str]) -> Trainer:
        trainer = make_trainer(config_file, settings)
        trainer.resume()
        return trainer

    def passes(trainer: Trainer, asked_in_step: int = -1, stop_after: int | None = None) -> list[int]:
        """Steps after which passes were made; asked to stop on rank 1."""
        is_asked = lambda: 15 if trainer.mesh.rank == 1 and trainer.steps_done == asked_in_step else 0  # noqa: E731
        reports = list(trainer.train(COSTS, 2**34, stop_after, is_asked))
        return [report.validation.step for report in reports if report is not None and report.validation is not None]

    first = start(at_end)
    leaving_off = passes(first, stop_after=last_step - 1)
    in_last_step = passes(first, asked_in_step=last_step - 1)

    every = [*overrides, "validation.every_steps=1", "train.keep_best=1", f"train.output_dir={directory}/every"]
    stopped = start(every)
    in_steps = passes(stopped, asked_in_step=1)
    abandoned = stopped.steps_done, stopped.stop_signal, in_steps
    stopped.save()
    going_on = start(every)
    passes(going_on, stop_after=2)
    going_on.save()
    other = start([*every, "validation.batches=1"])

    failing, error = start(every), ""
    dist.barrier(group=failing.mesh.control)
    if failing.mesh.rank == 0:
        for path in Path(directory, "held_out").rglob("*.txt"):
            path.unlink()
    dist.barrier(group=failing.mesh.control)
    try:
        passes(failing)
    except DataError as caught:
        error = str(caught)
    newest = latest_checkpoint(checkpoints_of(f"{directory}/every"))
    assert newest is not None
    forgotten = other.resume_warning, not other._evaluation.best and len(going_on._evaluation.best) > 0
    return LeftOutPasses(leaving_off, in_last_step, abandoned, (error, steps_in_name(newest)), *forgotten)


def start_error(config_file: str, overrides: list[str]) -> str:
    """What refuses validation data before the first step, or ""."""
    try:
        make_trainer(config_file, overrides)
    except DataError as error:
        return str(error)
    return ""
