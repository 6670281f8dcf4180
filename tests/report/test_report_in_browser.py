"""The page in a real browser: what a reader meets when they open it."""

import numpy as np
import pytest
from test_html_report import EVIL, make_report
from test_layout_decisions import DECISIONS

from browser_page import draw, steps
from evenload.data.length_profile import profile_lengths
from evenload.report.lengths_page import write_lengths_page
from evenload.report.run_report import RunReport, RunSection
from sweeps import sweep


@pytest.mark.parametrize("scheme", sweep(["dark", "light"], 1))
def test_page_opens_draws_every_figure_and_fits_the_width(open_page, scheme):
    page = open_page(scheme=scheme)
    plots = page.locator(".plot")
    for i in range(plots.count()):
        draw(page, plots.nth(i).get_attribute("data-figure").removesuffix("-data"))
        assert plots.nth(i).locator(".trace, .scatterlayer path").count() > 0
    canvases = steps(page).locator("canvas:not(.over)")
    assert canvases.count() == 2 * 2 + 1  # two origins, timeline and memory of each; one plan
    for i in range(canvases.count()):
        colors = canvases.nth(i).evaluate(
            "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
        )
        assert colors > 8
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_colours_follow_the_reader_also_while_open(open_page):
    """Dark text on a dark page is the usual fault of embedded plots."""
    page = open_page()
    plot = draw(page, "run-0-time")

    def tick_fill():
        return plot.evaluate("plot => getComputedStyle(plot.querySelector('.ytick text')).fill")

    def text_color():
        return page.evaluate("getComputedStyle(document.body).color")

    def darkest():
        return (
            steps(page)
            .locator(".pair.timeline canvas")
            .first.evaluate(
                "c => { const d = c.getContext('2d').getImageData(0, 0, 80, c.height).data; let least = 999, most = 0;"
                " for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 250) {"
                "   const s = d[i] + d[i + 1] + d[i + 2]; least = Math.min(least, s); most = Math.max(most, s); }"
                " return [least, most]; }"
            )
        )

    light = tick_fill()
    assert light == text_color()
    assert darkest()[0] < 150  # names of ranks: dark on light
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    assert tick_fill() == text_color() != light
    assert darkest()[1] > 600


def test_no_button_offers_to_upload_the_figure(open_page):
    """plotly.js 4 shows a "share in the cloud" button by default; run data must not leave by a click."""
    page = open_page()
    plot = draw(page, "all-packs")
    buttons = plot.locator(".modebar-btn")
    titles = [buttons.nth(i).get_attribute("data-title") for i in range(buttons.count())]
    assert len(titles) == 6
    assert not [title for title in titles if "cloud" in title.lower() or "share" in title.lower()]


def test_hostile_names_stay_text_in_the_step_view(open_page):
    page = open_page(make_report(EVIL))
    root = steps(page)
    assert EVIL in root.locator("h4 b").first.text_content()
    assert EVIL in root.locator(".left-out").text_content()
    assert EVIL in root.locator("select[name=strategy] option").first.text_content()
    assert page.locator("img").count() == 0


def test_a_narrow_page_makes_room_for_a_wrapped_legend(open_page):
    page = open_page(width=420)
    plot = draw(page, "all-split")
    legend = plot.locator(".legend").bounding_box()
    bar = plot.locator(".bars .point path").first.bounding_box()
    assert legend["y"] + legend["height"] <= bar["y"] + 1
    steps(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", sweep(["light", "dark"], 1))
def test_the_lengths_page_draws_its_figures(open_page, tmp_path, scheme):
    lengths = np.random.default_rng(0).lognormal(6, 2, 3000).astype(np.int64) + 1
    write_lengths_page(tmp_path / "lengths.html", f"lengths of {EVIL}", profile_lengths(lengths))
    page = open_page(tmp_path / "lengths.html", scheme)
    assert EVIL in page.locator("h1").text_content()
    for figure in ("classes", "cumulative", "windows"):
        assert draw(page, figure).locator(".trace, .scatterlayer path").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", sweep(["dark", "light"], 1))
def test_layouts_over_time_are_drawn_with_every_layout_named(open_page, scheme):
    sections = (RunSection(name="flexpipe", layout_decisions=DECISIONS),)
    page = open_page(RunReport(title="layouts", sections=sections), scheme=scheme)
    plot = draw(page, "layouts-0")
    marks = plot.locator(".scatterlayer .points path")
    assert marks.count() >= len(DECISIONS)
    names = plot.locator(".ytick text").all_text_contents()
    assert {"dp=4", "dp=2 pp=2"} <= set(names)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
