"""Norms as one kernel: which are, that they compute the same but for rounding, and who has them by default."""

import msgspec
import pytest
import torch

from evenload.config.sections import RunConfig
from evenload.runtime.model.fused_norms import FusedNorm, fuse_norms
from evenload.runtime.model.hf_model import build_stage_model
from reference_training import make_tokens, relative_error, tiny_config
from single_stage import assert_bf16_as_good_as_plain, packs_of, run_single_stage

LENGTHS = [61, 30, 1, 7, 2, 19]
# Norms a layer, and the last one.
NORMS = {"llama": 2, "qwen2": 2, "qwen3": 4, "mistral": 2, "olmo2": 4, "mixtral": 2}


def model_of(kind):
    config = tiny_config(kind)
    layers = (0, config.num_hidden_layers)
    cpu = torch.device("cpu")
    return build_stage_model(config, layers=layers, dtype=torch.float32, device=cpu, weights=None, seed=3)


@pytest.mark.parametrize("kind", NORMS)
def test_every_norm_is_fused_once(kind):
    model = model_of(kind)
    given = [*model.layers.values(), model.norm]
    names = {name for layer in model.layers.values() for name, _ in layer.named_parameters()}
    assert fuse_norms(given, model.architecture) == NORMS[kind] * len(model.layers) + 1
    assert fuse_norms(given, model.architecture) == 0
    assert isinstance(model.norm, FusedNorm)
    assert names == {name for layer in model.layers.values() for name, _ in layer.named_parameters()}


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3", "gpt2"])
def test_norms_of_another_kind_stay(kind):
    model = model_of(kind)
    assert fuse_norms([*model.layers.values(), model.norm], model.architecture) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-5)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2"])
def test_gradients_equal_those_of_transformers_norms(kind, dtype, tolerance):
    """Asymmetric packs."""
    config = tiny_config(kind)
    tokens = make_tokens(LENGTHS, config.vocab_size)
    forward = packs_of(LENGTHS, [0.3, 0.75], 40, last_first=False)
    backward = packs_of(LENGTHS, [0.5], 33, last_first=True)
    loss, gradients, *_ = run_single_stage(config, dtype, tokens, forward, backward)
    fused_loss, fused, *_ = run_single_stage(config, dtype, tokens, forward, backward, fused_norms=True)
    assert fused_loss == pytest.approx(loss, rel=tolerance)
    for name, gradient in gradients.items():
        assert relative_error(fused[name], gradient) <= tolerance, name


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bf16_they_err_no_more_than_plain_training(kind):
    assert_bf16_as_good_as_plain(kind, None, fused_norms=True)


def test_gpus_have_them_and_anyone_can_say_otherwise():
    run = RunConfig(output_dir="run", steps=1)
    assert not run.fuses_norms
    assert msgspec.structs.replace(run, fused_norms=True).fuses_norms
    assert msgspec.structs.replace(run, device="cuda").fuses_norms
    assert not msgspec.structs.replace(run, device="cuda", fused_norms=False).fuses_norms
