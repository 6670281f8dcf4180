"""What a reader types from the pages runs: every shell line and Python block, but those that say why they cannot.

In every run the pages' recipes are followed with less data and fewer steps (`page_sizes.SMALLER`) by this process and
ranks that have imported everything. `make test-docs` follows those whose files are all on the page as they stand, in
processes of their own.
"""

import runpy
from pathlib import Path

import pytest
import torch

from evenload.cli.main import main
from page_blocks import FOLLOWED, ROOT, Reader, ReaderHere, blocks_of, follow, name_of, reader_in
from page_sizes import OWN_SIZE, prepare, smaller
from quick_calibration import quick_calibration
from quick_commands import quick_commands
from rank_server import rank_context
from sweeps import thorough


@pytest.fixture
def reader_here(tmp_path, monkeypatch):
    """A reader whose commands run in this process, which is then as it was."""
    threads, environment = torch.get_num_threads(), reader_in(tmp_path, quick=True)
    for name in ("COLUMNS", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.chdir(tmp_path)
    rank_context()

    def evenload(words):
        with quick_commands(), pytest.raises(SystemExit) as ended:
            main(words)
        return int(ended.value.code or 0)

    def python(words):
        (script,) = words
        with quick_calibration():
            runpy.run_path(script, run_name="__main__")
        return 0

    yield ReaderHere(tmp_path, environment, {"evenload": evenload, "python": python})
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", FOLLOWED, ids=name_of)
@pytest.mark.long
def test_a_page_is_followed_to_its_end(page, reader_here):
    prepare(name_of(page), reader_here.folder)
    done = follow(smaller(name_of(page)), reader_here)
    assert done
    if page == ROOT / "README.md":
        commands = [command.split()[1] for command in done if command.startswith("evenload")]
        assert commands == ["plan", "train", "check", "bench"]
        assert all((reader_here.folder / name).is_file() for name in ("plan.html", "runs/first/report.html"))


@thorough
@pytest.mark.parametrize("name", OWN_SIZE)
@pytest.mark.timeout(1800)
def test_a_recipe_runs_as_it_stands(name, tmp_path):
    done = follow(blocks_of(ROOT / name), Reader(tmp_path, reader_in(tmp_path)))
    assert done or Path(name).stem in ("slurm", "kubernetes")


LOADER_PAGE = (
    ('"s3://bucket/corpus",', '"corpus",'),
    ('model="path/to/config.json"', 'model="small_model.json"'),
    ("micro_batches=4", "micro_batches=1"),
    ("range(3)", "range(1)"),
    ('"cuda"', '"cpu"'),
)
README_PAGE = (("max_tokens=16384", "max_tokens=2048"), ('"cuda"', '"cpu"'))
PREPARED = """
import torch
from transformers import AutoConfig, LlamaForCausalLM
from evenload.integrations.batch_formats import move_batch
torch.manual_seed(0)
model = LlamaForCausalLM(AutoConfig.from_pretrained("small_model.json"))
tokenizer = "bytes"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
before = model.lm_head.weight.detach().clone()
"""


@pytest.mark.parametrize(("name", "changes"), [("docs/loader.md", LOADER_PAGE), ("README.md", README_PAGE)])
@pytest.mark.long
def test_the_loop_that_the_pages_show_trains(name, changes, tmp_path, monkeypatch):
    """With a small model and corpus in place of the reader's; each replaced word must be on the page."""
    prepare(name, tmp_path)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index in range(12):
        (corpus / f"{index}.txt").write_text("A document among others. " * (1 + 5 * index))
    loop = next(
        block.text for block in blocks_of(ROOT / name)
        if block.language == "python" and block.text.startswith("from evenload import PackedLoader")
    )  # fmt: skip
    for old, new in changes:
        assert old in loop, old
        loop = loop.replace(old, new)
    monkeypatch.chdir(tmp_path)
    session = {}
    exec(PREPARED + loop, session)
    assert not session["before"].equal(session["model"].lm_head.weight)
    assert session["loader"].has_ended or session["loader"].epoch
    session["loader"].close()
