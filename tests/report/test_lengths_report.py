import io

import numpy as np
import pytest
from rich.console import Console

from evenload.data.length_profile import profile_lengths
from evenload.report.length_figures import cumulative_lengths_figure, length_classes_figure, window_cuts_figure
from evenload.report.lengths_page import write_lengths_page
from evenload.report.lengths_png import write_lengths_png
from evenload.report.lengths_table import LengthsTable, bar

PROFILE = profile_lengths(np.array([1, 2, 3, 3, 9, 16]), [4, 16])


def shown(width: int) -> str:
    stream = io.StringIO()
    Console(width=width, file=stream).print(LengthsTable(PROFILE))
    return stream.getvalue()


@pytest.mark.parametrize("width", [200, 120, 80])
def test_table_shows_the_profile_and_never_cuts_a_number(width: int) -> None:
    text = shown(width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    # 34 tokens: 26.5 % in the class from 8 on; 197 pairs: 22.8 %.
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("8 to 16"))
    assert row[3] == "1"
    assert row[4] == "16.7"
    assert "26.5" in row
    assert "22.8" in row
    empty = next(line.split() for line in text.splitlines() if line.strip().startswith("4 to 8"))
    assert empty[3:7] == ["0", "·", "·", "·"]
    window = next(line for line in text.splitlines() if line.split()[:1] == ["4"] and "to" not in line.split())
    # Longer than 4 are 9 and 16: 73.5 % of tokens, 17 tokens beyond. Across: 45 - 21 and 136 - 40 of 197.
    assert window.split()[1:] == ["2", "33.3", "%", "73.5", "%", "17", "50.0", "%", "60.9", "%"]


def test_bars_are_proportional_and_something_is_never_invisible() -> None:
    assert bar(0.0, 10) == ""
    assert bar(1.0, 4) == "████"
    assert bar(0.5, 3) == "█▌"
    assert bar(1e-9, 10) == "▏"


def test_figures_hold_the_shares_of_the_profile() -> None:
    documents, tokens, work = length_classes_figure(PROFILE).data
    assert list(tokens.y) == [c.tokens / 34 for c in PROFILE.classes]
    assert sum(documents.y) == pytest.approx(1)
    assert sum(work.y) == pytest.approx(1)
    assert [list(curve.y)[-1] for curve in cumulative_lengths_figure(PROFILE).data] == [1, 1, 1]
    beyond = window_cuts_figure(PROFILE).data[1]
    assert list(beyond.x) == ["4", "16"]
    assert list(beyond.y) == [17 / 34, 0]


def test_page_escapes_its_source_and_loads_nothing(tmp_path) -> None:
    write_lengths_page(tmp_path / "a.html", "<script>alert(1)</script>", PROFILE)
    page = (tmp_path / "a.html").read_text()
    assert "<script>alert(1)" not in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize("windows", [[4, 16], []])
def test_picture_is_a_png(tmp_path, windows) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'evenload[png]')")
    write_lengths_png(tmp_path / "a.png", "with $ and _", profile_lengths(np.array([1, 5, 900]), windows))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
