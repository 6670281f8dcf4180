"""Every number in table, JSON, page, trace and plan file of one `evenload plan` is the same number."""

import base64
import contextlib
import gzip
import html
import io
import json
import re

import numpy as np
import pytest

from evenload.cli.main import main
from evenload.report.table import COLUMNS, format_cell

STRATEGIES = ["padded", "best_fit", "wlb", "slimpack", "auto"]
LANES, STAGES, STEPS = 2 * 4, 4, 2


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """(table, JSON, page, trace, plan file) of a small case with two replicas, four stages and two steps."""
    folder = tmp_path_factory.mktemp("plan")
    np.save(folder / "lengths.npy", np.ceil(np.random.default_rng(0).lognormal(6.0, 1.5, 300)).astype(np.uint32))
    files = {name: folder / f"out.{name}" for name in ("json", "html", "trace", "emit-plan")}
    arguments = ["plan", str(folder / "lengths.npy"), "--model", "qwen2.5-0.5b", "--cluster", "h100x8"]
    arguments += ["--layout", "dp=2,pp=4", "--context", "8192", "--overlong", "truncate", "--documents", "48"]
    arguments += ["--steps", str(STEPS), "--strategy", ",".join(STRATEGIES)]
    arguments += ["--details", *(text for name, path in files.items() for text in (f"--{name}", str(path)))]
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert not stopped.value.code
    result = json.loads(files["json"].read_text())
    trace = json.loads(files["trace"].read_text())["traceEvents"]
    plans = json.loads(files["emit-plan"].read_text())["plans"]
    return shown.getvalue(), result, files["html"].read_text(), trace, plans


def test_json_is_the_plan_file(outputs):
    _, result, _, _, plans = outputs
    for row in result["strategies"]:
        own = [plan for plan in plans if plan["strategy"] == row["name"]]
        assert [plan["step"] for plan in own] == list(range(STEPS))
        assert row["step_time_s"] == [plan["predicted"]["step_time_s"] for plan in own]
        assert row["peak_memory_bytes"] == max(plan["predicted"]["peak_memory_bytes"] for plan in own)
        for direction in ("forward", "backward"):
            packs = [sum(len(replica[direction]) for replica in plan["replicas"]) for plan in own]
            assert row[f"num_packs_{direction}"] == np.mean(packs)
        assert {axis: own[0]["layout"][axis] for axis in row["layout"]} == row["layout"]


def test_json_adds_up(outputs):
    _, result, *_ = outputs
    best_fit_s = next(row["mean_step_time_s"] for row in result["strategies"] if row["name"] == "best_fit")
    for row in result["strategies"]:
        mean_s = row["mean_step_time_s"]
        assert mean_s == pytest.approx(np.mean(row["step_time_s"]), rel=1e-12)
        assert sum(row["time_split"].values()) == pytest.approx(mean_s, rel=1e-9)
        assert row["time_split"]["useful_s"] == pytest.approx(row["lower_bound_s"], rel=1e-9)
        assert row["fraction_of_bound"] == pytest.approx(row["lower_bound_s"] / mean_s)
        interval = result["step_time_interval"]
        assert row["step_time_interval_s"] == [mean_s * interval["low"], mean_s * interval["high"]]
        assert row["speedup_over_best_fit"] == pytest.approx(best_fit_s / mean_s)
    assert result["best"] == min(result["strategies"], key=lambda row: row["mean_step_time_s"])["name"]


def test_table_and_page_show_the_json(outputs):
    table, result, page, *_ = outputs
    rows = re.findall(r'<tr class="(?:best|feasible)">(.*?)</tr>', page, flags=re.DOTALL)
    in_page: dict[str, set[str]] = {}  # of the comparison and of its further columns
    for text in rows:
        (name,) = re.findall(r"<th[^>]*>(.*?)</th>", text)
        cells = (re.sub("<[^>]*>", "", cell.replace("<br>", " ")) for cell in re.findall(r"<td.*?>(.*?)</td>", text))
        in_page.setdefault(name.removeprefix("▶ "), set()).update(map(html.unescape, cells))
    for row in result["strategies"]:
        expected = [format_cell(column, row) for column in COLUMNS if row.get(column.key) is not None]
        assert in_page[row["name"]] <= set(expected)
        (line,) = [line for line in table.splitlines() if re.match(rf"\s*▶?\s*{row['name']}\s\s", line)]
        times = ("mean_step_time_s", "step_time_interval_s", "fraction_of_bound", "time_split")
        for key in (*times, "peak_memory_bytes", "num_packs_forward"):
            (column,) = [column for column in COLUMNS if column.key == key]
            assert format_cell(column, row) in in_page[row["name"]], key
            if key != "num_packs_forward":  # which only the page has
                assert format_cell(column, row) in line, key
    assert "from published errors of comparable simulators, not from our ledger" in table
    assert result["step_time_interval"]["basis"] in html.unescape(page)


def unpacked(page: str, block: dict) -> dict[str, np.ndarray]:
    """Inverse of `report.packed_columns`."""
    (text,) = re.findall(rf'<script type="application/gzip" id="{block["block"]}">(.*?)</script>', page)
    content, columns = gzip.decompress(base64.b64decode(text)), {}
    for name, dtype, length in block["columns"]:
        size = length * np.dtype(dtype).itemsize
        columns[name], content = np.frombuffer(content[:size], "<" + dtype), content[size:]
    return columns


def test_page_draws_the_plans_of_the_json(outputs):
    _, result, page, _, plans = outputs
    (text,) = re.findall(r'<script type="application/json" id="step-view-data">(.*?)</script>', page)
    sections = {section["name"]: section for section in json.loads(text)["sections"]}
    for row in result["strategies"]:
        for step, drawn in enumerate(sections[row["name"]]["steps"]):
            (plan,) = [one for one in plans if one["strategy"] == row["name"] and one["step"] == step]
            view = drawn["views"]["predicted"]
            assert view["stepTimeS"] == row["step_time_s"][step]
            columns = unpacked(page, view)
            kinds = [column.astype(np.int64) for name, column in columns.items() if name.startswith("kib")]
            held = np.split(sum(kinds), np.cumsum(columns["laneSamples"])[:-1])  # differences add up like bytes
            peak = max(int(np.cumsum(lane).max()) for lane in held)
            # Every kind is rounded to KiB on its own.
            assert peak == pytest.approx(plan["predicted"]["peak_memory_bytes"] / 1024, abs=len(kinds))
            assert len(columns["laneDp"]) == LANES
            busy = np.split((columns["gap"] + columns["length"].astype(np.int64)), np.cumsum(columns["laneTasks"])[:-1])
            ends_s = max(int(lane.sum()) for lane in busy) * view["unitS"]
            assert ends_s == pytest.approx(max(plan["predicted"]["per_replica_s"]), rel=1e-6)
            packs = unpacked(page, drawn["plan"])
            for direction, name in enumerate(("forward", "backward")):
                count = sum(len(replica[name]) for replica in plan["replicas"])
                assert (packs["packDirection"] == direction).sum() == count


def test_trace_is_the_best_plan(outputs):
    _, result, _, trace, plans = outputs
    (plan,) = [one for one in plans if one["strategy"] == result["best"] and one["step"] == 0]
    processes = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    for dp_rank, predicted_s in enumerate(plan["predicted"]["per_replica_s"]):
        (pid,) = [pid for pid, name in processes.items() if name == f"predicted dp {dp_rank}"]
        own = [event for event in trace if event["pid"] == pid]
        tasks = [e for e in own if e["ph"] == "X" and re.fullmatch(r"\d+[FBIW]\d+", e["name"])]
        assert max(e["ts"] + e["dur"] for e in tasks) == pytest.approx(predicted_s * 1e6, abs=2e-3)
        forward = [e for e in tasks if "F" in e["name"]]
        assert len(forward) == STAGES * len(plan["replicas"][dp_rank]["forward"])
        ends = [e["ts"] + e["dur"] for e in own if e["name"] == "optimizer"]
        assert ends == pytest.approx([plan["predicted"]["step_time_s"] * 1e6] * STAGES, abs=2e-3)
    counters = [e["args"]["bytes"] for e in trace if e["ph"] == "C" and e["name"].startswith("memory bytes")]
    assert max(counters) == plan["predicted"]["peak_memory_bytes"]
    assert any("critical" in e.get("cat", "") for e in trace)
