"""Every architecture replays exactly: loss and gradients equal plain training, whatever the cuts."""

import pytest
import torch

from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.recipes import check_supported, router_aux_loss_coef
from reference_training import exact_casts, make_tokens, tiny_config
from single_stage import assert_equals_plain, packs_of

LENGTHS = [61, 30, 1, 7, 2, 1, 19]
NEW = ["gemma", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3_moe"]
CUTS = {"sliced": ([0.3, 0.75], 40, [0.5], 33), "whole": ([], 70, [], 70), "many": ([0.1, 0.2, 0.6], 9, [0.9], 11)}


def packs(cuts):
    forward_cuts, forward_budget, backward_cuts, backward_budget = CUTS[cuts]
    forward = packs_of(LENGTHS, forward_cuts, forward_budget, last_first=False)
    return forward, packs_of(LENGTHS, backward_cuts, backward_budget, last_first=True)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("cuts", list(CUTS))
@pytest.mark.parametrize("kind", NEW)
def test_gradients_equal_plain_training_in_float64(kind, cuts, tied):
    """transformers' float32 roundings aside, nothing is left but float64's own."""
    config = tiny_config(kind, tied=tied)
    with exact_casts(kind):
        assert_equals_plain(
            config, torch.float64, make_tokens(LENGTHS, config.vocab_size), *packs(cuts), tolerance=1e-11
        )


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-5)])
def test_gradients_equal_unchanged_transformers(kind, dtype, tolerance):
    """With transformers' own roundings to float32, to their precision."""
    config = tiny_config(kind)
    assert_equals_plain(config, dtype, make_tokens(LENGTHS, config.vocab_size), *packs("sliced"), tolerance=tolerance)
