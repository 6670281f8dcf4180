from collections import Counter

import pytest
import torch

import gloo_cases
from evenload.feed.collate import PADDING_TOKEN
from packed_cases import (
    all_documents,
    gradient_of,
    loader_of,
    packed_loss,
    reference_gradient,
    tiny_model,
    tokens_of,
    write_texts,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "balanced"},
        {"strategy": "best_fit", "micro_batches": 9},
        {"strategy": "padded"},
        {"strategy": "wlb"},
        {"strategy": "fixed_greedy", "prefetch_steps": 0},
        {"strategy": "balanced", "workers": 2},
    ],
    ids=str,
)
def test_a_plain_loop_trains_as_documents_one_by_one(tmp_path, changes):
    """Loss and gradient of a step depend on its documents alone, whatever packs them."""
    write_texts(tmp_path, num_documents=16, longest=40)
    model = tiny_model()
    loader = loader_of(tmp_path, epochs=1, **changes)
    for step in loader.steps():
        documents = all_documents(step).elements()
        if changes["strategy"] == "padded":
            documents = [tuple(token for token in one if token != PADDING_TOKEN) for one in documents]
        loss, gradient = reference_gradient(model, list(documents))
        model.zero_grad()
        total = 0.0
        for batch in step:
            part = packed_loss(model, batch)
            part.backward()
            total += part.item()
        assert total == pytest.approx(loss, rel=1e-10)
        torch.testing.assert_close(gradient_of(model), gradient, rtol=1e-9, atol=1e-13)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_read_together_give_what_ranks_alone_give(tmp_path, gloo_pool, workers):
    """Reading is shared and tokens are exchanged; nothing of it shows in the batches."""
    texts = write_texts(tmp_path)
    settings = {"epochs": 1, "workers": workers}
    together = gloo_pool.run(2, gloo_cases.read_together, tmp_path, settings)
    for rank in range(2):
        alone = loader_of(tmp_path, rank=rank, world_size=2, epochs=1)
        prints = [[gloo_cases.batch_fingerprint(batch) for batch in step] for step in alone.steps()]
        assert together[rank][1] == prints
    result = Counter(document for rank in together for step in rank[0] for document in step)
    assert result == Counter(map(tokens_of, texts))
    assert together[0][2] == together[1][2], "the state is global"


def test_an_error_on_one_rank_is_the_same_error_on_all(tmp_path, gloo_pool):
    write_texts(tmp_path)
    (tmp_path / "zzz.jsonl").write_text("{broken\n")
    messages = gloo_pool.run(2, gloo_cases.message_of_error, tmp_path, {"epochs": 1})
    assert messages[0] == messages[1]
    assert "zzz.jsonl" in messages[0]


def test_groups_of_ranks_each_read_everything(tmp_path, gloo_pool):
    """Tensor-parallel ranks: each data-parallel group is a world of its own."""
    texts = Counter(map(tokens_of, write_texts(tmp_path)))
    ranks = gloo_pool.run(4, gloo_cases.read_in_group, tmp_path, {"epochs": 1})
    assert [(rank, size) for rank, size, _ in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert ranks[0][2] == ranks[2][2]
    assert Counter(ranks[0][2] + ranks[1][2]) == texts


def test_accelerate_leaves_the_loader_alone(tmp_path):
    """`prepare` divides a DataLoader's batches among ranks; here they are divided already."""
    accelerate = pytest.importorskip("accelerate")
    write_texts(tmp_path, num_documents=8, longest=40)
    loader = loader_of(tmp_path, epochs=1)
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    assert prepared is loader
    assert sum(map(len, prepared.steps())) > 0


def test_the_state_goes_through_a_distributed_checkpoint(tmp_path, gloo_pool):
    """Engines save every loader that is `Stateful` with `torch.distributed.checkpoint`."""
    write_texts(tmp_path / "data")
    for rest, resumed in gloo_pool.run(2, gloo_cases.save_and_load, tmp_path / "data", tmp_path / "checkpoint"):
        assert rest
        assert resumed == rest
