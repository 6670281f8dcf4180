"""The page in a real browser: what a reader meets when they open it."""

import shutil

import numpy as np
import pytest
from test_html_report import EVIL, make_report

from evenload.data.length_profile import profile_lengths
from evenload.report.html import write_report
from evenload.report.lengths_page import write_lengths_page
from evenload.report.palette import KIND_STYLES
from evenload.report.run_report import RunReport, RunSection, StepView
from report_samples import make_plan, make_timeline, with_details

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


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The page of `make_report()`, written once."""
    path = tmp_path_factory.mktemp("sample") / "report.html"
    write_report(path, make_report())
    return path


@pytest.fixture
def open_page(browser, sample, tmp_path):
    """Opens a report or the file of one; without, the sample. At the end no console message, error or network request
    may have happened."""
    complaints = []
    pages = []

    def open_report(report=None, scheme="light", width=1280):
        path = sample
        if isinstance(report, RunReport):
            path = tmp_path / "report.html"
            write_report(path, report)
        elif report is not None:
            path = report
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        pages.append(page)
        # Reading pixels back is what these tests do, not the page.
        page.on(
            "console",
            lambda message: (
                "willReadFrequently" in message.text or complaints.append(f"{message.type}: {message.text}")
            ),
        )
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


def steps(page):
    """The step view, drawn."""
    page.locator("#step-view").scroll_into_view_if_needed()
    page.wait_for_selector("#step-view[data-drawn]")
    page.wait_for_timeout(100)
    return page.locator("#step-view")


def choose(page, name, value):
    page.evaluate("document.getElementById('step-view').removeAttribute('data-drawn')")
    page.locator(f"#step-view select[name={name}]").select_option(value)
    return steps(page)


def pixel(page, canvas, x, y):
    """Colour at a place of the window, "#rrggbb"."""
    return canvas.evaluate(
        """(canvas, [x, y]) => {
            const box = canvas.getBoundingClientRect();
            const ratio = canvas.width / box.width;
            const at = [(x - box.left) * ratio, (y - box.top) * ratio];
            const [r, g, b] = canvas.getContext("2d").getImageData(...at, 1, 1).data;
            return "#" + [r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("");
        }""",
        [x, y],
    )


def task_box(page, panel, task):
    return page.evaluate(
        "([panel, task]) => document.getElementById('step-view').stepView.taskBox(panel, task)", [panel, task]
    )


def find_task(page, panel, **wanted):
    """Index of the first task with these columns in a panel."""
    return page.evaluate(
        """([panel, wanted]) => {
            const keys = ["kind", "stage", "pack"].filter((key) => wanted[key] !== undefined);
            const matches = (t, i) => keys.every((key) => t[key][i] === wanted[key]);
            const { timeline, placed } = document.getElementById("step-view").stepView.panels()[panel];
            for (const { lane } of placed.rows) {
                if (wanted.dp !== undefined && lane.dp !== wanted.dp) continue;
                for (let i = lane.first; i < lane.last; i++) {
                    if (matches(timeline, i)) return i;
                }
            }
            return -1;
        }""",
        [panel, wanted],
    )


def hover_task(page, panel, **wanted):
    box = task_box(page, panel, find_task(page, panel, **wanted))
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".tip:not([hidden])")
    return page.locator(".tip").inner_text()


def view(page):
    return [float(page.locator("#step-view .stage").get_attribute(f"data-{end}")) for end in ("from", "to")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
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


def test_the_page_holds_the_timelines_own_numbers(open_page):
    """Table, trace and page come from one timeline; the page must not show others."""
    report = make_report()
    page = open_page(report)
    steps(page)
    for panel, t in enumerate(report.sections[0].steps[0].timelines().values()):
        found = page.evaluate(
            "p => { const t = document.getElementById('step-view').stepView.panels()[p].timeline;"
            " return [t.kind, t.stage, t.pack, t.start, t.end].map((column) => Array.from(column)); }",
            panel,
        )
        order = np.lexsort((t.start_s, t.rank, t.dp_rank))
        for column, values in zip(("kind", "stage", "pack"), found[:3], strict=True):
            assert values == getattr(t, column)[order].tolist()
        assert np.allclose(found[3:], [t.start_s[order], t.end_s[order]], rtol=0, atol=1e-9)


def test_bars_stand_where_their_tasks_are(open_page):
    page = open_page()
    canvas = steps(page).locator(".pair.timeline canvas").first
    for kind, letter in enumerate("FB"):
        for pack in (2, 3):
            box = task_box(page, 0, find_task(page, 0, dp=1, kind=kind, stage=1, pack=pack))
            style = KIND_STYLES[letter]
            assert pixel(page, canvas, box["x"] + 3, box["y"] + 3) == (style.odd if pack % 2 else style.even)
    last = page.evaluate("document.getElementById('step-view').stepView.panels()[0].timeline.endS")
    assert last == pytest.approx(make_timeline(2, 4, 8).end_s.max())


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


def test_hovering_a_bar_shows_its_content(open_page):
    page = open_page()
    steps(page)
    text = hover_task(page, 0, dp=0, kind=0, stage=0, pack=0)
    assert "0F0 forward, stage 0, pack 0" in text
    assert "4,608 tokens of 2 documents, 1 of them sliced" in text
    assert "doc 800: tokens 0 to 4,096 of 32,768" in text
    assert "doc 1000: all 512 tokens" in text
    assert "ms" in text
    assert "on dp 0, rank 0" in text
    assert "GiB while it runs" in text
    assert "on the critical path" in text
    page.mouse.move(2, 2)
    assert page.locator(".tip").is_hidden()


def test_hovering_memory_and_documents_shows_their_content(open_page):
    page = open_page()
    view = steps(page)
    memory = view.locator(".pair.memory canvas.over").first
    memory.scroll_into_view_if_needed()
    box = memory.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 60)
    text = page.locator(".tip").inner_text()
    assert "peak" in text
    assert "of 80.0 GiB" in text
    documents = view.locator(".pair.documents canvas.over").first
    documents.scroll_into_view_if_needed()
    box = documents.bounding_box()
    # The longest document is the first row; its backward slices are the lower half, its last slice pack 0.
    page.mouse.move(box["x"] + box["width"] * 0.93, box["y"] + 13)
    text = page.locator(".tip").inner_text()
    assert "backward, pack 0 of dp 0" in text
    assert "doc 800: tokens 28,672 to 32,768 of 32,768" in text
    assert "kept for backward: recompute" in text


def test_strategy_step_and_replica_can_be_chosen(open_page):
    page = open_page()
    root = steps(page)
    headings = root.locator("h4 b")
    assert headings.all_text_contents() == ["auto, predicted", "auto, measured"]
    before = root.locator(".pair.timeline canvas").first.evaluate("c => c.toDataURL()")
    choose(page, "compare", "1")
    assert headings.all_text_contents() == ["auto, predicted", "auto, measured", "best_fit, predicted"]
    choose(page, "strategy", "1")
    assert headings.all_text_contents() == ["best_fit, predicted"]
    first = root.locator(".pair.timeline canvas").first.evaluate("c => c.toDataURL()")
    assert first != before
    choose(page, "step", "2")
    assert root.locator(".pair.timeline canvas").first.evaluate("c => c.toDataURL()") != first
    rows = "document.getElementById('step-view').stepView.panels()[0].placed.rows.map(({ lane }) => lane.dp)"
    assert page.evaluate(rows) == [0] * 4 + [1] * 4
    choose(page, "replica", "1")
    assert page.evaluate(rows) == [1] * 4
    choose(page, "replica", "slowest")
    t = make_timeline(2, 4, 8, seed=2)
    assert page.evaluate(rows) == [int(t.dp_rank[t.end_s.argmax()])] * 4


def test_dragging_zooms_all_timelines_and_a_double_click_goes_back(open_page):
    page = open_page()
    root = steps(page)
    whole = view(page)
    area = root.locator(".pair.timeline canvas.over").first.bounding_box()
    left, right = area["x"] + 92, area["x"] + area["width"] - 14
    middle = area["y"] + area["height"] / 2
    below = root.locator(".pair.timeline canvas:not(.over)").nth(1)
    untouched = below.evaluate("c => c.toDataURL()")
    page.mouse.move(left + 0.3 * (right - left), middle)
    page.mouse.down()
    page.mouse.move(left + 0.6 * (right - left), middle, steps=5)
    page.mouse.up()
    page.wait_for_timeout(200)
    span = whole[1] - whole[0]
    zoomed = view(page)
    assert zoomed == pytest.approx([whole[0] + 0.3 * span, whole[0] + 0.6 * span], abs=0.01 * span)
    assert below.evaluate("c => c.toDataURL()") != untouched
    page.keyboard.down("Shift")
    page.mouse.move(left + 0.5 * (right - left), middle)
    page.mouse.down()
    page.mouse.move(left + 0.75 * (right - left), middle, steps=5)
    page.mouse.up()
    page.keyboard.up("Shift")
    page.wait_for_timeout(200)
    assert view(page)[0] == pytest.approx(zoomed[0] - 0.25 * 0.3 * span, abs=0.01 * span)
    page.mouse.dblclick(left + 0.5 * (right - left), middle)
    page.wait_for_timeout(200)
    assert view(page) == pytest.approx(whole)


def test_keys_and_buttons_zoom_too(open_page):
    page = open_page()
    root = steps(page)
    whole = view(page)
    root.locator("button[name=in]").click()
    page.wait_for_timeout(100)
    half = view(page)
    assert half[1] - half[0] == pytest.approx((whole[1] - whole[0]) / 2)
    root.locator(".stage").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(100)
    assert view(page)[0] == pytest.approx(half[0] - 0.2 * (half[1] - half[0]))
    page.keyboard.press("0")
    page.wait_for_timeout(100)
    assert view(page) == pytest.approx(whole)


def test_the_critical_path_can_be_shown(open_page):
    page = open_page()
    root = steps(page)
    canvas = root.locator(".pair.timeline canvas").first
    box = task_box(page, 0, find_task(page, 0, dp=0, kind=0, stage=0, pack=0))
    at = box["x"] + 3, box["y"] + box["height"] - 5
    before = pixel(page, canvas, *at)
    root.locator("input[name=critical]").check()
    page.wait_for_timeout(100)
    assert pixel(page, canvas, *at) == "#111418" != before


def test_memory_by_kind_and_recompute_are_shown_where_the_prediction_knows_them(open_page):
    t = with_details(make_timeline(1, 4, 8))
    section = RunSection(name="a", steps=(StepView(step=1, predicted=t, plan=make_plan(1, 8)),))
    page = open_page(RunReport(title="t", sections=(section,)))
    root = steps(page)
    peak = page.evaluate("document.getElementById('step-view').stepView.panels()[0].placed.rows[0].lane.peakBytes")
    assert peak == t.memory_bytes[t.memory_rank == 0].max()
    lines = root.locator(".pair.memory canvas").first.evaluate("c => c.toDataURL()")
    root.locator("select[name=memory]").select_option("kinds")
    page.wait_for_timeout(200)
    assert root.locator(".pair.memory canvas").first.evaluate("c => c.toDataURL()") != lines
    assert "memory: activations recompute" in root.locator(".legend").inner_text()
    memory = root.locator(".pair.memory canvas.over").first
    memory.scroll_into_view_if_needed()
    box = memory.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    assert "weights: 5.00 GiB" in page.locator(".tip").inner_text()
    backward = int(np.flatnonzero(t.kind == 1)[0])
    text = hover_task(page, 0, kind=1, stage=int(t.stage[backward]), pack=int(t.pack[backward]))
    assert "recompute (front of a backward): 1.00 ms" in text
    assert "reload from the host: 2.00 ms" in text
    assert "gradient reduction" in root.locator(".legend").inner_text()


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


def test_sixteen_ranks_of_512_packs_stay_usable(open_page):
    predicted, measured = make_timeline(1, 16, 512), make_timeline(1, 16, 512, noise=0.1)
    section = RunSection(
        name="big", steps=(StepView(step=1, predicted=predicted, measured=measured, plan=make_plan(1, 512)),)
    )
    page = open_page(RunReport(title="big", sections=(section,)))
    steps(page)
    # Packs thinner than a pixel keep their width: a widened kind would cover the others.
    assert 0 < task_box(page, 0, 40)["width"] < 2
    redraw_ms = page.evaluate(
        """async () => {
            const root = document.getElementById("step-view");
            const begin = performance.now();
            root.querySelector("button[name=in]").click();
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            return performance.now() - begin;
        }"""
    )
    assert redraw_ms < 2000
    assert "forward" in hover_task(page, 1, kind=0, stage=15, pack=200)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_lengths_page_draws_its_figures(open_page, tmp_path, scheme):
    lengths = np.random.default_rng(0).lognormal(6, 2, 3000).astype(np.int64) + 1
    write_lengths_page(tmp_path / "lengths.html", f"lengths of {EVIL}", profile_lengths(lengths))
    page = open_page(tmp_path / "lengths.html", scheme)
    assert EVIL in page.locator("h1").text_content()
    for figure in ("classes", "cumulative", "windows"):
        assert draw(page, figure).locator(".trace, .scatterlayer path").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
