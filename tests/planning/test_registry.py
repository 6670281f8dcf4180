"""Strategies from outside: by `register`, and by an entry point of an installed package."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.planning.strategies.registry import STRATEGIES, strategy_named
from evenload.planning.strategies.strategy import Strategy
from evenload.types.base import Registry

LENGTHS = Path(__file__).parents[2] / "examples" / "lengths" / "github_dirs.npy.gz"


def strategy(name: str) -> Strategy:
    return Strategy(name=name, description="", plan=lambda problem: ())


def strategies(*records: Strategy, group: str = "evenload.no_such_group") -> Registry[Strategy]:
    return Registry("strategy", Strategy, group, records)


def test_names_are_unique_and_misspelt_ones_get_the_nearest():
    result = strategies(strategy("even"))
    result.register(strategy("odd"))
    assert list(result) == ["even", "odd"]
    with pytest.raises(ConfigError, match="strategy 'odd' exists already"):
        result.register(strategy("odd"))
    with pytest.raises(ConfigError, match=r"unknown strategy 'evn'; did you mean 'even'\? available: even, odd"):
        result.named("evn")
    with pytest.raises(ConfigError, match="a function, expected a Strategy"):
        result.register(strategy)  # type: ignore[arg-type]
    assert strategy_named("wlb") is STRATEGIES["wlb"]


def test_a_strategy_has_one_plan_function():
    with pytest.raises(ConfigError, match="one of plan and search"):
        Strategy(name="none", description="")


def install(folder: Path, code: str, entry_points: str) -> None:
    """A package and its metadata, as pip leaves them."""
    (folder / "toy_package.py").write_text(textwrap.dedent(code))
    metadata = folder / "toy_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(textwrap.dedent(entry_points))


TOY = """
import dataclasses
from evenload.schedule.static_schedules import GPIPE
from evenload.planning.packing import assign_in_turn
from evenload.planning.strategies.strategy import Strategy

def plan_toy(problem):
    return assign_in_turn(problem, [[index] for index in range(len(problem.num_tokens))])

TOY = Strategy(name="toy", description="every document alone", plan=plan_toy)
TOY_RULE = dataclasses.replace(GPIPE, name="toy_rule", description="GPipe by another name", tried_by_auto=True)
"""


def plan(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`evenload plan` in a process of its own."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\nfrom evenload.cli.main import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", program, "plan", str(LENGTHS), "--model", "llama-7b", "--cluster", "h100x8"]
    command += ["--layout", "dp=2,pp=4", "--context", "8k", "--overlong", "truncate", "--documents", "32", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_package_adds_a_strategy_and_a_schedule_by_entry_points(tmp_path):
    points = "[evenload.strategies]\ntoy = toy_package:TOY\n[evenload.schedules]\ntoy_rule = toy_package:TOY_RULE\n"
    install(tmp_path, TOY, points)
    run = plan(
        "--strategy", "toy,auto", "--json", str(tmp_path / "a.json"), "--set", "schedule=toy_rule", folder=tmp_path
    )
    assert run.returncode == 0, run.stderr
    for name, message in (("toyy", "did you mean 'toy'?"), ("toy", "did you mean 'toy_rule'?")):
        misspelt = plan("--strategy", name, "--set", "schedule=toy_ruel", folder=tmp_path)
        assert misspelt.returncode == 2
        assert message in misspelt.stderr


def test_a_broken_package_is_named(tmp_path):
    install(tmp_path, "import no_such_module", "[evenload.strategies]\ntoy = toy_package:TOY\n")
    run = plan("--strategy", "balanced", folder=tmp_path)
    assert run.returncode == 2
    assert (
        "entry point evenload.strategies: toy = toy_package:TOY of package toy-package cannot be loaded" in run.stderr
    )
