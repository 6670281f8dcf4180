"""The demo's configuration, filled in for a machine, is one that `evenload train` takes."""

import runpy
from pathlib import Path

import pytest

from evenload.runtime.config.train_config import layout_of, load_train_config
from evenload.runtime.model.configured import model_spec

ROOT = Path(__file__).parents[2]


def test_the_demo_fills_its_configuration_in(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Sources and tokeniser of this machine, all else as it stands in demo.toml; both strategies are compared."""
    monkeypatch.chdir(ROOT)
    demo = runpy.run_path(str(ROOT / "examples" / "stdlib_demo" / "run.py"))
    library = tmp_path / 'a "library"'
    library.mkdir()
    for index in range(20):
        (library / f"{index}.py").write_text(f"def function_{index}(first, second):\n    return first + {index}\n" * 50)
    demo["library_sources"].__globals__["library_sources"] = lambda: [str(library)]
    config = load_train_config(demo["write_config"](tmp_path / "config.toml"), [])
    assert list(config.data.sources) == [str(library)]
    assert Path(config.data.tokenizer).is_file()
    assert config.plan.strategy == demo["STRATEGIES"][1]
    assert layout_of(config, model_spec(config).num_layers).world_size == 2
    as_it_stands = load_train_config(ROOT / "examples" / "stdlib_demo" / "demo.toml", ["data.sources=['docs']"])
    assert (config.model, config.parallel, config.train) == (
        as_it_stands.model, as_it_stands.parallel, as_it_stands.train,
    )  # fmt: skip
