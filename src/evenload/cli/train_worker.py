"""One rank of `evenload train`: set up, calibrate, train, write. Runs under our launcher or `torchrun`."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from evenload.calibrate.deterministic_price import deterministic_price
from evenload.calibrate.disturbance import CoreWaits
from evenload.cli.callback_calls import CallbackCalls
from evenload.cli.layout_line import layout_line, other_layouts_lines
from evenload.cli.run_end import leave_finished, show_stopped
from evenload.cli.run_files import RunWriter
from evenload.cli.run_lines import (
    context_line,
    data_line,
    data_sheet_line,
    first_plan_line,
    gather_line,
    interval_line,
    prediction_line,
    reduction_line,
    resumed_line,
    strategy_line,
)
from evenload.cli.start_record import append_start, read_starts, start_record
from evenload.cli.step_lines import StepLines
from evenload.cli.step_profile import StepProfile
from evenload.cli.stop_request import StopLine, StopRequest
from evenload.cli.survivor_start import kept_steps, standing
from evenload.cli.switch_line import groups_line, switch_line, twins_line
from evenload.cli.validation_lines import validation_lines
from evenload.cli.worker_setup import RankSetup, run_coefficients, started_rank
from evenload.cost.coefficients import CostCoefficients
from evenload.errors import RankLostError
from evenload.explore.prediction_interval import prediction_interval
from evenload.integrations.callback import Callback
from evenload.plan.strategies.merge_default import decide_dp_merge
from evenload.runtime.checkpoint.directory import (
    checkpoints_of,
    latest_checkpoint,
    skipped_checkpoints,
    steps_in_name,
)
from evenload.runtime.checkpoint.kept_steps import KeptStep, KeptSteps
from evenload.runtime.comm.membership import Membership
from evenload.runtime.config.fitted_config import fitted_config
from evenload.runtime.config.run_layouts import layouts_of
from evenload.runtime.config.train_config import TrainConfig, layout_of
from evenload.runtime.model.configured import model_spec
from evenload.runtime.model.supported import position_warning
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.layout import ParallelLayout
from evenload.types.scaled_units import format_bytes
from evenload.types.validation import Validation

_OTHERS_CAME = "others are let in"

_MOST_IN_VAIN = 2
"""Rounds in a row that may end with nobody lost and nothing kept or saved."""


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """What ranks are to do.

    Args:
        cache: where calibrated cost files are kept between runs.
        command: goes on with this run.
        callbacks: told of the run on rank 0.
    """

    config: TrainConfig
    cache: Path
    command: str
    callbacks: tuple[Callback, ...] = ()

    def of(self, config: TrainConfig) -> "RunTask":
        """The same with another configuration, of fewer ranks."""
        return replace(self, config=config)


def run_worker(task: RunTask, line: StopLine | None = None) -> int:
    """Train with this process as one rank; rank 0 shows and writes. Returns the signal that stopped the run, or 0.

    Args:
        line: to our launcher; None under another one.
    """
    config = task.config
    if config.train.on_lost_rank == "shrink":
        return _run_with_fewer_and_fewer(task, line)
    with started_rank(config, *layouts_of(config, model_spec(config).num_layers)) as setup:
        return train_as_rank(task, setup, StopRequest(line)) or 0


def _run_with_fewer_and_fewer(task: RunTask, line: StopLine | None) -> int:
    """As `run_worker`; where ranks are lost, those that are left make everything but their processes anew."""
    here, config = os.environ, task.config
    members = Membership(int(here["RANK"]), int(here["WORLD_SIZE"]), here["MASTER_ADDR"], int(here["MASTER_PORT"]))
    num_layers, why, in_vain = model_spec(config).num_layers, "", 0
    while members.is_member or members.wait_to_join():
        now = fitted_config(config, num_layers, len(members.ranks))
        if members.round:  # what was saved before is this run's own
            now = msgspec.structs.replace(now, train=msgspec.structs.replace(now.train, resume=True))
        layouts = layouts_of(now, num_layers)
        size = layouts[0].world_size
        if not members.keep(size):
            if config.train.replace_lost_ranks:
                continue  # it may be needed once others come
            return 0
        # Cores and memory of the machine are divided by those that are left on it.
        here["LOCAL_WORLD_SIZE"] = str(size)
        start = standing(members, saved_steps(config))
        if members.rank == 0:
            note_start(config, layouts[0], start.steps_done, why, is_kept=start.is_kept)
        grows = partial(_is_larger_with_others, config, num_layers, members)
        try:
            stopped = _train_round(task.of(now), layouts, members, line, grows)
            if stopped is not None:
                return stopped
            why = _OTHERS_CAME
        except RankLostError as error:
            why = str(error)
        # Nothing of the round is held any more, so its groups can go.
        before = members.ranks
        members.go_on()
        lost = [f"rank {rank}" for rank in before if rank not in members.ranks]
        if config.train.survivor_memory == "shared":
            members.await_end(set(before) - set(members.ranks))
        has_come_on = standing(members, saved_steps(config)).steps_done != start.steps_done
        in_vain = 0 if lost or has_come_on else in_vain + 1
        if in_vain == _MOST_IN_VAIN:
            raise RankLostError(
                f"connections broke {in_vain} times in a row though every rank lives, with no step kept or saved in "
                f"between, so going on would not end ({why}); raise train.timeout_s where a rank is only slow"
            )
        if why != _OTHERS_CAME:
            why = f"lost {', '.join(lost) or 'a connection'} ({why})"
        elif lost:
            why += f", and lost {', '.join(lost)}"
    return 0


def _train_round(
    task: RunTask,
    layouts: tuple[ParallelLayout, ...],
    members: Membership,
    line: StopLine | None,
    asked_to_pause: Callable[[], bool],
) -> int | None:
    """`train_as_rank` with these members. A function of its own, so that when it ends nothing holds groups of the round
    or maps what was kept in it."""
    with started_rank(task.config, *layouts, members=members) as setup:
        return train_as_rank(task, setup, StopRequest(line), asked_to_pause, kept_steps(members))


def _is_larger_with_others(config: TrainConfig, num_layers: int, members: Membership) -> bool:
    """Whether the run would use more ranks if those that wait were let in."""
    waiting = members.num_waiting
    if not waiting:
        return False
    fitted = fitted_config(config, num_layers, len(members.ranks) + waiting)
    return layout_of(fitted, num_layers).world_size > len(members.ranks)


def note_start(
    config: TrainConfig, layout: ParallelLayout, steps_done: int, why: str, *, is_kept: bool = False
) -> None:
    """As the first of the ranks: write down with whom training goes on and, where this is not the start of the run, say
    what changed.

    Args:
        steps_done: from which they go on.
        why: they do; "" = the run starts.
        is_kept: they go on from a step that all kept in memory.
    """
    directory = Path(config.train.output_dir)
    record = start_record(
        directory, ranks=layout.world_size, layout=layout.describe(), steps_done=steps_done, is_kept=is_kept
    )
    earlier = read_starts(directory)
    if why:
        warn(record.line(earlier[-1] if earlier else None, why))
    append_start(directory, record)


def saved_steps(config: TrainConfig) -> int:
    """Steps in the latest checkpoint; 0 = there is none."""
    newest = latest_checkpoint(checkpoints_of(config.train.output_dir))
    return steps_in_name(newest) if newest is not None else 0


def train_as_rank(
    task: RunTask,
    setup: RankSetup,
    stop: StopRequest,
    asked_to_pause: Callable[[], bool] = lambda: False,
    kept: KeptSteps | None = None,
) -> int | None:
    """All that a rank does once it has met the others: calibrate, train, write. Collective.

    Returns:
        The signal that stopped the run, or 0; None where all ranks left off, saved, because one was asked to.
    """
    config, mesh, memory_cap_bytes = task.config, setup.mesh, setup.memory_cap_bytes
    console = Console(stderr=True, quiet=mesh.rank != 0, highlight=False)
    trainer = Trainer(config, mesh, setup.meshes, kept)
    resumed = trainer.resume()
    costs = run_coefficients(trainer, task.cache, setup.threads, console)
    _show_start(console, trainer, costs, memory_cap_bytes, resumed)
    files = RunWriter(trainer, costs, memory_cap_bytes, resumed=resumed)
    steps_before, calls = trainer.steps_done, CallbackCalls(task.callbacks, trainer)
    with stop.listening(), calls.running():
        told, asked, waits = (files, calls), (stop, asked_to_pause), CoreWaits(setup.demand)
        last = _run_steps(trainer, costs, memory_cap_bytes, told, console, asked, waits)
        # A step that was kept in memory is in no checkpoint yet, be it the last one.
        has_trained = trainer.steps_done > steps_before or isinstance(resumed, KeptStep)
        if has_trained:
            saved = trainer.save()
            console.print(f"checkpoint {saved}")
            calls.checkpoint(saved)
            if last is not None:
                files.write(last)
            elif mesh.rank == 0:  # all were kept: of the last ones the rank that wrote the files may be gone
                files.write_pictures()
        if trainer.stop_signal:
            calls.end_reason = "stopped"
            show_stopped(console, trainer, task.command)
        elif trainer.is_paused:
            calls.end_reason = "regrouped"
            return None
        else:
            leave_finished(console, trainer, files, last, has_trained=has_trained, command=task.command)
            calls.end_reason = "finished"
    return trainer.stop_signal


def _run_steps(
    trainer: Trainer,
    costs: CostCoefficients,
    memory_cap_bytes: int,
    told: tuple[RunWriter, CallbackCalls],
    console: Console,
    asked: tuple[StopRequest, Callable[[], bool]],
    waits: CoreWaits,
) -> StepReport | None:
    """The last step's report, on rank 0 and if any step ran.

    Args:
        told: of every step: files, and callbacks.
        asked: to stop, and to leave off.
    """
    files, calls = told
    last: StepReport | None = None
    has_validated = False
    ratios: list[float] = []
    interval = prediction_interval(costs, trainer.mesh.layout)
    config, (stop, pause) = trainer.config, asked
    lines = StepLines(console, config.log.lines_every_s, trainer.steps_done, config.train.steps)
    with lines.moving(), StepProfile(config, trainer.mesh.rank, trainer.steps_done) as profile:
        steps = trainer.train(
            costs,
            memory_cap_bytes,
            asked_to_stop=lambda: stop.signal,
            asked_to_pause=pause,
            on_made_up=partial(_tell_made_up, told, console),
        )
        for report in steps:
            profiled = profile.after_step(trainer.steps_done)
            if report is not None:
                files.add_step(report)
                calls.step(report)
                if last is None:
                    console.print(first_plan_line(report.plan, config.max_pack_tokens, interval), soft_wrap=True)
                else:
                    ratios.append(report.measured.step_time_s / report.plan.predicted.step_time_s)
                lines.show(report.row, trainer.steps_done)
                _show_events(report, console, is_first_validation=not has_validated)
                has_validated |= report.validation is not None
                if profiled:
                    console.print(profiled, soft_wrap=True, markup=False)
                warn(prediction_line(ratios, costs.device, config.train.cost_file, waits.share), console)
            last = report
    if held := interval_line(ratios, interval, waits.share()):
        console.print(held, soft_wrap=True)
    return last


def _tell_made_up(told: tuple[RunWriter, CallbackCalls], console: Console, validation: Validation) -> None:
    """A pass that an earlier start left out."""
    files, calls = told
    files.add_validation(validation)
    for line in validation_lines(validation, shows_left_out=True):
        console.print(line, soft_wrap=True, markup=False)
    calls.validation(validation)


def warn(text: str, console: Console | None = None) -> None:
    """A line to people, unless there is none."""
    if text:
        (console or Console(stderr=True, highlight=False)).print(
            f"evenload: warning: {text}", soft_wrap=True, markup=False
        )


def _show_events(report: StepReport, console: Console, *, is_first_validation: bool) -> None:
    """What a user should see of a step, and what became of a checkpoint in the background."""
    warn(report.warning, console)
    if report.decision is not None and (line := layout_line(report.decision)):
        console.print(line, soft_wrap=True, markup=False)
    if report.switch is not None:
        console.print(switch_line(report.plan.step, report.switch, report.decision), soft_wrap=True, markup=False)
    for sample in report.samples:
        line = f"sample after step {sample.step} | {sample.prompt!r} -> {sample.text!r}"
        console.print(line, soft_wrap=True, markup=False)
    if report.validation is not None:
        for line in validation_lines(report.validation, shows_left_out=is_first_validation):
            console.print(line, soft_wrap=True, markup=False)
    warn(f"{report.failed_save}; training goes on" if report.failed_save else "", console)
    if (saved := report.saved) is not None:
        console.print(
            f"checkpoint {saved.path} | {saved.num_bytes / 1e6:,.1f} MB written in {saved.write_s:.1f} s, training "
            f"waited {saved.stall_s:.2f} s",
            soft_wrap=True,
        )


def _show_start(
    console: Console,
    trainer: Trainer,
    costs: CostCoefficients,
    memory_cap_bytes: int,
    resumed: Path | KeptStep | None,
) -> None:
    config, model, mesh = trainer.config, trainer.model, trainer.mesh
    parameters = model.num_parameters
    facts = (
        f"model {model.name} ({parameters / 1e6:.1f} M parameters, {config.model.dtype})",
        f"layout {trainer.mesh.layout.describe()}{', fifo channels' if mesh.channels == 'fifo' and mesh.lines else ''}",
        f"attention {next(iter(trainer.stages.values())).backend_name}",
        f"costs {costs.source} on {costs.device}",
        f"memory limit {format_bytes(memory_cap_bytes)} a process",
    )
    console.print(" | ".join(facts), soft_wrap=True)
    if kept_bytes := trainer.survivors.num_bytes:
        text = (
            f"for survivors of a lost rank: {format_bytes(kept_bytes)} of shared memory a process hold its last steps"
        )
        console.print(text, soft_wrap=True)
    if config.train.deterministic and mesh.device.type == "cuda":
        times = deterministic_price(next(iter(trainer.stages.values())), model, mesh.layout.tp)
        console.print(f"deterministic kernels: attention's backward takes {times:.2f} times as long", soft_wrap=True)
    if mesh.device.type == "cuda" and model.bytes_per_element == 2 and (unknown := data_sheet_line(costs.device)):
        console.print(unknown, soft_wrap=True, markup=False)
    layout = trainer.mesh.layout
    _, merging = decide_dp_merge(config.plan.options, config.plan.strategy, layout, costs)
    console.print(strategy_line(config.plan.strategy, layout.cp, merging), soft_wrap=True)
    copies = [max(one.data_sizes) for one in trainer.meshes.layouts]
    if reduced := reduction_line(copies, costs.overlap if costs.overlap_reduction else None):
        console.print(reduced, soft_wrap=True)
        console.print(gather_line(copies, costs.overlap if costs.overlap_gather else None), soft_wrap=True)
    largest_group = max((group.size for group in mesh.context.values()), default=1)
    if travelling := context_line(largest_group, config.parallel.cp_exchange):
        console.print(travelling, soft_wrap=True)
    if groups := groups_line(trainer.meshes, are_declared=bool(config.plan.layouts)):
        console.print(groups, soft_wrap=True)
    if trainer.live is not None and (shared := twins_line(trainer.live.twins, config.plan.twin_bytes)):
        console.print(shared, soft_wrap=True, markup=False)
    for line in other_layouts_lines(costs, trainer.meshes.layouts):
        console.print(line, soft_wrap=True)
    console.print(f"tokenizer {trainer.tokenizer_fact}", soft_wrap=True)
    console.print(data_line(config.data, *trainer.source_size()), soft_wrap=True)
    for line in trainer.source_lines():
        console.print(f"source {line}", soft_wrap=True, markup=False)
    position = position_warning(trainer.hf_config, config.data.max_document_tokens)
    for line in (position, *trainer.tokenizer_warnings, *trainer.label_warnings()):
        warn(line, console)
    warn(trainer.resume_warning, console)
    if not isinstance(resumed, KeptStep):
        for line in skipped_checkpoints(checkpoints_of(config.train.output_dir), resumed):
            warn(line, console)
    if resumed is not None:
        where = "shared memory" if isinstance(resumed, KeptStep) else str(resumed)
        line = resumed_line(where, trainer.steps_done, trainer.saved_strategy, config.plan.strategy)
        console.print(line, soft_wrap=True, markup=False)
