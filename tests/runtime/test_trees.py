"""Trees of sequences that share prefixes train as their sequences do one by one, wherever forward and backward cut
them; and each way of getting it wrong shows."""

import numpy as np
import pytest
import torch

from evenload.errors import UnsupportedModelError
from evenload.feed import collate
from evenload.feed.collate import LabelEdges, collate_pack
from evenload.runtime.replay import context_attention
from evenload.runtime.replay.head import row_losses
from evenload.runtime.replay.rank_packs import PackEdges, PackTokens
from evenload.runtime.replay.store import ActivationStore
from evenload.types.document import MicroPack, Range, Slice
from evenload.types.tree import RowRun, TreeShape, shape_of
from reference_training import relative_error, tiny_config
from single_stage import packs_of, stage_of, trained
from sweeps import sweep
from tree_cases import plain_loss_and_gradients_of_paths, tree_batch

KINDS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "qwen3_moe", "deepseek_v3", "gpt_oss", "smollm3")
CHANGES = {"mistral": {"sliding_window": 7}}
POLICIES = ("recompute", "offload", "replay")


def shapes_of(batch):
    return {one.doc_id: shape_of(one.segments) for one in batch.documents if one.segments}


def loaded(pack, batch, device="cpu"):
    slices = tuple(Slice(doc_id=doc_id, start=start, stop=stop) for doc_id, start, stop in pack)
    shapes = shapes_of(batch)
    found = collate_pack(MicroPack(index=0, direction="forward", slices=slices), batch.table, shapes)
    columns = [torch.from_numpy(one).to(device) for one in (found.token_ids, found.targets, found.positions)]
    ranges = tuple(Range(*one) for one in pack)
    if found.edges is None:
        return PackTokens(ranges, *columns)
    own = [torch.from_numpy(one).to(device) for one in (found.edges.rows, found.edges.targets, found.edges.counts)]
    return PackTokens(ranges, *columns, trees=shapes, edges=PackEdges(*own, found.edges.rows))


def random_packs(batch, seed):
    rng = np.random.default_rng(seed)
    return [
        packs_of(batch.lengths, rng.random(4).tolist(), int(rng.integers(3, 70)), last_first=last_first)
        for last_first in (False, True)
    ]


def run(config, batch, packs, dtype=torch.float64, *, policies=None, defers=False):
    """Loss, gradients and the weights they are of."""
    forward, backward = packs
    lengths = dict(enumerate(batch.lengths))
    stage, buffers = stage_of(config, dtype)
    weights = {name: one.detach().clone() for name, one in trained(buffers).items()}
    stage.begin_step(lengths)
    store = ActivationStore(lengths, [tuple(Range(*one) for one in p) for p in backward], policies=policies or {})
    for pack in forward:
        stage.forward(loaded(pack, batch), None, store)
    loss = 0.0
    for number, pack in enumerate(backward):
        products = store.defer_weights(number) if defers else None
        loss += stage.backward(loaded(pack, batch), None, store, batch.num_labels, products)[1].item()
    for number in range(len(backward) if defers else 0):
        store.add_deferred_weights(number)
    store.check_empty()
    return loss, {name: one.main_grad.clone() for name, one in trained(buffers).items()}, weights


def worst_error(kind, seed, **options):
    config, batch = tiny_config(kind, num_hidden_layers=2, **CHANGES.get(kind, {})), tree_batch(seed)
    loss, gradients, weights = run(config, batch, random_packs(batch, seed), **options)
    plain_loss, plain = plain_loss_and_gradients_of_paths(config, weights, batch, torch.float64)
    errors = [relative_error(gradients[name], plain[name]) for name in plain]
    return max(abs(loss - plain_loss) / plain_loss, *errors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradients_equal_those_of_paths(kind, seed):
    assert worst_error(kind, seed) <= 1e-10


@pytest.mark.parametrize("seed", range(3, 9))
def test_every_policy_and_deferred_weights(seed):
    kind = ("llama", "mistral", "gemma3")[seed % 3]
    policies = {doc_id: POLICIES[(doc_id + seed) % 3] for doc_id in range(20)}
    assert worst_error(kind, seed, policies=policies, defers=seed % 2 == 0) <= 1e-10


def test_single_tokens_and_whole_trees():
    config, batch = tiny_config("qwen3", num_hidden_layers=2, tied=True), tree_batch(4)
    ones = [[(doc_id, at, at + 1)] for doc_id, size in enumerate(batch.lengths) for at in range(size)]
    last_first = [[(doc_id, at, at + 1)] for doc_id, n in enumerate(batch.lengths) for at in range(n - 1, -1, -1)]
    whole = [[(doc_id, 0, size) for doc_id, size in enumerate(batch.lengths)]]
    found = [run(config, batch, packs) for packs in ((ones, whole), (whole, last_first), (whole, whole))]
    plain_loss, plain = plain_loss_and_gradients_of_paths(config, found[0][2], batch, torch.float64)
    for loss, gradients, _ in found:
        assert loss == pytest.approx(plain_loss, rel=1e-12)
        assert max(relative_error(gradients[name], plain[name]) for name in gradients) <= 1e-10


@pytest.mark.parametrize("kind", sweep(("llama", "mistral", "gemma3", "gpt2"), 2))
def test_bf16_is_as_good_as_plain_bf16(kind):
    config = tiny_config(kind, hidden_size=64, num_hidden_layers=2, **CHANGES.get(kind, {}))
    batch = tree_batch(2, most_tokens=40)
    _, gradients, weights = run(config, batch, random_packs(batch, 2), torch.bfloat16)
    doubles = {name: one.double() for name, one in weights.items()}
    _, exact = plain_loss_and_gradients_of_paths(config, doubles, batch, torch.float64)
    _, plain = plain_loss_and_gradients_of_paths(config, weights, batch, torch.bfloat16)

    def error(found):
        off = sum(float((found[name].double() - exact[name]).square().sum()) for name in exact)
        return (off / sum(float(one.square().sum()) for one in exact.values())) ** 0.5

    assert error(gradients) <= 2 * error(plain)


def test_losses_of_rows_add_up_to_those_of_paths():
    config, batch = tiny_config("llama", num_hidden_layers=2), tree_batch(5)
    stage, buffers = stage_of(config)
    weights = {name: one.detach().clone() for name, one in trained(buffers).items()}
    lengths = dict(enumerate(batch.lengths))
    stage.begin_step(lengths)
    store, total = ActivationStore(lengths, []), 0.0
    for pack in random_packs(batch, 5)[0]:
        tokens = loaded(pack, batch)
        hidden = stage.forward(tokens, None, store)
        losses = row_losses(stage.model, hidden, tokens.targets, tokens.ranges, None, tokens.edges)
        assert losses.shape == tokens.targets.shape
        total += losses.sum().item()
    plain_loss, _ = plain_loss_and_gradients_of_paths(config, weights, batch, torch.float64)
    assert total / batch.num_labels == pytest.approx(plain_loss, rel=1e-12)


# What is wrong shows


def positions_of_rows(monkeypatch):
    monkeypatch.setattr(TreeShape, "positions", lambda self, start, stop: np.arange(start, stop))


def siblings_keys(monkeypatch):
    right = TreeShape.runs_to
    monkeypatch.setattr(
        TreeShape,
        "runs_to",
        lambda self, piece: [RowRun(piece.stop - sum(b - a for a, b in right(self, piece)), piece.stop)],
    )


def no_parents_last_key(monkeypatch):
    right = TreeShape.runs_before

    def without(self, segment):
        runs = right(self, segment)
        return [RowRun(runs[0].start + (segment > 1), runs[0].stop), *runs[1:]] if runs else runs

    def moved(self, piece):
        runs = without(self, piece.segment)
        return [RowRun(0, 1)] * (len(runs) > 0 and piece.segment > 1) + [
            *runs,
            RowRun(int(self.starts[piece.segment]), piece.stop),
        ]

    monkeypatch.setattr(TreeShape, "runs_to", lambda self, piece: moved(self, piece)[::-1])


def one_edge_a_row(monkeypatch):
    right = collate._of_trees

    def first_only(*given):
        edges = right(*given)
        kept = np.unique(edges.rows, return_index=True)[1]
        return LabelEdges(edges.rows[kept], edges.targets[kept], edges.counts[kept])

    monkeypatch.setattr(collate, "_of_trees", first_only)


def counted_once(monkeypatch):
    right = collate._of_trees

    def ones(*given):
        edges = right(*given)
        return LabelEdges(edges.rows, edges.targets, np.ones_like(edges.counts))

    monkeypatch.setattr(collate, "_of_trees", ones)


def gradients_of_one_branch(monkeypatch):
    def overwritten(parts, runs, num_rows, dtype):
        totals = tuple(one.new_zeros((num_rows, *one.shape[1:]), dtype=dtype) for one in parts)
        sizes = [stop - start for start, stop in runs]
        for total, part in zip(totals, parts, strict=True):
            for (start, stop), of_run in zip(runs, part.split(sizes), strict=True):
                total[start:stop] = of_run
        return totals

    monkeypatch.setattr(context_attention, "_added_up", overwritten)


def windows_of_rows(monkeypatch):
    monkeypatch.setattr(context_attention, "last_rows", lambda runs, count: [RowRun(0, count)])


MISTAKES = (positions_of_rows, siblings_keys, no_parents_last_key, one_edge_a_row, counted_once,
            gradients_of_one_branch, windows_of_rows)  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(monkeypatch, mistake):
    kind = "mistral" if mistake is windows_of_rows else "llama"
    assert worst_error(kind, 1) <= 1e-10
    mistake(monkeypatch)
    assert worst_error(kind, 1) > 1e-6


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("bamba", {}, "carries states along documents"),
        ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.1}, "has a load-balancing loss"),
    ],
)
def test_layers_that_know_no_branches_are_refused(kind, changes, why):
    config, batch = tiny_config(kind, num_hidden_layers=2, **changes), tree_batch(1)
    stage, _ = stage_of(config, router_aux_loss_coef=changes.get("router_aux_loss_coef", 0.0))
    lengths = dict(enumerate(batch.lengths))
    stage.begin_step(lengths)
    tree = next(doc_id for doc_id, one in enumerate(batch.documents) if one.segments)
    pack = loaded([(tree, 0, batch.lengths[tree])], batch)
    store = ActivationStore(lengths, [])
    with pytest.raises(UnsupportedModelError, match=why):
        stage.forward(pack, None, store)
