"""What a tensor-parallel rank of a `GlooPool` sends in each action, counted at the group."""

import torch
from torch import Tensor

from dist_cases import RankUnderTest
from evenload.runtime.comm.cp_groups import Transfer
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.replay.rank_packs import PackTokens
from evenload.runtime.replay.store import ActivationStore
from evenload.runtime.replay.weight_products import WeightProducts
from evenload.types.document import ActivationPolicy, Range
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S

TOKENS = 24


def hidden_transfers_by_action(num_layers: int, recomputed: int = 0) -> dict[str, float]:
    """F, B, I, W -> transfers a layer, in units of all rows' hidden states, with a first document of so many recomputed
    tokens."""
    mesh = create_meshes([even_layout(num_layers, tp=2)], torch.device("cpu"), timeout_s=TIMEOUT_S).start
    rank = RankUnderTest(mesh, "llama", {}, torch.float64)
    (stage,) = rank.stages.values()
    group = mesh.tensor
    assert group is not None
    counted, whole = [0], TOKENS * stage.hidden_size
    group.chunk_rows = TOKENS // 3
    gather, scatter = group.start_all_gather, group.start_all_to_all

    def all_gather(rows: Tensor, what: str) -> Transfer:
        counted[0] += rows.numel() * group.shard.size
        return gather(rows, what)

    def all_to_all(rows: Tensor, counts: list[int], what: str) -> Transfer:
        counted[0] += rows.numel()
        return scatter(rows, counts, what)

    group.start_all_gather, group.start_all_to_all = all_gather, all_to_all  # type: ignore[method-assign]
    lengths = {0: recomputed, 1: TOKENS - recomputed} if recomputed else {0: TOKENS}
    policies: dict[int, ActivationPolicy] = {0: "recompute"} if recomputed else {}
    ranges, found = tuple(Range(doc_id, 0, tokens) for doc_id, tokens in lengths.items()), {}
    positions = torch.arange(TOKENS)
    ids, targets = torch.zeros_like(positions), torch.zeros_like(positions)
    pack = PackTokens(ranges, ids, targets, positions)

    def count(name: str, action) -> None:
        counted[0] = 0
        action()
        found[name] = counted[0] / whole / num_layers

    for split in (False, True):
        stage.begin_step(lengths)
        store = ActivationStore(lengths, [ranges], policies=policies, shard=stage.row_shard)
        products = WeightProducts(store.held) if split else None
        hidden, grad = (torch.randn(stage.num_rows(ranges), stage.hidden_size, dtype=torch.float64) for _ in range(2))
        count("F", lambda h=hidden, s=store: stage.forward_layers(pack, h, s))
        count("I" if split else "B", lambda g=grad, s=store, p=products: stage.backward_layers(pack, g, s, p))
        if products is not None:
            count("W", products.add_all)
    return found
