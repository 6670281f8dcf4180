"""Weights that come behind the forwards of a layout's first step: late ones are waited for, unit by unit."""

import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from dist_training import COSTS, Outcome, assert_same_training, make_trainer, outcome_of
from evenload.runtime.stages.arrival import Arrival
from small_run import write_small_run
from switch_cases import ScriptedTrainer, scripted_run, through_host

SCRIPT = [0, 1, 2, 0, 2, 1]
STEPS = len(SCRIPT)
LATE_S = 0.05


class Late(NamedTuple):
    """A run on one rank; the outcome on rank 0. `read`: of every unit that a forward read while weights were still
    coming, what it waited for; `left`: when it began, the units that were not there yet."""

    outcome: Outcome | None
    read: list[int]
    left: list[set[int]]


def run_with_late_weights(config_file: str, overrides: list[str], mutant: str) -> Late:
    """Train with every piece LATE_S behind the one before; `mutant`: what does not wait."""
    trainer, read, left = make_trainer(config_file, overrides, ScriptedTrainer), [], []
    trainer.script = SCRIPT
    complete, await_unit, bring = Arrival._complete, Arrival.await_unit, Arrival._bring_weights

    def late(arrival, posted, what) -> None:
        time.sleep(LATE_S)
        complete(arrival, posted, what)

    def poisoned(arrival) -> None:
        # Memory that is taken again may still have the weights of before.
        for move in (*arrival._moves.weights, *arrival._moves.relayed):
            if move.target == arrival._new.rank:
                arrival._weights[move.piece].fill_(torch.nan)
        bring(arrival)

    def noted(arrival, unit) -> None:
        is_needed = unit in arrival._awaited
        await_unit(arrival, unit)
        if is_needed:
            read.append(unit)
            left.append({unit for unit in arrival._awaited if not arrival._arrived[unit].done()})

    patches = {"_complete": late, "_bring_weights": poisoned, "await_unit": noted}
    if mutant == "forwards":
        patches["await_unit"] = lambda arrival, unit: None
        patches["finish"] = lambda arrival: [await_unit(arrival, unit) for unit in sorted(arrival._awaited)]
    elif mutant == "backwards":
        patches["finish"] = lambda arrival: None
    with mock.patch.multiple(Arrival, **patches):
        reports = [report for report in trainer.train(COSTS, 2**34, STEPS) if report is not None]
    return Late(outcome_of(trainer, reports), read, left)


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    texts = (f"document {i} " * (1 + (i * 7) % 4) for i in range(12))
    lines = (
        f"max_document_tokens = 128\nbatch_documents = 4\n[optimizer]\nlearning_rate = 1e-3\n[train]\nsteps = {STEPS}"
    )
    return str(write_small_run(tmp_path, texts, lines, "llama", tied=True))


def settings(tmp_path: Path, name: str, *more: str) -> list[str]:
    fixed = ["model.dtype=float64", "plan.strategy=balanced", f"train.output_dir={tmp_path / name}"]
    return [*fixed, "parallel.pp=4", 'plan.layouts=["pp=2,dp=2", "dp=4"]', "train.on_nonfinite=skip", *more]


@pytest.mark.parametrize("way", ["read", "sent", "through host memory"])
def test_late_weights_train_what_weights_in_place_train(gloo_pool, config_file, tmp_path, way):
    """Losses and state to the bit, though forwards run while later units are not there; a stall is as long as a wait
    for the first unit."""
    more = ["plan.twin_bytes=0"] if way == "sent" else []
    call = [through_host] if way == "through host memory" else []
    late = gloo_pool.run(4, *call, run_with_late_weights, config_file, settings(tmp_path, "late", *more), "")
    plain = gloo_pool.run(4, scripted_run, config_file, settings(tmp_path, "plain", *more), SCRIPT, STEPS)[0]
    result = late[0].outcome
    assert_same_training(result, plain, 0.0)
    assert all(
        switch.weight_bytes == other.weight_bytes for switch, other in zip(result.switches, plain.switches, strict=True)
    )
    grown = [switch for switch in result.switches if switch.after == "dp=4"]
    assert len(grown) == 2
    assert all(switch.stall_s > LATE_S for switch in grown)
    for rank in late:
        assert rank.read
        assert any(rank.left), "no forward ran before all weights were there"


@pytest.mark.parametrize("mutant", ["forwards", "backwards"])
def test_a_pass_that_does_not_wait_is_seen(gloo_pool, config_file, tmp_path, mutant):
    """What guards the test above."""
    chosen = settings(tmp_path, "mutant"), settings(tmp_path, "plain")
    result = gloo_pool.run(4, run_with_late_weights, config_file, chosen[0], mutant)[0].outcome
    plain = gloo_pool.run(4, scripted_run, config_file, chosen[1], SCRIPT, STEPS)[0]
    with pytest.raises(AssertionError):
        assert_same_training(result, plain, 1e-10)
