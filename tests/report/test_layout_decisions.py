"""Decisions about the layout as people see them: the terminal's table and the page's figure."""

import io
import json
import re

import msgspec
import pytest
from rich.console import Console

from evenload.cli.run_lines import layout_line
from evenload.errors import DataError
from evenload.report.figures import layout_figure
from evenload.report.html import render_report
from evenload.report.run_files import append_rows, read_decisions
from evenload.report.run_report import RunReport, RunSection
from evenload.report.table import LayoutTable, format_action, format_conditions
from evenload.types.run import LayoutDecision


def decision(step, case=1, layout="dp=4", **changes):
    actions = {1: "stay", 2: "save memory", 3: "grow", 4: "shrink"}
    has_fit = case in (1, 4)
    usual = {
        **{"step": step, "layout": layout, "before": "dp=4", "action": actions[case], "case": case, "known_steps": 3},
        **{"fits": has_fit, "switching_is_slower": case == 1, "fits_saving": True, "other": "dp=2 pp=2"},
        **{"switching_is_slower_than_saving": case in (1, 2), "why": f"because of step {step}"},
        **{"keep_s": 1.0 if has_fit else None, "save_s": 1.0 if has_fit else 2.0, "new_s": 0.9, "switch_s": 0.2},
    }
    return LayoutDecision(**(usual | changes))


DECISIONS = (
    *(decision(0), decision(1), decision(2), decision(3, 2)),
    decision(4, 3, "dp=2 pp=2", keep_s=None, save_s=None),
    decision(5, 1, "dp=2 pp=2", is_patient=True),
    decision(6, 4),
    decision(7, other="", new_s=None, switch_s=0.0),
)


def printed(decisions):
    console = Console(width=220, color_system=None, file=io.StringIO())
    console.print(LayoutTable(decisions, "flexpipe: layout of every step"))
    return console.file.getvalue()


def row_of(text, begin):
    return next(line for line in text.splitlines() if line.split()[:1] == [begin])


def test_quiet_steps_are_one_row_and_every_switch_has_its_own():
    text = printed(DECISIONS)
    assert row_of(text, "0-2").split()[:7] == ["0-2", "dp=4", "A", "B", "C", "D", "①"]
    assert "because of step 2" in row_of(text, "0-2")
    assert "② save memory" in row_of(text, "3")
    assert row_of(text, "4").count("does not fit") == 2
    assert "③ grow" in row_of(text, "4")
    assert "① stay, waits" in row_of(text, "5")
    assert "④ shrink" in row_of(text, "6")
    # Without another layout there are no seconds of one.
    assert "900 ms" in row_of(text, "6")
    assert "900 ms" not in row_of(text, "7")


def test_conditions_that_do_not_hold_are_dots():
    assert format_conditions(decision(0)) == "A B C D"
    assert format_conditions(decision(0, 2)) == "· · C D"
    assert format_conditions(decision(0, 4)) == "A · C ·"
    assert format_action(decision(0, 3)) == "③ grow"


def test_the_figure_has_every_step_once_and_breaks_lines_where_nothing_fits():
    body = layout_figure(DECISIONS).body
    marks = re.findall('data-tip="step ([0-9]+): (.)', body)
    assert sorted(int(step) for step, _ in marks) == [one.step for one in DECISIONS]
    assert {case for _, case in marks} == {"①", "②", "③", "④"}
    (output,) = re.findall("data-curves='([^']*)'", body)
    lines = {series["name"]: series["values"] for series in json.loads(output)["series"]}
    third = pytest.approx(1.0 / 3)
    assert lines["T(keep)"] == [third, third, third, None, None, third, third, third]
    assert lines["T(save)"] == [None, None, None, pytest.approx(2.0 / 3), None, None, None, None]
    assert lines["T(new) + T(switch)"][-2:] == [pytest.approx((0.9 + 0.2) / 3), None]
    # A line that nothing fits breaks off and begins anew.
    assert re.search('d="M[^M"]*M[^M"]*" fill="none" stroke="#2f7fd0"', body)
    assert "because of step 4" in body


def test_names_are_text_in_the_figure_and_the_page_has_one_for_each_section_that_switches():
    evil = "<img src=x onerror=alert(1)>"
    figure = layout_figure([decision(0, layout=evil, why=evil)])
    assert "<img" not in figure.body
    sections = (RunSection(name="flexpipe", layout_decisions=DECISIONS), RunSection(name="auto"))
    page = render_report(RunReport(title="t", sections=sections))
    assert page.count("Layouts over time") == 1
    assert 'id="layouts-0' in page
    assert 'id="layouts-1' not in page
    assert "Layouts over time" not in render_report(RunReport(title="t", sections=sections[1:]))


def test_a_switch_that_was_made_has_its_measured_seconds_everywhere():
    made = msgspec.structs.replace(decision(6, 4), measured_switch_s=0.31, moved_bytes=3 << 20)
    assert "200 ms (310 ms measured)" in printed([made])
    assert "took 310 ms, measured" in layout_figure([made]).body
    assert layout_line(made) == (
        "layout dp=4 -> dp=4 before step 6, ④ shrink: because of step 6; predicted: 200 ms for the switch, -100 ms "
        "gained over 3 known steps"
    )
    forced = layout_line(decision(4, 3, keep_s=None, save_s=None))
    assert forced == (
        "layout dp=4 -> dp=4 before step 4, ③ grow: because of step 4; forced by memory, whatever it costs; predicted: "
        "200 ms for the switch"
    )
    assert layout_line(decision(5)) == ""


def test_both_memory_plans_are_told_and_which_is_taken():
    """FlexPipe's O_plan, layers that recompute, beside documents that recompute or offload."""
    shown = {}
    for by_documents_s, by_layers_s in ((0.5, 0.25), (0.25, 0.5), (None, 0.5), (0.5, None)):
        one = decision(3, 2, save_documents_s=by_documents_s, save_layers_s=by_layers_s)
        row = next(line for line in printed([one]).splitlines() if "save memory" in line)
        shown[by_documents_s, by_layers_s] = "s (layers)" in row
        figure = layout_figure([one]).body
        assert "saving memory in this step: by documents " in figure
        assert ("does not fit" in figure.split("by documents")[1].split("by layers")[0]) == (by_documents_s is None)
    assert list(shown.values()) == [True, False, True, False]
    assert "saving memory in this step" not in layout_figure([decision(0)]).body


def test_decisions_come_back_from_their_file_the_last_of_a_step_first_torn_line_aside(tmp_path):
    path = tmp_path / "layouts.jsonl"
    assert read_decisions(path) == ()
    for one in (decision(0), decision(1, 2), decision(2), decision(1, 4)):
        append_rows(path, [one])
    with open(path, "ab") as file:
        file.write(b'{"step": 3, "lay')
    assert read_decisions(path) == (decision(0), decision(1, 4), decision(2))
    path.write_text("{}\n")
    with pytest.raises(DataError, match="line 1 is no decision"):
        read_decisions(path)
