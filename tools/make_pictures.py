"""Pictures of the README and docs: element screenshots of report pages in headless Chromium.

    make demo && make docs

Writes to docs/pictures/, with a light colour scheme:
- demo-*.png from runs/demo/bench.html, both strategies of the last demo on the same batches;
- plan-*.png from the page of `evenload plan` on github_dirs, 64 GPUs, 128K context (the guide's example);
- lengths.png from the page of `evenload lengths` on the same table.
Needs playwright (in the dev extra) and a Chromium on the PATH; takes about half a minute.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "runs" / "demo" / "bench.html"
PICTURES = ROOT / "docs" / "pictures"
TABLE = "examples/lengths/github_dirs.npy.gz"
PLAN = (
    *("plan", TABLE, "--model", "llama-13b", "--cluster", "h100x64", "--layout", "dp=4,pp=4,tp=4"),
    *("--context", "131072", "--overlong", "truncate", "--documents", "512", "--steps", "4"),
    *("--strategy", "padded,best_fit,fixed_greedy,balanced,wlb,slimpack,auto"),
)
# File name -> position among the strategies of the page; they stand in the order in which the demo names them.
DEMO = {"demo-timeline-best-fit.png": 0, "demo-timeline.png": 1}
WIDTH, HEIGHT = 1000, 1000


def main() -> None:
    """Draw every figure and photograph it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("tools/make_pictures.py: no chromium on the PATH; install one (apt-get install chromium)")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(color_scheme="light", viewport={"width": WIDTH, "height": HEIGHT})
        plan, lengths = Path(folder) / "plan.html", Path(folder) / "lengths.html"
        evenload(*PLAN, "--html", str(plan))
        evenload("lengths", TABLE, "--html", str(lengths))
        page.goto(plan.as_uri())
        photograph_plot(page, "all-split", "plan-losses.png")
        photograph_step(page, "plan-timeline.png", ("timeline", "memory"))
        photograph_step(page, "plan-documents.png", ("documents",))
        page.goto(lengths.as_uri())
        photograph_plot(page, "classes", "lengths.png")
        if REPORT.is_file():
            page.goto(REPORT.as_uri())
            for name, position in DEMO.items():
                choose(page, "strategy", str(position))
                photograph_step(page, name, ("timeline",))
        else:
            sys.stderr.write(f"tools/make_pictures.py: no {REPORT.relative_to(ROOT)}, so demo-*.png stay as they are\n")
        browser.close()


def evenload(*arguments: str) -> None:
    """Run the command line; its tables are not shown."""
    command = [sys.executable, "-m", "evenload.cli.main", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def photograph_plot(page: Page, figure: str, name: str) -> None:
    """A whole figure with its heading."""
    element = page.locator(f"#{figure}")
    element.scroll_into_view_if_needed()
    settle(page)
    element.screenshot(path=PICTURES / name)


def choose(page: Page, control: str, value: str) -> None:
    """Make a choice in the step view."""
    page.wait_for_selector("#step-view[data-drawn]")
    page.evaluate("document.getElementById('step-view').removeAttribute('data-drawn')")
    page.locator(f"#step-view select[name={control}]").select_option(value)


def photograph_step(page: Page, name: str, kinds: tuple[str, ...]) -> None:
    """The step view with only some kinds of its pictures, each with the line above it."""
    view = page.locator("#step-view")
    view.scroll_into_view_if_needed()
    page.wait_for_selector("#step-view[data-drawn]")
    settle(page)
    page.evaluate(
        """kinds => {
            const stage = document.querySelector("#step-view .stage");
            for (const element of stage.children) {
                let picture = element;
                while (picture.matches("h4, .legend")) picture = picture.nextElementSibling;
                const pair = picture.matches(".pair") ? picture : picture.querySelector(".pair");
                element.style.display = pair && kinds.some((kind) => pair.classList.contains(kind)) ? "" : "none";
            }
            document.querySelector("#step-view figcaption").style.display = "none";
        }""",
        list(kinds),
    )
    settle(page)
    view.screenshot(path=PICTURES / name)


def settle(page: Page) -> None:
    """No tooltip in the picture, and drawing done."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)


if __name__ == "__main__":
    main()
