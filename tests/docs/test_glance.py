"""The README's picture is what tools/make_glance.py draws of today's plans."""

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "tools" / "make_glance.py"))


def test_the_committed_picture_is_of_todays_plans(script):
    """Run tools/make_glance.py."""
    panels = script["panels"]()
    best_fit, auto = panels
    assert auto.step_s < best_fit.step_s
    assert auto.idle_share < best_fit.idle_share
    assert script["TARGET"].read_text(encoding="utf-8") == script["picture"](panels)


def test_bars_lie_on_one_axis(script):
    """Half the seconds are half the width, whatever the panel."""
    panel = script["Panel"]
    drawn = ElementTree.fromstring(
        script["picture"]([panel("best_fit", 8.0, [(0, "F", 0.0, 8.0)]), panel("auto", 4.0, [(0, "B", 0.0, 4.0)])])
    )
    colours = script["COLOURS"]
    bars = {rect.get("fill"): rect for rect in drawn.iter("{http://www.w3.org/2000/svg}rect")}
    first, second = bars[colours["F"]], bars[colours["B"]]
    assert float(second.get("width")) == pytest.approx(float(first.get("width")) / 2, abs=0.01)
    assert first.get("x") == second.get("x")
    text = "".join(drawn.itertext())
    assert "2.00 times as fast (predicted)" in text
    assert "ranks idle 75%" in text  # one of four ranks computes
