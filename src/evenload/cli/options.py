"""Parts that commands share: requests whose fields are options, values as people write them (`128k`, `dp=8,pp=4`),
checks of files before the work begins, lines of output and progress bars."""

import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evenload.config.train_config import TrainConfig, load_train_config
from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout, read_layout_text
from evenload.types.text import counted

# ruff: noqa: RUF009  (`argument` makes a field, whose default is no call)
_Request = TypeVar("_Request")
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
COUNTS = "128k = 131072: 1k is 1024, 1M is 1024k."
"""For `--help`."""


def parse_tokens(option: str, text: str) -> int:
    """Read a count; `option` is named by errors."""
    match = re.fullmatch(r"(-?\d[\d_,]*(?:\.\d+)?)\s*([kKmMgG]?)", text.strip())
    if not match or (match[2] == "" and "." in match[1]):
        raise ConfigError(f"{option} is '{text}'; give a number of tokens, such as 131072 or 128k (1k = 1024)")
    count = Fraction(match[1].replace("_", "").replace(",", "")) * _UNITS[match[2].lower()]
    if count.denominator != 1:
        raise ConfigError(f"{option} is '{text}', which is {float(count)} tokens (1k = 1024); give a whole number")
    return int(count)


def parse_layout(text: str, num_layers: int, num_devices: int) -> ParallelLayout:
    """Read sizes of parallel dimensions; those not named are 1, dp is what the others leave of the devices."""
    written = read_layout_text(text)
    if "dp" in written.sizes:
        return written.layout(num_layers)
    rest, has_devices = written.ranks_per_replica, written.devices is not None
    if num_devices % rest or (has_devices and rest != num_devices):
        which = f", there are {num_devices}; it has no replicas"
        which = which if has_devices else f" a replica, which does not divide {num_devices}"
        raise ConfigError(f"layout '{text}' takes {counted(rest, 'device')}{which}")
    return written.layout(num_layers, **({} if has_devices else {"dp": num_devices // rest}))


def argument(metavar: str, help: str, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"typer": typer.Argument(metavar=metavar, help=help)})


def option(panel: str | None, help: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Declare a field of a request as an option of its command, in a panel of its help; `default` MISSING = needed."""
    return field(default=default, metadata={"typer": typer.Option(*names, help=help, rich_help_panel=panel, **more)})


def command_of(request: type[_Request], run: Callable[[_Request], None]) -> Callable[..., None]:
    """Make the function that typer turns into a command: a parameter per field of `request`, and as its help the
    docstring of `run`, with the lines of a paragraph joined, and indented blocks as they are."""
    hints = get_type_hints(request)

    def command(**values: Any) -> None:
        run(request(**values))

    own_first = sorted(fields(request), key=lambda one: one.name not in request.__annotations__)  # type: ignore[arg-type]
    command.__annotations__ = {one.name: Annotated[hints[one.name], one.metadata["typer"]] for one in own_first}
    defaults = {one.name: inspect.Parameter.empty if one.default is MISSING else one.default for one in own_first}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
            for name, annotation in command.__annotations__.items()
        ]
    )
    paragraphs = (inspect.getdoc(run) or "").split("\n\n")
    command.__doc__ = "\n\n".join(one if one.startswith("    ") else " ".join(one.splitlines()) for one in paragraphs)
    return command


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The configuration of a run that a command starts from."""

    config: Path = argument("CONFIG.toml", "Settings of a run of `evenload train`; see docs/configuration.md.")
    overrides: list[str] | None = argument(
        "[section.key=value]...", "Replace settings, for example parallel.pp=2.", default=None
    )

    def load(self) -> TrainConfig:
        return load_train_config(self.config, self.overrides or [])


def calibration_cache() -> Path:
    """Return where measured costs are kept between runs; called by the launcher, whose environment the user set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenload" / "calibration"


def shown_name(path: str) -> str:
    """Return a file's name as text that every file can hold: bytes that are no text are escaped."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def require_writable(*paths: Path | None) -> None:
    """Check output files by opening them; None stands for an option that was not given. Files keep what they hold."""
    for path in filter(None, paths):
        with _writing(path):
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise ConfigError(f"cannot write {path}: its folder does not exist or it is a folder")
            existed = path.exists()
            path.open("ab").close()
            if not existed:
                path.resolve().unlink()  # what a link leads to


def require_writable_directory(path: Path, setting: str) -> None:
    """Check a directory that a run will write into, without making it; `setting` is its name, for messages."""
    nearest = path.absolute()
    try:
        while not nearest.exists():
            if nearest.is_symlink():
                raise ConfigError(
                    f"{setting} is {path}, but {nearest} is a link to {os.readlink(nearest)}, which leads nowhere; "
                    "make that directory, or remove the link"
                )
            nearest = nearest.parent
        if not nearest.is_dir():
            raise ConfigError(f"{setting} is {path}, but {nearest} is a file; choose another directory")
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ConfigError(
            f"{setting} is {path}, but nothing can be written to {nearest} ({error.strerror or error}); choose another "
            "directory"
        ) from error


def indented_json(content: Any) -> bytes:
    """Encode a struct, or what holds structs, as JSON for people."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user named; `ConfigError` where it cannot be written."""
    with _writing(path):
        path.write_bytes(content)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def print_lines(console: Console, *lines: str) -> None:
    """Print lines that are not empty as they are: unwrapped, without markup."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[int, int | None, str], None]]:
    """Show a bar while the work goes on, on a terminal only; yields what moves it: steps done, all, description."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_hidden = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=escape(what))
