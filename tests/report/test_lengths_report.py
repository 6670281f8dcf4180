import io

import numpy as np
import pytest
from rich.console import Console

from evenload.data.lengths import profile_lengths
from evenload.report.lengths import (
    LengthsTable,
    axis_end,
    bar,
    length_classes_figure,
    read_classes,
    window_cuts,
    write_lengths_page,
)

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
    classes = length_classes_figure(PROFILE)
    assert classes.numbers is not None
    assert classes.numbers.headings == ("length (tokens)", "documents", "tokens", "attention work")
    assert classes.numbers.rows[0] == ("1 to 2", "1, 16.7 %", "1, 2.9 %", "1, 0.5 %")
    assert classes.numbers.rows[2] == ("4 to 8", "0, ·", "0, ·", "0, ·")
    assert "8 to 16 tokens: 26.47% of tokens (9)" in classes.body
    assert window_cuts(PROFILE).rows == (
        ("4", "2, 33.3 %", "17, 50.0 %", "120, 60.9 %"),
        ("16", "0, ·", "0, ·", "0, ·"),
    )


def test_one_outlier_does_not_flatten_the_histogram() -> None:
    """A document of 16 M tokens holds nearly all attention work; it pressed every other bar to the ground."""
    lengths = np.concatenate([np.random.default_rng(0).integers(100, 5000, 2000), [2**24]])
    profile = profile_lengths(lengths)
    shares = [one.attention_pairs / profile.attention_pairs for one in profile.classes]
    assert max(shares) > 0.99
    ordinary = sorted(shares)[-2]
    assert ordinary / axis_end(shares) > 0.4
    body = length_classes_figure(profile).body
    assert body.count('class="on-bar broken"') == 2  # tokens and attention work
    assert ">100.0 %<" in body
    assert "broken bar" in read_classes(profile)
    assert axis_end([0.3, 0.4, 0.3]) == pytest.approx(0.4 * 1.3)
    assert "broken bar" not in read_classes(profile_lengths(np.array([1, 1, 2, 2, 4])))


def test_page_escapes_its_source_and_loads_nothing(tmp_path) -> None:
    write_lengths_page(tmp_path / "a.html", "<script>alert(1)</script>", PROFILE)
    page = (tmp_path / "a.html").read_text()
    assert "<script>alert(1)" not in page
    assert "default-src 'none'" in page
    assert "<td>17, 50.0 %</td>" in page
