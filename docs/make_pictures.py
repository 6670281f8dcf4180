"""Pictures of the README and docs: element screenshots of the last demo's report, in headless Chromium.

    make demo && make docs

Opens runs/demo/report.html with a light colour scheme and writes docs/pictures/demo-timeline.png (the sliced run)
and docs/pictures/demo-timeline-best-fit.png (the baseline). Needs playwright (in the dev extra) and a Chromium on
the PATH.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "runs" / "demo" / "report.html"
PICTURES = ROOT / "docs" / "pictures"
# File name -> id of the figure in the page; the page's sections are in the order in which the demo trains.
FIGURES = {"demo-timeline.png": "run-0-timeline", "demo-timeline-best-fit.png": "run-1-timeline"}
WIDTH, HEIGHT = 1000, 900


def main() -> None:
    """Draw every figure and photograph it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("docs/make_pictures.py: no chromium on the PATH; install one (apt-get install chromium)")
    if not REPORT.is_file():
        sys.exit(f"docs/make_pictures.py: {REPORT.relative_to(ROOT)} is not there; run `make demo` first")
    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(color_scheme="light", viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(REPORT.as_uri())
        for name, figure in FIGURES.items():
            element = page.locator(f"#{figure}")
            element.scroll_into_view_if_needed()
            page.wait_for_selector(f"#{figure} .plot[data-drawn]")
            page.mouse.move(0, 0)  # no tooltip in the picture
            page.wait_for_timeout(300)
            element.screenshot(path=PICTURES / name)
        browser.close()


if __name__ == "__main__":
    main()
