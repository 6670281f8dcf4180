"""One rank of `evenload train`: set up, calibrate, train, write, call callbacks; under our launcher or torchrun."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from evenload.attention.backends import refusal
from evenload.attention.range_attention import Scoring
from evenload.calibrate.fit import CoreWaits
from evenload.cli import run_lines
from evenload.cli.launch import StopRequest, print_error
from evenload.cli.options import print_lines
from evenload.cli.run_files import RunWriter, leave_finished, show_stopped
from evenload.cli.worker_setup import RankSetup, require_runnable, run_coefficients, started_rank
from evenload.config.planner import fitted_config, layouts_of
from evenload.config.sections import Tracker
from evenload.config.train_config import TrainConfig, layout_of
from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import checkpoint_bytes
from evenload.errors import CallbackError, ConfigError, EvenloadError, RankLostError
from evenload.explore.prediction_interval import prediction_interval
from evenload.integrations.callback import Callback, EndReason, RunEnd, RunStart, TensorBoardLog, WandbLog
from evenload.planning.strategies.registry import decide_dp_merge
from evenload.runtime.checkpoint.directory import checkpoints_of, skipped_checkpoints
from evenload.runtime.checkpoint.writer import require_room
from evenload.runtime.comm.mesh import most_of_ranks
from evenload.runtime.comm.watch import comes_of_transport
from evenload.runtime.device import require_device
from evenload.runtime.model.model_config import model_spec, position_warning, proof_line
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.cluster import data_sheet_flops_per_s
from evenload.types.layout import ParallelLayout
from evenload.types.text import counted, format_bytes

_TRACKERS: dict[Tracker, Callable[[], Callback]] = {"wandb": WandbLog, "tensorboard": TensorBoardLog}


class CallbackCalls:
    """Calls trackers and callbacks during one start of a run, on rank 0; an exception of theirs stops the run."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        self._trainer = trainer
        self._callbacks: list[Callback] = []
        if trainer.mesh.rank == 0:
            self._callbacks = [*(_TRACKERS[name]() for name in trainer.config.log.to), *callbacks]
        self._begun: list[Callback] = []
        self.end_reason: EndReason = "failed"
        """Passed to `on_end`; changed where training ends in another way."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Call `on_start`, and in the end `on_end`, whatever happens, once for each callback that has begun."""
        start = RunStart(
            config=self._trainer.config,
            model=self._trainer.model,
            layout=self._trainer.mesh.layout.describe(),
            num_ranks=self._trainer.mesh.num_ranks,
            steps_done=self._trainer.steps_done,
        )
        try:
            for one in self._callbacks:
                self._begun.append(one)
                self._call(one, "on_start", start)
            yield
        except BaseException:
            self._end("failed")
            raise
        self._end(self.end_reason)

    def step(self, report: StepReport) -> None:
        self._call_all("on_step", report)
        if report.validation is not None:
            self._call_all("on_validation", report.validation)
        if report.saved is not None:
            self.checkpoint(report.saved.path)

    def checkpoint(self, path: Path) -> None:
        self._call_all("on_checkpoint", path)

    def _end(self, reason: EndReason) -> None:
        end = RunEnd(steps_done=self._trainer.steps_done, reason=reason)
        while self._begun:
            try:
                self._call(self._begun.pop(0), "on_end", end)
            except EvenloadError as error:
                if reason != "failed":
                    self._end("failed")
                    raise
                print_error(f"warning: {error}")  # What fails now must not hide what failed first.

    def _call_all(self, name: str, argument: object) -> None:
        for one in self._callbacks:
            self._call(one, name, argument)

    def _call(self, one: Callback, name: str, argument: object) -> None:
        try:
            getattr(one, name)(argument)
        except EvenloadError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise CallbackError(
                f"callback {type(one).__name__}.{name} raised {type(error).__name__}: {error} ({last.filename}, line "
                f"{last.lineno}), after {counted(self._trainer.steps_done, 'step')}; training stops"
            ) from error


def start_layout(config: TrainConfig) -> ParallelLayout:
    """Refuse a run that cannot start on this machine, and return the layout in which it starts."""
    layout = require_runnable(config)
    require_device(config.train.device, layout.world_size)
    return layout


def run_worker(config: TrainConfig, cache: Path, command: str, callbacks: tuple[Callback, ...] = ()) -> int:
    """Train with this process as one rank; rank 0 shows, writes and calls callbacks. Returns the signal that stopped
    the run, which `command` goes on with, or 0. Measured costs are kept in `cache` between runs.

    Under a torchrun that restarts processes (`--max-restarts`) the layout is fitted to the ranks that it has started,
    and a rank that loses another one ends at once, so that its agent acts. Raises `ConfigError`: settings that do not
    go together, or another number of ranks than the layout has.
    """
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    model = model_spec(config)
    num_layers = model.num_layers
    if os.environ["RANK"] == "0":
        require_room(config.train, checkpoint_bytes(model, has_muon=config.optimizer.name == "muon"))
    if may_restart:
        config = _fitted_to_started_ranks(config, num_layers)
    layouts = layouts_of(config, num_layers)
    if may_restart and not _has_place(layouts[0].world_size):
        return 0
    try:
        with started_rank(config, *layouts) as setup:
            return _train_as_rank(config, setup, cache, command, callbacks)
    except Exception as error:
        if may_restart and (isinstance(error, RankLostError) or comes_of_transport(error)):
            # Threads and groups may wait for ranks that are gone, and the agent waits for this process.
            print_error(f"error: {' '.join(str(error).split())}")
            sys.stdout.flush()
            os._exit(RankLostError.exit_code)
        raise


def _fitted_to_started_ranks(config: TrainConfig, num_layers: int) -> TrainConfig:
    """Return the settings in which as many ranks train as torchrun has started; rank 0 warns where these are fewer.
    `ConfigError`: no layout fits them, or torchrun keeps one store for all starts, and agents keep its address when its
    machine is gone (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`)."""
    here = os.environ
    num_ranks, full = int(here["WORLD_SIZE"]), layout_of(config.parallel, num_layers)
    if int(here["GROUP_WORLD_SIZE"]) > 1 and here.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise ConfigError(
            f"torchrun's --max-restarts is {here['TORCHELASTIC_MAX_RESTARTS']}, but its agents keep one store for all "
            "starts, in which ranks that are started again find what the lost ones left; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment on every machine, or leave --max-restarts out"
        )
    fitted = fitted_config(config, num_layers, num_ranks)
    if num_ranks < full.world_size and here["RANK"] == "0":
        print_error(
            f"warning: torchrun has started {counted(num_ranks, 'rank')}, layout {full.describe()} of [parallel] has "
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


def _train_as_rank(
    config: TrainConfig, setup: RankSetup, cache: Path, command: str, callbacks: tuple[Callback, ...]
) -> int:
    """Calibrate, train and write; returns the signal that stopped the run, or 0. Collective."""
    console, memory_cap_bytes = setup.console, setup.memory_cap_bytes
    trainer = Trainer(config, setup.mesh, setup.meshes)
    resumed = trainer.resume()
    costs = run_coefficients(trainer, cache, setup)
    print_lines(console, *_start_lines(trainer, costs, memory_cap_bytes, resumed))
    files = RunWriter(trainer, costs, memory_cap_bytes, resumed=resumed)
    steps_before, calls, stop = trainer.steps_done, CallbackCalls(callbacks, trainer), StopRequest()
    with stop.listening(), calls.running():
        last = _run_steps(trainer, costs, memory_cap_bytes, (files, calls), console, stop, CoreWaits(setup.demand))
        has_trained = trainer.steps_done > steps_before
        if has_trained:
            saved = trainer.save()
            print_lines(console, f"checkpoint {saved}")
            calls.checkpoint(saved)
            if last is not None:
                files.write(last)
        if trainer.stop_signal:
            calls.end_reason = "stopped"
            show_stopped(console, trainer, command)
        else:
            leave_finished(console, trainer, files, last, has_trained=has_trained, command=command)
            calls.end_reason = "finished"
    return trainer.stop_signal


def _run_steps(
    trainer: Trainer,
    costs: CostCoefficients,
    memory_cap_bytes: int,
    observers: tuple[RunWriter, CallbackCalls],
    console: Console,
    stop: StopRequest,
    waits: CoreWaits,
) -> StepReport | None:
    """Run the remaining steps; returns the last one's report, on rank 0 and if any step ran."""
    last: StepReport | None = None
    has_validated = False
    ratios: list[float] = []
    interval = prediction_interval(costs, trainer.mesh.layout)
    run, every_s = trainer.config.train, trainer.config.log.lines_every_s
    lines = run_lines.StepLines(console, every_s, trainer.steps_done, run.steps)

    with lines.moving():
        for report in trainer.train(costs, memory_cap_bytes, stop_requested=lambda: stop.signal):
            if report is not None:
                for observer in observers:
                    observer.step(report)
                if last is None:
                    print_lines(
                        console, run_lines.first_plan_line(report.plan, trainer.config.max_pack_tokens, interval)
                    )
                else:
                    ratios.append(report.measured.step_time_s / report.plan.predicted.step_time_s)
                lines.show(report.row, trainer.steps_done)
                print_lines(console, *_event_lines(report, is_first_validation=not has_validated))
                has_validated |= report.validation is not None
                print_lines(
                    console, *_warnings(run_lines.prediction_line(ratios, costs.device, run.cost_file, waits.share))
                )
            last = report
    waited_share = most_of_ranks(waits.share(), trainer.mesh)
    print_lines(console, run_lines.interval_line(ratios, interval, waited_share))
    return last


def _warnings(*texts: str) -> list[str]:
    return [f"evenload: warning: {text}" for text in texts if text]


def _event_lines(report: StepReport, *, is_first_validation: bool) -> Iterator[str]:
    """Yield what a user should see of a step, and what became of a checkpoint in the background."""
    yield from _warnings(report.warning)
    if report.decision is not None:
        yield run_lines.layout_line(report.decision)
    if report.switch is not None:
        yield run_lines.switch_line(report.plan.step, report.switch, report.decision)
    if report.validation is not None:
        yield from run_lines.validation_lines(report.validation, shows_left_out=is_first_validation)
    yield from _warnings(report.failed_save and f"{report.failed_save}; training goes on")
    if (saved := report.saved) is not None:
        yield (
            f"checkpoint {saved.path} | {saved.num_bytes / 1e6:,.1f} MB written in {saved.write_s:.1f} s, training "
            f"waited {saved.stall_s:.2f} s"
        )


def _attention_line(stage: PipelineStage) -> str:
    """State what computes attention, why nothing that is faster does, and which calls run on another backend."""
    caps = {one.soft_cap for sites in stage.model.structure.sites for one in sites.attention}
    elsewhere = (refusal(stage.backend, Scoring(1.0, soft_cap=cap)) for cap in sorted(caps))
    whys = "; ".join(filter(None, (stage.backend.reason, *elsewhere)))
    return f"attention {stage.backend.name}{f' ({whys})' if whys else ''}"


def _start_lines(
    trainer: Trainer, costs: CostCoefficients, memory_cap_bytes: int, resumed: Path | None
) -> Iterator[str]:
    """Yield everything that decides speed or data order."""
    config, model, mesh = trainer.config, trainer.model, trainer.mesh
    layout, stage = mesh.layout, next(iter(trainer.state.stages.values()))
    is_fifo = mesh.channels == "fifo" and bool(mesh.channel_groups)
    yield " | ".join(
        (
            f"model {model.name} ({model.num_parameters / 1e6:.1f} M parameters, {config.model.dtype})",
            f"layout {layout.describe()}{', fifo channels' if is_fifo else ''}",
            _attention_line(stage),
            f"kernels {', '.join(('liger:', *stage.model.liger)) if stage.model.liger else 'torch'}",
            f"costs {costs.source} on {costs.device}",
            f"memory limit {format_bytes(memory_cap_bytes)} a process",
        )
    )
    yield proof_line(trainer.hf_config)
    if mesh.device.type == "cuda" and model.bytes_per_element == 2 and data_sheet_flops_per_s(costs.device) is None:
        yield f"mfu_of_data_sheet stays empty: the peak of {costs.device} is not known; mfu is of the measured peak"
    _, merging = decide_dp_merge(config.plan.options, config.plan.strategy, model, layout, costs)
    yield run_lines.strategy_line(config.plan.strategy, layout.cp, merging, model.whole_documents)
    yield run_lines.groups_line(trainer.meshes, are_declared=bool(config.plan.layouts))
    if trainer.state.live is not None:
        yield run_lines.twins_line(trainer.state.live.twins, config.plan.twin_bytes)
    yield from run_lines.other_layouts_lines(costs, trainer.meshes.layouts)
    yield f"tokenizer {trainer.run_tokenizer_text}"
    files = [file for part in trainer.loader.parts for file in part.files]
    yield run_lines.data_line(config.data, len(files), sum(file.size_bytes or 0 for file in files))
    yield from (f"source {line}" for line in trainer.loader.source_lines())
    yield from _warnings(
        position_warning(trainer.hf_config, config.data.max_document_tokens),
        *trainer.tokenizer_warnings,
        *trainer.loader.label_warnings(),
        trainer.resume_warning,
        *skipped_checkpoints(checkpoints_of(config.train.output_dir), resumed),
    )
    if resumed is not None:
        yield run_lines.resumed_line(str(resumed), trainer.steps_done, trainer.saved_strategy, config.plan.strategy)
