"""Commands where containers, batch systems, old terminals and users name files and directories oddly: they work, or say
in one line what is wrong."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest

import commands
from commands import refused
from evenload.cli.launch import prepare_environment, replace_unknown_characters, with_home
from evenload.cli.options import require_writable, require_writable_directory
from evenload.cli.train import train_run
from evenload.config.keys import settings_of
from evenload.config.train_config import TrainConfig, load_train_config, read_train_config
from evenload.errors import ConfigError
from evenload.types.base import PathText
from small_run import LONG_TAILED_TEXTS, write_small_costs, write_small_run
from sweeps import LOOKS_FURTHER, sweep

PLAN = ("--model", "llama3-8b", "--cluster", "h100x8", "--strategy", "balanced,best_fit", "--documents", "4")
NOBODY = "import pwd\ndef getpwuid(uid):\n    raise KeyError(uid)\npwd.getpwuid = getpwuid\n"
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257,
    "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
BYTES_NAME = os.fsdecode(b"by\xe9te")
ODD_NAMES = ["sp ace", "new\nline", "[bold]b", "z[/red]q", "[0-9]*", "-dash", "~tilde", "東京", BYTES_NAME]


@pytest.fixture
def odd_environment(tmp_path: Path) -> dict[str, str]:
    """No HOME, a user without a name or an entry, a TMPDIR too long for sockets, and a terminal that knows ASCII."""
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody" / "sitecustomize.py").write_text(NOBODY)
    long = tmp_path / ("t" * 100)
    long.mkdir()
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")}
    return kept | {
        "PYTHONPATH": str(tmp_path / "nobody"),
        "TMPDIR": str(long),
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "COLUMNS": "200",
    }


def run(environment: dict[str, str], folder: Path, *arguments: str) -> str:
    """What a command that ends well wrote to both streams."""
    done = subprocess.run(
        [sys.executable, "-m", "evenload.cli.main", *arguments],
        check=False, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500,
    )  # fmt: skip
    output = done.stdout.decode("ascii")
    assert done.returncode == 0, output
    assert "Traceback" not in output
    assert "nanobind" not in output, "the core reports what Python keeps until it ends as a leak"
    return output


@pytest.mark.parametrize(
    "arguments", [("lengths", "l.txt"), ("plan", "l.txt", *PLAN), ("plan", "--help")], ids=" ".join
)
def test_tables_and_help_are_written_in_ascii(odd_environment, tmp_path, arguments):
    (tmp_path / "l.txt").write_text("100\n200\n3000\n500\n")
    text = run(odd_environment, tmp_path, *arguments)
    if arguments[0] == "lengths":
        assert "|256 to 512 |   1 | 25.0 % |####" in text
    elif arguments[1] == "l.txt":
        assert "1.00x" in text
        assert "> balanced" in text or "> best_fit" in text


RUNS = {
    "train": ("train", "config.toml", "train.output_dir=~/run"),
    "bench": ("bench", "config.toml", "--steps", "1", "--rounds", "1", "--json=~/bench.json"),
    "check": ("check", "config.toml"),
    "profile": ("profile", "--model=~/model", "--minutes", "0.1", "--context", "1k", "--output=~/profile.json"),
}
WRITTEN = {"train": "run/report.html", "bench": "bench.json", "profile": "profile.json"}


@pytest.mark.parametrize("name", sweep(list(RUNS), 2))
def test_processes_start_without_home_name_and_short_tmpdir(odd_environment, tmp_path, name):
    settings = 'max_document_tokens = 1024\nbatch_documents = 6\n[train]\nsteps = 1\ncost_file = "cost.json"\n'
    write_small_run(tmp_path, LONG_TAILED_TEXTS[:12], settings, tied=True)
    write_small_costs(tmp_path)
    if name == "profile":
        odd_environment["HOME"] = str(tmp_path)
    run(odd_environment, tmp_path, *RUNS[name])
    assert not (tmp_path / "~").exists()
    home = tmp_path if name == "profile" else Path(odd_environment["TMPDIR"], f"evenload-home-{os.getuid()}")
    assert home.stat().st_mode & 0o077 == 0 or name == "profile"
    assert name not in WRITTEN or (home / WRITTEN[name]).is_file()
    assert not list(tmp_path.glob("t*/pymp-*"))


def test_a_home_that_belongs_to_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    (tmp_path / f"evenload-home-{os.getuid()}").write_text("no directory")
    with pytest.raises(ConfigError, match=r"HOME is not set, and .*evenload-home-\d+ is another's or no directory"):
        prepare_environment()


def test_arguments_with_a_tilde_are_paths_whatever_stands_before():
    home = os.path.expanduser("~")
    assert with_home("~/a b") == f"{home}/a b"
    assert with_home("--html=~/x") == f"--html={home}/x"
    assert with_home("-o=~root/x") == f"-o={os.path.expanduser('~root')}/x"
    for same in ("~", "~tilde", "a~/b", "train.output_dir=~/run", "--set=x", ""):
        assert with_home(same) == same


NO_PATHS = {
    "data.text_column", "data.messages_column", "data.prompt_column", "data.completion_column", "data.tokens_column",
    "data.mask_column", "data.group_by",
    "data.labels_column", "data.eos_token", "train.attention", "optimizer.name", "plan.strategy",
    "plan.options.schedule", "log.project", "log.name",
}  # fmt: skip
"""Settings of any text that name no file; lists of texts are sources, patterns and names, and sources know `~`."""


def texts_of(kind, prefix=""):
    """Names of all settings that take any text, and whether they are paths."""
    whole = get_type_hints(kind, include_extras=True)
    for name, hint in settings_of(kind).items():
        inner = [one for one in (hint, *get_args(hint)) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        if inner:
            yield from texts_of(inner[0], f"{prefix}{name}.")
        elif str in (hint, *get_args(hint)) and "tuple" not in str(hint):
            yield f"{prefix}{name}", PathText in (whole[name], *get_args(whole[name]))


def test_every_setting_that_is_a_path_knows_the_home_directory(tmp_path, monkeypatch):
    result = {
        name: is_path
        for name, is_path in texts_of(TrainConfig)
        if not name.startswith(("data.mixture.", "validation."))
    }
    paths = {name for name, is_path in result.items() if is_path}
    assert {name for name in result if name not in NO_PATHS} == paths
    assert paths == {
        "model.path", "model.lora.path", "data.tokenizer", "data.chat_template", "train.output_dir", "train.cost_file",
    }  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = '[data]\nsources = ["s"]\nmax_document_tokens = 8\nbatch_documents = 1\n[train]\nsteps = 1\n[model]\n'
    (tmp_path / "c.toml").write_text(settings)
    config = load_train_config(Path("~/c.toml"), [f"{name}=~/{name}" for name in paths])
    for name in paths:
        value = config
        for key in name.split("."):
            value = getattr(value, key)
        assert value == f"{tmp_path}/{name}"
    with pytest.raises(ConfigError, match=r"output_dir is '~nobody-has-it/x', and no such home is known"):
        load_train_config(tmp_path / "c.toml", ["model.path=m", "train.output_dir=~nobody-has-it/x"])


def test_links_that_lead_nowhere_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, target in (("dangling", "/nowhere/run"), ("loop", "loop"), ("out.json", "made.json")):
        os.symlink(target, name)
    for name in ("dangling", "dangling/deeper", "loop"):
        with pytest.raises(
            ConfigError, match=rf"output_dir is {name}, but .* is a link to \S+, which leads nowhere; make"
        ):
            require_writable_directory(Path(name), "train.output_dir")
    run = {
        "model": {"path": "m"},
        "data": {"sources": ["s"], "max_document_tokens": 8, "batch_documents": 1},
        "train": {"output_dir": "dangling", "steps": 1},
    }
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a rank of torchrun")
    with pytest.raises(ConfigError, match=r"output_dir is dangling, but .* which leads nowhere"):
        train_run(read_train_config(run), name="c.toml", command="")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    capsys.readouterr()
    for arguments in (
        ("train", "loop"), ("check", "dangling"), ("plan", "l.txt", *PLAN, "--cost", "loop"), ("lengths", "dangling"),
        ("lengths", "l.txt", "--json", "loop"), ("lengths", "loop"), ("lengths", "l.txt", "--json", "dangling"),
    ):  # fmt: skip
        (tmp_path / "l.txt").write_text("5\n")
        refused(capsys, *arguments)
    require_writable(Path("out.json"))
    assert os.path.islink("out.json")
    assert not Path("made.json").exists()


def test_a_path_that_the_system_refuses_is_an_error_in_words(tmp_path):
    """As a folder that may not be searched, which stops no root."""
    name = tmp_path / ("x" * 300)
    with pytest.raises(ConfigError, match=r"cannot write \S+x: File name too long"):
        require_writable(name)
    with pytest.raises(ConfigError, match=r"train.output_dir is \S+x, but nothing can be written .*File name too long"):
        require_writable_directory(name, "train.output_dir")


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_read_shown_and_written(tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    file = Path(f"{name}.txt")
    file.parent.mkdir(exist_ok=True)
    file.write_text("100\n200\n3000\n500\n")
    source = f"./{file}" if name.startswith("-") else str(file)
    page = f"./{name}.html"
    typed = [("lengths", source, "--json", f"./{name}.json", "--html", page)]
    if LOOKS_FURTHER or name in ("z[/red]q", BYTES_NAME):
        typed.append(("plan", source, *PLAN, "--json", f"./{name}.json", "--html", page, "--trace", f"./{name}.t"))
    for arguments in typed:
        code = commands.run(*arguments)
        shown, error = capfd.readouterr()
        assert code == 0, error
        reported = source.replace(BYTES_NAME, r"by\xe9te")
        assert f": {reported}" in shown
        assert (
            reported in str(json.loads(Path(f"./{name}.json").read_bytes())["inputs"].values()).replace("\\\\", "\\")
            or "\n" in reported
        )
        assert Path(page).stat().st_size > 1000


@pytest.mark.parametrize(
    ("arrays", "output"),
    [
        ({"arr_0": np.array([1, 2, 3])}, "3 documents, 6 tokens"),
        ({"other": np.ones(2), "Lengths": np.array([4, 5])}, "2 documents, 9 tokens"),
        ({"a": np.array([1]), "b": np.array([1])}, r"has 2 columns of whole numbers: 'a', 'b'; keep the one"),
        ({"a": np.array([[1], None], object)}, "holds pickled Python objects"),
        ({"a": np.ones((2, 2), int)}, r"has shape \(2, 2\); lengths are a one-dimensional array"),
        ({"a": np.ones(2)}, "has dtype float64; lengths are integers"),
        ({}, "has no column of whole numbers"),
    ],
    ids=["one", "named", "several", "objects", "2-D", "floats", "none"],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_with_one_array_holds_lengths(tmp_path, capsys, arrays, output, save):
    save(tmp_path / "l.npz", **arrays)
    code, text = commands.run("lengths", str(tmp_path / "l.npz")), "".join(capsys.readouterr())
    assert code == (0 if "documents" in output else 2)
    assert re.search(output, text), text


def test_a_damaged_npz_is_named(tmp_path, capsys):
    (tmp_path / "l.npz").write_bytes(b"PK\x03\x04 no archive")
    error = refused(capsys, "lengths", str(tmp_path / "l.npz"))
    assert "l.npz cannot be read as an .npz: File is not a zip file" in error


def test_characters_that_a_terminal_lacks_are_replaced_like_with_like():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        replace_unknown_characters()
        print(f"1.2× ±6 % … ▶ é ① 東 {BYTES_NAME} ██▏", end="", flush=True)
    assert stream.buffer.getvalue() == rb"1.2x +-6 % ... > e 1 ? by\xe9te ###"
