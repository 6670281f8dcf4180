"""Help texts as a new user reads them, whatever the width of the terminal."""

import re
import tomllib

from typer.testing import CliRunner

from evenload.cli.main import app
from evenload.config.train_config import read_train_config


def shown(command: str) -> str:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_words_in_brackets_are_shown():
    """Rich takes "[plan.options]" for a style, and leaves it out."""
    text = " ".join(shown("plan").replace("│", " ").split())
    assert "as under [plan.options] of a configuration" in text
    assert "batch size and [plan.options] are those of the run" in text
    assert "one per rank of [parallel]" in shown("train")
    assert "the processes of [parallel]" in " ".join(shown("check").split())


def test_the_smallest_configuration_in_the_help_of_train_is_one():
    lines = shown("train").partition("smallest CONFIG.toml")[2].partition("Starts its own")[0].splitlines()[1:]
    config = read_train_config(tomllib.loads("\n".join(line.strip() for line in lines)))
    assert (config.model.random_init, config.data.batch_documents, config.train.steps) == (True, 64, 100)
