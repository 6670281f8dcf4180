"""docs/pictures/house.svg: floors of the package from the import contract, rooms from the folders.

python tools/make_house.py      writes the picture; tests/docs compares its words with the house as it stands
"""

import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "evenload"
TARGET = ROOT / "docs" / "pictures" / "house.svg"
PURPOSE = {
    "api": "commands as functions: evenload.plan, evenload.train",
    "cli": "commands",
    "bench": "strategies measured side by side, beside their predictions",
    "check": "is training under these plans equal to plain training?",
    "integrations": "PackedLoader, and engines that train its plans",
    "calibrate": "costs measured on this machine",
    "runtime": "executes plans: real gradients over torch.distributed",
    "attention": "attention of token ranges",
    "feed": "steps for a training loop",
    "explore": "what-if: compare, search layouts, explain",
    "plan": "a global batch in, one StepPlan out",
    "stepplan": "a finished plan",
    "simulate": "when every action runs",
    "schedule": "orders of packs, proof against deadlock",
    "cost": "seconds and bytes",
    "data": "documents from files, exactly once",
    "hub": "models by name: here, in the cache, on the Hub",
    "types": "plain data",
    "errors": "every error raised on purpose",
    "report": "tables, pages, traces: sees types only",
}
WIDTH, FLOOR, ROOM, LEFT, REPORT, TOP = 1160, 46, 22, 370, 170, 34
NEEDS_TORCH = {"bench", "check", "integrations", "calibrate", "runtime", "attention"}


def floors() -> list[str]:
    """Packages from the roof to the ground, as the contract orders them."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = tools["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [layer.removeprefix("evenload.") for layer in layers]


def rooms(package: str) -> list[str]:
    """What a package holds: folders, with a slash, then files."""
    folder = SOURCE / package
    if not folder.is_dir():
        return []
    inner = sorted(f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").is_file())
    return inner + sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def picture() -> str:
    """The SVG."""
    parts: list[str] = []
    y = TOP
    for package in floors():
        lines = _wrapped(rooms(package), WIDTH - LEFT - REPORT - 40)
        height = max(FLOOR, 14 + ROOM * len(lines))
        kind, width = "torch" if package in NEEDS_TORCH else "plain", WIDTH - REPORT - 30
        parts.append(f'<rect class="{kind}" x="10" y="{y}" width="{width}" height="{height - 4}" rx="4"/>')
        parts.append(f'<text class="name" x="22" y="{y + 19}">{package}</text>')
        parts.append(f'<text class="what" x="22" y="{y + 35}">{escape(PURPOSE[package])}</text>')
        for row, names in enumerate(lines):
            x = LEFT
            for name in names:
                kind, width = "room folder" if name.endswith("/") else "room", _width(name)
                parts.append(
                    f'<rect class="{kind}" x="{x}" y="{y + 6 + row * ROOM}" width="{width}" height="18" rx="3"/>'
                )
                parts.append(f'<text class="inner" x="{x + 7}" y="{y + 19 + row * ROOM}">{name}</text>')
                x += width + 6
        y += height
    side = WIDTH - REPORT - 10
    parts.append(f'<rect class="plain" x="{side}" y="{TOP}" width="{REPORT}" height="{y - TOP - 4}" rx="4"/>')
    parts.append(f'<text class="name" x="{side + 12}" y="{TOP + 19}">report</text>')
    for row, text in enumerate(("tables, pages and", "traces from types;", "cli and api import it")):
        parts.append(f'<text class="what" x="{side + 12}" y="{TOP + 37 + 15 * row}">{text}</text>')
    head = "Imports go down only, never in a circle. Blue floors need torch; planning, data and reports do not."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" width="{WIDTH}" height="{y + 8}" '
        'font-family="system-ui, sans-serif">\n'
        "<style>.plain{fill:#eef1ea}.torch{fill:#dfe9f5}.room{fill:#fff;stroke:#b8bfc6}.folder{fill:#f7e9c8}.name{font-size:15px;"
        "font-weight:600;fill:#1c232b}.what{font-size:12px;fill:#4c5661}.inner{font-size:12px;fill:#1c232b}</style>\n"
        f'<rect width="{WIDTH}" height="{y + 8}" fill="#fff"/>\n<text class="what" x="12" y="20">{head}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _wrapped(names: list[str], width: int) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    used = 0
    for name in names:
        if used + _width(name) > width:
            lines.append([])
            used = 0
        lines[-1].append(name)
        used += _width(name) + 6
    return lines


def _width(name: str) -> int:
    return 14 + round(7.3 * len(name))


def main() -> None:
    """Write the picture."""
    TARGET.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
