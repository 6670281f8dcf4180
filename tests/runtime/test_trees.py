"""Trees of sequences that share prefixes equal plain training of every sequence by itself, however they are cut."""

import weakref

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig

from evenload.errors import InvalidPlanError, UnsupportedModelError
from evenload.feed.collate import LabelEdges, collate_pack
from evenload.runtime.replay import head, rank_packs, tree_attention
from evenload.runtime.replay.rank_packs import RankPackTokens
from evenload.runtime.replay.store import ForwardStore
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import even_layout
from evenload.types.plan import decode_plan, encode_plan, seal
from evenload.types.tree import RowRun, Segment, TreeShape
from plan_building import greedy_packs
from reference_training import plain_model, tiny_config
from single_stage import stage_of, trained
from tree_cases import (
    assert_bf16_as_good_as_plain,
    batch_of,
    plain_paths,
    plan_of_packs,
    random_batch,
    random_packs,
    trees_of_lengths,
    worst_error,
)

MODELS = {
    "llama": ("llama", {}),
    "qwen3, tied": ("qwen3", {"tied": True}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "gemma3, windows by turns": ("gemma3", {"sliding_window_pattern": 2}),
    "gpt2, learned positions": ("gpt2", {}),
    "qwen3_moe, no balance": ("qwen3_moe", {}),
    "deepseek_v3, latent attention": ("deepseek_v3", {}),
    "gpt_oss, sinks": ("gpt_oss", {}),
}

CHUNKED = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attention_chunk_size": 8, "moe_layers": [], "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"], "attn_temperature_tuning": False,
    "intermediate_size_mlp": 48, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def _error(kind, seed, changes=(), *, batch=None, **options):
    batch = batch or random_batch(seed)
    config = tiny_config(kind, num_hidden_layers=2, **dict(changes))
    return worst_error(config, batch, *random_packs(batch, seed), **options)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_every_sequences(model, seed):
    kind, changes = MODELS[model]
    assert _error(kind, seed, changes) <= 1e-10


def test_chunks_count_along_the_path():
    config = AutoConfig.for_model("llama4_text", **CHUNKED)
    batch = random_batch(0)
    assert worst_error(config, batch, *random_packs(batch, 0)) <= 1e-10


@pytest.mark.parametrize("seed", [2, 3])
def test_prefixes_below_a_length_are_not_shared(seed):
    """Then siblings begin alike, and a row has one target twice."""
    batch = random_batch(seed, min_shared=8)
    again = batch_of([np.arange(5, dtype=np.int32)] * 2 + [np.array([0, 1, 2, 9, 8], np.int32)], min_shared=4)
    assert max(_error("llama", seed, batch=one) for one in (batch, again)) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_slices_of_single_tokens(kind):
    batch = random_batch(5, groups=1, most=4)
    packs = [
        greedy_packs(batch.lengths, np.linspace(0, 1, 99), 1, last_first=last_first) for last_first in (False, True)
    ]
    assert worst_error(tiny_config(kind, num_hidden_layers=2, sliding_window=3), batch, *packs) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("is_cut", [(False, False), (False, True), (True, False)])
def test_whole_trees(kind, is_cut):
    """In one slice in forward, backward or both: what keeps no sums beside other slices."""
    batch = random_batch(10)
    packs = [
        greedy_packs(batch.lengths, [0.4] if cut else [], 100, last_first=last_first)
        for cut, last_first in zip(is_cut, (False, True), strict=True)
    ]
    assert worst_error(tiny_config(kind, num_hidden_layers=2, sliding_window=7), batch, *packs) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3"])
def test_calls_of_few_keys(monkeypatch, kind):
    monkeypatch.setattr(tree_attention, "CALL_KEYS", 25)
    assert _error(kind, 4) <= 1e-10


def test_copies_of_keys_are_gone_before_the_next_call(monkeypatch):
    copies = []
    parts_of_call = tree_attention._Call.parts

    def watched(self, key):
        assert all(one() is None for one in copies)
        parts = parts_of_call(self, key)
        if len(self.lying) > 1:
            copies.extend(weakref.ref(tensor) for tensor in parts[0])
        return parts

    monkeypatch.setattr(tree_attention, "CALL_KEYS", 25)
    monkeypatch.setattr(tree_attention._Call, "parts", watched)
    assert _error("llama", 4) <= 1e-10
    assert len(copies) > 20


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("recomputed", [(), (0,)])
def test_every_policy(defers, recomputed):
    batch = random_batch(6)
    turns = {one.doc_id: ("recompute", "offload", "replay")[one.doc_id % 3] for one in batch.documents}
    assert _error("qwen3", 6, defers=defers, recomputed=recomputed, policies=None if recomputed else turns) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_bf16_is_as_good_as_plain_bf16(kind):
    batch = random_batch(7, most=40)
    config = tiny_config(kind, hidden_size=64, **({"sliding_window": 40} if kind == "mistral" else {}))
    assert_bf16_as_good_as_plain(config, batch, *random_packs(batch, 7))


def test_losses_of_forwards_alone():
    """Of every document its sequences' losses, and of a plain one its own."""
    batch, config = random_batch(8), tiny_config("llama", num_hidden_layers=2)
    stage, buffers = stage_of(config)
    weights = {name: p.detach().clone() for name, p in trained(buffers).items()}
    plan = plan_of_packs(batch, *random_packs(batch, 8))
    packs = RankPackTokens(plan, 0, {}, "all_gather", torch.device("cpu")).collate(batch.tokens)
    store, total = ForwardStore(packs.stored_tokens(), ()), 0.0
    for pack in plan.pack_plans[0].forward:
        tokens = packs.load(pack)
        with torch.no_grad():
            total += stage.losses(tokens, stage.forward(tokens, None, store)).sum().item()
    expected, _ = plain_paths(plain_model(config, weights, torch.float64), batch)
    assert total / batch.num_labels == pytest.approx(expected, rel=1e-12)


# What rows are trained to predict


def _torch_kernel(logits, targets, denominator, *, trains):
    """As `liger.cross_entropy`."""
    exact = logits.detach().clone().requires_grad_()
    losses = functional.cross_entropy(exact, targets, reduction="none") / denominator
    if trains:
        logits.copy_(torch.autograd.grad(losses.sum(), exact)[0])
    return losses.detach()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_ligers_loss_serves_rows_of_several_targets(monkeypatch, kind):
    monkeypatch.setattr(head, "cross_entropy", _torch_kernel)
    monkeypatch.setattr(head, "_in_kernel", lambda model: True)
    assert _error(kind, 9) <= 1e-10


def test_edges_of_a_pack():
    """a b c d, a b c f, a b e, and once more a b c d, of which b is no label in any."""
    tree = batch_of([np.array(one, np.int32) for one in ([1, 2, 3, 4], [1, 2, 3, 6], [1, 2, 5], [1, 2, 3, 4])])
    (document,), shape = tree.documents, TreeShape(tree.documents[0].segments)
    assert document.segments == (Segment(2, -1), Segment(1, 0), Segment(1, 1), Segment(1, 1), Segment(1, 0))
    assert document.num_label_tokens == 3 + 3 + 2 + 3
    (pack,) = plan_of_packs(tree, [[(0, 0, 6)]], [[(0, 0, 6)]]).pack_plans[0].forward
    batch = collate_pack(pack, tree.tokens, {0: shape})
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 6, 5]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 2]
    assert batch.edges is not None
    assert [one.tolist() for one in batch.edges] == [[0, 1, 1, 2, 2], [2, 3, 5, 4, 6], [4, 3, 1, 2, 1]]
    assert batch.targets.tolist() == [-100] * 6
    # A slice has the edges of its rows, wherever the tokens are that they predict.
    (_, pack) = plan_of_packs(tree, [[(0, 0, 1)], [(0, 1, 6)]], [[(0, 0, 6)]]).pack_plans[0].forward
    cut = collate_pack(pack, tree.tokens, {0: shape})
    assert cut.edges is not None
    assert [one.tolist() for one in cut.edges] == [[0, 0, 1, 1], [3, 5, 4, 6], [3, 1, 2, 1]]


def test_packs_of_plain_documents_have_targets_alone():
    batch = batch_of([np.array([1, 2, 3], np.int32), np.array([1, 2], np.int32)], [np.array([4, 5, 6], np.int32)])
    plan = plan_of_packs(batch, [[(0, 0, 3)], [(1, 0, 3)]], [[(0, 0, 3)], [(1, 0, 3)]])
    packs = RankPackTokens(plan, 0, {}, "all_gather", torch.device("cpu")).collate(batch.tokens)
    tree, plain = (packs.load(pack) for pack in plan.pack_plans[0].forward)
    assert tree.edges is not None
    assert tree.trees.keys() == {0}
    assert plain.edges is None
    assert not plain.trees
    assert plain.targets.tolist() == [5, 6, -100]


# What is refused, and what a plan says


def test_segments_are_in_a_plans_digest_and_file():
    batch = random_batch(0)
    plan = plan_of_packs(batch, *random_packs(batch, 0))
    assert decode_plan(encode_plan(plan)) == plan
    unsealed = msgspec.structs.replace(plan, digest="")  # a file has other predictions than a plan made by hand
    assert decode_plan_file(encode_plan_file([unsealed]))[0].documents == plan.documents
    plain = tuple(msgspec.structs.replace(one, segments=()) for one in plan.documents)
    assert seal(msgspec.structs.replace(plan, documents=plain)).digest != plan.digest
    assert b"segments" not in encode_plan_file([seal(msgspec.structs.replace(plan, documents=plain))])


def _shared(plan):
    (packs,) = plan.pack_plans
    forward = tuple(
        msgspec.structs.replace(pack, slices=tuple(msgspec.structs.replace(one, cp=2) for one in pack.slices))
        for pack in packs.forward
    )
    return {"pack_plans": (msgspec.structs.replace(packs, forward=forward),)}


def _padded(plan):
    (packs,) = plan.pack_plans
    forward = tuple(msgspec.structs.replace(pack, pad_to=99) for pack in packs.forward)
    return {"pack_plans": (msgspec.structs.replace(packs, forward=forward),)}


def _longer(plan):
    first, *others = plan.documents
    return {"documents": (msgspec.structs.replace(first, segments=(Segment(5, -1),)), *others)}


def _no_tree(plan):
    first, *others = plan.documents
    return {"documents": (msgspec.structs.replace(first, segments=(Segment(5, -1), Segment(1, -1))), *others)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda plan: {"layout": even_layout(2, cp=2)}, r"document 0 is a tree .* use parallel\.cp = 1"),
        (_shared, r"2 ranks share a slice of document 0, a tree .* use plan\.options\.dp_merge = false"),
        (_padded, r"pack 0 pads document 0, a tree of sequences; use another plan\.strategy"),
        (_longer, "document 0 has .* tokens, its segments 5"),
        (_no_tree, "document 0: segment 1 of a tree has 1 tokens behind segment -1"),
    ],
)
def test_plans_that_cannot_run_are_refused(change, named):
    batch = random_batch(1)
    plan = plan_of_packs(batch, *random_packs(batch, 1))
    wrong = seal(msgspec.structs.replace(plan, **change(plan)))
    with pytest.raises(InvalidPlanError, match=named):
        validate_plan(wrong)
    with pytest.raises(InvalidPlanError, match=named):
        RankPackTokens(wrong, 0, {}, "all_gather", torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("qwen3_moe", {"router_aux_loss_coef": 0.3}, "its load-balancing loss .* set model.router_aux_loss_coef = 0"),
        ("bamba", {}, "layer 3 carries a state from token to token, which knows no branches"),
        ("lfm2", {}, "carries a state"),
    ],
)
def test_models_that_know_no_branches_are_refused(kind, options, named):
    stage, _ = stage_of(tiny_config(kind), **options)
    with pytest.raises(UnsupportedModelError, match=named):
        tree_attention.refuse_trees(stage.model)


# What is known to go wrong: each as a mutant


def _positions_by_row(monkeypatch):
    monkeypatch.setattr(TreeShape, "positions", lambda shape, start, stop: np.arange(start, stop))


def _keys_of(change):
    """Other runs of rows as the keys of every range."""

    def mutate(monkeypatch):
        make = tree_attention._path_ranges

        def changed(*args):
            found = []
            for one in make(*args):
                runs = change(one.runs)
                size = sum(run.stop - run.start for run in runs)
                start = size - (one.rows.stop - one.rows.start)
                found.append(one._replace(runs=runs, positions=one.positions._replace(start=start, stop=size)))
            return found

        monkeypatch.setattr(tree_attention, "_path_ranges", changed)

    return mutate


def _edges_of(change):
    def mutate(monkeypatch):
        collate = rank_packs.collate_pack

        def changed(*args):
            batch = collate(*args)
            if batch.edges is not None:
                object.__setattr__(batch, "edges", LabelEdges(*change(*batch.edges)))
            return batch

        monkeypatch.setattr(rank_packs, "collate_pack", changed)

    return mutate


def _first_alone(rows, targets, weights):
    first = np.diff(rows, prepend=-1) > 0
    return rows[first], targets[first], weights[first]


def _drop_a_branch(monkeypatch):
    """The gradient of a prefix's keys from ranges that see it as a run of its own."""
    add = tree_attention._added

    def dropping(sums, span, runs, parts, dtype):
        count = sum(run.stop - run.start for run in runs[:-1])
        parts = [torch.cat([torch.zeros_like(part[:count]), part[count:]]) for part in parts]
        return add(sums, span, runs, tuple(parts), dtype)

    monkeypatch.setattr(tree_attention, "_added", dropping)


def _window_by_row(monkeypatch):
    def behind(one, count):
        size = sum(run.stop - run.start for run in one.runs) - count
        return one._replace(runs=[RowRun(one.runs[-1].stop - size, one.runs[-1].stop)])

    monkeypatch.setattr(tree_attention._PathRange, "behind", behind)


MUTANTS = {
    "positions by row": ("llama", _positions_by_row),
    "sibling's keys seen": ("llama", _keys_of(lambda runs: [RowRun(0, runs[-1].stop)])),
    "parent's keys missing": ("llama", _keys_of(lambda runs: [*runs[:-2], runs[-1]])),
    "one edge at a branch row": ("llama", _edges_of(_first_alone)),
    "weight of a shared label 1": ("llama", _edges_of(lambda rows, targets, weights: (rows, targets, weights**0))),
    "dK of a prefix dropped from one branch": ("llama", _drop_a_branch),
    "a window counts rows": ("mistral", _window_by_row),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_known_mistake_shows(monkeypatch, mutant):
    kind, mutate = MUTANTS[mutant]
    mutate(monkeypatch)
    batch = trees_of_lengths([64, 40, 35, 12, 50], seed=0)
    assert _error(kind, 0, {"sliding_window": 9} if kind == "mistral" else {}, batch=batch) >= 1e-4
