"""What GPT-2 alone has: positions that end, weights [in, out], files without the decoder's name."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from evenload.config.train_config import load_train_config
from evenload.cost.memory import parameters_per_rank, static_kinds
from evenload.data.hub import model_from_config
from evenload.errors import ConfigError
from evenload.runtime.model.hf_model import build_rank_models, require_model
from evenload.runtime.model.model_config import load_config, model_spec, position_warning, require_positions
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.types.layout import even_layout
from reference_training import stage_model, tiny_config

LENGTHS = [61, 1, 33]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"pp": 2, "virtual": 2}], ids=["whole", "pp2", "virtual"])
def test_ranks_hold_exactly_what_the_cost_model_counts(sizes, tied):
    config = tiny_config("gpt2", tied=tied)
    spec, layout = model_from_config(config.to_dict(), "tiny", 8), even_layout(4, **sizes)

    held = []
    for pp_rank in range(layout.pp):
        buffers = flatten_units(tuple(build_rank_models(layout, pp_rank, partial(stage_model, config)).values()), dp=1)
        held.append(sum(buffer.num_elements for buffer in buffers))
        assert sum(buffer.tied for buffer in buffers) == (tied and layout.pp > 1)
    assert parameters_per_rank(spec, layout).tolist() == held
    assert static_kinds(spec, layout)[:, 0].tolist() == [8 * count for count in held]


def test_random_weights_follow_the_scheme_of_transformers():
    """Matrices in front of a residual sum begin smaller by the root of the number of sums."""
    config = tiny_config("gpt2", n_embd=192, n_inner=768)
    layer = stage_model(config, layers=(1, 2)).layers[1]
    assert isinstance(layer, nn.Module)
    result = {name: parameter.std().item() for name, parameter in layer.named_parameters() if parameter.ndim == 2}
    for name, deviation in result.items():
        expected = 0.2 / (8**0.5 if name.endswith("c_proj.weight") else 1)
        assert deviation == pytest.approx(expected, rel=0.03), name
    assert not layer.mlp.c_fc.bias.any()


def test_the_published_files_load(tmp_path: Path):
    """Without the decoder's name in front, and with the causal masks that old versions stored."""
    torch.manual_seed(5)
    original = AutoModelForCausalLM.from_config(tiny_config("gpt2", tied=True), dtype=torch.float64)
    original.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    assert "wte.weight" in renamed
    stored = {"bias": torch.ones(1, 1, 8, 8).tril(), "masked_bias": torch.tensor(-1e4)}
    masks = {f"h.{index}.attn.{name}": mask.clone() for index in range(4) for name, mask in stored.items()}
    save_file(renamed | masks, file, metadata={"format": "pt"})
    config = load_config(str(tmp_path))
    require_model(config, str(tmp_path))
    expected = dict(original.named_parameters())
    for layers in ((0, 2), (2, 4)):
        for named in stage_model(config, layers=layers, weights=str(tmp_path)).unit_parameters():
            for name, parameter in named:
                assert torch.equal(parameter, expected["transformer.wte.weight" if name == "lm_head.weight" else name])


@pytest.fixture
def run(tmp_path):
    """A configuration of a run, from changes to config.json and settings."""

    def make(changes, *overrides):
        model = tmp_path / "model"
        tiny_config("gpt2").save_pretrained(model)
        written = json.loads((model / "config.json").read_text()) | changes
        (model / "config.json").write_text(json.dumps(written))
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "run.toml").write_text(f"""
            model = {{ path = "{model}", random_init = true }}
            data = {{ sources = ["{tmp_path / "docs"}"], max_document_tokens = 513, batch_documents = 4 }}
            train = {{ output_dir = "{tmp_path / "run"}", steps = 2 }}
        """)
        return load_train_config(tmp_path / "run.toml", list(overrides))

    return make


def test_documents_beyond_the_table_are_refused_with_the_setting_that_cuts_them(run):
    with pytest.raises(ConfigError) as error:
        model_spec(run({}))
    parts = "up to 513 tokens", "position for 512 tokens only (n_positions", "data.max_document_tokens = 512 with"
    assert all(part in str(error.value) for part in parts)
    config = run({}, "data.max_document_tokens=512")
    assert model_spec(config).position_rows == 512
    require_positions(tiny_config("llama", max_position_embeddings=8), 513)  # rotary positions go on: a warning
    assert position_warning(load_config(config.model.path), 512) == ""
