"""Sections of docs/planner.md say where their hand-written figures come from, in a comment under the heading.

`<!-- figures: FILE; ...; once: COMMIT, ... -->`: benchmarks, tests and decisions that hold them, and for what was tried
once and has no rows the commits, which the text names too, with the day. Tables that are made of rows need no comment.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "planner.md"
_SOURCES = re.compile(r"<!-- figures: (.*?) -->")


def sections() -> list[tuple[str, str]]:
    """Heading and text of each; headings in code do not count, the page has none."""
    parts = re.split(r"^#+ (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def figures_by_hand(text: str) -> list[str]:
    """Numbers outside of made blocks, code, comments and addresses."""
    text = re.sub(r"<!-- ([^>]*): make docs -->\n.*?<!-- end of \1 -->\n", "", text, flags=re.S)
    text = re.sub(r"```.*?```|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.S)
    return re.findall(r"\d[\d.,]*", text)


@pytest.mark.parametrize(("heading", "text"), sections(), ids=[heading for heading, _ in sections()])
def test_a_section_with_figures_names_their_sources(heading, text):
    named = _SOURCES.findall(text)
    assert len(named) == bool(figures_by_hand(text)), figures_by_hand(text)
    for source in (source for line in named for source in line.split("; ")):
        kind, _, output = source.partition(": ")
        if kind == "once":
            for commit in output.split(", "):
                assert re.search(rf"on\s+20\d\d-\d\d-\d\d\W+commit `{commit}`", text), commit
        elif kind != "paper":
            assert (ROOT / source).is_file(), source
