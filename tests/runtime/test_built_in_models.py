"""Built-in models have no config.json: the one made for them has their shape, and so have fewer of their layers."""

import pytest

from evenload.errors import ConfigError
from evenload.runtime.model.model_config import config_from, spec_of, with_few_layers
from evenload.types.architectures import TRAINED
from evenload.types.model import MODEL_TYPES, MODELS
from reference_training import tiny_config

_TRAINED_TYPES = {architecture.model_type for architecture in TRAINED.values()}
NAMES = [name for name, model_type in MODEL_TYPES.items() if model_type in _TRAINED_TYPES]


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_models_configuration_has_its_shape(name):
    """Read back as any config.json is, nothing differs; and fewer layers are the same layers."""
    config = config_from(name)
    assert spec_of(config, name, 2) == MODELS[name]
    model = MODELS[name]
    kinds = set(model.windows)
    for stages, most in ((1, 1), (2, 3)):
        few = spec_of(with_few_layers(config, model.windows, stages, most), name, 2)
        layers = max(most, len(kinds))
        assert few.num_layers == stages * layers
        assert {few.windows[stage * layers : (stage + 1) * layers] for stage in range(stages)} == {
            few.windows[:layers]
        }, "stages are alike"
        assert set(few.windows) == kinds, "one of each kind of attention"


def test_a_folder_is_read_and_a_wrong_name_is_answered(tmp_path):
    tiny_config("gemma3").save_pretrained(tmp_path)
    config = config_from(str(tmp_path))
    windows = spec_of(config, "tiny", 4).windows
    assert len(set(windows)) == 2
    few = with_few_layers(config, windows, 1, 1)
    assert few.num_hidden_layers == 2
    assert config.num_hidden_layers == 4, "the model's own is left as it was"
    with pytest.raises(ConfigError, match="did you mean 'llama-7b'"):
        config_from("lama-7b")
