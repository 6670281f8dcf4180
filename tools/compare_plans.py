"""Prove that plans stay the same while the code moves: record them in two trees, and compare.

    TREE/.venv/bin/python tools/compare_plans.py record OUT.json
    python tools/compare_plans.py diff BEFORE.json AFTER.json

`record` plans with the `evenload` that its interpreter imports. Only the command line is called (the function that the
tree's pyproject.toml names, in this process), because commands and files are fixed while modules move. Of every case of
the grid (plan_grid.py) it keeps the exit code, the messages, all figures of `--json` and, of every step of
`--emit-plan`, the plan's digest, a hash of everything in the file that is no float, and sums of the floats. Left out is
what two runs of the same code differ in: planning times, the table that shows them and the version. Everything is read
and written in a temporary folder. Takes one to three minutes of one core.

`diff` prints every difference (case, field, both values) and exits with 1 if there is one. Floats may differ by 1e-9 of
their size, everything else must be equal.
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
    messages = [line for line in out.splitlines() if line.strip() and not line.startswith(" ")]
    messages[:1] = [re.sub(r"^evenload \S+ ", "", line) for line in messages[:1]]
    result: dict[str, Any] = {"exit": code, "err": err, "out": "\n".join(messages)}
    if files["--json"].exists():
        result |= flat(json.loads(files["--json"].read_bytes()))
    if files["--emit-plan"].exists():
        for plan in json.loads(files["--emit-plan"].read_bytes())["plans"]:
            result |= plan_figures(plan)
    return result


def record(out: Path) -> None:
    """Run the grid and write what it gave."""
    os.environ |= {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    out, main, cases = out.resolve(), command_line(), list(grid())
    assert len({case.name for case in cases}) == len(cases), "two cases have the same name"
    result, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs()
        for case in cases:
            started = time.process_time()
            result[case.name] = recorded(main, case)
            seconds[case.name] = time.process_time() - started
    out.write_text(json.dumps(result, indent=0) + "\n")
    show(f"{len(cases)} cases, {sum(map(len, result.values())):,} fields, {sum(seconds.values()):.0f} s of CPU: {out}")
    plans = sum(field.endswith("/digest") for fields in result.values() for field in fields)
    codes = {code: sum(fields["exit"] == code for fields in result.values()) for code in (0, 1, 2, 3)}
    show(f"{plans:,} plans; cases by exit code: {codes}")
    for name in sorted(seconds, key=seconds.__getitem__)[-5:]:
        show(f"slow: {seconds[name]:.1f} s {name}")


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
                show(f"{case}\n  {field}\n    {values[0]!r}\n    {values[1]!r}")
    show(f"{count:,} of {compared:,} fields differ, in {len(differing)} of {len(one.keys() | other.keys())} cases")
    return count


def show(line: str) -> None:
    """A line on stdout."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="plan the grid").add_argument("out", type=Path)
    two = commands.add_parser("diff", help="compare two records")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.out)
    else:
        sys.exit(diff(arguments.before, arguments.after) > 0)


if __name__ == "__main__":
    main()
