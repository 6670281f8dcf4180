"""Pictures of benchmarks: a plotly figure drawn in headless Chromium, as PNG."""

import shutil
import sys
from pathlib import Path

import plotly.graph_objects as go

FONT = {"family": "Inter, Helvetica, Arial, sans-serif", "size": 13, "color": "#1f2530"}


def write_png(figure: go.Figure, path: Path, *, width: int, height: int) -> None:
    """Draw a figure. Needs playwright (in the dev and bench extras) and a Chromium on the PATH."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium on the PATH to draw the picture; install one (apt-get install chromium)")
    figure.update_layout(width=width, height=height, font=FONT, paper_bgcolor="white", plot_bgcolor="white")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=2)
        page.set_content(figure.to_html(include_plotlyjs=True, config={"displayModeBar": False}))
        page.wait_for_selector(".main-svg")
        page.wait_for_timeout(500)
        page.locator(".plotly-graph-div").screenshot(path=path)
        browser.close()
