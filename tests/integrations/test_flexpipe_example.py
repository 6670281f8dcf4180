"""The models of examples/flexpipe are those that are planned by name, and its configuration is one that trains."""

from pathlib import Path

import msgspec
import pytest

from evenload.config.train_config import layout_of, load_train_config
from evenload.data.hub import model_from
from evenload.runtime.model.configured import load_config, model_spec
from evenload.types.model_catalog import MODELS

EXAMPLE = Path(__file__).parents[2] / "examples" / "flexpipe"


@pytest.mark.parametrize("name", ["gpt-3.35b", "gpt-13b"])
def test_the_example_models_are_the_planned_ones(name: str) -> None:
    file = EXAMPLE / f"{name}.json"
    assert msgspec.structs.replace(model_from(str(file)), name=name) == MODELS[name]
    assert load_config(str(file)).num_hidden_layers == MODELS[name].num_layers, "and nothing refuses to train it"


def test_its_configuration_is_complete_but_for_data() -> None:
    config = load_train_config(
        EXAMPLE / "train.toml", ["data.sources=['docs']", f"model.path={EXAMPLE / 'gpt-3.35b.json'}"]
    )
    model = model_spec(config)
    assert model.position_rows == config.data.max_document_tokens
    assert layout_of(config, model.num_layers).world_size == 16
