"""One rank of `evenload train`: set up, calibrate, train, write. Runs under our launcher or `torchrun`."""

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from evenload.calibrate.fit import CoreWaits
from evenload.calibrate.kernels import deterministic_price
from evenload.cli.callback_calls import CallbackCalls, StepProfile
from evenload.cli.run_files import RunWriter, leave_finished, show_stopped
from evenload.cli.run_lines import (
    StepLines,
    context_line,
    data_line,
    data_sheet_line,
    first_plan_line,
    gather_line,
    groups_line,
    interval_line,
    layout_line,
    other_layouts_lines,
    prediction_line,
    reduction_line,
    resumed_line,
    strategy_line,
    switch_line,
    twins_line,
    validation_lines,
)
from evenload.cli.stop_request import StopRequest
from evenload.cli.worker_setup import RankSetup, run_coefficients, started_rank
from evenload.config.layouts import fitted_config, layouts_of
from evenload.config.train_config import TrainConfig, layout_of
from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError, RankLostError
from evenload.explore.prediction_interval import prediction_interval
from evenload.integrations.callback import Callback
from evenload.plan.strategies.registry import decide_dp_merge
from evenload.runtime.checkpoint.directory import (
    checkpoints_of,
    skipped_checkpoints,
)
from evenload.runtime.comm.watch import comes_of_transport
from evenload.runtime.model.configured import model_spec
from evenload.runtime.model.supported import position_warning
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.run import Validation
from evenload.types.text import counted, format_bytes


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """What ranks are to do.

    Args:
        cache: where calibrated cost files are kept between runs.
        command: goes on with this run.
        callbacks: called on rank 0.
    """

    config: TrainConfig
    cache: Path
    command: str
    callbacks: tuple[Callback, ...] = ()


def run_worker(task: RunTask) -> int:
    """Train with this process as one rank; rank 0 shows and writes. Returns the signal that stopped the run, or 0.

    Under a torchrun that restarts processes (`--max-restarts`) the layout is fitted to the ranks that it has started,
    and a rank that loses another one ends at once, so that its agent acts.

    Raises:
        ConfigError: settings that do not go together, or another number of ranks than the layout has.
    """
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if may_restart:
        task = replace(task, config=_fitted_to_started_ranks(task.config))
    layouts = layouts_of(task.config, model_spec(task.config).num_layers)
    if may_restart and not _has_place(layouts[0].world_size):
        return 0
    try:
        with started_rank(task.config, *layouts) as setup:
            return train_as_rank(task, setup, StopRequest())
    except Exception as error:
        if may_restart and (isinstance(error, RankLostError) or comes_of_transport(error)):
            # Threads and groups may wait for ranks that are gone, and the agent waits for this process.
            sys.stderr.write(f"evenload: error: {' '.join(str(error).split())}\n")
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(RankLostError.exit_code)
        raise


def _fitted_to_started_ranks(config: TrainConfig) -> TrainConfig:
    """Return the settings in which as many ranks train as torchrun has started; rank 0 says where these are fewer.

    Raises:
        ConfigError: no layout fits them, or torchrun keeps one store for all starts: ranks that are started again
            would find in it what the lost ones left, and agents keep its address when its machine is gone (torch 2.13,
            `DynamicRendezvousHandler.next_rendezvous`).
    """
    here, num_layers = os.environ, model_spec(config).num_layers
    num_ranks, full = int(here["WORLD_SIZE"]), layout_of(config.parallel, num_layers)
    if int(here["GROUP_WORLD_SIZE"]) > 1 and here.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise ConfigError(
            f"torchrun's --max-restarts is {here['TORCHELASTIC_MAX_RESTARTS']}, but its agents keep one store for all "
            "starts, in which ranks that are started again find what the lost ones left; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment on every machine, or leave --max-restarts out"
        )
    fitted = fitted_config(config, num_layers, num_ranks)
    if num_ranks < full.world_size and here["RANK"] == "0":
        warn(
            f"torchrun has started {counted(num_ranks, 'rank')}, layout {full.describe()} of [parallel] has "
            f"{full.world_size}: they train in layout {layout_of(fitted.parallel, num_layers).describe()}"
        )
    return fitted


def _has_place(num_ranks: int) -> bool:
    """Return whether this process is among so many ranks, the first ones, and count only these from now on."""
    here = os.environ
    rank, first_here = int(here["RANK"]), int(here["RANK"]) - int(here["LOCAL_RANK"])
    if rank >= num_ranks:
        return False
    here["WORLD_SIZE"] = str(min(num_ranks, int(here["WORLD_SIZE"])))
    # Cores and memory of the machine are divided by those that train on it.
    here["LOCAL_WORLD_SIZE"] = str(min(int(here["LOCAL_WORLD_SIZE"]), num_ranks - first_here))
    return True


def train_as_rank(
    task: RunTask,
    setup: RankSetup,
    stop: StopRequest,
) -> int:
    """All that a rank does once it has met the others: calibrate, train, write. Returns the signal that stopped the
    run, or 0. Collective."""
    config, mesh, memory_cap_bytes = task.config, setup.mesh, setup.memory_cap_bytes
    console = Console(stderr=True, quiet=mesh.rank != 0, highlight=False)
    trainer = Trainer(config, mesh, setup.meshes)
    resumed = trainer.resume()
    costs = run_coefficients(trainer, task.cache, setup.threads, console)
    _show_start(console, trainer, costs, memory_cap_bytes, resumed)
    files = RunWriter(trainer, costs, memory_cap_bytes, resumed=resumed)
    steps_before, calls = trainer.steps_done, CallbackCalls(task.callbacks, trainer)
    with stop.listening(), calls.running():
        waits = CoreWaits(setup.demand)
        last = _run_steps(trainer, costs, memory_cap_bytes, (files, calls), console, stop, waits)
        has_trained = trainer.steps_done > steps_before
        if has_trained:
            saved = trainer.save()
            console.print(f"checkpoint {saved}")
            calls.checkpoint(saved)
            if last is not None:
                files.write(last)
        if trainer.stop_signal:
            calls.end_reason = "stopped"
            show_stopped(console, trainer, task.command)
        else:
            leave_finished(console, trainer, files, last, has_trained=has_trained, command=task.command)
            calls.end_reason = "finished"
    return trainer.stop_signal


def _run_steps(
    trainer: Trainer,
    costs: CostCoefficients,
    memory_cap_bytes: int,
    receivers: tuple[RunWriter, CallbackCalls],
    console: Console,
    stop: StopRequest,
    waits: CoreWaits,
) -> StepReport | None:
    """The last step's report, on rank 0 and if any step ran.

    Args:
        receivers: of every step's report: files, and callbacks.
    """
    files, calls = receivers
    last: StepReport | None = None
    has_validated = False
    ratios: list[float] = []
    interval = prediction_interval(costs, trainer.mesh.layout)
    config = trainer.config
    lines = StepLines(console, config.log.lines_every_s, trainer.steps_done, config.train.steps)
    with lines.moving(), StepProfile(config, trainer.mesh.rank, trainer.steps_done) as profile:
        steps = trainer.train(
            costs,
            memory_cap_bytes,
            stop_requested=lambda: stop.signal,
            on_late_pass=partial(_show_late_pass, receivers, console),
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


def _show_late_pass(receivers: tuple[RunWriter, CallbackCalls], console: Console, validation: Validation) -> None:
    """A pass that an earlier start left out."""
    files, calls = receivers
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
    resumed: Path | None,
) -> None:
    config, model, mesh = trainer.config, trainer.model, trainer.mesh
    parameters = model.num_parameters
    is_fifo = mesh.channels == "fifo" and bool(mesh.channel_groups)
    facts = (
        f"model {model.name} ({parameters / 1e6:.1f} M parameters, {config.model.dtype})",
        f"layout {trainer.mesh.layout.describe()}{', fifo channels' if is_fifo else ''}",
        f"attention {next(iter(trainer.stages.values())).backend.name}",
        f"costs {costs.source} on {costs.device}",
        f"memory limit {format_bytes(memory_cap_bytes)} a process",
    )
    console.print(" | ".join(facts), soft_wrap=True)
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
    files = [file for part in trainer.loader.parts for file in part.files]
    console.print(data_line(config.data, len(files), sum(file.size_bytes or 0 for file in files)), soft_wrap=True)
    for line in trainer.loader.source_lines():
        console.print(f"source {line}", soft_wrap=True, markup=False)
    position = position_warning(trainer.hf_config, config.data.max_document_tokens)
    for line in (position, *trainer.tokenizer_warnings, *trainer.loader.label_warnings()):
        warn(line, console)
    warn(trainer.resume_warning, console)
    for line in skipped_checkpoints(checkpoints_of(config.train.output_dir), resumed):
        warn(line, console)
    if resumed is not None:
        line = resumed_line(str(resumed), trainer.steps_done, trainer.saved_strategy, config.plan.strategy)
        console.print(line, soft_wrap=True, markup=False)
