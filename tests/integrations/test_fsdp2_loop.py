"""`Fsdp2Loop.save` leaves a whole checkpoint, whatever happens while it writes the next."""

import pytest
import torch

from engine_conformance import check_gradients, check_isolation, check_training
from evenload.errors import ConfigError
from evenload.integrations.fsdp2_loop import Fsdp2Loop
from fsdp2_case import fsdp2_case, leaks_of_fsdp2, refusals_of_fsdp2
from packed_cases import loader_of, tiny_model, write_texts
from whole_save_cases import errors_of_loading, save_again_and_fail

CASES = {
    "balanced": fsdp2_case(),
    "best_fit": fsdp2_case(loader={"strategy": "best_fit"}),
    "reduced every pack": fsdp2_case({"reduce_every_pack": True}, {"strategy": "wlb"}),
    "float32": fsdp2_case({"dtype": torch.float32}, gradient_error=1e-6),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_documents_one_by_one(gloo_pool, tmp_path, case):
    check_gradients(gloo_pool, case, tmp_path / "corpus")


def test_replicas_of_shards_sum_over_both(gloo_pool, tmp_path):
    """HSDP: shards are reduced inside a node and summed across nodes."""
    check_gradients(gloo_pool, fsdp2_case({"mesh": (2, 2)}), tmp_path / "corpus", world_size=4)


def test_documents_do_not_see_each_other(gloo_pool, tmp_path):
    check_isolation(gloo_pool, fsdp2_case(), tmp_path / "corpus")


@pytest.mark.parametrize(("kind", "why"), [("jamba", "with 'evenload train'"), ("bamba", "Install `mamba_ssm`")])
def test_a_model_that_mixes_documents_is_refused_on_all_ranks(gloo_pool, tmp_path, kind, why):
    """Where transformers itself says nothing, and where it refuses."""
    write_texts(tmp_path)
    for message, num_steps in gloo_pool.run(2, leaks_of_fsdp2, tmp_path, kind):
        assert "does not keep the documents of a pack apart" in message
        assert why in message
        assert num_steps == 0


def test_training_is_plain_training_and_goes_on_with_other_ranks(gloo_pool, tmp_path):
    check_training(gloo_pool, fsdp2_case(), tmp_path / "corpus", resumed_world_sizes=(1, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": True, "shuffle_window": 1}, "without it"),
        ({"format": "varlen"}, 'make it with format="hf"'),
        ({"rank": 0, "world_size": 2}, "the loader is rank 0 of 2, torch.distributed has 0 of 1"),
    ],
)
def test_loaders_that_would_train_something_else_are_refused(tmp_path, changes, message):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Fsdp2Loop(tiny_model(), None, loader_of(tmp_path, **changes))


def test_a_model_that_is_not_sharded_is_refused(tmp_path):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match="is not sharded; call fully_shard"):
        Fsdp2Loop(tiny_model(), None, loader_of(tmp_path))


def test_what_ranks_would_wait_for_or_leave_out_is_refused(gloo_pool, tmp_path):
    write_texts(tmp_path)
    for messages in gloo_pool.run(2, refusals_of_fsdp2, tmp_path):
        counts, ignored, tensor_ranks, elsewhere, norm, taken = messages
        assert "equal_micro_batches is off, but FSDP2 gathers parameters in every forward pass" in counts
        assert "parameter 'lm_head.weight' is not sharded" in ignored
        assert "on a mesh of (1, 2) ranks: tensor-parallel ranks are not tested" in tensor_ranks
        assert "lies on meta, its mesh is of cpu devices" in elsewhere
        assert "max_grad_norm is 0" in norm
        assert "stateful has ['loader']" in taken


def test_a_save_that_fails_leaves_the_one_before(gloo_pool, tmp_path):
    write_texts(tmp_path / "corpus")
    for result in gloo_pool.run(2, save_again_and_fail, tmp_path / "corpus", tmp_path / "saved"):
        assert result.first == ["step-00000000"]
        assert "could not be written" in result.message
        assert "an earlier checkpoint is intact" in result.message
        assert result.num_steps == 0, "what was loaded is the first one"
        assert result.last == ["step-00000001"], "the next save removes what the failed one left, and the one before"
        assert "was written, but could not get its name" in result.unnamed, "others would wait for rank 0"


def test_folders_and_loaders_that_do_not_fit_are_refused_on_all_ranks(gloo_pool, tmp_path):
    write_texts(tmp_path / "corpus")
    for address, missing, batches in gloo_pool.run(2, errors_of_loading, tmp_path / "corpus", tmp_path / "saved"):
        assert "a folder that all ranks reach" in address
        assert "CheckpointError: " in missing
        assert "holds no whole checkpoint" in missing
        assert "ConfigError: " in batches
        assert "batch_documents" in batches
