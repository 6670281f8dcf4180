"""Every check passes on a right run and fails on one that is broken in the way it looks for."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from check_cases import invariance_among_processors, invariance_verdict, isolation_verdict, resume_verdict, tree_verdict
from dist_training import COSTS
from evenload.check.checks import check_ledger, check_memory, survey_batches
from evenload.check.smaller_run import Verdict, exact_casts, exit_code, smaller_run
from evenload.config.train_config import layout_of, load_train_config
from evenload.runtime.model.model_config import load_config, model_spec
from evenload.runtime.model.weight_files import stored_weights
from evenload.types.text import format_bytes
from other_rounding import rounded_up
from reference_training import KINDS, make_tokens, plain_loss_and_gradients, plain_model, relative_error, tiny_config
from small_run import write_small_run
from sweeps import sweep

PIPELINE, TENSOR = ["parallel.pp=2"], ["parallel.tp=2"]
MERGED = ["parallel.dp=2", "plan.options.dp_merge=true"]


SETTINGS = """
    max_document_tokens = 1024
    batch_documents = 20
    [train]
    steps = 20
"""
TEXTS = tuple(f"document {i} " * (1 + (i * 7) % 13 + (40 if i % 9 == 0 else 0)) for i in range(60))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_small_run(tmp_path, TEXTS, SETTINGS, "qwen3", tied=True)


def agreed(verdicts: list[Verdict]) -> Verdict:
    assert all(verdict == verdicts[0] for verdict in verdicts), "all ranks tell the same"
    return verdicts[0]


@pytest.mark.parametrize(
    "more",
    sweep(
        [
            [*PIPELINE, "plan.strategy=slimpack"],
            TENSOR,
            MERGED,
            [*PIPELINE, "plan.strategy=balanced", "model.lora.rank=2"],
            ["parallel.cp=2"],
        ],
        3,
    ),
    ids=" ".join,
)
def test_documents_are_isolated_to_the_bit(gloo_pool, config_file, more):
    verdict = agreed(gloo_pool.run(2, isolation_verdict, str(config_file), more, False))
    assert verdict.outcome == "pass"
    assert "unchanged to the bit" in verdict.found


def test_labels_that_carry_no_loss_are_not_given_one(gloo_pool, config_file):
    """Prompts are masked; a document that others changed would else be trained on other tokens than before."""
    records = [{"prompt": "ask " * (1 + i % 5), "completion": "answer " * (1 + i % 3)} for i in range(40)]
    file = config_file.parent / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))
    more = [*PIPELINE, f"data.sources=['{file}']", "data.format=jsonl", "data.record=prompt_completion"]
    for leaky, outcome in ((False, "pass"), (True, "fail")):
        assert agreed(gloo_pool.run(2, isolation_verdict, str(config_file), more, leaky)).outcome == outcome


@pytest.mark.parametrize("more", [PIPELINE, TENSOR], ids=" ".join)
def test_a_leak_of_a_thousandth_of_the_neighbour_is_caught(gloo_pool, config_file, more):
    verdict = agreed(gloo_pool.run(2, isolation_verdict, str(config_file), more, True))
    assert verdict.outcome == "fail"
    assert "reach another" in verdict.why


@pytest.mark.parametrize(
    ("layout", "dtype"),
    sweep(
        [
            (PIPELINE, "float64"),
            (["parallel.dp=2"], "float32"),
            (TENSOR, "bfloat16"),
            (MERGED, "float64"),
            (["parallel.cp=2"], "float64"),
            (TENSOR, "float64"),
        ],
        3,
    ),
)
def test_every_plan_equals_plain_training(gloo_pool, config_file, layout, dtype):
    more = [*layout, f"model.dtype={dtype}"]
    verdict = agreed(gloo_pool.run(2, invariance_verdict, str(config_file), more, False))
    assert verdict.outcome == "pass", verdict
    for title in ("slimpack", "padded", "best_fit", "balanced", "slimpack in short slices"):
        assert title in verdict.found


@pytest.mark.parametrize(("count_once", "outcome"), [(False, "pass"), (True, "fail")])
def test_trees_equal_plain_training_of_every_path(gloo_pool, config_file, count_once, outcome):
    (verdict,) = gloo_pool.run(1, tree_verdict, str(config_file), ["model.dtype=float64"], count_once)
    assert verdict.outcome == outcome, verdict


@pytest.mark.parametrize(
    "kind", sweep(["gemma2", "qwen3_moe", *(k for k in KINDS if k not in ("gemma2", "qwen3_moe"))], 2)
)
def test_in_float64_the_verdict_does_not_depend_on_the_processor(gloo_pool, tmp_path, kind):
    """Of every architecture; its plain model takes the attention that transformers has for it."""
    file = write_small_run(tmp_path, TEXTS, SETTINGS, kind)
    more = [*PIPELINE, "model.dtype=float64", "data.max_document_tokens=512", "data.overlong=truncate"]
    verdict = agreed(gloo_pool.run(2, invariance_among_processors, str(file), more))
    assert verdict.outcome == "pass", verdict


def test_a_wrong_denominator_is_caught(gloo_pool, config_file):
    verdict = agreed(gloo_pool.run(2, invariance_verdict, str(config_file), PIPELINE, True))
    assert verdict.outcome == "fail"
    assert verdict.why.startswith("slimpack in short slices: loss off by ")


@pytest.mark.parametrize("more", sweep([[*TENSOR, "model.lora.rank=2"], PIPELINE], 1), ids=" ".join)
def test_a_restart_is_exact(gloo_pool, config_file, more):
    verdict = agreed(gloo_pool.run(2, resume_verdict, str(config_file), more, False))
    assert verdict.outcome == "pass"
    assert "2 steps after a restart from step 3" in verdict.found


def test_a_restart_that_forgets_its_place_in_the_data_is_caught(gloo_pool, config_file):
    verdict = agreed(gloo_pool.run(2, resume_verdict, str(config_file), ["parallel.dp=2"], True))
    assert verdict.outcome == "fail"
    assert "step 3: plan " in verdict.why


def surveyed(config_file: Path, *overrides: str, cap_bytes: int = 2**34):
    config = load_train_config(config_file, [*PIPELINE, *overrides])
    model = model_spec(config)
    return survey_batches(config, model, layout_of(config.parallel, model.num_layers), COSTS, cap_bytes)


def test_an_epoch_is_accounted_for(config_file):
    survey = surveyed(config_file)
    verdict = check_ledger(survey)
    assert verdict.outcome == "pass"
    assert verdict.found.startswith("a whole epoch, 3 steps of 60 documents")
    assert survey.tokens == sum(len(file.read_bytes()) + 1 for file in (config_file.parent / "corpus").iterdir())


def test_a_document_that_training_would_stop_at_fails_the_ledger(config_file):
    verdict = check_ledger(surveyed(config_file, "data.max_document_tokens=100"))
    assert verdict.outcome == "fail"
    assert ".txt has " in verdict.why


def test_the_fullest_step_is_held_against_the_limit(config_file):
    survey = surveyed(config_file, "plan.strategy=slimpack")
    assert check_memory(survey, 2**34, "slimpack").outcome == "pass"
    peak = max(survey.peaks)[0]
    tight = surveyed(config_file, "plan.strategy=padded", cap_bytes=peak // 2)
    verdict = check_memory(tight, peak // 2, "padded")
    assert verdict.outcome == "fail"
    assert f"{format_bytes(max(tight.peaks)[0])} predicted in step {max(tight.peaks)[1]}" in verdict.found
    nothing = surveyed(config_file, cap_bytes=1000)
    verdict = check_memory(nothing, 1000, "slimpack")
    assert verdict.outcome == "fail"
    assert "the device offers" in verdict.why


@pytest.mark.parametrize(
    ("failed", "code"), [((), 0), (("memory",), 3), (("isolation",), 1), (("memory", "ledger"), 1)]
)
def test_exit_codes(failed, code):
    names = ("isolation", "invariance", "resume", "ledger", "memory")
    verdicts = [Verdict(name=name, outcome="fail" if name in failed else "pass", found="") for name in names]
    assert exit_code([*verdicts, Verdict(name="other", outcome="skipped", found="")]) == code


def test_a_large_model_is_checked_by_its_first_layers_with_their_own_weights(tmp_path, config_file):
    large = tmp_path / "large"
    tiny_config("qwen3", hidden_size=1024, intermediate_size=4096, num_hidden_layers=9).save_pretrained(large)
    names = ["model.norm.weight", *(f"model.layers.{index}.mlp.up_proj.weight" for index in range(9))]
    save_file({name: torch.full((1,), 7.0) for name in names}, large / "model.safetensors")
    pretrained = ["model.random_init=false", "data.tokenizer=bytes"]
    smaller, notes = smaller_run(
        load_train_config(config_file, [f"model.path={large}", "parallel.dp=8", "parallel.pp=3", *pretrained]),
        tmp_path / "short",
    )
    kept = load_config(smaller.model.path)
    assert kept.num_hidden_layers == 3
    assert len(kept.layer_types) == 3
    # The other layers' tensors lie in the same file, and have no place in the shorter model.
    assert set(stored_weights(tmp_path / "short" / "model")) == set(names[:4])
    assert smaller.parallel.dp == 2
    assert any("first 3 of 9 layers" in note for note in notes)
    assert any("2 of 8 replicas" in note for note in notes)


TOKENS = make_tokens([31, 12], 97)
EXACT = 1e-12
UNSUPPORTED = {("gemma2", "sdpa"), ("gpt_oss", "sdpa")}
NORMS = [kind for kind in KINDS if kind not in ("gpt2", "gemma4")]
"""Kinds whose norms are transformers' own and take roots: GPT-2's are torch's, which do not round, Gemma 4's powers."""

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


class Narrowed(TorchFunctionMode):
    """Collects functions that make float32 of a float64 model's values, or of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [value.dtype for value in args if isinstance(value, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32 and torch.float32 not in given:
            self.functions.append(getattr(func, "__name__", str(func)))
        return result


@pytest.mark.parametrize(
    ("kind", "attention"),
    [(kind, name) for kind in KINDS for name in ("sdpa", "eager") if (kind, name) not in UNSUPPORTED],
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
