"""Trainer, TRL (with and without LoRA) and Accelerate train a plan as documents one by one (`engine_conformance`)."""

import pytest

from engine_conformance import check_gradients, check_isolation, check_training
from sweeps import thorough
from trainer_engine_cases import ACCELERATE, LORA, SFT, TRAINER

CASES = {"trainer": TRAINER, "sft": SFT, "lora": LORA, "accelerate": ACCELERATE}
# Its own use of names that transformers has renamed.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.long]


def cases(*default):
    """All of them; those that are not named only in thorough runs."""
    return [pytest.param(case, id=name, marks=() if name in default else (thorough,)) for name, case in CASES.items()]


@pytest.mark.parametrize("case", cases("lora", "accelerate"))
def test_gradients_are_those_of_documents_one_by_one(gloo_pool, tmp_path, case):
    check_gradients(gloo_pool, case, tmp_path / "data")


@pytest.mark.parametrize("case", cases())
def test_documents_do_not_see_each_other(gloo_pool, tmp_path, case):
    check_isolation(gloo_pool, case, tmp_path / "data")


@pytest.mark.parametrize("case", cases("trainer", "sft", "accelerate"))
def test_training_is_plain_training_and_resumes_with_other_ranks(gloo_pool, tmp_path, case):
    check_training(gloo_pool, case, tmp_path / "data")
