"""`evenload lengths`: what the user's document lengths look like, before anything is planned."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from evenload.cli.options import COUNTS, parse_tokens, require_writable, shown_name, write_output
from evenload.cli.plan_arguments import (
    SOURCE_HELP,
    IncludeOption,
    OnCorruptOption,
    RecordOption,
    TokenizerOption,
    length_source,
    unit_line,
)
from evenload.data.lengths import DEFAULT_WINDOWS, profile_lengths, require_windows
from evenload.report.lengths import LengthsTable, write_lengths_page, write_lengths_png

PIPED_WIDTH = 140
"""Columns of the tables when the output is not a terminal."""


def lengths_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    window: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS",
            help=f"A context window; repeat for several. {COUNTS} Default: 4k, 8k, ... 1M.",
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    record: RecordOption = None,
    include: IncludeOption = None,
    on_corrupt: OnCorruptOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures; it needs no network.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture; needs pip install 'evenload\\[png]'.")] = None,
) -> None:
    """Show how long your documents are, and what a context window would cut.

    Counts documents, tokens and attention work by length. Attention work is the
    number of query-key pairs, about half the square of a document's length.
    Where it lies in few long documents, packing by token counts leaves devices
    waiting; 'evenload plan' shows how much that costs.

    [bold]Example[/bold]:

    evenload lengths examples/lengths/github_dirs.npy.gz --html lengths.html

    [bold]How to read it[/bold]:

    "half of the tokens lie in the 108 longest documents (1.0 %)": these decide
    the step time, unless they are cut into slices.

    Window 128K, tokens beyond 54.4M, 41.1 %: truncating documents to 128K
    tokens throws 41.1 % of the data away.

    Exit code: 0 ok, 2 wrong input.
    """
    require_writable(json_file, html, png)
    windows = tuple(parse_tokens("--window", text) for text in window or ()) or DEFAULT_WINDOWS
    require_windows(windows)
    asked = length_source(source, tokenizer=tokenizer, record=record, include=include, on_corrupt=on_corrupt)
    # Counting the tokens of a text source takes time; the spinner shows on terminals only.
    with Console(stderr=True).status(f"reading {escape(source)}"):
        table = asked.read()
    source = shown_name(source)
    profile = profile_lengths(table.lengths, windows)
    console = Console() if Console().is_terminal else Console(width=PIPED_WIDTH)
    title = f"evenload {version('evenload')} lengths: {source}"
    title += f" (tokeniser {table.tokenizer})" if table.tokenizer else ""
    for line in filter(None, (title, unit_line(table))):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(LengthsTable(profile, table.unit), highlight=False)
    if json_file:
        inputs = {"source": source, "unit": table.unit, "tokenizer": table.tokenizer}
        content = {"version": version("evenload"), "inputs": inputs, **msgspec.to_builtins(profile)}
        write_output(json_file, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    name = f"Document lengths in {table.unit}: {source}"
    if html:
        write_lengths_page(html, name, profile, table.unit)
    if png:
        write_lengths_png(png, name, profile, table.unit)
