"""The page in a real browser: what a reader meets when they open it."""

import shutil

import pytest
from test_html_report import EVIL, make_report

from evenload.report.html import write_report
from evenload.report.run_report import RunReport, RunSection
from report_samples import make_timeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens a report; at the end no console message, error or network request may have happened."""
    complaints = []
    pages = []

    def open_report(report, scheme="light", width=1280):
        path = tmp_path / "report.html"
        write_report(path, report)
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: complaints.append(request.url) if "file:" not in request.url[:5] else None)
        page.goto(path.as_uri())
        return page

    yield open_report
    for page in pages:
        page.close()
    assert [text for text in complaints if not text.startswith("data:")] == []


def draw(page, figure):
    page.locator(f"#{figure}").scroll_into_view_if_needed()
    page.wait_for_selector(f"#{figure} .plot[data-drawn]")
    return page.locator(f"#{figure} .plot")


def hover_first_bar(page, plot):
    # After the idle tracks of 2 replicas of 4 ranks.
    bar = plot.locator(".bars .point path").nth(8)
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    plot.locator(".hoverlayer .hovertext").first.wait_for()
    return plot.locator(".hoverlayer .hovertext").first.text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_opens_draws_every_figure_and_fits_the_width(open_page, scheme):
    page = open_page(make_report(), scheme)
    plots = page.locator(".plot")
    for i in range(plots.count()):
        draw(page, plots.nth(i).get_attribute("data-figure").removesuffix("-data"))
        assert plots.nth(i).locator(".trace, .scatterlayer path").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_colours_follow_the_reader_also_while_open(open_page):
    """Dark text on a dark page is the usual fault of embedded plots."""
    page = open_page(make_report())
    plot = draw(page, "run-0-timeline")

    def tick_fill():
        return plot.evaluate("plot => getComputedStyle(plot.querySelector('.ytick text')).fill")

    def text_color():
        return page.evaluate("getComputedStyle(document.body).color")

    light = tick_fill()
    assert light == text_color()
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    assert tick_fill() == text_color() != light


def test_hovering_a_bar_shows_its_content(open_page):
    page = open_page(make_report())
    text = hover_first_bar(page, draw(page, "run-0-timeline"))
    assert "0F0" in text
    assert "4,608 tokens of 2 documents, 1 of them sliced" in text
    assert "ms" in text


def test_dragging_zooms_both_panels_and_a_double_click_goes_back(open_page):
    page = open_page(make_report())
    plot = draw(page, "run-0-timeline")
    whole = plot.evaluate("plot => plot.layout.xaxis.range")
    area = plot.locator(".nsewdrag").first.bounding_box()
    middle = area["y"] + area["height"] / 2
    page.mouse.move(area["x"] + area["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    page.wait_for_timeout(400)
    zoomed, below = plot.evaluate("plot => [plot.layout.xaxis.range, plot.layout.xaxis2.range]")
    assert zoomed == below
    span = whole[1] - whole[0]
    assert zoomed == pytest.approx([whole[0] + 0.3 * span, whole[0] + 0.6 * span], abs=0.01 * span)
    page.mouse.dblclick(area["x"] + area["width"] / 2, middle)
    page.wait_for_timeout(600)
    assert plot.evaluate("plot => plot.layout.xaxis.range") == pytest.approx(whole)


def test_no_button_offers_to_upload_the_figure(open_page):
    """plotly.js 4 shows a "share in the cloud" button by default; run data must not leave by a click."""
    page = open_page(make_report())
    plot = draw(page, "run-0-timeline")
    buttons = plot.locator(".modebar-btn")
    titles = [buttons.nth(i).get_attribute("data-title") for i in range(buttons.count())]
    assert len(titles) == 6
    assert not [title for title in titles if "cloud" in title.lower() or "share" in title.lower()]


def test_hostile_labels_stay_text_in_tooltips(open_page):
    page = open_page(make_report(EVIL))
    text = hover_first_bar(page, draw(page, "run-0-timeline"))
    assert "</script>" in text
    assert page.locator("img").count() == 0


def test_a_narrow_page_makes_room_for_a_wrapped_legend(open_page):
    page = open_page(make_report(), width=420)
    plot = draw(page, "run-1-timeline")
    legend = plot.locator(".legend").bounding_box()
    heading = plot.locator(".annotation").first.bounding_box()
    assert legend["y"] + legend["height"] <= heading["y"] + 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_sixteen_ranks_of_512_packs_stay_usable(open_page):
    timelines = make_timeline(1, 16, 512), make_timeline(1, 16, 512, noise=0.1)
    section = RunSection(name="big", predicted=timelines[0], measured=timelines[1])
    page = open_page(RunReport(title="big", sections=(section,)))
    plot = draw(page, "run-0-timeline")
    assert plot.locator(".bars .point").count() == 2 * (16 * 512 * 2 + 16)
    # Packs thinner than a pixel keep their width: a widened kind would cover the others.
    widths = plot.evaluate(
        "plot => [...plot.querySelectorAll('.bars .point path')].slice(16, 40).map(p => p.getBBox().width)"
    )
    assert 0 < min(widths) < 1
    zoom_ms = plot.evaluate(
        "async plot => { const t = performance.now(); await Plotly.relayout(plot, {'xaxis.range': [1, 3]});"
        " return performance.now() - t; }"
    )
    assert zoom_ms < 5000
