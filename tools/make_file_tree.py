"""docs/files.md: every file with a line, from the first line of every file's docstring; `make docs` refreshes it.

Lists the files that git knows in src/evenload, native, tools, examples, benchmarks and docs, and folders of tests. A
test fails when the names differ from the page's; the descriptions are whatever they were when this ran last.
"""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "files.md"
HEAD = """# Every file, a line each

Made by `python tools/make_file_tree.py`; do not edit. [architecture.md](architecture.md) says how the folders hang
together.

"""
AS_FOLDERS = ("tests/", "benchmarks/results/", "benchmarks/accuracy/costs/", "benchmarks/accuracy/inputs/")
FOLDERS = ("src/evenload", "native", "tests", "tools", "examples", "benchmarks", "docs")
OTHER = {
    "src/evenload/_native.pyi": "Types of the native core.",
    "src/evenload/py.typed": "Says that the package is typed (PEP 561).",
    "src/evenload/report/report.css": "Style of the pages, light and dark.",
    "docs/site.css": "Width of the pages of the site.",
    "src/evenload/report/report.js": "Draws figures when they are scrolled near, and again when colours change.",
    "native/.clang-format": "Format of the C++ files.",
    "examples/stdlib_demo/demo.toml": "Configuration of the demo.",
    "examples/stdlib_demo/model.json": "The demo's model: a small Llama.",
    "examples/flexpipe/train.toml": "Configuration of its runs.",
    "examples/flexpipe/gpt-3.35b.json": "FlexPipe's GPT of 16 layers.",
    "examples/flexpipe/gpt-13b.json": "FlexPipe's GPT of 40 layers.",
    "examples/flexpipe/gpt-small.json": "The same on a small scale, for a CPU.",
    "benchmarks/peers.txt": "Peers to be installed without their requirements.",
    "src/evenload/explore/prediction_errors.json": "Intervals of predicted step times, made from the ledger.",
    "benchmarks/results": "Rows of every benchmark that a page shows, in the file of its name.",
    "benchmarks/accuracy/cpu.csv": "Signed errors of predictions on CPUs, a row a batch and strategy; rows only grow.",
    "benchmarks/accuracy/gpu.csv": "The same on GPUs.",
    "benchmarks/accuracy/costs": "Cost files from which current rows were predicted.",
    "benchmarks/accuracy/inputs": "Models, layouts, options and batches of current rows.",
    "tests": "Settings of all tests.",
    "tests/attention": "Slices equal whole-document attention.",
    "tests/bench": "What a comparison of strategies says of its measurements.",
    "tests/check": "`evenload check` passes what is right and fails what is broken on purpose.",
    "tests/cli": "Commands as a user runs them: real processes, kills, mistakes.",
    "tests/cost": "Costs and bytes by hand.",
    "tests/data": "Sources, batches, exact resume, the ledger.",
    "tests/dist": "Real gloo processes: every strategy, layout and cut equals plain training; resume.",
    "tests/docs": "Links, file tree and generated pages.",
    "tests/gpu": "The same promises on CUDA; skipped, with the reason, where there is none.",
    "tests/integrations": "`PackedLoader` in other people's loops: Trainer, Accelerate, TRL, examples.",
    "tests/planning": "Planners against invariants and brute force.",
    "tests/explore": "Comparison, layout search, splits of time.",
    "tests/feed": "Steps for a loop: collate, exchange, read ahead.",
    "tests/stepplan": "Finished plans: validity, files, rows of ranks.",
    "tests/support": "Cases and helpers that several folders share.",
    "tests/planning/data": "Length tables of the planner's tests.",
    "tests/calibrate": "Measuring what things cost here.",
    "tests/report": "Pages in a browser, traces, tables, figures.",
    "tests/runtime": "Replay equals plain training for any cuts.",
    "tests/seams": "Our micro-batches in the place of other trainers' own: their contract, installed and removed.",
    "tests/schedule": "No deadlock within the conditions, deadlock outside, memory bound by brute force.",
    "tests/simulate": "Hand-drawn timelines, closed forms, native equals its twin.",
    "tests/suite": "Of the tests themselves.",
    "tests/types": "Catalogues, work curves, files.",
}


def tracked_files() -> list[str]:
    """Paths that git knows below FOLDERS, without empty package markers; of tests and recorded inputs the folders."""
    command = ["git", "ls-files", "--", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [path for path in listed if (ROOT / path).is_file() and not path.endswith("__init__.py")]
    return sorted({str(Path(path).parent) if path.startswith(AS_FOLDERS) else path for path in files})


def file_tree() -> str:
    """Lines of path and description, grouped by folder."""
    lines: list[str] = []
    folder = ""
    for path in sorted(tracked_files(), key=lambda path: (FOLDERS.index(_top(path)), _folder(path), path)):
        if _folder(path) != folder:
            folder = _folder(path)
            lines += ["", f"{folder}/"] if folder != "tests" or not lines or lines[-1] != "" else [f"{folder}/"]
        name = path.removeprefix("tests").lstrip("/") if folder == "tests" else Path(path).name
        lines.append(f"  {name or '*.py':<26} {_description(path)}".rstrip())
    return "```\n" + "\n".join(lines).strip("\n") + "\n```\n"


def listed_paths(text: str) -> set[str]:
    """Paths that a tree names; the inverse of `file_tree`."""
    paths: set[str] = set()
    folder = ""
    for line in text.splitlines():
        if line.startswith("  "):
            name = line.split()[0]
            paths.add(folder if name == "*.py" else f"{folder}/{name}")
        elif line.endswith("/"):
            folder = line.rstrip("/")
    return paths


def _top(path: str) -> str:
    return next(folder for folder in FOLDERS if path == folder or path.startswith(f"{folder}/"))


def _folder(path: str) -> str:
    return "tests" if _top(path) == "tests" else str(Path(path).parent)


def _description(path: str) -> str:
    if path in OTHER:
        return OTHER[path]
    file = ROOT / path
    if path.endswith(".py"):
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        return " ".join(docstring.split("\n\n")[0].split()) if docstring else ""
    if path.endswith(".cpp") and file.with_suffix(".h").is_file():
        return f"Implements {file.stem}.h."
    if path.endswith((".cpp", ".h", ".md")):
        first = file.read_text(encoding="utf-8").splitlines()[0]
        return first.lstrip("/# ")
    return {".gz": "Document lengths.", ".png": "Picture made by make_pictures.py."}.get(file.suffix, "")


def page() -> str:
    """docs/files.md as it should be."""
    return HEAD + file_tree()


def main() -> None:
    """Write the page."""
    TARGET.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
