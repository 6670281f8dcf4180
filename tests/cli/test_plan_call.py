"""`evenload.plan` gives what `evenload plan` writes."""

import io
import json
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

import evenload
from commands import run
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.stepplan.validate import validate_plan

WHERE = {"model": "llama-7b", "cluster": "h100x8", "layout": "dp=2,pp=4"}


def without_clock(content: bytes) -> dict:
    result = json.loads(content)
    for row in filter(None, (*result["strategies"], result["baseline"])):
        del row["plan_time_s"]
    return result


def test_the_figures_are_those_of_the_command(table, tmp_path, capsys):
    options = ["--model", "llama-7b", "--cluster", "h100x8", "--layout", "dp=2,pp=4", "--tokens", "64k", "--steps", "2"]
    names = ("best_fit", "balanced", "slimpack")
    strategies = ["--strategy", ",".join(names), "--set", "candidates=2", "--json", str(tmp_path / "out.json")]
    assert run("plan", table, *options, *strategies, "--details") == 0
    shown = capsys.readouterr().out
    result = evenload.plan(table, **WHERE, tokens="64k", steps=2, strategy=names, set_options=["candidates=2"])
    assert capsys.readouterr().out == "", "a function says nothing"
    assert without_clock(result.to_json()) == without_clock((tmp_path / "out.json").read_bytes())
    assert result.interval.describe() in shown
    details = Console(file=io.StringIO(), width=400)
    result.show(details, details=True)
    assert result.interval.describe() in details.file.getvalue()
    assert result.interval.describe() not in str(result), "only where details are asked for"

    assert [row.name for row in result.strategies] == list(names)
    assert result.best == min(result.strategies, key=lambda row: row.mean_step_time_s or np.inf).name
    assert result.factor == result[result.best].speedup_over_baseline > 1
    assert result.baseline.mean_step_time_s == pytest.approx(result.factor * result[result.best].mean_step_time_s)
    assert result.headline in shown
    assert result.headline in " ".join(str(result).split())
    assert result["best_fit"].speedup_over_best_fit == 1
    low_s, high_s = result[result.best].step_time_interval_s
    assert low_s < result[result.best].mean_step_time_s < high_s
    for name in names:
        plans = result.plans(name)
        assert [(plan.strategy, plan.step) for plan in plans] == [(name, 0), (name, 1)]
        for plan in plans:
            validate_plan(plan, max_pack_tokens=result.inputs["context"])
    assert result.plans() == result.plans(result.best)
    with pytest.raises(ConfigError, match="'wlb' is not in this comparison, which has best_fit, balanced, slimpack"):
        result.plans("wlb")

    given = evenload.plan(np.load(table), **WHERE, tokens=65_536, steps=2, strategy=names, set_options=["candidates=2"])
    assert [row.step_time_s for row in given.strategies] == [row.step_time_s for row in result.strategies]
    assert given.inputs["lengths"] == "lengths of the caller"

    for name, begin in (("page.html", b"<!doctype html>"), ("trace.json", b"{")):
        write = result.write_html if name == "page.html" else result.write_trace
        write(tmp_path / name)
        assert (tmp_path / name).read_bytes().lower().startswith(begin)
        with pytest.raises(ConfigError, match="cannot write"):
            write(tmp_path / "nowhere" / name)


def test_plans_of_a_part_are_not_given_as_those_of_the_cluster(tmp_path):
    search = {"search_layout": True, "search_seconds": 0.001, "strategy": "balanced"}
    result = evenload.plan([512, 2000] * 100, model="qwen2.5-0.5b", cluster="h100x1024", documents=2000, **search)
    assert result.layouts[0].stride > 1
    for call in (result.plans, lambda: result.write_trace(tmp_path / "trace.json")):
        with pytest.raises(ConfigError, match=r"the search judged balanced on one of \d+ replicas .*--layout dp="):
            call()
    assert not (tmp_path / "trace.json").exists()


def texts_of(result):
    """Text of all cells; fails where a tag is not closed."""
    page = result._repr_html_().replace("<br>", "<br/>")
    return list(ElementTree.fromstring(f"<div>{page}</div>").itertext())


def test_a_notebook_shows_a_table_and_says_what_does_not_fit():
    """Nothing is raised where no strategy fits: the object says it, and raises on demand, as the command ends."""
    result = evenload.plan(
        [4096] * 64, model="llama-70b", cluster="h100x8", layout="pp=8", documents=8, strategy="balanced"
    )
    assert (result.best, result.factor) == (None, None)
    why = f"balanced: not feasible: {result['balanced'].why}"
    assert why in texts_of(result)
    assert why in " ".join(str(result).split())
    with pytest.raises(
        InfeasiblePlanError, match=r"no strategy fits; the closest: .* in all 20 layouts of the cluster .* alone"
    ):
        result.require_feasible()
    with pytest.raises(ConfigError, match="no strategy fits memory"):
        result.plans()

    result = evenload.plan([100, 2000] * 20, **WHERE, documents=16, strategy="balanced")
    assert "▶ balanced" in texts_of(result)
    assert repr(result) == "Comparison(1 strategy, best='balanced', factor=None)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stratgy": "all"}, (ConfigError, "evenload.plan has no 'stratgy'; did you mean 'strategy'?")),
        ({"polcy": "choose"}, (ConfigError, "evenload.plan has no 'polcy'; did you mean 'policy'?")),
        ({"xyz": 1}, (ConfigError, "evenload.plan has no 'xyz'; it takes lengths, cluster, .*, overlong, ")),
        ({"overlong": "cut"}, (ConfigError, "overlong is 'cut'; choices: error, split")),
        ({"policy": "keep"}, (ConfigError, "policy is 'keep'")),
        ({"worst": 0}, (ConfigError, "worst is 0, must be at least 1")),
        ({"strategy": "slimpak"}, (ConfigError, "did you mean 'slimpack'")),
        ({"lengths": [1.5, 2.0]}, (DataError, "lengths are float64 of shape")),
        ({"lengths": [[1, 2]]}, (DataError, "give one whole number a document")),
        ({"lengths": [3, 0]}, (DataError, "length 0 of document 1 is below 1")),
        ({"lengths": []}, (DataError, "holds no lengths")),
    ],
)
def test_mistakes_are_errors_in_words(given, expected):
    kind, words = expected
    with pytest.raises(kind, match=words):
        evenload.plan(**{"lengths": [100, 200], **WHERE, "documents": 2, **given})
