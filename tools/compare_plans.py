"""Proof that plans stay the same while the code moves: record them in two trees, compare; and time planning in both.

    TREE/.venv/bin/python tools/compare_plans.py record OUT.json
    python tools/compare_plans.py diff BEFORE.json AFTER.json
    python tools/compare_plans.py time BEFORE_TREE AFTER_TREE [--alternations 7]

`record` plans with the `evenload` that its interpreter imports. Only the command line is called (the function that the
tree's pyproject.toml names, in this process), because commands and files are fixed while modules move. Of every case of
the grid (plan_grid.py) it keeps the exit code, the messages, all figures of `--json` and, of every step of
`--emit-plan`, the plan's digest, a hash of everything in the file that is no float, and sums of the floats. Left out is
what two runs of the same code differ in: planning times, the table that shows them and the version. Everything is read
and written in a temporary folder. Takes one to three minutes of one core.

`diff` prints every difference (case, field, both values) and exits with 1 if there is one. Floats may differ by 1e-9 of
their size, everything else must be equal.

`time` starts both trees once, each with its own .venv where it has one, and lets them plan the same batch in turns, so
that other work on the machine meets both. A time is `plan_time_s` of `--json`, the best of three; the table has the
medians over the alternations and the median and quartiles of their ratios (after / before).
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plan_grid import Case, grid, write_inputs

TOLERANCE = 1e-9
CHANGING = ("plan_time_s", "version")
"""Keys of `--json` that say nothing about the plan."""


def command_line() -> Callable[[list[str]], object]:
    """The function behind the command `evenload` of the tree that this interpreter imports."""
    package = importlib.import_module("evenload")
    tree = Path(str(package.__file__)).resolve().parents[2]
    scripts = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["evenload"].partition(":")
    return getattr(importlib.import_module(module), function)


def call(main: Callable[[list[str]], object], arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
            code = 0
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    return code, out.getvalue(), err.getvalue()


def flat(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of JSON by path; entries of a list that have a name go by it."""
    entries: list[tuple[str, object]] | None = None
    if isinstance(value, dict):
        entries = [(str(key), inner) for key, inner in value.items() if key not in CHANGING]
    elif isinstance(value, list):
        entries = [(str(e["name"]) if isinstance(e, dict) and "name" in e else str(i), e) for i, e in enumerate(value)]
    if entries is None:
        yield path, value
        return
    if not entries:
        yield path, "empty"
    for key, inner in entries:
        yield from flat(inner, f"{path}/{key}" if path else key)


def plan_figures(plan: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is compared of one step of a plan file."""
    where = f"plan/{plan['strategy']}/step {plan['step']}"
    yield f"{where}/digest", plan.pop("digest")
    yield from flat(plan.pop("predicted"), f"{where}/predicted")
    floats: list[float] = []
    exact = [(path, floats.append(leaf) if isinstance(leaf, float) else leaf) for path, leaf in flat(plan)]
    yield f"{where}/content", hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:16]
    yield f"{where}/float_sum", math.fsum(floats)
    yield f"{where}/float_moment", math.fsum(index * number for index, number in enumerate(floats))


def recorded(main: Callable[[list[str]], object], case: Case) -> dict[str, Any]:
    """Everything that is compared of a case, by field."""
    arguments = list(case.arguments)
    if case.run:
        Path("run.toml").write_text(case.run)
    files = {"--json": Path("out.json"), "--emit-plan": Path("plans.json")}
    for option, path in files.items():
        path.unlink(missing_ok=True)
        if option == "--json" or arguments[0] == "plan":
            arguments += [option, str(path)]
    code, out, err = call(main, arguments)
    # Lines of tables begin with a space; their figures are those of the JSON and planning times.
    said = [line for line in out.splitlines() if line.strip() and not line.startswith(" ")]
    said[:1] = [re.sub(r"^evenload \S+ ", "", line) for line in said[:1]]
    found: dict[str, Any] = {"exit": code, "err": err, "out": "\n".join(said)}
    if files["--json"].exists():
        found |= flat(json.loads(files["--json"].read_bytes()))
    if files["--emit-plan"].exists():
        for plan in json.loads(files["--emit-plan"].read_bytes())["plans"]:
            found |= plan_figures(plan)
    return found


def record(out: Path) -> None:
    """Run the grid and write what it gave."""
    os.environ |= {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    out, main, cases = out.resolve(), command_line(), list(grid())
    assert len({case.name for case in cases}) == len(cases), "two cases have the same name"
    found, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs()
        for case in cases:
            started = time.process_time()
            found[case.name] = recorded(main, case)
            seconds[case.name] = time.process_time() - started
    out.write_text(json.dumps(found, indent=0) + "\n")
    say(f"{len(cases)} cases, {sum(map(len, found.values())):,} fields, {sum(seconds.values()):.0f} s of CPU: {out}")
    plans = sum(field.endswith("/digest") for fields in found.values() for field in fields)
    codes = {code: sum(fields["exit"] == code for fields in found.values()) for code in (0, 1, 2, 3)}
    say(f"{plans:,} plans; cases by exit code: {codes}")
    for name in sorted(seconds, key=seconds.__getitem__)[-5:]:
        say(f"slow: {seconds[name]:.1f} s {name}")


def same(one: Any, other: Any) -> bool:
    """Equal, or floats within the tolerance."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and one == other


def diff(before: Path, after: Path) -> int:
    """Print all differences and return how many."""
    one, other = json.loads(before.read_bytes()), json.loads(after.read_bytes())
    count, compared, differing = 0, 0, set()
    for case in dict.fromkeys((*one, *other)):
        fields, others = one.get(case, {}), other.get(case, {})
        for field in dict.fromkeys((*fields, *others)):
            compared += 1
            values = fields.get(field, "(missing)"), others.get(field, "(missing)")
            if not same(*values):
                count += 1
                differing.add(case)
                say(f"{case}\n  {field}\n    {values[0]!r}\n    {values[1]!r}")
    say(f"{count:,} of {compared:,} fields differ, in {len(differing)} of {len(one.keys() | other.keys())} cases")
    return count


TIMED = {
    f"{name}, {documents:,} documents, {cluster}": "window.npy --model llama-7b --layout dp=8,pp=4 --context 32k "
    f"--cluster {cluster} --documents {documents} --strategy {name} --json out.json"
    for cluster, names, sizes in (
        ("b200x32", ("slimpack", "auto", "wlb", "best_fit"), (512, 2_048)),  # memory does not bind
        ("h100x32", ("slimpack", "auto"), (512,)),  # it does
    )
    for name in names
    for documents in sizes
}


def serve() -> None:
    """One tree of `time`: plans the case named on a line of stdin, answers with seconds."""
    main, answer = command_line(), sys.stdout
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs()
        answer.write(f"{importlib.import_module('evenload').__file__}\n")
        answer.flush()
        for line in sys.stdin:
            times = []
            for _ in range(3):
                code, _, err = call(main, ["plan", *TIMED[line.rstrip("\n")].split()])
                assert code == 0, err
                times.append(json.loads(Path("out.json").read_bytes())["strategies"][0]["plan_time_s"])
            answer.write(f"{min(times)}\n")
            answer.flush()


def start(tree: Path) -> subprocess.Popen[str]:
    """A process that plans with a tree."""
    python = tree / ".venv" / "bin" / "python"
    command = [str(python if python.exists() else sys.executable), str(Path(__file__).resolve()), "serve"]
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    imported = ask(child, None)
    if not Path(imported).resolve().is_relative_to(tree / "src"):
        stop(child)
        sys.exit(f"{tree}: its interpreter imports {imported}; make TREE/.venv import TREE/src")
    return child


def ask(child: subprocess.Popen[str], line: str | None) -> str:
    """A line of a child's, after one for it."""
    assert child.stdin is not None
    assert child.stdout is not None
    if line is not None:
        child.stdin.write(f"{line}\n")
        child.stdin.flush()
    return child.stdout.readline().strip() or sys.exit("a tree's process ended; its message stands above")


def stop(child: subprocess.Popen[str]) -> None:
    """End a child by ending its input."""
    assert child.stdin is not None
    child.stdin.close()
    child.wait()


def compare_times(before: Path, after: Path, alternations: int) -> None:
    """Print planning times of two trees and their ratios."""
    children = [start(before.resolve()), start(after.resolve())]
    for case in TIMED:
        for child in children:
            ask(child, case)  # the first call pays for imports and caches
    times: dict[str, list[tuple[float, float]]] = {case: [] for case in TIMED}
    for turn in range(alternations):
        for case in TIMED:
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            taken = {index: float(ask(children[index], case)) for index in order}
            times[case].append((taken[0], taken[1]))
    for child in children:
        stop(child)
    say(f"{'':<38} {'before':>10} {'after':>10} {'ratio':>7}   quartiles")
    for case, pairs in times.items():
        first, second = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        low, middle, high = statistics.quantiles([after_s / before_s for before_s, after_s in pairs], n=4)
        say(f"{case:<38} {first:>7.1f} ms {second:>7.1f} ms {middle:>7.3f}   {low:.3f} .. {high:.3f}")


def say(line: str) -> None:
    """A line on stdout."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="plan the grid").add_argument("out", type=Path)
    for name, what in (("diff", "compare two records"), ("time", "compare planning times of two trees")):
        command = commands.add_parser(name, help=what)
        command.add_argument("before", type=Path)
        command.add_argument("after", type=Path)
    command.add_argument("--alternations", type=int, default=7)
    commands.add_parser("serve", help="used by time")
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.out)
    elif asked.command == "diff":
        sys.exit(diff(asked.before, asked.after) > 0)
    elif asked.command == "time":
        compare_times(asked.before, asked.after, asked.alternations)
    else:
        serve()


if __name__ == "__main__":
    main()
