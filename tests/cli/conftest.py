"""Commands from this process, whose ranks start with everything imported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import run, write_lengths
from rank_server import rank_context
from small_run import LONG_TAILED_TEXTS, write_small_costs, write_small_run


@pytest.fixture
def small_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a tiny model, documents, config.toml and cost.json of a layout into the working directory."""

    def write(settings: str, **layout: int) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        write_small_run(tmp_path, LONG_TAILED_TEXTS, settings, tied=True)
        write_small_costs(tmp_path, **layout)
        return tmp_path

    return write


@pytest.fixture
def table(tmp_path) -> str:
    return write_lengths(tmp_path)


@pytest.fixture
def command_here(capfd: pytest.CaptureFixture[str]):
    """Runs a command of `evenload` here, with real ranks from the tests' server: a start of its own imports for ten
    seconds of a core, which test_train_command.py does often enough."""

    def command(*arguments: str) -> tuple[int, str, str]:
        """Exit code and what the command itself, not its ranks, wrote to stdout and stderr."""
        rank_context()
        capfd.readouterr()
        return run(*arguments), *capfd.readouterr()

    return command


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks must not start, and what is checked before is checked in this process, which has imported it all."""
    monkeypatch.setattr("evenload.cli.launch.run_local", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr("evenload.cli.launch.start_fork_server", lambda *_: None)
    monkeypatch.setattr("evenload.cli.launch.call_in_child", lambda function, *arguments: function(*arguments))
