"""A real browser and pages in it, which must not complain, talk or reach for the network."""

import shutil

import pytest
from test_html_report import make_report

from evenload.report.html import write_report
from evenload.report.run_report import RunReport

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
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

    def open_report(report=None, scheme="light", size=(1280, 900), link="", touch=False):
        path = report or sample
        if isinstance(report, RunReport):
            path = tmp_path / "report.html"
            write_report(path, report)
        width, height = size
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height}, has_touch=touch)
        pages.append(page)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: complaints.append(request.url) if "file:" not in request.url[:5] else None)
        page.goto(path.as_uri() + link)
        return page

    yield open_report
    for page in pages:
        page.close()
    # Reading pixels back is what these tests do, not the page.
    result = [text for text in complaints if not text.startswith("data:") and "willReadFrequently" not in text]
    assert result == []
