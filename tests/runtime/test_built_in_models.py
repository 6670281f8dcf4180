"""Built-in models have no config.json: the one made for them has their shape, and so have fewer of their layers."""

import pytest

from evenload.errors import ConfigError
from evenload.runtime.model.model_config import load_config, spec_of, with_few_layers
from evenload.types.model import MODELS
from reference_training import tiny_config

NAMES = [
    "llama-7b",
    "gpt-3.35b",
    "qwen2.5-0.5b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "gemma3-1b",
    "gpt-oss-20b",
    "olmo3-7b",
]


@pytest.mark.parametrize("name", NAMES)
def test_fewer_layers_are_the_same_layers(name):
    config, model = load_config(name), MODELS[name]
    for stages, most in ((1, 1), (2, 3)):
        few = spec_of(with_few_layers(config, model.layers, stages, most), name, 2)
        layers = max(most, len(model.kinds))
        assert few.num_layers == stages * layers
        assert {few.layers[stage * layers : (stage + 1) * layers] for stage in range(stages)} == {
            few.layers[:layers]
        }, "stages are alike"
        assert set(few.kinds) == set(model.kinds), "one of each kind"


def test_the_first_layers_are_dense_in_a_shorter_model_too():
    model = MODELS["glm-4.5"]
    few = spec_of(with_few_layers(load_config("glm-4.5"), model.layers, 1, 1), "glm-4.5", 2)
    assert (few.kinds, few.layers) == (model.kinds, (0, 1))


def test_a_folder_is_read_and_a_wrong_name_is_answered(tmp_path):
    tiny_config("gemma3").save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    kinds = spec_of(config, "tiny", 4).layers
    assert len(set(kinds)) == 2
    few = with_few_layers(config, kinds, 1, 1)
    assert few.num_hidden_layers == 2
    assert config.num_hidden_layers == 4, "the model's own is left as it was"
    with pytest.raises(ConfigError, match="did you mean 'llama-7b'"):
        load_config("lama-7b")
