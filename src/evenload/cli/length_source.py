"""`LengthSource`: where `evenload plan` and `evenload lengths` have their lengths from, and how documents are counted.

A training configuration stands for the documents that it trains, read as it reads them; what the command line says
beside it wins, by the same way as `evenload train config.toml data.tokenizer=...`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from evenload.config.keys import set_options
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.data.config import DataConfig, OnCorrupt, RecordKind
from evenload.data.encoding.open_encoder import open_encoder
from evenload.data.encoding.tokenize import open_tokenizer
from evenload.data.lengths import LengthTable, count_documents, read_length_table
from evenload.data.number_files import holds_numbers

SOURCE_HELP = (
    "Document lengths: .npy, .npz, .txt (one a line), .csv or .json of numbers (also .gz); or documents to count "
    "(file, folder, glob, URL); or the config.toml of a run of 'evenload train', for the documents that it trains."
)
DATA_PANEL = "Documents"
"""Over their options in help texts."""
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="Counts documents: a tokenizer.json or its folder. Without it documents are counted in bytes.",
        rich_help_panel=DATA_PANEL,
    ),
]
RecordOption = Annotated[
    RecordKind | None,
    typer.Option(help="What a record of the documents holds (data.record). Default: text.", rich_help_panel=DATA_PANEL),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        help="File names of a folder that are read, such as '*.py'; repeat for several. Default: all.",
        rich_help_panel=DATA_PANEL,
    ),
]
OnCorruptOption = Annotated[
    OnCorrupt | None,
    typer.Option(
        help="Stop at a record that cannot be read, or leave it out. Default: error.", rich_help_panel=DATA_PANEL
    ),
]


@dataclass(frozen=True, kw_only=True)
class LengthSource:
    """Where lengths come from, nothing of it read yet; `run` is the training configuration that was named, `table` what
    was given instead of a name."""

    name: str
    data: DataConfig
    run: TrainConfig | None = None
    table: LengthTable | None = None

    def read(self) -> LengthTable:
        if self.table is not None:
            return self.table
        if self.run is not None:
            return count_documents(self.data, self.name)
        return read_length_table(self.name, self.data)


def length_source(
    source: str,
    *,
    tokenizer: str | None,
    record: RecordKind | None,
    include: list[str] | None,
    on_corrupt: OnCorrupt | None,
    model: str | None = None,
    settings: Sequence[str] = (),
) -> LengthSource:
    """What the options ask for, checked as far as it can be without reading documents.

    A `model` that is a path replaces the configuration's; `settings` are of its `plan.options`, as `key=value`.
    """
    asked: dict[str, Any] = {"tokenizer": tokenizer, "record": record, "include": include, "on_corrupt": on_corrupt}
    asked = {name: tuple(value) if name == "include" else value for name, value in asked.items() if value}
    if source.endswith(".toml"):
        overrides = [f"data.{name}={json.dumps(value)}" for name, value in asked.items()]
        if model is not None and Path(model).exists():
            overrides.append(f"model.path={json.dumps(model)}")
        run = load_train_config(Path(source), [*overrides, *set_options(settings)])
        data = _with_asked_parts(run.data, asked)
        open_tokenizer(data.tokenizer, data.eos_token)
        return LengthSource(name=source, data=data, run=run)
    data = DataConfig(sources=(source,), batch_documents=1, max_document_tokens=1, **asked)
    if data.tokenizer is not None and data.record != "tokens" and open_tokenizer(data.tokenizer).eos_id is None:
        # Nobody can name the token here; its own length stands in the output.
        data = msgspec.structs.replace(data, append_eos=False)
    if not (holds_numbers(source) and data.record == "text"):
        open_encoder(data)
    return LengthSource(name=source, data=data)


def _with_asked_parts(data: DataConfig, asked: dict[str, Any]) -> DataConfig:
    """Parts of a mixture have their own record kind and file names, which the command line replaces, too."""
    own = {name: asked[name] for name in ("record", "include") if name in asked}
    if not own or not data.mixture:
        return data
    return msgspec.structs.replace(data, mixture=tuple(msgspec.structs.replace(part, **own) for part in data.mixture))


def unit_line(table: LengthTable) -> str:
    """What a table in bytes means, and how to get tokens; "" of a table in tokens."""
    if table.unit == "tokens":
        return ""
    return (
        "lengths are counted in bytes, end of document included, because no tokeniser was named; --tokenizer FOLDER "
        "counts what a model sees"
    )
