"""What the documentation's site has beyond docs/: its first page, the Python API, and files that pages link to.

A hook of mkdocs (mkdocs.yml names it). Pages in docs/ are written for people who read them in the repository, so they
link to files outside of docs/ and to folders. Here every such file and folder becomes a page of the site
(`source/...`), and links to it lead there; the site needs no address of the repository. README.md is the first page. Of
the Python API every public module gets its section, from docstrings, through mkdocstrings; `API` says which modules
those are, and tests/docs/test_reference.py that all their names are documented.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "src"
README = ROOT / "README.md"
API: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "python": (
        "Planning, micro-batches and training as functions, and callbacks",
        (
            "evenload/__init__.py",
            "evenload/cli/plan.py",
            "evenload/cli/comparison.py",
            "evenload/planning/micro_batches.py",
            "evenload/cli/train.py",
            "evenload/integrations/callback.py",
        ),
    ),
    "loader": (
        "The loader, and other people's loops",
        ("evenload/integrations/*.py",),
    ),
    "planning": (
        "Planning a step, and writing a strategy or a schedule",
        (
            "evenload/planning/planner.py", "evenload/planning/problem.py", "evenload/planning/strategies/strategy.py",
            "evenload/planning/strategies/registry.py", "evenload/schedule/registry.py",
        ),
    ),
    "types": ("Data that crosses package borders", ("evenload/types/*.py",)),
    "settings": (
        "Settings of data and runs",
        (
            "evenload/data/config.py", "evenload/config/train_config.py", "evenload/config/sections.py",
        ),
    ),
    "errors": ("Errors", ("evenload/errors.py",)),
}  # fmt: skip
"""Name of a page -> its title, and the modules whose names are public."""

_LINK = re.compile(r"(?P<before>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()\s*(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_FENCED = re.compile(r"^```.*?^```$", flags=re.M | re.S)
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".csv": "text", ".sh": "sh", ".yml": "yaml"}
_MOST_SHOWN_CHARACTERS = 60_000
PICTURES = (".png", ".svg")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that docs/ does not hold."""
    from mkdocs.structure.files import File

    pages = {"index.md": README.read_text(encoding="utf-8")} | reference_pages()
    for path in linked_outside():
        if path.endswith(PICTURES):
            files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))
        else:
            pages[place_of(path)] = source_page(path)
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_config(config: Any) -> Any:
    """Name the pages of the reference in the navigation."""
    for section in config["nav"]:
        if "Python API" in section:
            section["Python API"] += [{title: f"reference/{name}.md"} for name, (title, _) in API.items()]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository's pages as links of the site's."""
    place = page.file.src_uri
    if place.startswith(("source/", "reference/")) or place == "decisions/index.md":
        return markdown
    home = "README.md" if place == "index.md" else f"docs/{place}"
    return with_links(markdown, home, place)


def with_links(markdown: str, home: str, place: str) -> str:
    """A page's text with links that hold on the site.

    Args:
        home: the page's path in the repository.
        place: its path on the site, before it becomes HTML.
    """

    def moved(match: re.Match[str]) -> str:
        path = repository_path(match["target"], home)
        if path is None:
            return match[0]
        target = posixpath.relpath(place_of(path), posixpath.dirname(place))
        return f"{match['before']}{target}{match['anchor'] or ''})"

    return outside_of_fences(markdown, lambda text: _LINK.sub(moved, text))


def outside_of_fences(markdown: str, change: Any) -> str:
    """Change everything but fenced blocks."""
    parts, last = [], 0
    for fenced in _FENCED.finditer(markdown):
        parts += [change(markdown[last : fenced.start()]), fenced[0]]
        last = fenced.end()
    return "".join([*parts, change(markdown[last:])])


def repository_path(target: str, home: str) -> str | None:
    """What a link leads to, as a path in the repository; None for an address elsewhere."""
    if re.match(r"[a-z]+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), target))


def place_of(path: str) -> str:
    """Where the site shows a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        return f"{inside}/index.md" if (ROOT / path).is_dir() else inside
    return f"source/{path}" if path.endswith(PICTURES) else f"source/{path}.md"


def linked_outside() -> Iterator[str]:
    """Files and folders that pages link to and docs/ does not hold as pages, each once."""
    seen = set()
    todo = [("README.md", README), *((str(page.relative_to(ROOT)), page) for page in sorted(DOCS.rglob("*.md")))]
    for home, page in todo:
        text = page.read_text(encoding="utf-8")
        for link in _LINK.finditer(_FENCED.sub("", text)):
            path = repository_path(link["target"], home)
            if path is None or path in seen or path == "README.md":
                continue
            seen.add(path)
            if (ROOT / path).is_dir() or not path.startswith("docs/"):
                yield path


def source_page(path: str) -> str:
    """A page that shows a file, or lists a folder."""
    file = ROOT / path
    if file.is_dir():
        return folder_page(path)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        # Its own links lead to files that need no page of their own.
        return outside_of_fences(text, lambda part: _LINK.sub(lambda link: link["before"][:-1].strip("![]"), part))
    if len(text) > _MOST_SHOWN_CHARACTERS:
        return f"# {path}\n\n{len(text):,} characters, in the repository.\n"
    return f"# {path}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"


def folder_page(path: str) -> str:
    """The files of a folder; those that are pages of the site by their titles."""
    lines = [f"# {path}", ""]
    for file in sorted((ROOT / path).iterdir()):
        if file.name.startswith((".", "__")):
            continue
        if file.suffix == ".md" and path.startswith("docs/"):
            title = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
            lines.append(f"- [{title}]({file.name})")
        else:
            lines.append(f"- `{file.name}`")
    return "\n".join([*lines, ""])


def reference_pages() -> dict[str, str]:
    """Pages of the Python API by their place, and one that lists them."""
    pages = {}
    lines = ["# Python API", "", "From docstrings. What is not here is Evenload's own and may change.", ""]
    for name, (title, _) in API.items():
        modules = public_modules(name)
        pages[f"reference/{name}.md"] = f"# {title}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
        lines.append(f"- [{title}]({name}.md)")
        lines += [f"    - [`{module}`]({name}.md#{module})" for module in modules]
    pages["reference/index.md"] = "\n".join([*lines, ""])
    return pages


def public_modules(name: str) -> list[str]:
    """Modules of a page, in the order of its patterns; packages that hold nothing but others are left out."""
    result = []
    for pattern in API[name][1]:
        for file in sorted(PACKAGE.glob(pattern)):
            path = file.relative_to(PACKAGE).as_posix()
            is_package = file.name == "__init__.py"
            if is_package and path != "evenload/__init__.py":
                continue
            result.append(path.removesuffix("/__init__.py").removesuffix(".py").replace("/", "."))
    return result
