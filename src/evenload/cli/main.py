"""`evenload`: the command line. One file per command; errors become one line here and nowhere else.

Importing this module must not import torch: planning works without it, so commands that train import their
parts when they run.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from evenload.cli.environment import prepare_environment, with_home
from evenload.cli.init import init_command
from evenload.cli.lengths import lengths_command
from evenload.cli.measure import bench_command, check_command, profile_command
from evenload.cli.plan import plan_command
from evenload.cli.train import train_command
from evenload.errors import EvenloadError

app = typer.Typer(
    name="evenload",
    help="Train large language models fast on documents of very different lengths.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
# In the order in which they are used, which the help keeps.
for name, command in {
    "init": init_command,
    "lengths": lengths_command,
    "plan": plan_command,
    "train": train_command,
    "check": check_command,
    "bench": bench_command,
    "profile": profile_command,
}.items():
    app.command(name)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evenload {version('evenload')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train large language models fast on documents of very different lengths."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 ok, 2 user error, 3 infeasible, 1 a broken plan."""
    try:
        prepare_environment()
        app(args=[with_home(one) for one in (sys.argv[1:] if arguments is None else arguments)])
    except EvenloadError as error:
        sys.stderr.write(f"evenload: error: {' '.join(str(error).split())}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output (head, less) closed early; not an error of ours.
        sys.exit(0)


if __name__ == "__main__":
    main()
