"""One rank of `evenload train`: set up, calibrate, train, write. Runs under our launcher or `torchrun`."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.distributed.elastic.multiprocessing.errors import record

from evenload.cli.run_files import RunWriter
from evenload.cli.start_lines import data_line, first_plan_line, strategy_line
from evenload.cli.worker_setup import RankSetup, run_coefficients, started_rank
from evenload.cost.coefficients import CostCoefficients
from evenload.plan.merge_default import decide_dp_merge
from evenload.report.table import step_line
from evenload.runtime.checkpoint import skipped_checkpoints
from evenload.runtime.config import TrainConfig
from evenload.runtime.export_files import tokenizer_note
from evenload.runtime.recipes import position_warning
from evenload.runtime.run_layout import layout_of
from evenload.runtime.trainer import StepReport, Trainer, model_spec
from evenload.types.scaled_units import format_bytes


@record
def run_worker(config: TrainConfig, cache_directory: str) -> None:
    """Train with this process as one rank; rank 0 shows and writes.

    Args:
        cache_directory: where calibrated cost files are kept between runs.
    """
    layout = layout_of(config, model_spec(config).num_layers)
    with started_rank(config, layout) as setup:
        _train(config, setup, Path(cache_directory))


def _train(config: TrainConfig, setup: RankSetup, cache: Path) -> None:
    mesh, memory_cap_bytes = setup.mesh, setup.memory_cap_bytes
    console = Console(stderr=True, quiet=mesh.rank != 0, highlight=False)
    trainer = Trainer(config, mesh)
    directory = Path(config.train.output_dir)
    resumed = trainer.resume()
    costs = run_coefficients(trainer, cache, setup.threads, console)
    _show_start(console, trainer, costs, memory_cap_bytes, setup.threads, resumed)
    files = None
    if mesh.rank == 0:
        files = RunWriter(
            directory,
            config,
            trainer.model,
            costs,
            memory_cap_bytes,
            tokenizer=trainer.tokenizer_fact,
            resumed=resumed is not None,
        )
    last = _run_steps(trainer, costs, memory_cap_bytes, files, console)
    if last is False:
        console.print(f"nothing left to train: {trainer.steps_done} steps are done; raise train.steps or data.epochs")
        return
    console.print(f"checkpoint {trainer.save()}")
    if config.train.export_hf:
        what = "Hugging Face model" if config.model.lora is None else "PEFT adapter"
        exported = trainer.export()
        named = mesh.rank == 0 and config.model.lora is None
        note = f", {tokenizer_note(exported, config.data, config.model.path)}" if named else ""
        console.print(f"{what} {exported}{note}", soft_wrap=True)
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


def _show_start(
    console: Console,
    trainer: Trainer,
    costs: CostCoefficients,
    memory_cap_bytes: int,
    threads: int,
    resumed: Path | None,
) -> None:
    config, model = trainer.config, trainer.model
    parameters = model.num_parameters
    facts = (
        f"model {model.name} ({parameters / 1e6:.1f} M parameters, {config.model.dtype})",
        f"layout {trainer.mesh.layout.describe()}{', fifo channels' if config.parallel.channels == 'fifo' else ''}",
        f"attention {next(iter(trainer.stages.values())).backend_name}",
        f"costs {costs.source} on {costs.device}",
        f"memory limit {format_bytes(memory_cap_bytes)} a process",
    )
    console.print(" | ".join(facts), soft_wrap=True)
    layout = trainer.mesh.layout
    _, merging = decide_dp_merge(config.plan.options, config.plan.strategy, layout, costs)
    console.print(strategy_line(config.plan.strategy, layout.cp, merging), soft_wrap=True)
    console.print(f"tokenizer {trainer.tokenizer_fact}", soft_wrap=True)
    console.print(data_line(config.data, *trainer.source_size()), soft_wrap=True)
    if warning := position_warning(trainer.hf_config, config.data.max_document_tokens):
        console.print(f"evenload: warning: {warning}", soft_wrap=True)
    for line in skipped_checkpoints(Path(config.train.output_dir) / "checkpoints", resumed):
        console.print(f"evenload: warning: {line}", soft_wrap=True)
    if resumed is not None:
        console.print(f"resumed from {resumed} after {trainer.steps_done} steps")
