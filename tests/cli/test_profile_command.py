"""`evenload profile` as a user runs it, and what `evenload plan` says about the file."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from commands import run
from evenload.cli.measure import ProfileRequest
from evenload.cli.measure_worker import profile_task
from evenload.cost.coefficients import read_coefficients, write_coefficients
from reference_training import tiny_config

# One pass over what coefficients need takes less than a second; the budget is over at once.
SHORT = ("--minutes", "0.01", "--threads", "1", "--context", "1k")
CLUSTER = """
name = "this"
num_nodes = 1
devices_per_node = 2
device = { name = "cpu", peak_flops_per_s = 1e11, memory_bytes = 8000000000 }
intra_node = { bandwidth_bytes_per_s = 1e9, latency_s = 1e-4 }
inter_node = { bandwidth_bytes_per_s = 1e9, latency_s = 1e-4 }
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_config("llama", vocab_size=257).save_pretrained(tmp_path / "tiny")
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 900, 60).astype(np.uint32))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(cost: str, *more: str, layout: str = "dp=1") -> int:
    common = ["plan", "lengths.npy", "--cluster", "cluster.toml", "--documents", "20", "--strategy", "best_fit"]
    return run(*common, "--model", "tiny/config.json", "--context", "4k", "--layout", layout, "--cost", cost, *more)


@pytest.mark.long
def test_one_process_measures_a_file_that_plans(project, capfd, command_here):
    """The file plans the model it was measured on; another model and a corrupt file are refused, and it is said where
    one was changed by hand."""
    code, output, errors = command_here("profile", "--model", "tiny", *SHORT, "-o", "cost.json")
    assert code == 0, errors
    assert "packs that the fit had not seen were off by" in output
    assert sorted(path.name for path in project.iterdir()) == ["cluster.toml", "cost.json", "lengths.npy", "tiny"]

    assert plan("cost.json") == 0
    shown = capfd.readouterr().out
    assert "cost: measured on" in shown
    assert "model tiny in float32" in shown
    assert "packs that the fit had not seen were off by" in shown
    assert "CHANGED" not in shown
    # The links of another layout are the cluster's, and it is said.
    assert plan("cost.json", layout="dp=2") == 0
    assert "the reduction of gradients over 2 devices was not measured" in capfd.readouterr().out
    assert plan("cost.json", layout="dp=1,pp=2") == 0
    assert "the transfer between pipeline stages over 2 devices was not measured" in capfd.readouterr().out

    costs = read_coefficients("cost.json")
    write_coefficients("changed.json", msgspec.structs.replace(costs, head_s_per_token=1e-9))
    assert plan("changed.json") == 0
    assert "CHANGED after it was measured" in capfd.readouterr().out

    for name, content, message in (
        ("cut.json", (project / "cost.json").read_bytes()[:500], "is not valid"),
        ("other.json", b'{"a": 1}', "is not valid"),
    ):
        (project / name).write_bytes(content)
        assert plan(name) == 2
        assert message in capfd.readouterr().err
    assert plan("missing.json") == 2
    assert "cannot be read" in capfd.readouterr().err

    tiny_config("llama", vocab_size=257, intermediate_size=96).save_pretrained(project / "tiny")
    assert plan("cost.json") == 2
    error = capfd.readouterr().err
    assert "was measured on model tiny" in error
    assert "whose layers differ" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-7b"], "did you mean"),
        (["--model", "bert-340m"], "a dropout mask would differ"),
        (["--model", "tiny", "--minutes", "0"], "--minutes is 0, must be above 0"),
        (["--model", "tiny", "--context", "512"], "--context is 512 tokens, must be at least 1024"),
        (["--model", "tiny", "--layout", "pp=3,xp=2"], "'xp=2' is not one of dp cp pp tp virtual"),
        (["--model", "tiny", "--layout", "pp=64"], "64"),
        (["--model", "tiny", "--layout", "tp=3"], "parallel.tp is 3"),
        (["--model", "tiny", "--attention", "none"], "none"),
        (["--model", "tiny", "--device", "cuda"], "train.device is 'cuda'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused_before_processes_start(project, command_here, arguments, message):
    """As the command checks it, in this process; no file is left."""
    named = dict(zip(arguments[::2], arguments[1::2], strict=True))
    if named.keys() & {"--minutes", "--context"}:
        code, _, errors = command_here("profile", *arguments, "-o", "cost.json")
        assert code == 2
        assert message in errors
    else:
        given = {name.removeprefix("--"): value for name, value in named.items()}
        request = ProfileRequest(**{"device": "cpu", **given}, output=Path("cost.json"))  # type: ignore[arg-type]
        with pytest.raises(Exception, match=message.replace("(", r"\(")) as refused:
            profile_task(Path("answer.json"), request)
        assert type(refused.value).__module__ == "evenload.errors"
    assert not (project / "cost.json").exists()
