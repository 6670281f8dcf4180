"""docs/configuration.md from the structs of the configuration and their docstrings, so that it cannot drift.

python tools/make_configuration.py          writes the file; tests/docs compares it with the committed one
"""

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from evenload.config.keys import settings_of
from evenload.config.train_config import TrainConfig

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration of `evenload train`

Made by `python tools/make_configuration.py` from the structs in `src/evenload`; do not edit.

A run is one TOML file with the sections below. Every key is checked: an unknown one is an error that names the
nearest known key. On the command line `section.key=value` replaces a value, for example `train.steps=20` or
`plan.options.max_pack_tokens=8192`; the value is read as TOML, and as a string where it is no TOML, so words need
no quotes. Relative paths are relative to the working directory. How the settings work together is in
[training.md](training.md).

At least `model.path`, `data.sources`, `data.max_document_tokens`, one of `data.batch_documents` and
`data.batch_tokens`, `train.output_dir`, and one of `train.steps` and `data.epochs` must be set.
"""


def configuration_page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_section(TrainConfig, "")])


def _section(kind: type[msgspec.Struct], prefix: str) -> list[str]:
    """Tables of a struct's plain keys, then the sections of its nested structs."""
    meanings = _meanings(kind)
    rows, nested = [], []
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, hint in settings_of(kind).items():
        table = (
            hint if isinstance(hint, type) else get_args(hint)[0] if not prefix else None
        )  # a section may be left out
        if isinstance(table, type) and issubclass(table, msgspec.Struct):
            nested += _section(table, f"{prefix}{name}.")
            continue
        field = fields[name]
        if field.name not in meanings:
            raise SystemExit(f"{kind.__name__}.{field.name} has no line in the docstring's Args")
        rows.append(f"| `{field.name}` | {_type(hint)} | {_default(field)} | {_cell(meanings[field.name])} |")
    lines = []
    if prefix:
        summary = _words((kind.__doc__ or "").partition("Args:")[0])
        lines += [f"## [{prefix.rstrip('.')}]", "", summary, ""]
    if rows:
        lines += ["| key | values | default | meaning |", "|---|---|---|---|", *rows, ""]
    return lines + nested


def _meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> text of its entry in the docstring's Args; `a, b: text` describes both."""
    block = (kind.__doc__ or "").partition("Args:")[2]
    block = re.split(r"\n\s*\n\s*Raises:", block)[0]
    result: dict[str, str] = {}
    names: list[str] = []
    for line in block.splitlines():
        entry = re.match(r" {8}([a-z0-9_]+(?:, [a-z0-9_]+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            result |= dict.fromkeys(names, entry[2])
        elif line.strip():
            for name in names:
                result[name] += f" {line.strip()}"
    return result


def _type(hint: Any) -> str:
    """The words for what a key takes."""
    (inner, *_) = get_args(hint) or (None,)
    if get_origin(hint) is tuple and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        return "list of tables"
    text = str(hint) if not isinstance(hint, type) else hint.__name__
    values = re.search(r"Literal\[(.*)\]", text)
    if values:
        return ", ".join(f'`"{value}"`' for value in re.findall(r"'([^']*)'", values[1]))
    text = re.sub(r"typing\.Optional\[(.*)\]", r"\1 | None", text)
    text = (
        text.replace("tuple[str, ...]", "list of strings")
        .replace("tuple[int, ...]", "list of integers")
        .replace("tuple[int, int]", "list of two integers")
        .replace(" | None", " or unset")
    )
    for name, words in (("str", "string"), ("int", "integer"), ("bool", "`true`, `false`"), ("float", "number")):
        text = re.sub(rf"\b{name}\b", words, text)
    return text


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "needed"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{list(value) if isinstance(value, tuple) else value}`"


def _cell(text: str) -> str:
    """One line that cannot end a table's cell; None is "unset" in TOML."""
    return _words(text).replace("|", "\\|").replace("None = ", "unset = ").replace("None", "unset")


def _words(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    TARGET.write_text(configuration_page(), encoding="utf-8")
