"""Batches of sequences that share prefixes: as trees, and path by path through transformers' own model."""

from typing import NamedTuple

import numpy as np
import torch

from evenload.data.blocks import TokenTable
from evenload.data.prefix_tree import build_trees
from evenload.types.document import Document
from reference_training import plain_model

VOCABULARY = 97


class TreeBatch(NamedTuple):
    """Sequences, of every token whether it is trained, and what a loader makes of them."""

    sequences: list[np.ndarray]
    masks: list[np.ndarray]
    documents: tuple[Document, ...]
    table: TokenTable

    @property
    def lengths(self):
        return [one.num_tokens for one in self.documents]

    @property
    def num_labels(self):
        return sum(one.num_label_tokens for one in self.documents)


def random_sequences(rng, groups=3, most_children=3, depth=3, most_tokens=12):
    """Inner nodes may end a sequence, siblings may begin alike, one sequence comes twice, one has a single token."""
    sequences = []

    def grow(prefix, level):
        own = rng.integers(0, VOCABULARY, rng.integers(1, most_tokens))
        path = np.concatenate([prefix, own]).astype(np.int32)
        if level == depth or rng.random() < 0.3:
            sequences.append(path)
            return
        if rng.random() < 0.3:
            sequences.append(path)
        for _ in range(rng.integers(1, most_children + 1)):
            grow(path, level + 1)

    for _ in range(groups):
        grow(np.zeros(0, np.int32), 0)
    sequences += [sequences[0].copy(), rng.integers(0, VOCABULARY, 1).astype(np.int32)]
    picked = rng.permutation(len(sequences))[:16]
    return [sequences[at] for at in picked]


def tree_batch(seed, **options):
    """Trees, and plain documents where a sequence shares nothing."""
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, **options)
    masks = [(rng.random(len(one)) < 0.8).astype(np.int64) for one in sequences]
    for one in masks:
        one[0] = 0
    trees = build_trees(sequences, masks)
    tokens = np.concatenate([tree.tokens for tree in trees])
    counts = np.concatenate([tree.weights for tree in trees]).astype(np.int32)
    documents = tuple(
        Document(
            doc_id=doc_id,
            num_tokens=len(tree.tokens),
            num_label_tokens=int(tree.weights.sum()),
            segments=tree.segments if len(tree.segments) > 1 else (),
        )
        for doc_id, tree in enumerate(trees)
    )
    edges = np.cumsum([0, *(one.num_tokens for one in documents)])
    labels = np.where(counts > 0, tokens, -100).astype(np.int32)
    table = TokenTable(np.arange(len(trees)), edges, tokens, labels, np.maximum(counts, 1).astype(np.int32))
    return TreeBatch(sequences, masks, documents, table)


def plain_loss_and_gradients_of_paths(config, weights, batch, dtype):
    """Of every sequence by itself."""
    model = plain_model(config, weights, dtype)
    total = torch.zeros((), dtype=dtype)
    for tokens, mask in zip(batch.sequences, batch.masks, strict=True):
        if len(tokens) < 2:
            continue
        ids = torch.from_numpy(tokens.astype(np.int64))
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        total = total - (torch.from_numpy(mask[1:]) * logp).sum() / max(1, batch.num_labels)
    total.backward()
    return total.item(), {name: one.grad for name, one in model.named_parameters()}
