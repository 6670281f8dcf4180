"""A new user's first ten minutes: Evenload installed into an empty environment, and README.md's paths taken in it.

    python benchmarks/fresh_install.py WHEEL_OR_CHECKOUT --python PATH... [--extra train] [--compiler]
        [--find-links DIR] [--constrained] [--append]

For every interpreter a virtual environment is made and filled by pip, with no variable of the caller's but PATH: the
environment's own programs, and with `--compiler` the system's. Then what README.md has a reader type is typed as it
stands there, in a folder that holds nothing but `examples` and `docs`: the plan, `python -m evenload`, a shell's
completion, and with the extra `train` its `config.toml` trained, checked and measured, and its loop; without it, the
line that says what to install. What does not work ends this with its output; nothing is noted then.

What is downloaded is downloaded first, so installing holds no network; of a checkout pip also fetches what builds it,
and that is not apart. Seconds are the processor's, of all processes that a command started: what others do on the
machine meanwhile does not count. They are of one go.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from results import Row, append_rows

ROOT = Path(__file__).resolve().parent.parent
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
LOOP_NEEDS = """
import torch
from transformers import AutoConfig, LlamaForCausalLM
model = LlamaForCausalLM(AutoConfig.from_pretrained("examples/stdlib_demo/model.json"))
tokenizer = "bytes"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
"""What the loop of README.md takes from its reader."""
SMALL_STEP = ("batch_tokens=500_000", "batch_tokens=4_000")


class Wanted(NamedTuple):
    """What is installed, and how.

    Args:
        source: a wheel, a source distribution or a checkout.
        extra: "" or what stands in the brackets.
        compiler: whether the system's programs are on the PATH.
        find_links: a folder of wheels that pip looks at beside the index, or "".
        constrained: take the versions of constraints.txt, as the Makefile does, and compile nothing to bytecode.
    """

    source: Path
    extra: str
    compiler: bool
    find_links: str
    constrained: bool

    @property
    def requirement(self) -> str:
        return f"{self.source}[{self.extra}]" if self.extra else str(self.source)

    @property
    def kind(self) -> str:
        """Of the source: "wheel", "checkout" or "source distribution"."""
        if self.source.is_dir():
            return "checkout"
        return "wheel" if self.source.suffix == ".whl" else "source distribution"

    def pip_options(self) -> list[str]:
        """What every call of pip gets."""
        options = ["--quiet", "--disable-pip-version-check"]
        options += ["--find-links", self.find_links] if self.find_links else []
        return options + (["-c", str(ROOT / "constraints.txt")] if self.constrained else [])


class Environment:
    """A virtual environment in a folder of its own, and commands that see nothing else."""

    def __init__(self, folder: Path, python: str, compiler: bool) -> None:
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        self.programs = folder / "venv" / "bin"
        self.reader = folder / "reader"
        self.reader.mkdir()
        for name in ("examples", "docs"):
            shutil.copytree(ROOT / name, self.reader / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        path = f"{self.programs}:{SYSTEM_PATH}" if compiler else str(self.programs)
        self.variables = {"PATH": path, "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"}

    def call(self, *words: str | Path, expected: int = 0) -> tuple[float, str]:
        """Run a program of the environment in the reader's folder: processor seconds, and what it printed.

        Raises:
            SystemExit: it ended with another code than expected.
        """
        began_s = _processor_seconds()
        done = subprocess.run(
            [self.programs / words[0], *words[1:]], cwd=self.reader, env=self.variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if done.returncode != expected:
            sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}, not {expected}:\n{done.stdout}")
        return _processor_seconds() - began_s, done.stdout

    def installed_bytes(self) -> int:
        """Of all files, pip's own among them."""
        return sum(file.stat().st_size for file in self.programs.parent.rglob("*") if file.is_file())

    def version_of(self, package: str) -> str:
        """As its metadata says."""
        return self.call("python", "-c", f"import importlib.metadata as m; print(m.version({package!r}))")[1].strip()


def _processor_seconds() -> float:
    """Of all children that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Every interpreter in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a wheel, a source distribution or a checkout")
    parser.add_argument("--python", action="append", required=True, metavar="PATH", help="an interpreter to try")
    parser.add_argument("--extra", default="", help='what stands in the brackets: "train"')
    parser.add_argument("--compiler", action="store_true", help="let the environment see the system's programs")
    parser.add_argument("--find-links", default="", metavar="DIR", help="wheels beside the index: PyTorch's for CPUs")
    parser.add_argument("--constrained", action="store_true", help="the versions of constraints.txt, as in `make`")
    parser.add_argument("--append", action="store_true", help="append the rows to benchmarks/results/results.csv")
    options = parser.parse_args()
    wanted = Wanted(options.source.resolve(), options.extra, options.compiler, options.find_links, options.constrained)
    for python in options.python:
        rows, torch = tried(python, wanted)
        for row in rows:
            print(f"{row.case:<90} {row.metric:<12} {row.value:>9.4g} {row.unit}", flush=True)
        if options.append:
            append_rows(rows, torch=torch)


def tried(python: str, wanted: Wanted) -> tuple[list[Row], str]:
    """Install and take all paths: rows of megabytes and processor seconds; and torch's version, "" without it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = Environment(folder, python, wanted.compiler)
        figures: dict[str, tuple[float, str]] = {}
        links: list[str] = []
        if wanted.kind == "wheel":
            held = folder / "held"
            environment.call(
                "python", "-m", "pip", "download", *wanted.pip_options(), "--dest", held, wanted.requirement
            )
            figures["download"] = sum(file.stat().st_size for file in held.iterdir()) / 1e6, "MB"
            links = ["--no-index", "--find-links", str(held)]
        compiled = ["--no-compile"] if wanted.constrained else []
        install = ("python", "-m", "pip", "install", *wanted.pip_options(), *compiled, *links, wanted.requirement)
        figures["install"] = environment.call(*install)[0], "processor s"
        figures["disk"] = environment.installed_bytes() / 1e6, "MB"
        figures |= {path: (seconds, "processor s") for path, seconds in paths_taken(environment, wanted.extra).items()}
        torch = environment.version_of("torch") if wanted.extra else ""
        named = environment.call("python", "-c", "import platform; print(platform.python_version())")[1].strip()
    facts = (
        f"Python {named}", f"{wanted.kind} [{wanted.extra}]" if wanted.extra else wanted.kind,
        "compiler" if wanted.compiler else "no compiler", f"torch {torch}" if torch else "no torch",
        *(["as in make"] if wanted.constrained else []),
    )  # fmt: skip
    return [Row("fresh install", ", ".join(facts), what, *figure, "") for what, figure in figures.items()], torch


def paths_taken(environment: Environment, extra: str) -> dict[str, float]:
    """Processor seconds of every path of README.md."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    planning, training = re.findall(r"```sh\n(.*?)```", page, flags=re.S)
    (toml,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    (loop,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (environment.reader / "config.toml").write_text(toml)
    _complete(environment)
    seconds = {"module": environment.call("python", "-m", "evenload", "--version")[0]}
    (command,) = _commands(planning)
    seconds["plan"] = _typed(environment, command)
    if not extra:
        seconds["train"], said = environment.call("evenload", "train", "config.toml", expected=2)
        if "pip install 'evenload[train]'" not in said or len(said.splitlines()) != 1:
            sys.exit(f"evenload train without torch says:\n{said}")
        return seconds
    seconds |= {command.split()[1]: _typed(environment, command) for command in _commands(training)}
    corpus = environment.reader / "corpus"
    corpus.mkdir()
    for index in range(12):
        (corpus / f"{index}.txt").write_text("A document among others. " * (1 + 5 * index))
    if SMALL_STEP[0] not in loop:
        sys.exit(f"README.md's loop has no {SMALL_STEP[0]}")
    (environment.reader / "loop.py").write_text(
        f"{LOOP_NEEDS}\nif __name__ == '__main__':\n" + re.sub("^", "    ", loop.replace(*SMALL_STEP), flags=re.M)
    )
    return seconds | {"loop": environment.call("python", "loop.py")[0]}


def _commands(block: str) -> list[str]:
    return block.replace("\\\n", " ").strip().splitlines()


def _typed(environment: Environment, command: str) -> float:
    return environment.call(*command.split())[0]


def _complete(environment: Environment) -> None:
    """What bash asks when somebody types `evenload pl` and the tabulator."""
    asked = {"_EVENLOAD_COMPLETE": "complete_bash", "COMP_WORDS": "evenload pl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [environment.programs / "evenload"],
        env=environment.variables | asked,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stdout.split() != ["plan"]:
        sys.exit(f"'evenload pl' completes to {done.stdout!r} {done.stderr}")


if __name__ == "__main__":
    os.nice(5)
    main()
