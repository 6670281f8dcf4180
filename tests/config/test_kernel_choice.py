"""Which kernels a run takes, what its memory model counts then, and what is refused."""

from importlib.metadata import PackageNotFoundError

import pytest

from cost_samples import sample_model
from evenload.cli.worker_setup import require_runnable
from evenload.config import sections
from evenload.config.sections import uses_liger
from evenload.config.train_config import read_train_config
from evenload.errors import ConfigError
from reference_training import tiny_config


@pytest.fixture
def config_of(tmp_path):
    """A run's configuration with settings."""
    tiny_config("llama", vocab_size=257).save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n')
    tree = {
        "model": {"path": str(tmp_path / "model"), "random_init": True, "dtype": "bfloat16"},
        "data": {"sources": [str(tmp_path / "texts.jsonl")], "max_document_tokens": 64, "batch_documents": 1},
        "train": {"output_dir": str(tmp_path / "run"), "steps": 1},
    }
    return lambda *settings: read_train_config(tree, settings)


@pytest.fixture
def install(monkeypatch):
    """Pretend that a version of Liger is installed, or none."""

    def version(name, number):
        assert name == "liger-kernel"
        if number is None:
            raise PackageNotFoundError(name)
        return number

    return lambda number: monkeypatch.setattr(sections, "version", lambda name: version(name, number))


GPU, CPU, F64 = "train.device=cuda", "train.device=cpu", "model.dtype=float64"


@pytest.mark.parametrize(
    ("installed", "settings", "expected"),
    [
        ("0.8.5", [GPU], True),
        ("0.8.5", [GPU, "model.dtype=float32"], True),
        ("0.8.5", [GPU, "train.kernels=torch"], False),
        ("0.8.5", [GPU, F64], False),
        ("0.8.5", [CPU], False),
        ("0.9.0", [GPU], False),
        (None, [GPU], False),
        # A plan for another machine, whose run is refused there if it has none.
        (None, [GPU, "train.kernels=liger"], True),
    ],
)
def test_a_run_takes_liger_where_it_is_installed_on_a_gpu_and_its_memory_follows(
    config_of, install, installed, settings, expected
):
    install(installed)
    config = config_of(*settings)
    assert uses_liger(config.train, config.model.dtype) == expected
    assert config.with_run_memory(sample_model()).fused_cross_entropy == expected


@pytest.mark.parametrize(
    ("installed", "settings", "message"),
    [
        ("0.8.5", [CPU], 'train.kernels is "liger": they need train.device = "cuda", and it is "cpu"; or set'),
        ("0.8.5", [GPU, F64], 'they compute in float32, and model.dtype is "float64"'),
        (None, [GPU], r"liger-kernel is not installed: pip install 'evenload\[liger\]'"),
        ("0.9.1", [GPU], "liger-kernel 0.9.1 is installed, and 0.8 is tested"),
    ],
)
def test_liger_where_it_cannot_run_is_refused_at_start(config_of, install, installed, settings, message):
    install(installed)
    with pytest.raises(ConfigError, match=message):
        require_runnable(config_of("train.kernels=liger", *settings))
