import importlib.util

import pytest
import torch

from deepspeed_case import deepspeed_case, refusals_of_deepspeed
from engine_conformance import FreshRanks, check_gradients, check_isolation, check_training
from engine_records import plain_adam
from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.deepspeed_loop import DeepSpeedLoop, require_same_ranks
from overflowing_engine import updates_that_overflow
from packed_cases import loader_of, write_texts
from sweeps import sweep

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'evenload[deepspeed]'",
)

CASES = {
    "ZeRO-2, unequal counts": deepspeed_case(
        2, loader={"engine": "deepspeed-zero2", "strategy": "best_fit"}, uneven_counts=True
    ),
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
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_plain_training_and_goes_on_with_other_ranks(tmp_path, stage):
    """With another number of ranks through DeepSpeed's universal checkpoint, which knows Adam only."""
    case = deepspeed_case(stage, optimizer=plain_adam, learning_rate=0.01, growth=10.0)
    check_training(FreshRanks(), case, tmp_path / "corpus", 2, sweep((1, 3, 2), 1))


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


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"])
def test_a_checkpoint_of_other_ranks_says_how_it_goes_on(tmp_path, name):
    """By what it says: the files of other ranks lie on their own nodes."""
    (tmp_path / "step-4").mkdir()
    torch.save({"dp_world_size": 2, "module": {}}, tmp_path / "step-4" / name)
    (tmp_path / "step-4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "latest").write_text("step-4")
    require_same_ranks(tmp_path, None, 2)
    for tag in (None, "step-4"):
        with pytest.raises(CheckpointError, match="was saved by 2 ranks, and there are 1") as refused:
            require_same_ranks(tmp_path, tag, 1)
        assert "ds_to_universal --inject_missing_state --input_folder" in str(refused.value)


def test_an_update_that_the_engine_left_out_is_told_and_not_counted(gloo_pool, tmp_path):
    write_texts(tmp_path)
    assert gloo_pool.run(1, updates_that_overflow, tmp_path) == [[(0, False), (1, True), (1, False), (2, True)]]


def test_a_broken_checkpoint_is_named(tmp_path):
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"half of a fi")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt' cannot be read"):
        require_same_ranks(tmp_path, None, 1)


def test_what_is_no_engine_is_refused(tmp_path):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match="object has no coalesce_grad_reduction"):
        DeepSpeedLoop(object(), loader_of(tmp_path))
