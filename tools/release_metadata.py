"""What a release says of its home: project URLs and absolute links, written into the checkout that it is built from.

    python tools/release_metadata.py https://HOST/OWNER/NAME v0.1.0        in .github/workflows/release.yml

The repository's files do not name the place that it is published at, so forks and mirrors need no change; the release
workflow knows it. pyproject.toml gets [project.urls], and README.md, which the index shows, absolute links and pictures
of that version. Refuses a tag that is not the version's, and a tree that has been through this already.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def main() -> None:
    """Both files."""
    if len(sys.argv) != 3:
        sys.exit("usage: python tools/release_metadata.py REPOSITORY_URL TAG")
    home, tag = sys.argv[1].rstrip("/"), sys.argv[2]
    project, page = ROOT / "pyproject.toml", ROOT / "README.md"
    settings = project.read_text(encoding="utf-8")
    version = tomllib.loads(settings)["project"]["version"]
    if tag.startswith("v") and tag != f"v{version}":
        sys.exit(f"tools/release_metadata.py: tag {tag}, but pyproject.toml says version {version}; change one of them")
    project.write_text(with_urls(settings, home), encoding="utf-8")
    page.write_text(with_absolute_links(page.read_text(encoding="utf-8"), home, tag), encoding="utf-8")


def with_urls(settings: str, home: str) -> str:
    """pyproject.toml with [project.urls].

    Raises:
        SystemExit: it has them already.
    """
    if "[project.urls]" in settings:
        sys.exit("tools/release_metadata.py: pyproject.toml has [project.urls] already")
    lines = (
        "[project.urls]",
        f'Homepage = "{home}"',
        f'Documentation = "{home}/tree/main/docs"',
        f'Source = "{home}"',
        f'Issues = "{home}/issues"',
        f'Changelog = "{home}/blob/main/CHANGELOG.md"',
    )
    return settings.replace("[project.scripts]", "\n".join(lines) + "\n\n[project.scripts]", 1)


def with_absolute_links(page: str, home: str, tag: str) -> str:
    """A page whose relative links lead to the files of that tag, and whose pictures are loaded from there."""

    def absolute(match: re.Match[str]) -> str:
        target, text = match["target"], _LINK.sub(absolute, match["text"])
        if not re.match(r"[a-z]+:|#", target):
            target = f"{home}/{'raw' if match['mark'] else 'blob'}/{tag}/{target}"
        return f"{match['mark']}[{text}]({target})"

    return _LINK.sub(absolute, page)


if __name__ == "__main__":
    main()
