"""The step view in a real browser: the timelines' own numbers, and what pointing, choosing and dragging shows."""

import dataclasses

import numpy as np
import pytest
from test_html_report import make_report

from browser_page import choose, find_task, hover_task, pixel, steps, task_box, view
from evenload.report.run_report import RunReport, RunSection, StepView
from evenload.report.svg import KIND_STYLES
from evenload.types.text import format_bytes
from evenload.types.timeline import MEMORY_KINDS
from report_samples import make_plan, make_row, make_timeline, with_details


def test_the_page_holds_the_timelines_own_numbers(open_page):
    """Table, trace and page come from one timeline; the page must not show others."""
    report = make_report()
    page = open_page(report)
    steps(page)
    for panel, t in enumerate(report.sections[0].steps[0].timelines().values()):
        result = page.evaluate(
            "p => { const t = document.getElementById('step-view').stepView.panels()[p].timeline;"
            " return [t.kind, t.stage, t.pack, t.start, t.end].map((column) => Array.from(column)); }",
            panel,
        )
        order = np.lexsort((t.start_s, t.rank, t.dp_rank))
        for column, values in zip(("kind", "stage", "pack"), result[:3], strict=True):
            assert values == getattr(t, column)[order].tolist()
        assert np.allclose(result[3:], [t.start_s[order], t.end_s[order]], rtol=0, atol=1e-9)


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


def test_hovering_a_bar_shows_its_content(open_page):
    page = open_page()
    steps(page)
    text = hover_task(page, 0, dp=0, kind=0, stage=0, pack=0)
    for part in (
        *("0F0 forward, stage 0, pack 0", "4,608 tokens of 2 documents, 1 of them sliced", "on dp 0, rank 0", "ms"),
        *("doc 800: tokens 0 to 4,096 of 32,768", "doc 1000: all 512 tokens"),
        *("GiB while it runs", "on the critical path"),
    ):
        assert part in text
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


def test_a_prediction_beside_a_run_says_its_peak_as_the_run_counts_it(open_page):
    predicted, measured = with_details(make_timeline(1, 4, 8)), make_timeline(1, 4, 8, noise=0.2)
    by_kind = predicted.memory_kind_bytes.copy()
    by_kind[5, MEMORY_KINDS.index("head_logits")] = 2**30
    predicted = dataclasses.replace(predicted, memory_bytes=by_kind.sum(axis=1), memory_kind_bytes=by_kind)
    step = StepView(step=1, predicted=predicted, measured=measured, plan=make_plan(1, 8))
    run = RunSection(name="run", steps=(step,))
    alone = RunSection(name="alone", steps=(StepView(step=1, predicted=predicted),))
    page = open_page(RunReport(title="", sections=(run, alone), best=("run",), comparison=({"name": "run"},)))
    root = steps(page)
    choose(page, "compare", "1")
    lines = root.locator("h4:not(.sub)").all_inner_texts()
    assert [line.split("memory peak ")[1] for line in lines] == [
        "6.00 GiB, 5.01 GiB without buffers",
        f"{format_bytes(int(measured.memory_bytes.max()))} without buffers",
        "6.00 GiB",
    ]


def test_strategy_step_and_replica_can_be_chosen(open_page):
    page = open_page()
    root = steps(page)
    headings = root.locator("h4 b")
    assert headings.all_text_contents() == ["auto, predicted", "auto, measured", "best_fit, predicted"]
    before = root.locator(".pair.timeline canvas").first.evaluate("c => c.toDataURL()")
    choose(page, "compare", "-1")
    assert headings.all_text_contents() == ["auto, predicted", "auto, measured"]
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
    assert root.locator("button[name=after]").is_disabled()
    root.locator("button[name=before]").click()
    page.wait_for_selector("#step-view[data-drawn^='1/1/']")
    assert root.locator("button[name=before]").is_disabled()


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
    assert view(page)[0] == pytest.approx(zoomed[0] - 0.25 * 0.3 * span, abs=0.01 * span)
    page.mouse.dblclick(left + 0.5 * (right - left), middle)
    assert view(page) == pytest.approx(whole)


def test_keys_and_buttons_zoom_too(open_page):
    page = open_page()
    root = steps(page)
    whole = view(page)
    root.locator("button[name=in]").click()
    half = view(page)
    assert half[1] - half[0] == pytest.approx((whole[1] - whole[0]) / 2)
    root.locator(".stage").focus()
    page.keyboard.press("ArrowLeft")
    assert view(page)[0] == pytest.approx(half[0] - 0.2 * (half[1] - half[0]))
    page.keyboard.press("0")
    assert view(page) == pytest.approx(whole)
    root.locator("button[name=in]").click()
    half = view(page)
    scroller = root.locator(".scroller").first
    scroller.focus()
    for key in ("Home", "ArrowLeft", "ArrowDown"):
        scroller.press(key)
    assert view(page) == half, "keys in the documents scroll them"
    scroller.press("0")
    assert view(page) != half


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
    assert "rank 0 to rank 3" in root.locator(".legend").nth(1).inner_text()
    root.locator("select[name=memory]").select_option("kinds")
    page.wait_for_timeout(200)
    assert root.locator(".pair.memory canvas").first.evaluate("c => c.toDataURL()") != lines
    assert "activations recompute" in root.locator(".legend").nth(1).inner_text()
    memory = root.locator(".pair.memory canvas.over").first
    memory.scroll_into_view_if_needed()
    box = memory.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    assert "weights: 5.00 GiB" in page.locator(".tip").inner_text()
    backward = int(np.flatnonzero(t.kind == 1)[0])
    text = hover_task(page, 0, kind=1, stage=int(t.stage[backward]), pack=int(t.pack[backward]))
    assert "recompute (front of a backward): 1.00 ms" in text
    assert "reload from the host: 2.00 ms" in text
    assert "gradient reduction" in root.locator(".legend").first.inner_text()


def test_sixteen_ranks_of_512_packs_stay_usable(open_page):
    predicted, measured = make_timeline(1, 16, 512), make_timeline(1, 16, 512, noise=0.1)
    step = StepView(step=1, predicted=predicted, measured=measured, plan=make_plan(1, 512))
    page = open_page(RunReport(title="big", sections=(RunSection(name="big", steps=(step,)),)))
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


def test_a_link_shows_somebody_else_the_same(open_page):
    page = open_page()
    root = steps(page)
    choose(page, "strategy", "1")
    choose(page, "step", "2")
    choose(page, "replica", "1")
    root.locator("button[name=in]").click()
    page.wait_for_url("**#step-view&*time=*")
    link = page.evaluate("location.hash")
    shown = view(page)
    assert link.startswith("#step-view&strategy=best_fit&compare=-&step=2&replica=1&memory=ranks&time=")
    other = open_page(link=link)
    root = steps(other)
    assert root.locator("h4 b").all_text_contents() == ["best_fit, predicted"]
    assert root.locator("select[name=step]").input_value() == "2"
    assert root.locator("select[name=replica]").input_value() == "1"
    assert view(other) == pytest.approx(shown, rel=1e-6)
    # What is shown is a part of this page's step, also where the link is of a longer one.
    beyond = open_page(link="#step-view&strategy=best_fit&time=1000,1001&tokens=-9e9,9e9")
    steps(beyond)
    low, high = view(beyond)
    longest_s = max(make_timeline(2, 4, 8, seed=seed).end_s.max() for seed in range(9))
    assert 0 <= low < high < 1.5 * longest_s
    # Names that this page does not know are left out.
    steps(open_page(link="#step-view&strategy=gone&step=99&replica=x&time=2,1"))


def test_fingers_tap_and_move_on_a_phone(open_page):
    page = open_page(size=(390, 844), touch=True)
    root = steps(page)
    box = task_box(page, 0, find_task(page, 0, dp=0, kind=0, stage=0, pack=0))
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "0F0 forward, stage 0, pack 0" in page.locator(".tip").inner_text()
    root.locator("button[name=in]").click()
    before = view(page)
    over = root.locator(".pair.timeline canvas.over").first
    fingers = "(c, [type, x, id]) => c.dispatchEvent(new PointerEvent(type, { pointerType: 'touch', pointerId: id,"
    fingers += " clientX: c.getBoundingClientRect().left + x, clientY: 0, bubbles: true }))"
    # Pointers made by a script cannot be captured.
    over.evaluate("c => (c.setPointerCapture = () => {})")
    for type_, x in (("pointerdown", 200), ("pointermove", 150), ("pointerup", 150)):
        over.evaluate(fingers, [type_, x, 1])
    moved = view(page)
    assert moved[0] > before[0]
    assert moved[1] - moved[0] == pytest.approx(before[1] - before[0])
    for type_, x, finger in (("pointerdown", 150, 1), ("pointerdown", 200, 2), ("pointermove", 250, 2)):
        over.evaluate(fingers, [type_, x, finger])
    assert view(page)[1] - view(page)[0] == pytest.approx((moved[1] - moved[0]) / 2)


def test_a_trained_run_shows_its_last_step_and_a_click_on_a_curve_another(open_page):
    views = tuple(
        StepView(step=step, predicted=make_timeline(1, 2, 3, seed=step), measured=make_timeline(1, 2, 3, seed=step))
        for step in (0, 2, 4)
    )
    rows = tuple(make_row(step) for step in range(5))
    page = open_page(RunReport(title="t", sections=(RunSection(name="a", metrics=rows, steps=views),)))
    root = steps(page)
    assert root.locator("select[name=step]").input_value() == "4"
    plot = page.locator("#run-0-time svg.plot[data-curves]")
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_selector("#step-view[data-drawn^='0/0/']")
    plot.click(position={"x": plot.bounding_box()["width"] * 0.45, "y": 100})
    page.wait_for_selector("#step-view[data-drawn^='0/2/']")
