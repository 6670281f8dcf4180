"""A Megatron-Core model in the terms of the cost model, without Megatron-Core."""

import logging
from types import SimpleNamespace

import pytest

from evenload.errors import ConfigError
from evenload.integrations.engine_loop import balance_for_trained
from evenload.integrations.megatron_step import model_of
from packed_cases import loader_of, write_texts


def stage(**changes):
    """What a `GPTModel` knows of itself, on every stage alike."""
    known = {"vocab_size": 300, "share_embeddings_and_output_weights": True, "max_sequence_length": 128}
    return SimpleNamespace(**({**known, "position_embedding_type": "rope"} | changes))


def config(**changes):
    settings = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}
    settings |= {
        "ffn_hidden_size": 96,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "bf16": True,
        "fp16": False,
    }
    others = {"num_moe_experts": None, "multi_latent_attention": False, "window_size": None}
    return SimpleNamespace(**(settings | others | changes))


def test_every_shape_is_read():
    spec = model_of(stage(), config())
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.tied_embeddings) == (3, 32, 300, True)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn_hidden_size) == (4, 2, 16, 96)
    # Queries and output of 4 heads, keys and values of 2; gate, up, down.
    assert spec.linear_parameters_per_layer == 32 * 16 * (2 * 4 + 2 * 2) + 3 * 32 * 96
    assert (spec.bytes_per_element, spec.position_rows) == (2, 0)
    learned = model_of(stage(position_embedding_type="learned_absolute"), config(gated_linear_unit=False, bf16=False))
    assert (learned.position_rows, learned.bytes_per_element, learned.gated_ffn) == (128, 4, False)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (SimpleNamespace(), {}, "no vocab_size.*PackedLoader\\(model"),
        (stage(), {"multi_latent_attention": True}, "multi_latent_attention"),
        (stage(), {"window_size": (64, 0)}, "window_size"),
    ],
)
def test_what_is_not_priced_is_named(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        model_of(model, config(**changes))


def test_packs_are_balanced_for_the_model_below_its_wrappers(tmp_path, caplog):
    write_texts(tmp_path)
    loader = loader_of(tmp_path, engine="megatron", rank=0, world_size=2)
    assert "llama-7b, which is assumed" in loader.start_lines[0]
    with caplog.at_level(logging.WARNING, "evenload.loader"):
        balance_for_trained(loader, lambda: model_of(SimpleNamespace(module=SimpleNamespace()), config()))
    assert "not balanced for the model" in caplog.text
    assert loader.model_is_assumed
    balance_for_trained(loader, lambda: model_of(SimpleNamespace(module=SimpleNamespace(module=stage())), config()))
    assert "equal time for megatron;" in loader.start_lines[0]
    named = loader_of(tmp_path, engine="megatron", rank=0, world_size=2, model="llama-13b")
    balance_for_trained(named, lambda: model_of(stage(), config()))
    assert "llama-13b" in named.start_lines[0]
