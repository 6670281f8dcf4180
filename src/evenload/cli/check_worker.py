"""What `evenload check` runs in other processes: the preparation in one, then the checks in one per rank."""

from pathlib import Path

import msgspec
from rich.console import Console

from evenload.check.checks import run_checks
from evenload.check.runner import Scope, checked_scope
from evenload.cli.worker_setup import memory_for_rank, require_runnable, run_coefficients, started_rank
from evenload.config.tokenizer import tokenizer_fact, tokenizer_warnings
from evenload.config.train_config import TrainConfig, layout_of
from evenload.data.tokenize import open_tokenizer
from evenload.runtime.device import require_device
from evenload.runtime.model.configured import load_config, model_spec
from evenload.runtime.model.supported import position_warning
from evenload.runtime.trainer import Trainer
from evenload.types.layout import ParallelLayout


def prepared_check(config: TrainConfig, directory: Path) -> tuple[Scope, ParallelLayout, tuple[str, ...]]:
    """What is checked, on which layout, and the lines to show before; the smaller run goes to `directory`."""
    require_runnable(config)
    scope = checked_scope(config, directory)
    layout = layout_of(scope.config.parallel, model_spec(scope.config).num_layers)
    smaller = f"; smaller than your run: {', '.join(scope.notes)}" if scope.notes else ""
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.eos_token)
    lines = [
        f"checking {config.model.path} on layout {layout.describe()}{smaller}",
        f"tokenizer {tokenizer_fact(config.data, tokenizer, model_spec(config).vocab_size)}",
    ]
    warnings = (
        position_warning(load_config(config.model.path), config.data.max_document_tokens),
        *tokenizer_warnings(config.data, tokenizer, config.model.path),
    )
    lines += [f"evenload: warning: {warning}" for warning in warnings if warning]
    require_device(scope.config.train.device, layout.world_size)
    return scope, layout, tuple(lines)


def run_check_worker(config: TrainConfig, scope: Scope, cache: Path, answer: Path) -> int:
    """One rank of the checks; rank 0 leaves the verdicts in a file. They end at once when they are asked to stop."""
    layout = layout_of(scope.config.parallel, model_spec(scope.config).num_layers)
    users = layout_of(config.parallel, model_spec(config).num_layers)
    with started_rank(scope.config, layout) as setup:
        cap_bytes = config.plan.memory_bytes or memory_for_rank(setup.mesh.device, users.world_size)
        console = Console(stderr=True, quiet=setup.mesh.rank != 0, highlight=False)
        trainer = Trainer(scope.config, setup.mesh)
        coefficients = run_coefficients(trainer, cache, setup.threads, console, config.data.max_document_tokens)
        del trainer
        verdicts = run_checks(
            config,
            scope,
            setup.mesh,
            coefficients,
            setup.memory_cap_bytes,
            cap_bytes,
            lambda name: console.print(f"checking {name}"),
        )
        if setup.mesh.rank == 0:
            answer.write_bytes(msgspec.json.encode(verdicts))
    return 0
