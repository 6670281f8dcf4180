"""Tensor parallelism with sequence parallelism: plans through the real executor equal plain training, in every company;
what is stored is what the memory model says; what cannot be cut right is refused."""

import itertools

import pytest
import torch

from dist_cases import gradients_of_plans
from evenload.cost.groups import TENSOR_RINGS, WEIGHT_RINGS
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.comm.tensor_group import RowShard, row_owners
from evenload.runtime.model.tensor_weights import require_tensor_parallel
from evenload.types.plan import encode_plan
from reference_training import make_tokens, tiny_config
from tensor_transfer_cases import hidden_transfers_by_action
from varied_plans import SCHEDULES, varied_plan

LAYERS = 4
FOUR_HEADS = {"num_key_value_heads": 4}


def plans_of(tp, pp, dp, virtual, count=5, seed=0):
    """Policies and schedules by turns; every third plan keeps documents whole."""
    schedules = SCHEDULES if virtual == 1 else ("list_split",)
    policies = ["mixed", "replay", "mixed", "recompute", "offload"]
    return [
        varied_plan(
            1009 * seed + 31 * index + 7 * tp + 3 * pp + dp,
            num_layers=LAYERS,
            pp=pp,
            dp=dp,
            tp=tp,
            virtual=virtual,
            policies=policies[index % len(policies)],
            schedule=schedules[(index + 2) % len(schedules)],
            whole=index % 3 == 2,
            num_documents=6,
        )
        for index in range(count)
    ]


def test_every_tp_starts_from_the_same_weights(gloo_pool):
    (single,) = gloo_pool.run(1, gradients_of_plans, *_one_plan(1))
    for tp in (2, 4):
        for rank in gloo_pool.run(tp, gradients_of_plans, *_one_plan(tp)):
            assert rank[0][3].keys() == single[0][3].keys()
            assert all((rank[0][3][name] == value).all() for name, value in single[0][3].items())


def _one_plan(tp):
    plan = varied_plan(1, num_layers=LAYERS, pp=1, tp=tp, policies="replay")
    tokens = make_tokens([d.num_tokens for d in plan.documents], 97)
    return "llama", FOUR_HEADS, [encode_plan(plan)], [tokens], torch.float64, {}


@pytest.mark.parametrize(
    ("kind", "changes", "tp", "error", "message"),
    [
        ("llama", {}, 4, ConfigError, "parallel.tp is 4, but num_key_value_heads of the model is 2"),
        ("llama", {"intermediate_size": 81}, 2, ConfigError, "intermediate_size of the model is 81"),
        ("llama", {"vocab_size": 1}, 2, ConfigError, "vocab_size of the model is 1: some rank would get none"),
        ("olmo2", {}, 2, UnsupportedModelError, "norms all query heads together"),
        ("mixtral", {}, 2, UnsupportedModelError, "the model has experts"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind, changes, tp, error, message):
    config = tiny_config(kind, **changes)
    with pytest.raises(error, match=message):
        require_tensor_parallel(config, tp)
    require_tensor_parallel(config, 1)


def test_rows_of_any_slice_are_divided_to_within_one():
    """Brute force over the owner of every token; what decides memory, transfers and row counts."""
    for doc_id, start, length, size in itertools.product((0, 1, 5), (0, 1, 7), (0, 1, 4, 9), (2, 3, 4)):
        piece = [(doc_id, start, start + length)]
        owners = row_owners(piece, size)
        counts = [RowShard(rank, size).num_rows(piece) for rank in range(size)]
        assert counts == [(owners == rank).sum() for rank in range(size)]
        assert max(counts) - min(counts) <= 1


def test_every_action_makes_the_transfers_it_is_charged(gloo_pool):
    """Split backwards gather rows again in W: charged as whole backwards they would look free."""
    for counts in gloo_pool.run(2, hidden_transfers_by_action, 3):
        assert counts == {
            "F": TENSOR_RINGS["forward"],
            "B": TENSOR_RINGS["backward"],
            "I": TENSOR_RINGS["backward"],
            "W": WEIGHT_RINGS,
        }
