"""`evenload lengths`: what the user's document lengths look like, before anything is planned."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console

from evenload.cli.options import (
    COUNTS,
    argument,
    command_of,
    indented_json,
    option,
    parse_tokens,
    print_lines,
    require_writable,
    shown_name,
    write_output,
)
from evenload.cli.plan_request import SOURCE_HELP, DocumentOptions, length_source, unit_message
from evenload.data.lengths import DEFAULT_WINDOWS, profile_lengths, require_windows
from evenload.report.lengths import LengthsTable, write_lengths_page

# ruff: noqa: RUF009  (`option` makes a field, whose default is no call)
PIPED_WIDTH = 140
"""Columns of the tables when the output is not a terminal."""


@dataclass(frozen=True, kw_only=True)
class LengthsRequest(DocumentOptions):
    """What `evenload lengths` is to show."""

    source: str = argument("SOURCE", SOURCE_HELP)
    window: list[str] | None = option(
        None, f"A context window; repeat for several. {COUNTS} Default: 4k, 8k, ... 1M.", metavar="TOKENS"
    )
    json_file: Path | None = option(None, "Write all figures as JSON.", "--json")
    html: Path | None = option(None, "Write a page with pictures; it needs no network.")


def show_lengths(request: LengthsRequest) -> None:
    """Show how long your documents are, and what a context window would cut.

    Counts documents, tokens and attention work by length. Attention work is the
    number of query-key pairs, about half the square of a document's length.
    Where it lies in few long documents, packing by token counts leaves devices
    waiting; 'evenload plan' shows how much that costs.

    [bold]Example[/bold]: evenload lengths examples/lengths/github_dirs.npy.gz --html lengths.html

    Exit code: 0 ok, 2 wrong input.
    """
    require_writable(request.json_file, request.html)
    windows = tuple(parse_tokens("--window", text) for text in request.window or ()) or DEFAULT_WINDOWS
    require_windows(windows)
    source = length_source(request.source, request)
    table = source.read()
    shown = shown_name(request.source)
    profile = profile_lengths(table.sequence_lengths, windows)
    console = Console() if Console().is_terminal else Console(width=PIPED_WIDTH)
    tokenizer = f" (tokeniser {table.tokenizer})" if table.tokenizer else ""
    print_lines(console, f"evenload {version('evenload')} lengths: {shown}{tokenizer}", unit_message(table))
    console.print(LengthsTable(profile, table.unit), highlight=False)
    if request.json_file:
        inputs = {"source": shown, "unit": table.unit, "tokenizer": table.tokenizer}
        content = {"version": version("evenload"), "inputs": inputs, **msgspec.to_builtins(profile)}
        write_output(request.json_file, indented_json(content))
    if request.html:
        write_lengths_page(request.html, f"Document lengths in {table.unit}: {shown}", profile, table.unit)


lengths_command = command_of(LengthsRequest, show_lengths)
