"""Random trees of sequences that share prefixes, as documents and their tokens, and plain training of every sequence by
itself: what trees must equal."""

from typing import NamedTuple

import msgspec
import numpy as np
import torch

from evenload.data.blocks import TokenTable, make_table
from evenload.data.encoders import IGNORE_INDEX, EncodedDocument
from evenload.data.prefix_tree import build_trees
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.replay.rank_packs import RankPackTokens
from evenload.runtime.replay.store import ActivationStore
from evenload.stepplan.validate import validate_plan
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan, decode_plan, seal
from evenload.types.tree import Segment, TreeShape
from gloo_pool import TIMEOUT_S
from plan_building import greedy_packs, pack_plan, running_need, step_plan, word_schedule
from reference_training import plain_model, relative_error
from single_stage import stage_of, trained
from tensor_families import FamilyRank, FamilyTask

VOCAB = 97


class TreeBatch(NamedTuple):
    """Sequences with whether each token is a label, and the documents that they become: trees, then plain ones."""

    sequences: list[np.ndarray]
    labels: list[np.ndarray]
    documents: tuple[Document, ...]
    tokens: TokenTable

    @property
    def lengths(self) -> dict[int, int]:
        return {one.doc_id: one.num_tokens for one in self.documents}

    @property
    def num_labels(self) -> int:
        return sum(one.num_label_tokens for one in self.documents)


def random_batch(seed: int, *, groups=3, most=14, depth=4, plain=2, labelled=0.7, min_shared=1) -> TreeBatch:
    """Trees in which inner nodes may end a sequence and siblings begin alike; one sequence comes twice, one has one
    token; and documents that are no trees."""
    rng = np.random.default_rng(seed)
    sequences: list[np.ndarray] = []

    def grow(prefix, level):
        path = np.concatenate([prefix, rng.integers(0, VOCAB, rng.integers(1, most + 1))]).astype(np.int32)
        if level == depth or rng.random() < 0.3:
            sequences.append(path)
            return
        if rng.random() < 0.2:
            sequences.append(path)
        for _ in range(rng.integers(1, 4)):
            grow(path, level + 1)

    for _ in range(groups):
        grow(np.zeros(0, np.int32), 0)
    sequences += [sequences[0].copy(), rng.integers(0, VOCAB, 1).astype(np.int32)]
    sequences = [sequences[at] for at in rng.permutation(len(sequences))[:20]]
    alone = [rng.integers(0, VOCAB, n).astype(np.int32) for n in rng.integers(2, 30, plain)]
    return batch_of(sequences, alone, labelled=labelled, seed=seed, min_shared=min_shared)


def batch_of(sequences, alone=(), *, labelled=1.0, seed=0, min_shared=1) -> TreeBatch:
    """Of sequences that become trees, and of others that stay plain documents."""
    rng = np.random.default_rng(seed)
    labels = [rng.random(len(one)) < labelled for one in (*sequences, *alone)]
    for one in labels:
        one[0] = False
    weights = [one.astype(np.float64) for one in labels[: len(sequences)]]
    trees = build_trees(sequences, weights, min_shared_tokens=min_shared)
    parts = [(tree.tokens, tree.weights.astype(np.int32), tree.segments) for tree in trees]
    parts += [(one, own.astype(np.int32), ()) for one, own in zip(alone, labels[len(sequences) :], strict=True)]
    encoded, documents = [], []
    for doc_id, (tokens, counts, segments) in enumerate(parts):
        targets = np.where(counts > 0, tokens, np.int32(IGNORE_INDEX))
        encoded.append(EncodedDocument(tokens, targets, counts if segments else None))
        documents.append(
            Document(doc_id=doc_id, num_tokens=len(tokens), num_label_tokens=int(counts.sum()), segments=segments)
        )
    return TreeBatch([*sequences, *alone], labels, tuple(documents), make_table(range(len(parts)), encoded))


def trees_of_lengths(lengths, seed: int) -> TreeBatch:
    """Documents of given lengths: two of three are trees, which also branch where nothing of them is trained."""
    rng = np.random.default_rng(seed)
    sequences, labels, encoded, documents = [], [], [], []
    for doc_id, length in enumerate(lengths):
        segments = _random_segments(rng, length) if doc_id % 3 else ()
        shape = TreeShape(segments or (Segment(length, -1),))
        tokens, counts = rng.integers(0, VOCAB, length).astype(np.int32), np.zeros(length, np.int32)
        inner = set(shape.parents.tolist())
        for last in range(len(shape.parents)):
            if last in inner and rng.random() < 0.7:
                continue
            rows = shape.rows_of_path(last)
            labels.append((rng.random(len(rows)) < 0.7) & (rows > 0))
            sequences.append(tokens[rows])
            counts[rows] += labels[-1]
        encoded.append(EncodedDocument(tokens, np.where(counts > 0, tokens, np.int32(IGNORE_INDEX)), counts))
        documents.append(
            Document(doc_id=doc_id, num_tokens=length, num_label_tokens=int(counts.sum()), segments=segments)
        )
    return TreeBatch(sequences, labels, tuple(documents), make_table(range(len(lengths)), encoded))


def _random_segments(rng, length: int) -> tuple[Segment, ...]:
    segments, chain, left = [], [], length
    while left:
        size = int(rng.integers(1, max(2, length // 4)))
        size, left = min(size, left), left - min(size, left)
        del chain[1 + int(rng.integers(0, len(chain) + 1)) :]
        segments.append(Segment(size, chain[-1] if chain else -1))
        chain.append(len(segments) - 1)
    return tuple(segments)


def with_trees(plan: StepPlan, batch: TreeBatch) -> StepPlan:
    """The plan with the batch's documents."""
    plan = seal(msgspec.structs.replace(plan, documents=batch.documents, num_label_tokens=batch.num_labels))
    validate_plan(plan)
    return plan


def random_packs(batch: TreeBatch, seed: int):
    """Forward and backward packs of all documents, each cut at random."""
    rng, lengths = np.random.default_rng(seed), batch.lengths
    cuts = [(rng.random(rng.integers(1, 6)).tolist(), int(rng.integers(3, 90))) for _ in range(2)]
    return [greedy_packs(lengths, *one, last_first=bool(at)) for at, one in enumerate(cuts)]


def plan_of_packs(batch: TreeBatch, forward, backward, layout=even_layout(2)) -> StepPlan:  # noqa: B008
    """Of one rank."""
    packs = pack_plan(0, forward, backward)
    schedule = word_schedule(packs, 1, running_need(packs), [0])
    return with_trees(step_plan(layout, batch.lengths, [packs], [schedule]), batch)


def run_trees(stage, batch: TreeBatch, forward, backward, *, policies=None, recomputed=(), defers=False):
    """The loss and the store after all forwards, then all backwards (deferred: and then all weight gradients)."""
    plan = plan_of_packs(batch, forward, backward)
    packs = RankPackTokens(plan, 0, {}, "all_gather", torch.device("cpu")).collate(batch.tokens)
    stage.begin_step(batch.lengths)
    (listed,) = plan.pack_plans
    ranges = [packs.ranges(pack) for pack in listed.backward]
    store = ActivationStore(packs.stored_tokens(), ranges, policies=policies, recomputed_layers=recomputed)
    for pack in listed.forward:
        stage.forward(packs.load(pack), None, store)
    loss = 0.0
    for pack in listed.backward:
        products = store.defer_weights(pack.index) if defers else None
        loss += stage.backward(packs.load(pack), None, store, plan.num_label_tokens, products)[1].item()
    for pack in listed.backward if defers else ():
        store.add_deferred_weights(pack.index)
    store.check_empty()
    assert not any(store.held.held_by_kind.values())
    return loss


def plain_paths(model, batch: TreeBatch):
    """Loss and gradients of a model of transformers under autograd, one sequence after the other."""
    total = 0.0
    for tokens, is_label in zip(batch.sequences, batch.labels, strict=True):
        ids, chosen = torch.from_numpy(tokens).long(), torch.from_numpy(is_label[1:])
        if not chosen.any():
            continue
        logits = model(ids[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits[chosen], ids[1:][chosen], reduction="sum") / batch.num_labels
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst_error(config, batch: TreeBatch, forward, backward, *, stage=None, dtype=torch.float64, **options) -> float:
    """The largest relative error of the loss and of a parameter's gradient."""
    stage, buffers = stage or stage_of(config, dtype)
    weights = {name: p.detach().clone() for name, p in trained(buffers).items()}
    loss = run_trees(stage, batch, forward, backward, **options)
    expected, plain = plain_paths(plain_model(config, weights, dtype), batch)
    gradients = {name: p.main_grad for name, p in trained(buffers).items()}
    errors = [relative_error(one, plain.get(name, torch.zeros_like(one))) for name, one in gradients.items()]
    return max(*errors, abs(loss - expected) / abs(expected))


def assert_bf16_as_good_as_plain(config, batch: TreeBatch, forward, backward):
    """Loss and gradients in bf16 err at most twice as much as plain bf16 autograd, path by path, does."""
    stage, buffers = stage_of(config, torch.bfloat16)
    weights = {name: p.detach().clone() for name, p in trained(buffers).items()}
    loss = run_trees(stage, batch, forward, backward)
    doubles = {name: one.double() for name, one in weights.items()}
    exact_loss, exact = plain_paths(plain_model(config, doubles, torch.float64), batch)
    plain_loss, plain = plain_paths(plain_model(config, weights, torch.bfloat16), batch)

    def error(found):
        return sum(float((found[name].double() - one).square().sum()) for name, one in exact.items()) ** 0.5

    assert error({name: p.main_grad for name, p in trained(buffers).items()}) <= 2 * error(plain)
    assert abs(loss - exact_loss) <= max(2 * abs(plain_loss - exact_loss), 2e-3 * abs(exact_loss))


def train_trees(tasks: list[FamilyTask], tokens: TokenTable) -> list[tuple[float, dict, float, np.ndarray]]:
    """As a rank of a `GlooPool`, by task: its share of the loss, its gradients, the whole one's norm, and its share of
    every document's loss by forwards alone."""
    plans = [decode_plan(task.plan) for task in tasks]
    mesh = create_meshes([plans[0].layout], torch.device("cpu"), timeout_s=TIMEOUT_S).start
    if mesh.tensor is not None:
        mesh.tensor.chunk_rows = 3
    results = []
    for task, plan in zip(tasks, plans, strict=True):
        rank = FamilyRank(mesh, task)
        loss, gradients, norm, _ = rank.run(plan, tokens, "all_gather")
        results.append((loss, gradients, norm, rank.losses(plan, tokens, "all_gather")))
    return results
