"""What docs/plan.md and docs/guide.md show and say of `evenload plan` and `evenload lengths`: output and sentences.

    python tools/make_plan_pages.py [--without-search]      part of `make docs`; minutes, nearly all of them the search

Every block stands between two comments of its page and is made anew from the command that the page names: the output
as a terminal of the page's width shows it, and the sentences with figures from the same command's `--json`. The search
has two hours, so that it ends by itself on any machine and the page says the same. A test runs everything but the
search and compares; of the search it runs the winner.
"""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenload.report.table import format_losses
from evenload.report.units import format_percent, format_seconds

ROOT = Path(__file__).resolve().parent.parent
PLAN, GUIDE = ROOT / "docs" / "plan.md", ROOT / "docs" / "guide.md"
TABLE = "examples/lengths/github_dirs.npy.gz"
SIZES = ("--documents", "512", "--steps", "4")
PLAN_COMMAND = ("plan", TABLE, "--model", "llama-7b", "--cluster", "h100x32", "--layout", "dp=4,pp=8",
               "--context", "16384", "--overlong", "truncate", *SIZES)  # fmt: skip
MODEL = ("--model", "llama-13b", "--cluster", "h100x64")
CONTEXT = ("--context", "131072", "--overlong", "truncate", *SIZES)
STRATEGIES = ("plan", TABLE, *MODEL, "--layout", "dp=4,pp=4,tp=4", *CONTEXT,
              "--strategy", "padded,best_fit,fixed_greedy,balanced,wlb,slimpack,auto")  # fmt: skip
# However slow the machine: a page does not depend on it.
SEARCH = ("plan", TABLE, *MODEL, "--search-layout", "--search-seconds", "7200", *CONTEXT,
          "--strategy", "best_fit,slimpack,auto")  # fmt: skip
LENGTHS = ("lengths", TABLE, "--window", "131072")
PLAN_WIDTH, GUIDE_WIDTH = 118, 118
_SHOWN_LAYOUTS = 6


def main() -> None:
    """Both pages."""
    put(PLAN, {"plan output": plan_output()})
    strategies = run(STRATEGIES, GUIDE_WIDTH)
    put(GUIDE, cheap_blocks(strategies))
    if "--without-search" in sys.argv[1:]:
        output, _ = run(winner(GUIDE.read_text(encoding="utf-8")), GUIDE_WIDTH)
        put(GUIDE, {"winner output": fenced(output)})
    else:
        put(GUIDE, search_blocks(strategies, run(SEARCH, GUIDE_WIDTH)))
        output, _ = run(winner(GUIDE.read_text(encoding="utf-8")), GUIDE_WIDTH)
        put(GUIDE, {"winner output": fenced(output)})


def plan_output() -> str:
    """The example of docs/plan.md."""
    return fenced(run(PLAN_COMMAND, PLAN_WIDTH)[0])


def cheap_blocks(strategies: tuple[str, Any]) -> dict[str, str]:
    """Blocks of the guide that seconds suffice for.

    Args:
        strategies: output and figures of `STRATEGIES`.
    """
    lengths, found = run(LENGTHS, GUIDE_WIDTH)
    output, figures = strategies
    return {
        "lengths output": fenced(lengths.partition("\n\n")[0]),
        "lengths figures": lengths_figures(found),
        "strategies output": fenced(output),
        "strategies figures": strategies_figures(by_name(figures)),
    }


def search_blocks(strategies: tuple[str, Any], search: tuple[str, Any]) -> dict[str, str]:
    """Blocks of the guide that need the search over layouts."""
    output, figures = search
    layouts, judged = output_parts(output)
    return {
        "layouts output": fenced(f"{shorten_layouts(layouts)}\n{said_of_layouts(layouts)}"),
        "winner output": fenced(judged),  # names the layout that wins, for `winner`
        "layouts figures": layouts_figures(figures),
        "decision figures": decision_figures(by_name(strategies[1]), figures),
    }


def lengths_figures(found: Mapping[str, Any]) -> str:
    """What the profile means for a window of 128K."""
    (window,) = found["windows"]
    half = found["half_of_tokens"]["documents"]
    beyond = format_percent(window["tokens_beyond"] / found["tokens"])
    return filled(
        f"Half of the documents have at most {found['median']:,.0f} tokens; half of the tokens lie in {half:,} of "
        f"{found['documents']:,} documents. A window of 128K is shorter than "
        f"{format_percent(window['longer_documents'] / found['documents'])} of the documents, and those hold "
        f"{format_percent(window['longer_tokens'] / found['tokens'])} of all tokens. That is a decision to take before "
        f"any other: `--overlong truncate` loses {beyond} of the tokens, `split` keeps them but breaks attention "
        "between the pieces, `drop` takes the documents out, `error` (the default) makes you choose. We truncate here. "
        "What is left is still a long tail: with so few documents at the full context, one of them alone is longer "
        "than hundreds of the others together."
    )


def strategies_figures(rows: Mapping[str, Any]) -> str:
    """How to read the comparison."""
    best_fit, auto = rows["best_fit"], rows["auto"]
    return filled(
        "Read three things. *of bound* is how much of the step is useful work: what no schedule can beat. "
        "*vs best_fit* is what changing the strategy alone brings, over `best_fit` in the windows that suit it best, a "
        "row of its own where these are not the ones asked for. *bubble* is the share of the ranks' time in which "
        f"nothing is computed: {percent(best_fit, 'bubble_fraction')} with `best_fit`, "
        f"{percent(auto, 'bubble_fraction')} with `auto`. `best_fit` fills windows with equal tokens, and a window "
        "with one document of 128K tokens has many times the work of a window of short ones, so packs wait for each "
        "other. In a wider terminal *lost to* names the two largest causes: of `best_fit` "
        f"{format_losses(best_fit['time_split'])}; of `auto` {format_losses(auto['time_split'])}."
    )


def layouts_figures(figures: Mapping[str, Any]) -> str:
    """Which layout wins, and what the best of the other kind is."""
    fitting = [layout for layout in figures["layouts"] if layout["feasible"]]
    best = fitting[0]
    split = by_name(figures)[figures["best"]]["time_split"]
    offload = split["offload_s"] / sum(split.values())
    moved = f", with activations in host memory for {format_percent(offload)} of the step" if offload > 0.0005 else ""
    return filled(
        f"{named(best['layout'])} wins ({best['label']}){moved}. {other_kind(fitting)} Layouts that are out say by how "
        "many GiB and on which rank. The second table compares the strategies in the layout that wins."
    )


def decision_figures(habit: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """The decision, in figures of both commands."""
    rows = by_name(figures)
    best, best_fit = rows[figures["best"]], rows["best_fit"]
    fitting = [layout for layout in figures["layouts"] if layout["feasible"]]
    slower = habit["best_fit"]["mean_step_time_s"] / best["mean_step_time_s"]
    points = (
        f"**Layout**: {named(fitting[0]['layout'])}: {seconds(best)} a step, {percent(best, 'fraction_of_bound')} of "
        f"the bound. The layout of section 2 with `best_fit` takes {seconds(habit['best_fit'])}, {slower:.2f} times as "
        f"long for the same gradients. The layout alone gives `best_fit` {seconds(best_fit)}.",
        f"**Strategy**: `auto` {seconds(rows['auto'])}, `slimpack` {seconds(rows['slimpack'])}, `best_fit` "
        f"{seconds(best_fit)}, which loses most to {format_losses(best_fit['time_split'])}.",
        f"**The other kind of layout**: {other_kind(fitting)} In the layout of section 2 `auto` is "
        f"{habit['auto']['speedup_over_baseline']:.2f} times as fast as `best_fit` in its best windows: where there is "
        "a pipeline, the packer matters most.",
        f"**What the rest is lost to** in the best plan: {format_losses(best['time_split'])}.",
    )
    return "".join(filled(point, "- ") for point in points)


def other_kind(fitting: list[Any]) -> str:
    """The best layout with a pipeline where the winner has none, or the best without."""
    has_pipeline = fitting[0]["layout"]["pp"] > 1
    others = [one for one in fitting if (one["layout"]["pp"] > 1) != has_pipeline and one["num_batches"] == 4]
    kind = "without a pipeline" if has_pipeline else "with a pipeline"
    if not others:
        return f"No layout {kind} was tried on all steps."
    behind = others[0]["mean_step_time_s"] / fitting[0]["mean_step_time_s"] - 1
    return f"The best {kind}, {named(others[0]['layout'])}, is {format_percent(behind)} behind."


def run(arguments: tuple[str, ...], width: int) -> tuple[str, Any]:
    """What a command prints in a terminal of so many columns, and what it writes as JSON.

    Raises:
        SystemExit: the command failed, or shows seconds that are not the same twice (the time to plan).
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "evenload.cli.main", *arguments, "--json", str(file)]
        terminal, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 60, width, 0, 0))
        environment = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}
        environment |= {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": str(width), "LINES": "60"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=end, stderr=subprocess.DEVNULL, env=environment)
        os.close(end)
        output = read_all(terminal)
        if process.wait():
            sys.exit(f"tools/make_plan_pages.py: {' '.join(command)} ended with {process.returncode}")
        # A terminal breaks the lines that the command does not.
        lines = (
            textwrap.wrap(line, width) or [""] if len(line) > width else [line.rstrip()] for line in output.splitlines()
        )
        text = "\n".join(line.rstrip() for parts in lines for line in parts)
        if "plan_time_s" in file.read_text() and "plan time" not in text.partition("left out for width")[2]:
            sys.exit(f"tools/make_plan_pages.py: at {width} columns the time to plan is shown; make them fewer")
        return text.strip("\n"), json.loads(file.read_text())


def read_all(terminal: int) -> str:
    """Everything a process writes to its terminal; Linux says EIO at the end."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)


def output_parts(output: str) -> tuple[str, str]:
    """The table of layouts, and the comparison in the one that won, which begins with the line of the command."""
    first, begin, second = output.partition("\nevenload ")
    return first, begin.strip("\n") + second


def shorten_layouts(table: str) -> str:
    """The first layouts, and one that is out."""
    lines = table.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.strip().startswith("──"))
    rows = [line for line in lines[rule + 1 :] if line.strip() and line.split()[0].isdigit()]
    out = next((line for line in rows if " - " in line), None)
    return "\n".join([*lines[: rule + 1], *rows[:_SHOWN_LAYOUTS], "   ...", *([out] if out else [])])


def said_of_layouts(table: str) -> str:
    """The lines below the table: every strategy's layout, and what was looked at."""
    _, begin, lines = table.partition("layout of each strategy:")
    return (begin + lines).rstrip()


def by_name(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of a comparison."""
    return {row["name"]: row for row in figures["strategies"]}


def named(layout: Mapping[str, int]) -> str:
    """dp 8, cp 2, tp 4."""
    return ", ".join(f"{name} {size}" for name, size in layout.items() if size > 1)


def seconds(row: Mapping[str, Any]) -> str:
    """Predicted, of a step."""
    return format_seconds(row["mean_step_time_s"])


def percent(row: Mapping[str, Any], key: str) -> str:
    """A share of a row."""
    return format_percent(row[key])


def filled(text: str, mark: str = "") -> str:
    """Lines of at most 120 characters; a list's point with its mark."""
    words, lines, line = text.split(), [], mark
    for word in words:
        if len(line) + len(word) > 118:
            lines.append(line.rstrip())
            line = " " * len(mark)
        line += word + " "
    return "\n".join([*lines, line.rstrip()]) + "\n"


def fenced(text: str) -> str:
    """As a block of code."""
    return f"```\n{text.rstrip()}\n```\n"


def block_of(page: str, name: str) -> str:
    """What stands between the comments of a block.

    Raises:
        SystemExit: the page has no such block.
    """
    return _parts(page, name)[1]


def winner(page: str) -> tuple[str, ...]:
    """The command that plans in the layout that the page says won the search, without searching."""
    layout = block_of(page, "winner output").partition(", layout ")[2].partition(", ")[0].split()
    search = list(SEARCH)
    at = search.index("--search-layout")
    return (*search[:at], "--layout", ",".join(layout), *search[at + 3 :])  # without --search-seconds and its number


def put(page: Path, blocks: Mapping[str, str]) -> None:
    """Write the blocks into a page."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        before, _, after = _parts(text, name)
        text = before + block + after
    page.write_text(text, encoding="utf-8")


def _parts(text: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: make docs -->\n", f"<!-- end of {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"tools/make_plan_pages.py: a page must have '{begin.strip()}' and '{end.strip()}' once each")
    start, stop = text.index(begin) + len(begin), text.index(end)
    return text[:start], text[start:stop], text[stop:]


if __name__ == "__main__":
    main()
