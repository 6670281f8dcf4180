"""Runs whose layout changes between steps as a script says, as one rank of a `GlooPool`."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist

import dist_training
from dist_training import COSTS, Outcome, make_trainer, outcome_of, whole_state
from evenload.config.planner import make_planner
from evenload.errors import InvalidPlanError
from evenload.planning.layouts.moves import moved_bytes, plan_moves
from evenload.planning.planner import Proposal, StepPlanner
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.stages import live_stages
from evenload.runtime.trainer import Trainer
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.plan import seal
from staged_group import NAME, register_staged


class ScriptedPlanner(StepPlanner):
    """Plans every step in the layout that a script names, as a planner that decides would hand it out.

    Args:
        planners: of the run's layouts, in their order.
        script: for every step the index of its layout; the last one stays.
    """

    def __init__(self, planners: Sequence[StepPlanner], script: Sequence[int]) -> None:
        self._planners, self._script = planners, tuple(script)
        self.options = planners[0].options

    def propose(self, step: int, documents, strategy: str, **settings) -> Proposal:
        so_far = self._script[: step + 1]
        proposal = self._planners[so_far[-1]].propose(step, documents, strategy, **settings)
        generation = sum(a != b for a, b in itertools.pairwise((0, *so_far)))
        layout = msgspec.structs.replace(proposal.plan.layout, generation=generation)
        return replace(proposal, plan=seal(msgspec.structs.replace(proposal.plan, layout=layout)))


class ScriptedTrainer(Trainer):
    """A trainer whose layouts follow a script."""

    script: Sequence[int] = (0,)

    def planners(self, coefficients, memory_cap_bytes):
        make = lambda layout: make_planner(self.config, self.model, layout, coefficients, memory_cap_bytes)  # noqa: E731
        return ScriptedPlanner([make(layout) for layout in self.meshes.layouts], self.script), None


def scripted_run(config_file: str, overrides: list[str], script: Sequence[int], stop_after: int) -> Outcome | None:
    """Resume if there is a checkpoint, train until `stop_after` steps are done, save."""
    trainer = make_trainer(config_file, overrides, ScriptedTrainer)
    trainer.script = script
    trainer.resume()
    reports = [report for report in trainer.train(COSTS, 2**34, stop_after) if report is not None]
    trainer.save()
    return outcome_of(trainer, reports)


def changed_by_moving(
    config_file: str, overrides: list[str], order: Sequence[int], steps: int, ranks_per_machine: int | None = None
) -> list[str]:
    """Names of tensors that going from layout to layout without training changes; then a step is trained."""
    trainer = make_trainer(config_file, overrides, ScriptedTrainer, ranks_per_machine)
    trainer.script = (*[0] * steps, order[-1])
    for _ in trainer.train(COSTS, 2**34, steps):
        pass
    before, changed = whole_state(trainer.state), []
    for generation, index in enumerate(order, start=1):
        layout = msgspec.structs.replace(trainer.meshes.layouts[index], generation=generation)
        planned = planned_bytes(trainer, layout)
        trainer.state.change_layout(layout, COSTS)
        switch = trainer.state.settle()
        after = whole_state(trainer.state)
        assert switch is not None
        assert switch.weight_bytes + switch.state_bytes > 0
        assert (switch.weight_bytes, switch.state_bytes) == planned
        assert before.keys() == after.keys()
        changed += [name for name, tensor in before.items() if not np.array_equal(tensor, after[name])]
    reports = [report for report in trainer.train(COSTS, 2**34, steps + 1) if report is not None]
    assert all(np.isfinite(float(report.row["loss"])) for report in reports)
    return changed


def through_host(case, *arguments):
    """A case of this module with twins as GPUs have them, on plain memory with copies in a thread."""
    with mock.patch.object(live_stages, "passes_host", return_value=True):
        return case(*arguments)


def on_device(name: str, case, *arguments):
    """A case of this module with all ranks on one device, and what they send through host memory."""
    register_staged()
    if name != "cpu":
        torch.cuda.set_device(torch.device(name))

    def staged(layouts, device, *given, **settings):
        return create_meshes(layouts, torch.device(name), *given, backend=NAME, **settings)

    with mock.patch.object(dist_training, "create_meshes", staged):
        return case(*arguments)


def planned_bytes(trainer: Trainer, layout: ParallelLayout) -> tuple[int, int]:
    """Of weights and of optimizer state, that all ranks are to receive. Collective."""
    state, mesh = trainer.state, trainer.mesh
    pieces = [live.piece for live in state.live._pieces]
    moves = plan_moves(state.layout, layout, pieces, ranks_per_node=mesh.ranks_per_machine, tp_rank=mesh.tp_rank)
    weights = moved_bytes((*moves.weights, *moves.relayed), pieces, of_state=False)
    planned = torch.tensor([weights, moved_bytes(moves.state, pieces, of_state=True)])
    dist.all_reduce(planned, group=mesh.control)
    # Ranks with the same place in their tensor-parallel groups plan the same.
    weights, state = (planned // (mesh.num_ranks // layout.tp)).tolist()
    return weights, state


def refused_layouts(config_file: str, overrides: list[str]) -> list[str]:
    """What a run says of a layout that it has no groups for, and of one that changes in the same generation."""
    trainer, output = make_trainer(config_file, overrides, ScriptedTrainer), []
    for layout in (msgspec.structs.replace(even_layout(4, pp=2, virtual=2), generation=1), trainer.meshes.layouts[1]):
        try:
            trainer.state.change_layout(layout, COSTS)
        except InvalidPlanError as error:
            output.append(str(error))
    return output
