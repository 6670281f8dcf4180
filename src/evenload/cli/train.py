"""`evenload train`: train a Hugging Face decoder as a TOML file says."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from evenload.errors import require_train_extra


def train_command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="Settings of the run; see docs/configuration.md.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value]...", help="Replace settings, for example train.steps=20."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes to start here; default: as many as the layout needs.")
    ] = None,
) -> None:
    """Train a Hugging Face decoder on documents of any length.

    The smallest CONFIG.toml, here of a folder of text files, read as bytes, and random weights:

        \\[model]
        path = "config.json"  # or a Hugging Face directory, or a name on the Hub
        random_init = true
        \\[data]
        sources = \\["corpus"]
        max_document_tokens = 8192
        batch_documents = 64
        \\[train]
        output_dir = "runs/first"
        steps = 100

    Starts its own processes on this machine, one per rank of \\[parallel]. Under torchrun (one machine or many)
    it is one rank of that job:

        evenload train config.toml parallel.pp=2 train.steps=100

        torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
            -m evenload.cli.main train config.toml

    SIGTERM, SIGHUP or Ctrl-C: finishes the running step, saves a checkpoint and says how to go on; exit code 128 +
    signal. A second one ends at once.

    Writes metrics.jsonl, report.html, trace.json, plan.json, checkpoints/ and model/ into train.output_dir.
    """
    from evenload.cli.run_lines import resume_command
    from evenload.cli.train_run import train_run
    from evenload.config.train_config import load_train_config

    require_train_extra("evenload train")
    settings = load_train_config(config, overrides or [])
    command = resume_command(sys.orig_argv, is_resumed=settings.train.resume)
    number = train_run(settings, name=str(config), command=command, nproc=nproc)
    sys.exit(128 + number if number else 0)
