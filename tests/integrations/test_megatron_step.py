"""A Megatron-Core model in the terms of the cost model, without Megatron-Core."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from engine_conformance import check_gradients, check_isolation, check_training
from evenload.errors import ConfigError
from evenload.integrations.engine_loop import balance_for_trained
from evenload.integrations.loader_options import LoaderOptions
from evenload.integrations.megatron_step import DocumentAttention, document_layer_spec, model_of, require_runnable
from megatron_case import megatron_case, refusals_of_megatron
from packed_cases import loader_of, tiny_model, write_texts

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


GRADIENTS = {
    "one stage, two replicas": (megatron_case(loader={"strategy": "best_fit"}), 2),
    "two stages, two replicas of uneven counts": (
        megatron_case({"pp": 2}, uneven_counts=True, loader={"strategy": "balanced"}),
        4,
    ),
    "summed beside the last backward": (megatron_case({"overlap": True}), 2),
    "a scaled loss": (megatron_case({"loss_scale": 1024.0}), 2),
}


@pytest.mark.long
@pytest.mark.parametrize(("case", "world_size"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_those_of_documents_one_by_one(gloo_pool, tmp_path, case, world_size):
    check_gradients(gloo_pool, case, tmp_path / "corpus", world_size)


def test_documents_do_not_see_each_other(gloo_pool, tmp_path):
    check_isolation(gloo_pool, megatron_case(), tmp_path / "corpus")


@pytest.mark.long
def test_training_is_plain_training_and_goes_on_with_fewer_replicas(gloo_pool, tmp_path):
    """Two stages and two replicas; then one."""
    check_training(gloo_pool, megatron_case({"pp": 2}), tmp_path / "corpus", 4, resumed_world_sizes=(2,))


def test_what_stages_would_wait_for_is_said_on_all_of_them(gloo_pool, tmp_path):
    write_texts(tmp_path / "corpus")
    for place, untold in gloo_pool.run(2, refusals_of_megatron, tmp_path / "corpus"):
        assert "of 2, Megatron-Core's data-parallel rank is 0 of 1" in place
        assert "returned no 'evenload loss'" in untold


@pytest.mark.parametrize("changes", [{"softmax_type": "learnable"}, {"qk_clip": True}])
def test_attention_that_the_layers_do_not_have_is_refused(changes):
    plain = {"attention_dropout": 0.0, "window_size": None, "multi_latent_attention": False}
    with pytest.raises(ConfigError, match=next(iter(changes))):
        document_layer_spec(SimpleNamespace(**(plain | {"softmax_type": "vanilla", "qk_clip": False} | changes)))


def config(**changes):
    settings = {
        **{"calculate_per_token_loss": True, "finalize_model_grads_func": print, "variable_seq_lengths": True},
        **{"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1, "context_parallel_size": 1},
        **{"sequence_parallel": False, "num_moe_experts": None, "expert_model_parallel_size": 1},
        "virtual_pipeline_model_parallel_size": None,
    }
    return SimpleNamespace(**(settings | changes))


def options(**changes):
    return LoaderOptions(**({"max_tokens": 64, "engine": "megatron"} | changes))


REFUSED = {
    "another format": ({}, {"engine": "deepspeed"}, 'engine="megatron"'),
    "a mean of means": ({"calculate_per_token_loss": False}, {}, "set it to True"),
    "no sums over replicas": ({"finalize_model_grads_func": None}, {}, "finalize_model_grads"),
    "one length": ({"variable_seq_lengths": False}, {}, "set it to True"),
    "context ranks": ({"context_parallel_size": 2}, {}, "evenload train"),
    "rows that ranks do not divide": (
        {"sequence_parallel": True, "tensor_model_parallel_size": 2}, {}, "pack_multiple=2"
    ),
    "experts": ({"num_moe_experts": 4}, {}, "evenload train"),
    "interleaved chunks": ({"virtual_pipeline_model_parallel_size": 2}, {}, "1F1B"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "loader", "fix"), REFUSED.values(), ids=REFUSED)
def test_what_it_would_run_wrong_is_refused_with_what_works(changes, loader, fix):
    require_runnable(config(), options())
    with pytest.raises(ConfigError, match=fix):
        require_runnable(config(**changes), options(**loader))


def test_attention_stays_inside_documents():
    """Against softmax written out, document by document; two query heads a key head."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(11, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5, 6, 11]))
    module = DocumentAttention(SimpleNamespace(kv_channels=8))
    out = module(q, k, v, None, packed_seq_params=packed)
    expected = []
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        rows = slice(start, stop)
        keys, values = (tensor[rows].repeat_interleave(2, dim=1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / math.sqrt(8)
        hidden = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
    reference = torch.cat(expected)
    assert torch.allclose(out, reference, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    made = torch.autograd.grad(out, (q, k, v), grad)
    for result, wanted in zip(made, torch.autograd.grad(reference, (q, k, v), grad), strict=True):
        assert torch.allclose(result, wanted, rtol=0, atol=1e-12)


def test_attention_without_documents_is_refused():
    module = DocumentAttention(SimpleNamespace(kv_channels=8))
    with pytest.raises(ConfigError, match="packed_seq_params"):
        module(*(torch.zeros(3, 2, 8) for _ in range(3)), None, packed_seq_params=None)


def stage(**changes):
    """What a `GPTModel` knows of itself, on every stage alike."""
    known = {"vocab_size": 300, "share_embeddings_and_output_weights": True, "max_sequence_length": 128}
    return SimpleNamespace(**({**known, "position_embedding_type": "rope"} | changes))


def shape_config(**changes):
    settings = {
        **{"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16},
        **{"ffn_hidden_size": 96, "gated_linear_unit": True, "add_bias_linear": False, "bf16": True, "fp16": False},
        **{"num_moe_experts": None, "multi_latent_attention": False, "window_size": None},
    }
    return SimpleNamespace(**(settings | changes))


def test_every_shape_is_read():
    spec = model_of(stage(), shape_config())
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.tied_embeddings) == (3, 32, 300, True)
    (kind,) = spec.kinds
    assert (kind.attention.heads, kind.attention.kv_heads, kind.attention.head_dim, kind.inner) == (4, 2, 16, 96)
    # Queries and output of 4 heads, keys and values of 2; gate, up, down.
    assert kind.active_products == 32 * 16 * (2 * 4 + 2 * 2) + 3 * 32 * 96
    assert (spec.bytes_per_element, spec.position_rows) == (2, 0)
    plain = shape_config(gated_linear_unit=False, bf16=False)
    learned = model_of(stage(position_embedding_type="learned_absolute"), plain)
    assert (learned.position_rows, learned.bytes_per_element, len(learned.kinds[0].products)) == (128, 4, 6)


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
        model_of(model, shape_config(**changes))


def test_packs_are_balanced_for_the_model_below_its_wrappers(tmp_path, caplog):
    write_texts(tmp_path)
    loader = loader_of(tmp_path, engine="megatron", rank=0, world_size=2)
    assert "llama-7b, which is assumed" in loader.start_messages[0]
    wrapped = SimpleNamespace(module=SimpleNamespace(module=stage()))
    balance_for_trained(loader, tiny_model(), lambda: model_of(wrapped, shape_config()))
    assert "equal time for megatron;" in loader.start_messages[0]
    named = loader_of(tmp_path, engine="megatron", rank=0, world_size=2, model="llama-13b")
    balance_for_trained(named, tiny_model(), lambda: model_of(stage(), shape_config()))
    assert "llama-13b" in named.start_messages[0]
    other = loader_of(tmp_path, engine="megatron", rank=0, world_size=2)
    with caplog.at_level(logging.INFO, "evenload.loader"):
        balance_for_trained(other, tiny_model(), lambda: model_of(SimpleNamespace(), shape_config()))
    assert "sizes of the model's weights alone" in caplog.text
    assert "equal time for LlamaForCausalLM;" in other.start_messages[0]
    assert not any(record.levelname == "WARNING" for record in caplog.records)
