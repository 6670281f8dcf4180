"""The page of `evenload plan` in a real browser: the answer first, and nothing cut off on a phone."""

import pytest

import evenload


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    found = evenload.plan(
        [200, 900, 3000, 12_000] * 40, model="llama-7b", cluster="h100x8", layout="pp=8", documents=64
    )
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    found.write_html(path)
    return found, path


def test_the_answer_cards_table_and_next_step_stand_above_the_details(page_file, open_page):
    found, path = page_file
    page = open_page(path)
    tops = [
        page.locator(selector).first.bounding_box()["y"]
        for selector in (".headline", "dl.tiles", ".summary", ".first table", ".next", "#details", "#step-view")
    ]
    assert tops == sorted(tops)
    assert page.locator(".headline").inner_text() == found.headline
    assert page.locator("dl.tiles > div").count() == 3
    assert 1 <= page.locator(".first tbody tr").count() <= 5
    assert page.locator(".next").inner_text() == found.next_step
    legend = page.locator("#all-split .legend span").all_inner_texts()
    assert legend[0] == "useful work"
    assert len(legend) <= 7


def test_nothing_of_the_answer_is_cut_at_400_px(page_file, open_page):
    _, path = page_file
    page = open_page(path, size=(400, 900))
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    scrolled = page.evaluate("[...document.querySelectorAll('.first .scroll')].map(e => e.scrollWidth - e.clientWidth)")
    assert scrolled == [0]
    for selector in (".headline", "dl.tiles", ".summary", ".first", ".next"):
        box = page.locator(selector).first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
