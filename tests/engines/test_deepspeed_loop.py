import importlib.util

import pytest

from deepspeed_case import deepspeed_case, refusals_of_deepspeed
from engine_conformance import FreshRanks, check_gradients, check_isolation, check_training
from evenload.errors import ConfigError
from evenload.integrations.engines.deepspeed_loop import DeepSpeedLoop
from packed_cases import loader_of, write_texts
from sweeps import sweep

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'evenload[deepspeed]'",
)

CASES = {
    "ZeRO-2, unequal counts": deepspeed_case(2, loader={"engine": "deepspeed-zero2", "strategy": "best_fit"}),
    "ZeRO-3": deepspeed_case(3, loader={"engine": "deepspeed-zero3"}),
    "ZeRO-1": deepspeed_case(1, loader={"engine": "deepspeed"}),
    "ZeRO-2": deepspeed_case(2),
    "ZeRO-3, reduced once": deepspeed_case(3, {"reduce_every_pack": False}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", sweep([*CASES], 2))
def test_gradients_are_those_of_documents_one_by_one(tmp_path, name):
    """In a step in which a rank has no documents at all, too."""
    check_gradients(FreshRanks(), CASES[name], tmp_path / "corpus")


@pytest.mark.long
def test_documents_do_not_see_each_other(tmp_path):
    check_isolation(FreshRanks(), CASES["ZeRO-3"], tmp_path / "corpus")


@pytest.mark.long
@pytest.mark.parametrize("stage", sweep([3, 1], 1))
def test_training_is_plain_training_and_goes_on(tmp_path, stage):
    check_training(FreshRanks(), deepspeed_case(stage, training_error=2e-4), tmp_path / "corpus", 2, (2,))


@pytest.mark.long
def test_engines_that_would_train_something_else_are_refused(tmp_path):
    write_texts(tmp_path)
    (messages, _) = FreshRanks().run(2, refusals_of_deepspeed, tmp_path)
    assert "gradient_accumulation_steps is 4" in messages["accumulation"]
    assert "ZeRO stage is 0" in messages["stage"]
    assert 'gradient_allreduce_op is "sum"' in messages["sum"]
    assert "managed_gradient_accumulation is False" in messages["unmanaged"]
    assert "cannot be put off to the end of the step" in messages["own sums"]
    assert "gathers parameters in every forward pass under ZeRO-3" in messages["counts"]
    assert "is no checkpoint of this loop" in messages["checkpoint"]


def test_what_is_no_engine_is_refused(tmp_path):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match="object has no coalesce_grad_reduction"):
        DeepSpeedLoop(object(), loader_of(tmp_path))
