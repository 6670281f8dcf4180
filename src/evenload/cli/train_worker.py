"""One rank of `evenload train`: set up, calibrate, train, write. Runs under our launcher or `torchrun`."""

import os
import platform
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.distributed.elastic.multiprocessing.errors import record

from evenload.cli.run_files import RunWriter
from evenload.cli.start_lines import data_line, first_plan_line, strategy_line
from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.profile.calibrate import calibrate
from evenload.profile.cost_cache import cached_path, read_cached, write_cached
from evenload.report.table import step_line
from evenload.runtime.config import TrainConfig
from evenload.runtime.mesh import Mesh, create_mesh
from evenload.runtime.trainer import StepReport, Trainer, layout_of, model_spec

# Kept for the interpreter, libraries and the operating system when the memory limit is not configured.
_FREE_SHARE = 0.2


@record
def run_worker(config: TrainConfig, cache_directory: str) -> None:
    """Train with this process as one rank; rank 0 shows and writes.

    Args:
        cache_directory: where calibrated cost files are kept between runs.
    """
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    threads = config.train.threads_per_process or max(1, len(os.sched_getaffinity(0)) // local_world)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.train.timeout_s))
    try:
        model = model_spec(config)
        mesh = create_mesh(
            layout_of(config, model.num_layers),
            torch.device("cpu"),
            config.train.timeout_s,
            config.train.checkpoint_timeout_s,
            signs=_store_of_signs(),
        )
        _train(config, mesh, Path(cache_directory), threads, local_world)
    finally:
        # After an error other ranks may never answer; the launcher ends them.
        if sys.exc_info()[0] is None:
            mesh.watch.close()
            dist.destroy_process_group()


def _train(config: TrainConfig, mesh: Mesh, cache: Path, threads: int, local_world: int) -> None:
    console = Console(stderr=True, quiet=mesh.rank != 0, highlight=False)
    trainer = Trainer(config, mesh)
    directory = Path(config.train.output_dir)
    resumed = trainer.resume()
    costs = _coefficients(trainer, cache, threads, console)
    memory_cap_bytes = config.plan.memory_bytes or _share_of_memory(local_world)
    _show_start(console, trainer, costs, memory_cap_bytes, threads, resumed)
    files = None
    if mesh.rank == 0:
        files = RunWriter(directory, config, trainer.model, costs, memory_cap_bytes, resumed=resumed is not None)
    last = _run_steps(trainer, costs, memory_cap_bytes, files, console)
    if last is False:
        console.print(f"nothing left to train: {trainer.steps_done} steps are done; raise train.steps or data.epochs")
        return
    console.print(f"checkpoint {trainer.save()}")
    if config.train.export_hf:
        what = "Hugging Face model" if config.model.lora is None else "PEFT adapter"
        console.print(f"{what} {trainer.export()}")
    if files is not None and isinstance(last, StepReport):
        files.finish(last)
        console.print("\n".join(["", "ledger of documents and tokens", *last.ledger_lines]))
        console.print(
            f"\nreport {directory / 'report.html'} | trace {directory / 'trace.json'} (open at ui.perfetto.dev)"
        )


def _run_steps(
    trainer: Trainer, costs: CostCoefficients, memory_cap_bytes: int, files: RunWriter | None, console: Console
) -> StepReport | bool:
    """The last step's report on rank 0; elsewhere whether any step ran."""
    last: StepReport | bool = False
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("steps", total=trainer.config.train.steps, completed=trainer.steps_done)
        for report in trainer.train(costs, memory_cap_bytes):
            progress.update(task, completed=trainer.steps_done)
            if report is not None and files is not None:
                files.add_step(report)
                if last is False:
                    console.print(first_plan_line(report.plan, trainer.config.max_pack_tokens), soft_wrap=True)
                console.print(step_line(report.row), soft_wrap=True)
                _show_save(report, console)
            last = report or True
    return last


def _show_save(report: StepReport, console: Console) -> None:
    """What became of a checkpoint in the background."""
    if report.failed_save:
        console.print(f"evenload: warning: {report.failed_save}; training goes on", soft_wrap=True)
    if (saved := report.saved) is not None:
        console.print(
            f"checkpoint {saved.path} | {saved.num_bytes / 1e6:,.1f} MB written in {saved.write_s:.1f} s, training "
            f"waited {saved.stall_s:.2f} s",
            soft_wrap=True,
        )


def _coefficients(trainer: Trainer, cache: Path, threads: int, console: Console) -> CostCoefficients:
    """The checkpoint's cost file after a resume (so that plans stay the same), else the configured one, else cached,
    else measured."""
    if trainer.coefficients is not None:
        return trainer.coefficients
    mesh, configured = trainer.mesh, trainer.config.train.cost_file
    name = f"{_processor_name()}, {threads} thread{'s' if threads > 1 else ''} a process"
    backend = trainer.config.train.attention
    path = cached_path(cache, trainer.model, mesh.layout, name, threads, backend)
    found: list[CostCoefficients | None] = [None]
    if mesh.rank == 0:
        found[0] = read_coefficients(configured) if configured is not None else read_cached(path)
    dist.broadcast_object_list(found, src=0, group=mesh.control)
    if found[0] is not None:
        return found[0]
    console.print("calibrating: timing this model's layers on this machine (seconds; cached for the next run)")
    measured = calibrate(trainer.stages, trainer.model, mesh, trainer.config.data.max_document_tokens, name)
    if mesh.rank == 0:
        write_cached(path, measured)
    return measured


def _show_start(
    console: Console,
    trainer: Trainer,
    costs: CostCoefficients,
    memory_cap_bytes: int,
    threads: int,
    resumed: Path | None,
) -> None:
    config, model = trainer.config, trainer.model
    parameters = model.num_layers * model.stored_parameters_per_layer + model.embedding_parameters * (
        1 if model.tied_embeddings else 2
    )
    facts = (
        f"model {model.name} ({parameters / 1e6:.1f} M parameters, {config.model.dtype})",
        f"layout {trainer.mesh.layout.describe()}",
        f"attention {next(iter(trainer.stages.values())).backend_name}",
        f"costs {costs.source} on {costs.device}",
        f"memory limit {memory_cap_bytes / 2**30:.1f} GiB a process",
    )
    console.print(" | ".join(facts), soft_wrap=True)
    console.print(strategy_line(config.plan.strategy, trainer.mesh.layout.cp), soft_wrap=True)
    console.print(data_line(config.data, *trainer.source_size()), soft_wrap=True)
    if resumed is not None:
        console.print(f"resumed from {resumed} after {trainer.steps_done} steps")


def _store_of_signs() -> dist.Store:
    """A connection of its own to the store through which the ranks met."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore("evenload", store)


def _share_of_memory(local_world: int) -> int:
    """Bytes for one process: of the machine, or of the container where one is limited (cgroup v2, v1)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = limit.read_text().strip() if limit.is_file() else "max"
        if text.isdigit():
            total = min(total, int(text))
    return int(total * (1 - _FREE_SHARE) / local_world)


def _processor_name() -> str:
    """The CPU's model name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
