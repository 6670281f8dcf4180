"""What a reader types from the pages: files that load, commands that parse, Python that runs; whole recipes.

Whole recipes start training processes, so they run under `make test-docs` and `make test-thorough`; every run parses
each command of every page (but those that leave something out, "...") and reads each configuration of a recipe.
"""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer
import yaml

from evenload.cli.main import app
from evenload.runtime.config.train_config import load_train_config
from page_blocks import ROOT, blocks_of, commands_in, follow, reader_in
from sweeps import thorough

RECIPES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
PAGES = [ROOT / "CONTRIBUTING.md", *RECIPES]
PAGES += [page for page in sorted((ROOT / "docs").glob("*.md")) if page not in PAGES]
_STARTS = re.compile(r"^(?:evenload|.*-m evenload(?:\.cli\.main)?) (?P<arguments>[a-z]+ .*)$")


def typed(page):
    """Commands of a page: in `sh` and `console` blocks, and lines set off by four spaces."""
    text = page.read_text(encoding="utf-8")
    for block in blocks_of(page):
        if block.language in ("sh", "console"):
            yield from commands_in(block.text)
    shown = re.findall(r"(?:^    (?! ).*\n(?:^     .*\n)*)+", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    for part in shown:
        yield from commands_in(textwrap.dedent(part))


def words_of(command):
    """Words as a shell splits them, without what follows a pipe."""
    code = f"set -f; for word in {command.partition(' | ')[0]}; do printf '%s\\0' \"$word\"; done"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def require_parses(arguments):
    """The command, its options and their values are known; nothing runs."""
    name, *rest = arguments
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_pages_parses(page, tmp_path, monkeypatch):
    """An option that was renamed, or never was."""
    monkeypatch.chdir(tmp_path)
    for command in typed(page):
        found = _STARTS.match(command)
        if found and "..." not in command:
            require_parses(words_of(found["arguments"]))


def test_the_pages_hold_commands():
    assert sum(_STARTS.match(command) is not None for page in PAGES for command in typed(page)) > 30


def test_a_misspelt_option_is_found():
    with pytest.raises(Exception, match="No such option: --modle"):
        require_parses(["plan", "lengths.npy", "--modle", "llama-7b"])


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_files_of_a_recipe_load_and_its_python_compiles(page, tmp_path, monkeypatch):
    done = follow(page, tmp_path, shell=False)
    monkeypatch.chdir(tmp_path)
    for name in done:
        if name.endswith(".toml"):
            load_train_config(Path(name), [])
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, page.name, "exec")


def test_cluster_recipes_start_what_parses():
    """Slurm's script and Kubernetes' pods cannot run here; their command is a command of ours, for so many ranks."""
    slurm = next(block for block in blocks_of(ROOT / "docs/howto/slurm.md") if block.language == "sh")
    subprocess.run(["bash", "-n"], input=slurm.text, text=True, check=True)
    (command,) = (line for line in commands_in(slurm.text) if line.startswith("srun "))
    pods = next(block for block in blocks_of(ROOT / "docs/howto/kubernetes.md") if block.language == "yaml")
    service, job = yaml.safe_load_all(pods.text)
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    for words in (command.split(), container["args"]):
        at = words.index("-m")
        assert words[at + 1] == "evenload"
        require_parses(words[at + 2 :])
        sizes = [int(size) for size in re.findall(r"parallel\.\w+=(\d+)", " ".join(words))]
        assert sizes == [4, 4]  # two machines of eight


@thorough
@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
@pytest.mark.timeout(1800)
def test_a_recipe_runs_from_end_to_end(page, tmp_path):
    done = follow(page, tmp_path)
    assert done or page.stem in ("slurm", "kubernetes")


@thorough
def test_the_site_builds_without_a_dead_link(tmp_path):
    """Every warning of mkdocs is an error (mkdocs.yml: strict)."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "loader.html").stat().st_size > 10_000


LOADER_PAGE = (
    ('"s3://bucket/corpus",', '"corpus",'),
    ('model="path/to/config.json"', 'model="examples/stdlib_demo/model.json"'),
    ("batch_tokens=500_000", "batch_tokens=4_000"),
    ("range(3)", "range(1)"),
    ('"cuda"', '"cpu"'),
)
README_PAGE = (("batch_tokens=500_000", "batch_tokens=4_000"),)
PREPARED = """
import torch
from transformers import AutoConfig, LlamaForCausalLM
from evenload.integrations.batch_formats import move_batch
torch.manual_seed(0)
model = LlamaForCausalLM(AutoConfig.from_pretrained("examples/stdlib_demo/model.json"))
tokenizer = "bytes"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
before = model.lm_head.weight.detach().clone()
"""


@pytest.mark.parametrize(("name", "changes"), [("docs/loader.md", LOADER_PAGE), ("README.md", README_PAGE)])
@pytest.mark.long
def test_the_loop_that_the_pages_show_trains(name, changes, tmp_path, monkeypatch):
    """With a small model and corpus in place of the reader's; each replaced word must be on the page."""
    reader_in(tmp_path)
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
