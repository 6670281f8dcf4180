"""Tensor parallelism with sequence parallelism: transfers are as charged; what cannot be cut right is refused."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from dist_cases import RankUnderTest
from evenload.cost.group_transfers import BLOCK_RINGS, EXPERT_TRANSFERS, WEIGHT_RINGS
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.comm.collectives import Transfer
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.comm.tensor_group import RowShard, row_owners
from evenload.runtime.model.tensor_weights import require_tensor_parallel
from evenload.runtime.replay.rank_packs import PackTokens
from evenload.runtime.replay.store import ActivationStore
from evenload.runtime.replay.weight_products import WeightProducts
from evenload.types.document import Range
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S
from reference_training import KINDS, structure, tiny_config

TOKENS = 24


def hidden_transfers_by_action(kind: str, num_layers: int) -> dict[str, float]:
    """F, B, I, W -> transfers of hidden states a layer, in units of all rows' ones."""
    meshes = create_meshes([even_layout(num_layers, tp=2)], torch.device("cpu"), timeout_s=TIMEOUT_S)
    changes = {"num_local_experts": 4} if kind == "mixtral" else {}
    rank = RankUnderTest(meshes, meshes.start.layout, kind, changes, torch.float64)
    (whole_model,) = rank.stages.values()
    stage = whole_model.with_layers(whole_model.model.layers)
    group = meshes.start.tensor
    assert group is not None
    counted, whole = [0], TOKENS * stage.hidden_size
    group.chunk_rows = TOKENS // 3
    gather, scatter = group.all_gather, group.all_to_all

    def is_hidden(rows: Tensor) -> bool:
        return rows.ndim == 2 and rows.shape[1] == stage.hidden_size

    def all_gather(rows: Tensor, what: str) -> Transfer:
        counted[0] += rows.numel() * group.shard.size * is_hidden(rows)
        return gather(rows, what)

    def all_to_all(rows: Tensor, sent: list[int], received: list[int], what: str) -> Transfer:
        counted[0] += rows.numel() * is_hidden(rows)
        return scatter(rows, sent, received, what)

    group.all_gather, group.all_to_all = all_gather, all_to_all  # type: ignore[method-assign]
    lengths, ranges, result = {0: TOKENS}, (Range(0, 0, TOKENS),), {}
    positions = torch.arange(TOKENS)
    ids, targets = torch.zeros_like(positions), torch.zeros_like(positions)
    pack = PackTokens(ranges, ids, targets, positions)

    def count(name: str, action) -> None:
        counted[0] = 0
        action()
        result[name] = counted[0] / whole / num_layers

    for split in (False, True):
        stage.begin_step(lengths)
        store = ActivationStore(lengths, [ranges], shard=stage.row_shard)
        products = WeightProducts(store.held) if split else None
        hidden, grad = (torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=torch.float64) for _ in range(2))
        count("F", lambda h=hidden, s=store: stage.forward_layers(pack, h, s))
        count("I" if split else "B", lambda g=grad, s=store, p=products: stage.backward_layers(pack, g, s, p))
        if products is not None:
            count("W", products.add_all)
    return result


@pytest.mark.parametrize(
    ("kind", "changes", "tp", "error", "message"),
    [
        ("llama", {}, 4, ConfigError, "parallel.tp is 4, but num_key_value_heads of the model is 2"),
        ("llama", {"intermediate_size": 81}, 2, ConfigError, "outputs of mlp.gate_proj of the model is 81"),
        ("llama", {"vocab_size": 1}, 2, ConfigError, "vocab_size of the model is 1: some rank would get none"),
        # It norms all query heads together, which would lie on different ranks.
        ("olmo2", {}, 2, UnsupportedModelError, r"parallel\.tp is 2 and .* self_attn\.k_proj, .*; use parallel\.dp"),
        ("gpt2", {}, 2, UnsupportedModelError, "parallel.tp is 2 and the model has no plan for tensor parallelism"),
        ("mixtral", {}, 2, ConfigError, "number of mlp.experts of the model is 5"),
        ("nanochat", {}, 2, UnsupportedModelError, "the model computes with its embeddings before its layers"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind, changes, tp, error, message):
    config = tiny_config(kind, **changes) if kind in KINDS else AutoConfig.for_model(kind)
    found = structure(config)
    with pytest.raises(error, match=message):
        require_tensor_parallel(config, found, tp)
    require_tensor_parallel(config, found, 1)


def test_rows_of_any_slice_are_divided_to_within_one():
    """Brute force over the owner of every token; what decides memory, transfers and row counts."""
    for doc_id, start, length, size in itertools.product((0, 1, 5), (0, 1, 7), (0, 1, 4, 9), (2, 3, 4)):
        piece = [(doc_id, start, start + length)]
        owners = row_owners(piece, size)
        counts = [RowShard(rank, size).num_rows(piece) for rank in range(size)]
        assert counts == [(owners == rank).sum() for rank in range(size)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("kind", "blocks", "rows_of_experts"), [("llama", 2, 0), ("mixtral", 1, 2 / 2)])
def test_every_action_makes_the_transfers_it_is_charged(gloo_pool, kind, blocks, rows_of_experts):
    """Split backwards gather rows again in W: charged as whole backwards they would look free. Of experts, every rank
    sends its half of the rows, once to each of two chosen."""
    forward, backward = (
        blocks * BLOCK_RINGS[way] + rows_of_experts * EXPERT_TRANSFERS[way] for way in ("forward", "backward")
    )
    one, other = gloo_pool.run(2, hidden_transfers_by_action, kind, 3)
    mean = {action: (one[action] + other[action]) / 2 for action in one}  # what comes back is as much as was chosen
    assert mean == pytest.approx({"F": forward, "B": backward, "I": backward, "W": blocks * WEIGHT_RINGS}, rel=1e-12)
