"""Commands and files of the pages, without running them: commands parse, files load, smaller words are on the page."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from evenload.cli.main import app
from evenload.config.train_config import load_train_config
from evenload.types.cluster import cluster_from
from page_blocks import FOLLOWED, PAGES, ROOT, SHELL, blocks_of, commands_in, name_of, reader_in, save_files
from page_sizes import SMALLER, smaller

_STARTS = re.compile(r"^(?:evenload|.*-m evenload(?:\.cli\.main)?) (?P<arguments>[a-z]+ .*)$")


def typed(page):
    """Commands of a page."""
    for block in blocks_of(page):
        if block.language in SHELL:
            yield from commands_in(block.text)


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_the_pages_parses(page, tmp_path, monkeypatch):
    """An option that was renamed, or never was; also of what is not run."""
    monkeypatch.chdir(tmp_path)
    for command in typed(page):
        result = _STARTS.match(command)
        if result and "..." not in command:
            require_parses(words_of(result["arguments"]))


def test_a_smaller_word_must_be_on_the_page():
    with pytest.raises(AssertionError, match="has: steps = 4711"):
        smaller("README.md", (("steps = 4711", "steps = 1"),))
    assert set(SMALLER) == {name_of(page) for page in FOLLOWED}


@pytest.mark.parametrize("page", FOLLOWED, ids=name_of)
def test_files_of_a_page_load_as_they_stand_and_its_python_compiles(page, tmp_path, monkeypatch):
    reader_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in save_files(blocks_of(page), tmp_path):
        if name == "my_machine.toml":
            cluster_from(name)
        elif name.endswith(".toml"):
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


def test_configurations_in_the_docs_are_valid(tmp_path):
    """An example with a misspelt or removed key is the first thing a new user meets."""
    for page in (ROOT / "README.md", ROOT / "docs" / "training.md"):
        examples = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
        assert examples, page.name
        # The first one stands alone; the others are parts of a configuration, tried on top of it.
        file = tmp_path / "config.toml"
        file.write_text(examples[0])
        load_train_config(file, [])
        for part in examples[1:]:
            load_train_config(file, list(overrides_of(tomllib.loads(part))))


def overrides_of(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from overrides_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"
