"""Documentation that points at something: the thing must be there."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them from headings, and those that a page sets itself."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ +(.+)$", text, flags=re.M)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings(page):
    """A moved file or a renamed heading leaves a dead link that nobody clicks for months."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    broken = []
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_page_of_files_names_exactly_the_files_there_are():
    """A file without a line is a file nobody finds; run tools/make_file_tree.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_file_tree.py"))
    tree = script["TARGET"].read_text(encoding="utf-8").partition("```")[2].rpartition("```")[0]
    assert script["listed_paths"](tree) == set(script["tracked_files"]())


def test_the_readmes_tree_has_every_room_and_folder_and_the_page_stays_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tree,) = (block for block in re.findall(r"^```\w*\n(.*?)^```$", readme, flags=re.M | re.S) if "native/" in block)
    named = re.findall(r"([\w/]+)/(?=\s)", "\n".join(line[:24] + " " for line in tree.splitlines()))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {path.split("/")[0] for path in tracked if "/" in path and not path.startswith(".")} - {"src"}
    rooms = {path.split("/")[2] for path in tracked if path.startswith("src/evenload/") and path.count("/") > 2}
    assert sorted(name.removeprefix("src/evenload/") for name in named) == sorted(folders | rooms)
    assert len(tree.splitlines()) <= 25
    assert len(readme.splitlines()) < 150


def test_code_in_docs_names_files_that_exist():
    """Paths in backquotes, such as `stepplan/validate.py`, below the root or the package."""
    missing = []
    for page in pages():
        for path in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|cpp|h|toml|json))`", page.read_text(encoding="utf-8")):
            written_by_runs = path.startswith("runs/")
            if not written_by_runs and not any((base / path).exists() for base in (ROOT, ROOT / "src" / "evenload")):
                missing.append(f"{page.name}: {path}")
    assert missing == []
