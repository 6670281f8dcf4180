import io
import math

import pytest
from rich.console import Console

from evenload.report.table import COLUMNS, ComparisonTable, progress_text, shown_columns, step_line
from evenload.types.text import format_count, format_seconds
from evenload.types.timeline import CAUSE_LABELS
from report_samples import make_row


def plan_row(name, **values):
    """A row of `evenload plan --json` with its fixed keys."""
    return {
        **{"name": name, "feasible": True, "why": "", "layout": {"dp": 2, "cp": 1, "pp": 4, "tp": 1}},
        **{"step_time_s": [1.2, 1.3], "mean_step_time_s": 1.25, "lower_bound_s": 1.15, "fraction_of_bound": 0.92},
        **{"speedup_over_best_fit": 1.42, "speedup_over_baseline": 1.31, "tokens_per_s_per_device": 8123.0},
        **{"bubble_fraction": 0.073, "imbalance_forward": 1.041, "imbalance_backward": 1.052, "imbalance_dp": 1.003},
        **{"max_pack_tokens": 8192, "cap_violations": 0, "peak_memory_bytes": 61 * 2**30, "plan_time_s": 0.018},
        **{"num_packs_forward": 8, "num_packs_backward": 9},
        **{"deferred_tokens": 0, "dropped_tokens": 0, "mean_token_delay_steps": 0.0},
    } | values


def refused_row(name, why):
    return dict.fromkeys(plan_row(name)) | {"name": name, "feasible": False, "why": why}


def printed(table, width=240):
    console = Console(width=width, color_system=None, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_losses_are_the_two_largest_groups():
    split = dict.fromkeys(CAUSE_LABELS, 0.0) | {
        "useful_s": 7.0,
        "padding_s": 0.3,
        "recompute_s": 0.2,
        "dp_imbalance_s": 2.0,
        "p2p_s": 0.5,
    }
    text = printed(ComparisonTable([plan_row("auto", time_split=split)]))
    assert "lost to" in text
    assert "uneven replicas 20.0 %, extra compute 5.0 %" in text
    assert "transfers" not in text
    nothing = dict.fromkeys(CAUSE_LABELS, 0.0) | {"useful_s": 7.0}
    assert "0.0 %" not in printed(ComparisonTable([plan_row("auto", time_split=nothing)]))


def test_best_row_is_marked_and_refused_rows_give_their_reason():
    rows = [refused_row("padded", "document 812 needs [red]141 GiB[/red]"), plan_row("auto"), plan_row("best_fit")]
    text = printed(ComparisonTable(rows, best=("auto",)))
    assert text.count("▶") == 1
    for cell in ("▶ auto", "padded: not feasible: document 812 needs [red]141 GiB[/red]"):
        assert cell in text
    for cell in ("1.25 s", "92.0 %", "1.31×", "8.12K", "61.0 GiB"):
        assert cell in text


def test_counts_of_bad_things_show_only_when_there_are_any():
    assert {"cap_violations", "deferred_tokens"}.isdisjoint(column.key for column in shown_columns([plan_row("a")]))
    keys = [column.key for column in shown_columns([plan_row("a"), plan_row("wlb", deferred_tokens=5)])]
    assert "deferred_tokens" in keys
    assert keys == [column.key for column in COLUMNS if column.key in keys]


@pytest.mark.parametrize("width", [60, 80, 100, 130, 160])
def test_a_narrow_terminal_loses_whole_columns_and_says_which(width):
    """A number cut to "1.2…" would be read as a number."""
    rows = [plan_row("auto"), plan_row("fixed_greedy", peak_memory_bytes=60 * 2**30, dropped_tokens=5_850_000)]
    text = printed(ComparisonTable(rows, best=("auto",)), width)
    assert "…" not in text
    assert "1.25 s" in text
    assert max(len(line.rstrip()) for line in text.splitlines() if "auto" in line) <= width
    shown = "5.85M" in text
    assert shown != ("left out for width" in text and "tokens dropped" in text.split("left out for width")[1])


def varied_rows():
    """Rows that differ in everything."""
    names = ("best_fit", "best_fit 128K", "fixed_greedy", "slimpack", "auto")
    return [
        {key: value * (1 + at / 8) if isinstance(value, float) else value for key, value in plan_row(name).items()}
        | {
            **{"peak_memory_bytes": (60 + at) * 2**30, "peak_host_bytes_per_node": (600 + at) * 2**30},
            **{"deferred_tokens": 5_850_000 * at, "dropped_tokens": 21_300_000 + 100_000 * at},
            "step_time_interval_s": (38.0 + at, 59.2 + at),
            **{"fraction_of_layout_bound": 0.9 - at / 100, "mfu": 0.4 - at / 100},
        }
        for at, name in enumerate(names)
    ]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_what_decides_stays_in_a_narrow_terminal(width):
    """The factor over best_fit and tokens/s, whatever else has room."""
    rows = varied_rows()
    text = printed(ComparisonTable(rows, best=("auto",)), width)
    assert "…" not in text
    assert max(map(len, (line.rstrip() for line in text.splitlines() if "×" in line))) <= width
    for row in rows:
        (line,) = (line for line in text.splitlines() if line.strip(" ▶").startswith(f"{row['name']}  "))
        assert f"{row['speedup_over_baseline']:.2f}×" in line
        assert format_count(row["tokens_per_s_per_device"]) in line
        assert format_seconds(row["mean_step_time_s"]) in line


def test_a_terminal_shows_what_decides_and_leaves_the_rest_to_page_and_json():
    text = printed(
        ComparisonTable([plan_row("best_fit", cuts="whole"), plan_row("auto", cuts="symmetric")], best=("auto",))
    )
    assert "left out" not in text
    for detail in ("fwd", "1.041", "bubble", "packs", "plan", "cuts", "symmetric", "layout", "pp=4"):
        assert detail not in text


def test_no_feasible_row_still_prints_every_reason():
    text = printed(ComparisonTable([refused_row("a", "too long"), refused_row("b", "")]))
    assert "a: not feasible: too long" in text
    assert "b: not feasible: no reason given" in text


def test_step_line_says_what_was_measured_and_predicted_within_100_columns():
    row = make_row(12, loss=5.4321, step_time_s=1.3, predicted_step_time_s=1.25, tokens_per_s=50412.0)
    line = "step 12 | loss 5.4321 | grad 1.25 | lr 0.0003 | 50.4K tokens/s | 1.30 s (predicted 1.25 s)"
    assert step_line(row) == line
    trees = {"path_tokens_per_s": 161318.4, "tree_token_ratio": 3.2}
    assert step_line(row | trees) == line.replace("tokens/s", "tokens/s (161K of all sequences)")
    assert step_line(row | {"path_tokens_per_s": 50412.0, "tree_token_ratio": 1.0}) == line
    # Waiting is told where it is much of the step.
    assert step_line(row | {"data_wait_s": 0.2}) == f"{line} | waited 200 ms for data"
    long = make_row(
        99_999, loss=10.4321, grad_norm=0.0123, lr=1.23e-5, step_time_s=0.0123, predicted_step_time_s=0.0125,
        tokens_per_s=999e3, data_wait_s=0.0,
    )  # fmt: skip
    assert len(step_line(long)) <= 100
    assert len(progress_text(long)) <= 40


def test_step_line_never_turns_the_unknown_into_zero():
    row = make_row(1, loss=math.nan, predicted_step_time_s=None, deferred_documents=3)
    line = step_line(row)
    assert "loss nan" in line
    assert "(predicted -)" in line
    assert "3 documents deferred" in line
