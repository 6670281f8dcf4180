"""`evenload init`: what it writes loads, passes what `evenload train` checks, and trains."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import evenload
from commands import refused, run
from evenload.cli import plan_inputs
from evenload.cli.main import app
from evenload.cli.worker_setup import require_runnable
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.report.run_files import read_metrics
from evenload.types.model import CONFIGURATIONS
from hub_cache import add_model, use_hub_cache
from quick_commands import quick_commands
from rank_server import rank_context
from reference_training import tiny_config

LENGTHS = tuple(int(length) for length in np.random.default_rng(0).integers(3, 500, 400))


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents of `LENGTHS` words, in a folder where commands run; no GPU, no network, and two models on the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_inputs, "_DRIVER", tmp_path / "no-gpus")
    use_hub_cache(tmp_path / "hub", monkeypatch)
    Path("data.jsonl").write_text("".join(json.dumps({"text": "word " * length}) + "\n" for length in LENGTHS))
    return tmp_path


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[TrainConfig, str]:
    """The configuration that the command writes, and what it says."""
    assert run("init", *arguments) == 0, capsys.readouterr()
    return load_train_config(Path("config.toml")), capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        ("--model qwen3-8b --data data.jsonl --gpus 8", 8),
        ("--model qwen3-8b --gpus 1 --lora --context 8k", 1),
        ("--model llama3-70b --gpus 64 --context 32k", 64),
        ("--model mixtral-8x7b --gpus 32 --context 4k", 32),
        ("--model gpt-3.35b --gpus 2", 2),
        ("--model gemma3-1b --gpus h200x4 --data data.jsonl", 4),
        ("--model model --gpus 0 --data data.jsonl", 1),
    ],
)
def test_a_file_passes_what_train_checks_before_processes_start(arguments, devices, capsys):
    tiny_config("qwen3", vocab_size=257).save_pretrained("model")
    config, said = written(capsys, *arguments.split())
    layout = require_runnable(config)
    assert layout.world_size == devices
    assert config.train.device == ("cpu" if "--gpus 0" in arguments else "cuda")
    assert (config.model.lora is not None) == ("--lora" in arguments)
    lines = said.splitlines()
    assert lines[0].startswith("wrote config.toml, for ")
    train = lines[-1]
    assert train.endswith("train config.toml")
    assert train.startswith(
        f"torchrun --nnodes {devices // 8} --nproc-per-node 8 " if devices > 8 else "evenload train"
    )
    if config.train.device == "cuda":
        cluster = "h200x4" if "h200x4" in arguments else f"h100x{devices}"
        assert ("several GPUs have never trained together yet" in said) == (devices > 1)
        assert lines[-2] == f"evenload plan config.toml --cluster {cluster}"
        assert run(*lines[-2].split()[1:], "--strategy", config.plan.strategy) == 0, "it fits by prediction"


def test_the_layout_is_the_one_of_evenload_plan_and_every_choice_says_why(capsys):
    config, _ = written(capsys, "--model", "qwen3-8b", "--data", "data.jsonl", "--gpus", "8")
    # The byte tokeniser counts five a word, and the end of the document.
    lengths = [5 * length + 1 for length in LENGTHS]
    context, batch = config.data.max_document_tokens, config.data.batch_tokens
    assert context == max(lengths)
    assert batch == sum(lengths) // 20 // 1024 * 1024
    assert sum(lengths) / batch >= 20
    planned = evenload.plan(lengths, model="qwen3-8b", cluster="h100x8", context=context, tokens=batch)
    chosen = {axis: getattr(config.parallel, axis) for axis in ("dp", "cp", "pp", "tp")}
    assert chosen == {axis: planned.inputs["layout"][axis] for axis in chosen}
    text = Path("config.toml").read_text()
    settings = [line for line in text.splitlines() if "=" in line and not line.startswith("# Lines")]
    bare = [line.partition(" ")[0] for line in settings if "  # " not in line]
    assert set(bare) <= {"path", "dp", "pp", "cp", "tp", "#", "rank", "device"}, "these speak for themselves"
    assert f"max_document_tokens = {context}" in text
    assert "# the longest document\n" in text
    assert "record" not in text, "the run looks for itself"


def test_a_column_with_a_name_of_its_own_is_named_once(capsys):
    Path("bodies.jsonl").write_text('{"body": "some words", "id": 3}\n' * 40)
    assert run("init", "--model", "qwen3-8b", "--data", "bodies.jsonl", "--gpus", "0") == 2
    assert "--text-column KEY" in capsys.readouterr().err
    fix = ["--text-column", "body"]
    config, _ = written(capsys, "--model", "qwen3-8b", "--data", "bodies.jsonl", "--gpus", "0", *fix)
    assert config.data.text_column == "body"
    assert run("lengths", "bodies.jsonl", *fix) == 0
    assert run("plan", "bodies.jsonl", "--model", "llama3.2-1b", "--cluster", "h100x1", "--context", "8k", *fix) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert "--data bodies.jsonl --text-column body --context 8192 --gpus h100x1 writes" in told
    Path("config.toml").unlink()
    assert run(*told.partition(" writes")[0].split()[2:]) == 0, "what is told to do next works"


def test_comments_are_settings_with_their_defaults(capsys):
    """Taking all `#` away changes nothing."""
    config, _ = written(capsys, "--model", "qwen3-8b", "--gpus", "8", "--lora")
    text = Path("config.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines() if not line.startswith(("# Lines", "# As"))]
    assert len(lines) > 35
    Path("all.toml").write_text("\n".join(line for line in lines if not line.startswith("tokenizer")))
    assert load_train_config(Path("all.toml")) == config
    assert len(tomllib.loads(Path("all.toml").read_text())["plan"]) == 1


def test_the_context_is_the_longest_document_or_the_models_limit(capsys):
    longer = sum(5 * length + 1 > 1024 for length in LENGTHS)
    assert longer > 100
    for arguments, context, why in (
        ([], 40_960, "the model's limit"),
        (["--context", "1k", "--data", "data.jsonl"], 1024, f"as --context says; {longer} of 400 documents are longer"),
        (["--context", "64k"], 65_536, "as --context says; the model's limit is 40,960"),
    ):
        Path("config.toml").unlink(missing_ok=True)
        config, _ = written(capsys, "--model", "qwen3-8b", *arguments)
        assert (config.data.max_document_tokens, config.data.overlong) == (context, "split")
        assert why in Path("config.toml").read_text()


def test_a_name_on_the_hub_keeps_its_name_and_takes_its_tokeniser(project, capsys):
    add_model(project / "hub", "Qwen/Qwen3-8B", CONFIGURATIONS["qwen3-8b"])
    config, _ = written(capsys, "--model", "Qwen/Qwen3-8B", "--data", "data.jsonl", "--gpus", "8")
    assert (config.model.path, config.model.random_init, config.data.tokenizer) == (
        "Qwen/Qwen3-8B",
        False,
        "Qwen/Qwen3-8B",
    )
    assert config.data.max_document_tokens == max(LENGTHS) + 1, "a token a word, and the end"
    assert config.optimizer.learning_rate == 1e-5
    assert run("plan", "config.toml", "--cluster", "h100x8", "--strategy", "best_fit") == 0


def test_chats_are_found_and_planned_in_the_tokens_of_their_template(project, capsys):
    add_model(project / "hub", "Qwen/Qwen3-8B", CONFIGURATIONS["qwen3-8b"])
    chats = [
        [{"role": "user", "content": "word " * 9}, {"role": "assistant", "content": "word " * length}]
        for length in LENGTHS
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    config, said = written(capsys, "--model", "Qwen/Qwen3-8B", "--data", "chats.jsonl", "--gpus", "8")
    assert config.data.max_document_tokens == 1 + 9 + 1 + max(LENGTHS) + 1, "names of roles, words, and the end"
    command = said.splitlines()[3].split()[1:]
    assert run(*command, "--strategy", config.plan.strategy) == 0
    assert "400 documents" in capsys.readouterr().out


def test_a_model_that_is_built_in_needs_neither_torch_nor_the_hub(project):
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from evenload.cli.main import main\n"
        "main(['init', '--model', 'Qwen/Qwen3-8B', '--gpus', '8', '--context', '8k'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_train_config(project / "config.toml").model.path == "Qwen/Qwen3-8B"


def test_gpus_are_this_machines_where_it_has_some(project, capsys):
    for index in range(2):
        (project / "no-gpus" / str(index)).mkdir(parents=True)
        (project / "no-gpus" / str(index) / "information").write_text("Model: \t NVIDIA A100-SXM4-40GB\n")
    for arguments, cluster in (((), "a100-40x2"), (("--gpus", "8"), "a100-40x8"), (("--gpus", "h100x1"), "h100x1")):
        Path("config.toml").unlink(missing_ok=True)
        _, said = written(capsys, "--model", "qwen3-0.6b", "--context", "4k", *arguments)
        assert f"evenload plan config.toml --cluster {cluster}\n" in said


def test_what_cannot_be_is_refused_and_nothing_is_written(project, capsys):
    for arguments, message in (
        ("--model qwn3-8b --gpus 8", "did you mean 'qwen3-8b'"),
        (
            "--model bert-340m --gpus 8",
            "the longest document that bert-340m was made for is not known; give --data, or --context 32k",
        ),
        ("--model qwen3-8b --gpus 12 --context 4k", "12 devices do not fill nodes of 8"),
        ("--model qwen3-8b --gpus h10x8 --context 4k", "did you mean 'h100x8'"),
        ("--model qwen3-8b --gpus 8 --data nowhere.jsonl", "nowhere.jsonl"),
        (
            "--model qwen3-8b --gpus 8 --out run.txt",
            "--out is run.txt; name a file that does not exist yet and ends with",
        ),
        ("--model other/qwen --gpus 8", "is no file or folder here; as a name on the Hugging Face Hub it is not in"),
    ):
        assert message in refused(capsys, "init", *arguments.split())
    assert run("init", "--model", "llama3-70b", "--gpus", "1", "--context", "4k") == 3
    assert "no layout of h100x1 fits llama3-70b" in capsys.readouterr().err
    assert not list(project.glob("*.toml"))
    Path("config.toml").write_text("mine")
    assert "name a file that does not exist" in refused(capsys, "init", "--model", "qwen3-8b", "--gpus", "8")
    assert Path("config.toml").read_text() == "mine"


@pytest.mark.long
def test_a_tiny_model_trains_as_it_is_written(capfd):
    """On this machine's CPU, first in one process, as written, then in two."""
    tiny_config("llama", vocab_size=257).save_pretrained("model")
    assert run("init", "--model", "model", "--data", "data.jsonl") == 0
    rank_context()
    with quick_commands():
        assert run("train", "config.toml", "parallel.dp=2", "train.steps=2", "data.workers=0") == 0, capfd.readouterr()
    rows = read_metrics(Path("runs/config/metrics.jsonl"))
    assert [row["step"] for row in rows] == [0, 1]
    assert all(0 < row["loss"] < 7 for row in rows)


def test_the_help_lists_it_first():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    names = ["init", "lengths", "plan", "train", "check", "bench", "profile"]
    at = [shown.index(f"│ {name} ") for name in names]
    assert at == sorted(at)


def test_chats_of_a_model_without_a_tokeniser_get_a_plain_template(capsys):
    """A built-in name has neither tokeniser nor template."""
    answers = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a " * 50})
    Path("chats.jsonl").write_text(f"{json.dumps({'messages': answers})}\n" * 40)
    config, _ = written(capsys, "--model", "qwen3-8b", "--data", "chats.jsonl", "--gpus", "0")
    assert (config.data.chat_template, config.data.tokenizer) == ("chatml", "bytes")
    require_runnable(config)
