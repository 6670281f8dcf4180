"""Decisions about the layout as people see them: the table of terminal and page."""

import io
import re

import msgspec
import pytest
from rich.console import Console

from evenload.cli.run_lines import layout_line
from evenload.errors import DataError
from evenload.report.html import render_report
from evenload.report.run_files import append_rows, read_decisions
from evenload.report.run_report import RunReport, RunSection
from evenload.report.table import format_action, format_conditions, layout_rows, layout_table
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
    console.print(layout_table(decisions, "flexpipe: layout of every step"))
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


def test_the_page_has_the_same_table_for_each_section_that_switches_and_names_are_text():
    evil = "<img src=x onerror=alert(1)>"
    sections = (RunSection(name="flexpipe", layout_decisions=DECISIONS), RunSection(name="auto"))
    page = render_report(RunReport(title="t", sections=sections))
    assert page.count("Layouts over time") == 1
    assert page.count('class="layouts"') == 1
    cells = [tuple(re.findall("<t[hd][^>]*>([^<]*)", row)) for row in page.split("<tr>") if "because of step" in row]
    assert cells == list(layout_rows(DECISIONS))
    assert "Layouts over time" not in render_report(RunReport(title="t", sections=sections[1:]))
    hostile = RunSection(name="a", layout_decisions=(decision(0, layout=evil, why=evil),))
    assert "<img" not in render_report(RunReport(title="t", sections=(hostile,)))


def test_a_switch_that_was_made_has_its_measured_seconds_everywhere():
    made = msgspec.structs.replace(decision(6, 4), measured_switch_s=0.31, moved_bytes=3 << 20)
    assert "200 ms (310 ms measured)" in printed([made])
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


def test_the_memory_plan_that_is_taken_is_told():
    """FlexPipe's O_plan, layers that recompute, beside documents that recompute or offload."""
    shown = {}
    for by_documents_s, by_layers_s in ((0.5, 0.25), (0.25, 0.5), (None, 0.5), (0.5, None)):
        one = decision(3, 2, save_documents_s=by_documents_s, save_layers_s=by_layers_s)
        row = next(line for line in printed([one]).splitlines() if "save memory" in line)
        shown[by_documents_s, by_layers_s] = "s (layers)" in row
    assert list(shown.values()) == [True, False, True, False]


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
