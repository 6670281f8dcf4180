"""The page in a real browser: what a reader meets when they open it."""

import numpy as np
import pytest
from test_html_report import EVIL, make_report
from test_layout_decisions import DECISIONS

from browser_page import plots, steps
from evenload.data.lengths import profile_lengths
from evenload.report.lengths import write_lengths_page
from evenload.report.run_report import RunReport, RunSection
from sweeps import sweep

SIZES = {"desk": (1440, 900), "phone": (390, 844)}


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("scheme", "size"), sweep([("dark", "desk"), ("light", "phone"), ("light", "desk")], 2))
def test_page_opens_with_every_figure_and_fits_the_width(open_page, scheme, size):
    page = open_page(scheme=scheme, size=SIZES[size])
    for figure in ("all-split", "run-0-time", "run-0-speed", "run-0-loss"):
        for plot in plots(page, figure).all():
            assert plot.locator("rect, circle, path, text").count() > 0
            assert plot.bounding_box()["width"] > 150
    canvases = steps(page).locator("canvas:not(.over)")
    assert canvases.count() == 3 * 2 + 1  # predicted and measured, and the baseline; timeline and memory; one plan
    for i in range(canvases.count()):
        colors = canvases.nth(i).evaluate(
            "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
        )
        assert colors > 8
    assert fits(page)


def test_colours_follow_the_reader_also_while_open_and_paper_is_white(open_page):
    """Dark text on a dark page is the usual fault of embedded plots."""
    page = open_page()
    tick = plots(page, "run-0-time").locator("text").first

    def fill():
        return tick.evaluate("text => getComputedStyle(text).fill")

    def extremes():
        """Of the names of ranks."""
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

    light = fill()
    assert extremes()[0] < 150
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    assert fill() != light
    assert extremes()[1] > 600
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert fill() == light
    assert extremes()[0] < 150
    assert page.locator("details:not([open]):not(.numbers)").count() == 0
    widths = "[...document.querySelectorAll('#step-view canvas')].map((c) => c.clientWidth)"
    assert max(page.evaluate(widths)) < 700
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert extremes()[1] > 600
    assert max(page.evaluate(widths)) > 900
    assert page.locator("details[open]").count() == 0


def test_pointing_at_curves_and_bars_says_their_values_also_by_keys(open_page):
    page = open_page()
    plot = plots(page, "run-0-time")
    box = plot.bounding_box()
    row = make_report().sections[0].metrics[2]
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    tip = page.locator(".tip")
    output = tip.inner_text().splitlines()
    assert output[0] == "step 3"
    assert output[1].startswith("predicted: ")
    assert output[2] == f"measured: {row['step_time_s']:.2f} s"
    plot.focus()
    page.keyboard.press("Home")
    assert tip.inner_text().startswith("step 1\n")
    page.keyboard.press("ArrowRight")
    assert page.locator("#run-0-time .said").text_content().startswith("step 2, predicted: ")
    bar = plots(page, "all-split").first.locator("rect[data-tip]").first
    bar.hover()
    assert tip.inner_text() == bar.get_attribute("data-tip")
    page.mouse.move(2, 2)
    assert tip.is_hidden()


@pytest.mark.parametrize(("scheme", "size"), sweep([("dark", "phone"), ("light", "desk"), ("light", "phone")], 2))
def test_axe_finds_no_fault_of_contrast_labels_or_roles(open_page, tmp_path, scheme, size):
    """Deque's axe-core: WCAG 2 A and AA, and its best practices."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    lengths = np.random.default_rng(0).lognormal(6, 2, 3000).astype(np.int64) + 1
    write_lengths_page(tmp_path / "lengths.html", "lengths", profile_lengths(lengths))
    layouts = RunReport(title="layouts", sections=(RunSection(name="flexpipe", layout_decisions=DECISIONS),))
    for report in (None, layouts, tmp_path / "lengths.html"):
        page = open_page(report, scheme=scheme, size=SIZES[size])
        if report is None:
            steps(page)
        page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        result = axe.run(page)
        assert result.violations_count == 0, result.generate_report()


def test_hostile_names_stay_text_in_the_step_view(open_page):
    page = open_page(make_report(EVIL))
    root = steps(page)
    assert EVIL in root.locator("h4 b").first.text_content()
    assert EVIL in root.locator(".left-out").text_content()
    assert EVIL in root.locator("select[name=strategy] option").first.text_content()
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", sweep(["light", "dark"], 1))
def test_the_lengths_page_draws_its_figures(open_page, tmp_path, scheme):
    lengths = np.random.default_rng(0).lognormal(6, 2, 3000).astype(np.int64) + 1
    write_lengths_page(tmp_path / "lengths.html", f"lengths of {EVIL}", profile_lengths(lengths))
    page = open_page(tmp_path / "lengths.html", scheme)
    assert EVIL in page.locator("h1").text_content()
    assert plots(page, "classes").first.locator("rect, path").count() > 0
    assert "128K" in page.locator("tbody th").all_text_contents()
    assert fits(page)


@pytest.mark.parametrize("scheme", sweep(["dark", "light"], 1))
def test_layouts_over_time_name_every_layout(open_page, scheme):
    sections = (RunSection(name="flexpipe", layout_decisions=DECISIONS),)
    page = open_page(RunReport(title="layouts", sections=sections), scheme=scheme)
    assert {"dp=4", "dp=2 pp=2"} <= set(page.locator(".layouts td").all_text_contents())
    assert fits(page)
