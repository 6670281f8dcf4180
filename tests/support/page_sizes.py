"""What tests put into the pages' recipes instead of what a reader has: less data, fewer steps; the rest is the page's.

Each word must be on the page, so a page that changes fails its test until the table says what is to be small there.
`make test-docs` follows the pages of `OWN_SIZE` as they stand.
"""

import json
from pathlib import Path

import msgspec
import numpy as np

from dist_training import COSTS
from evenload.cost.coefficients import MeasuredOn, write_coefficients
from evenload.data.hub import model_from
from page_blocks import ROOT, Block, blocks_of, save_files

Words = tuple[tuple[str, str], ...]
"""(what stands on a page, what a test puts there)."""

_FEW_PAGES = ('sources = ["docs"]', 'sources = ["docs/howto"]')
_SHORT = ("max_document_tokens = 1024", "max_document_tokens = 256")
_FEW = ("batch_documents = 8", "batch_documents = 4")
_ONE_BENCH = ("best_fit,slimpack,auto\n", "best_fit,slimpack,auto --steps 1 --rounds 1\n")
_MODEL = "examples/stdlib_demo/model.json"
SMALL_MODEL = "small_model.json"
"""In its place in a reader's folder: most of a page's time would be calibrating and training the larger one."""

SMALLER: dict[str, Words] = {
    "README.md": (
        ("--overlong truncate --html", "--overlong truncate --documents 32 --html"),
        _FEW_PAGES,
        ("max_document_tokens = 4096", "max_document_tokens = 256"),
        ("steps = 3", "steps = 2"),
        _ONE_BENCH,
    ),
    "docs/tutorial.md": (
        ("--documents 128 --steps 2", "--documents 32 --steps 1"),
        _FEW_PAGES,
        ("max_document_tokens = 2048 ", "max_document_tokens = 256 "),
        _FEW,
        ("steps = 3", "steps = 1"),
        ("train.steps=5", "train.steps=2"),
        ('"docs", include=["*.md"], max_tokens=2048', '"docs/howto", include=["*.md"], max_tokens=512'),
    ),
    "docs/long_context.md": (
        ("--documents 16", "--documents 4"),
        _FEW_PAGES,
        ("max_document_tokens = 8192 ", "max_document_tokens = 1024 "),
        ("batch_tokens = 16384 ", "batch_tokens = 2048 "),
        ("steps = 2", "steps = 1"),
    ),
    "docs/howto/lora.md": (_FEW_PAGES, _SHORT, _FEW),
    "docs/howto/moe.md": (_FEW_PAGES, _SHORT, _FEW),
    "docs/howto/python.md": (
        ("documents=64", "documents=16"),
        ('"sources": ["docs"]', '"sources": ["docs/howto"]'),
        ('"max_document_tokens": 1024', '"max_document_tokens": 256'),
        ('"batch_documents": 8', '"batch_documents": 4'),
    ),
    "docs/howto/resume_elsewhere.md": (
        _FEW_PAGES,
        _SHORT,
        _FEW,
        ("steps = 2", "steps = 1"),
        ("train.steps=4", "train.steps=2"),
    ),
    "docs/chats.md": (),
    "docs/trees.md": (),
    "docs/training.md": (
        ('path = "models/Qwen2.5-0.5B" ', f'path = "{_MODEL}"\nrandom_init = true '),
        ('sources = ["corpus"] ', 'sources = ["docs/howto"]\ntokenizer = "bytes" '),
        ("max_document_tokens = 4096", "max_document_tokens = 256"),
        ("batch_documents = 64", "batch_documents = 4"),
        ("steps = 200", "steps = 2"),
        ("train.steps=20", "train.steps=1"),
        _ONE_BENCH,
    ),
    "docs/plan.md": (
        ("plan examples/lengths/stdlib.npy.gz", "plan examples/lengths/stdlib.npy.gz --documents 16"),
        ("corpus --include '*.txt' --tokenizer MODEL_FOLDER", "docs/howto --include '*.md' --tokenizer bytes"),
        ("--documents 512 --steps 4", "--documents 32 --steps 1"),
        ("--search-seconds 7200", "--search-seconds 1"),
        ("profile --model qwen2.5-0.5b", f"profile --minutes 0.01 --model {_MODEL}"),
        ("plan lengths.npy --model qwen2.5-0.5b", f"plan lengths.npy --model {_MODEL} --documents 64 --steps 1"),
    ),
    "docs/micro_batches.md": (),
    "docs/engines.md": (("--documents 512", "--documents 32 --steps 1"),),
    "examples/flexpipe/README.md": (
        ("plan LENGTHS", "plan examples/lengths/stdlib.npy.gz --context 2048 --overlong truncate --documents 16"),
        ("data.sources='[\"docs\"]'", "data.sources='[\"docs/howto\"]' data.max_document_tokens=256"),
        ("train.steps=10", "train.steps=1"),
    ),
}  # fmt: skip
"""Of a page, by its path."""

OWN_SIZE = (
    *("README.md", "docs/tutorial.md", "docs/chats.md", "docs/long_context.md"),
    *(name for name in SMALLER if name.startswith("docs/howto/")),
)
"""Recipes whose files are all the page's, so that they can also be followed as they stand."""


def smaller(name: str, words: Words | None = None) -> list[Block]:
    """The blocks of a page with `SMALL_MODEL` and other words, by default those of the table, each of which must be in
    some block."""
    blocks = list(blocks_of(ROOT / name))
    for old, new in SMALLER[name] if words is None else words:
        assert any(old in block.text for block in blocks if block.is_done), f"no block of {name} has: {old}"
        blocks = [block._replace(text=block.text.replace(old, new)) for block in blocks]
    return [block._replace(text=block.text.replace(_MODEL, SMALL_MODEL)) for block in blocks]


def prepare(name: str, folder: Path) -> None:
    """What a reader of this page has before they begin."""
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64}
    (folder / SMALL_MODEL).write_text(json.dumps(json.loads((ROOT / _MODEL).read_bytes()) | sizes))
    if name == "docs/plan.md":
        save_files(smaller("README.md"), folder)
        # "the `cost.json` that the run left in its `output_dir`"
        run = folder / "runs" / "first"
        run.mkdir(parents=True)
        model = msgspec.structs.replace(model_from(str(folder / SMALL_MODEL)), bytes_per_element=4)
        measured_on = MeasuredOn(model=model, dp=1, cp=1, pp=2, tp=1)
        write_coefficients(run / "cost.json", msgspec.structs.replace(COSTS, measured_on=measured_on))
        np.save(folder / "lengths.npy", np.random.default_rng(0).integers(1, 900, 100).astype(np.uint32))
