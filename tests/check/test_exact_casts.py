"""Under `exact_casts` float64 results do not depend on how a processor rounds to float32; without it, they do."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from evenload.check.runner import exact_casts
from other_rounding import rounded_up
from reference_training import KINDS, make_tokens, plain_loss_and_gradients, plain_model, relative_error, tiny_config

TOKENS = make_tokens([31, 12], 97)
EXACT = 1e-12
UNSUPPORTED = ("gemma2", "sdpa")
NORMS = [kind for kind in KINDS if kind != "gpt2"]
"""Kinds whose norms are transformers' own; GPT-2's are torch's, which do not round."""

rounds = pytest.mark.rounded_casts("shows what the roundings do, or turns them off and on by itself")


def random_weights(kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float64)
    return {name: torch.randn_like(p) * 0.2 for name, p in model.named_parameters()}


def difference(kind: str) -> float:
    """Between two processors: the largest relative error of a parameter's gradient."""
    config, weights = tiny_config(kind), random_weights(kind)
    with rounded_up(2):
        _, here = plain_loss_and_gradients(config, weights, TOKENS, torch.float64)
    with rounded_up(3):
        _, there = plain_loss_and_gradients(config, weights, TOKENS, torch.float64)
    return max(relative_error(here[name], gradient) for name, gradient in there.items())


@rounds
@pytest.mark.parametrize("kind", NORMS)
def test_what_differs_among_processors_does_not_under_exact_casts(kind):
    assert difference(kind) > 100 * EXACT
    with exact_casts():
        assert difference(kind) <= EXACT
    assert difference(kind) > 100 * EXACT, "and is over afterwards"


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_it_holds_in_every_test_that_does_not_ask_otherwise(kind):
    assert difference(kind) <= EXACT


class Narrowed(TorchFunctionMode):
    """Collects functions that make float32 of a float64 model's values, or of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = [value.dtype for value in args if isinstance(value, torch.Tensor)]
        if isinstance(found, torch.Tensor) and found.dtype is torch.float32 and torch.float32 not in given:
            self.functions.append(getattr(func, "__name__", str(func)))
        return found


@pytest.mark.parametrize(
    ("kind", "attention"), [(kind, name) for kind in KINDS for name in ("sdpa", "eager") if (kind, name) != UNSUPPORTED]
)
def test_nothing_of_a_float64_model_passes_through_float32(kind, attention):
    """Norms, softmax, routers, rotary angles, the loss of labels and of routers, and whatever a kind may add."""
    balance = {"output_router_logits": True} if kind in ("mixtral", "qwen3_moe") else {}
    model = plain_model(tiny_config(kind, **balance), random_weights(kind), torch.float64)
    model.set_attn_implementation(attention)
    ids = TOKENS[0][None]
    with Narrowed() as narrowed:
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert narrowed.functions == []


@rounds
def test_without_it_transformers_does_narrow():
    model = plain_model(tiny_config("llama"), random_weights("llama"), torch.float64)
    with Narrowed() as narrowed:
        model(TOKENS[0][None], use_cache=False)
    assert {"to", "float"} <= set(narrowed.functions)


@rounds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_other_precisions_are_left_alone(dtype):
    weights = {name: weight.to(dtype) for name, weight in random_weights("gemma2").items()}
    model = plain_model(tiny_config("gemma2"), weights, dtype)
    plain = model(TOKENS[0][None]).logits
    with exact_casts():
        assert torch.equal(model(TOKENS[0][None]).logits, plain)


@rounds
def test_it_holds_in_all_threads_and_inside_modules_of_float64_only():
    class Caster(nn.Module):
        def forward(self, values):
            return values.float(), values.to(torch.float32), torch.zeros(1, dtype=torch.float32)

    def dtypes(given: torch.dtype) -> set[torch.dtype]:
        return {values.dtype for values in Caster()(torch.ones(1, dtype=given))}

    with exact_casts(), ThreadPoolExecutor(1) as other:
        for call in (dtypes, lambda dtype: other.submit(dtypes, dtype).result()):
            assert call(torch.float64) == {torch.float64}
            assert call(torch.float32) == call(torch.bfloat16) == {torch.float32}
        assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32, "outside of modules"
    assert dtypes(torch.float64) == {torch.float32}
