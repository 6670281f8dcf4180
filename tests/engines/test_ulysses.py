"""DeepSpeed's sequence parallelism on packs: groups of ranks that share every pack train as one rank would."""

import importlib.util
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepspeed_case import deepspeed_case, refusals_of_ulysses, shared_epoch
from engine_conformance import FreshRanks, check_gradients, check_isolation, check_training
from engine_records import EngineCase, plain_adam
from evenload.errors import ConfigError
from evenload.integrations.deepspeed_loop import sequence_share, share_loss
from evenload.integrations.engine_loop import balance_for_trained, hf_pack_loss
from evenload.integrations.fsdp2_loop import Fsdp2Loop
from evenload.integrations.planner import model_spec_of
from packed_cases import (
    all_documents,
    batch_fingerprint,
    epoch_of_ranks,
    loader_of,
    tiny_model,
    tokens_of,
    write_texts,
)
from sweeps import sweep

with_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'evenload[deepspeed]'",
)


def shared_case(stage: int, loader: dict | None = None, **changes) -> EngineCase:
    """ZeRO of a stage, every pack shared by two ranks."""
    engine = "deepspeed" if stage == 1 else f"deepspeed-zero{stage}"
    return deepspeed_case(stage, loader={"engine": engine, "sequence_ranks": 2} | (loader or {}), **changes)


CASES: dict[str, tuple[EngineCase, int]] = {
    "two groups, unequal counts": (shared_case(2, {"strategy": "best_fit"}, uneven_counts=True), 4),
    "ZeRO-3": (shared_case(3), 2),
    "ZeRO-1": (shared_case(1), 2),
    "ZeRO-2": (shared_case(2, {"equal_micro_batches": True}), 2),
    "two groups, ZeRO-3": (shared_case(3), 4),
    "four ranks, two key heads": (shared_case(1, {"sequence_ranks": 4}), 4),
}


THREE_RANKS = {"rank": 0, "world_size": 3, "sequence_ranks": 3, "max_tokens": 66}


@with_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("name", sweep([*CASES], 2))
def test_gradients_are_those_of_documents_one_by_one(tmp_path, name):
    case, world_size = CASES[name]
    check_gradients(FreshRanks(), case, tmp_path / "corpus", world_size)


@with_deepspeed
@pytest.mark.long
def test_documents_do_not_see_each_other(tmp_path):
    check_isolation(FreshRanks(), shared_case(1), tmp_path / "corpus")


@with_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("stage", sweep([1, 3, 2], 1))
def test_training_is_plain_training_and_goes_on_without_sequence_groups(tmp_path, stage):
    """With as many ranks from DeepSpeed's checkpoint as it is, with another number from what is made universal."""
    case = shared_case(stage, optimizer=plain_adam, learning_rate=0.01, growth=10.0)
    alone = replace(case, loader=case.loader | {"sequence_ranks": 1})
    check_training(FreshRanks(), case, tmp_path / "corpus", 2, (2, 1), alone)


@with_deepspeed
@pytest.mark.long
def test_a_checkpoint_of_single_ranks_goes_on_in_sequence_groups(tmp_path):
    shared = shared_case(1, optimizer=plain_adam, learning_rate=0.01, growth=10.0)
    case = replace(shared, loader=shared.loader | {"sequence_ranks": 1})
    check_training(FreshRanks(), case, tmp_path / "corpus", 2, sweep((2, 4), 1), shared)


@with_deepspeed
@pytest.mark.long
def test_groups_that_would_train_something_else_are_refused(tmp_path):
    write_texts(tmp_path)
    (messages, _) = FreshRanks().run(2, refusals_of_ulysses, tmp_path)
    assert "call deepspeed.init_distributed() first" in messages["early"]
    assert "cannot share sequences among 3 ranks: world_size (2)" in messages["ranks"]
    assert "the loader's sequence_ranks is 1, and DeepSpeed has sequence groups of 2" in messages["loader"]
    assert "sequence parallel group is already initialized" in messages["again"]
    assert "attention is 'sdpa', which under Ulysses runs a pack as one sequence" in messages["sdpa"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_a_pack_are_its_rows_and_their_losses_add_up(tmp_path, ranks):
    write_texts(tmp_path)
    model = tiny_model()
    loader = loader_of(tmp_path, engine="deepspeed", sequence_ranks=ranks, rank=0, world_size=ranks)
    batch = next(iter(loader))
    whole = hf_pack_loss(model, batch)
    shares = [sequence_share(batch, rank, ranks) for rank in range(ranks)]
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([share[name] for share in shares], 1), batch[name])
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    parts = logits.chunk(ranks, dim=1)
    losses = [
        share_loss(lambda part=part, **inputs: SimpleNamespace(logits=part), share)
        for part, share in zip(parts, shares, strict=True)
    ]
    assert sum(losses).item() == pytest.approx(whole.item(), rel=1e-12)


def test_ranks_of_a_group_get_the_same_packs_and_groups_different_ones(tmp_path):
    texts = write_texts(tmp_path)
    settings = {"engine": "deepspeed", "sequence_ranks": 2, "pack_multiple": 3, "max_tokens": 66, "epochs": 1}
    first, twin, second, last = epoch_of_ranks(tmp_path, 4, **settings)
    for group in ((first, twin), (second, last)):
        assert [[*map(batch_fingerprint, batches)] for batches in group] == [[*map(batch_fingerprint, group[0])]] * 2
    found = all_documents(first + second)
    assert Counter({document: times for document, times in found.items() if any(document)}) == Counter(
        map(tokens_of, texts)
    )
    assert {batch["input_ids"].shape[1] % 6 for batch in first + second} == {0}


def test_a_loader_reads_once_for_all_ranks_of_all_groups(gloo_pool, tmp_path):
    """Ranks that read together exchange tokens, to every rank of a group."""
    write_texts(tmp_path)
    together = gloo_pool.run(4, shared_epoch, tmp_path)
    settings = {"engine": "deepspeed", "sequence_ranks": 2, "epochs": 1}
    alone = epoch_of_ranks(tmp_path, 4, **settings)
    assert together == [[*map(batch_fingerprint, batches)] for batches in alone]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": None}, "sequence_ranks is 2. A plain loop runs a whole model"),
        ({"engine": "fsdp2"}, "fully_shard shards weights, not sequences"),
        ({"engine": "megatron"}, "Give group = the data-parallel ranks, or train on engine deepspeed"),
        ({"format": "varlen"}, 'the loader has format "varlen", which is not cut for ranks'),
        ({"strategy": "skrull"}, "keeps some documents of a micro-batch whole on one rank of 2"),
        ({"max_tokens": 65}, "sequence_ranks 2: a full pack padded to a multiple.*such as 66"),
        ({"sequence_ranks": 0}, "sequence_ranks is 0, must be at least 1"),
        ({"rank": 0, "world_size": 3}, "sequence_ranks is 2, which does not divide 3 ranks"),
        ({}, "sequence_ranks is 2, which does not divide 1 rank;"),
        (THREE_RANKS | {"model": "llama-7b"}, "shares heads among 3 ranks, and llama-7b has 32 query heads"),
    ],
)
def test_loaders_that_cannot_be_shared_are_refused(tmp_path, changes, message):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match=message):
        loader_of(tmp_path, **({"engine": "deepspeed", "sequence_ranks": 2} | changes))


@pytest.mark.parametrize(("heads", "is_refused"), [(4, True), (3, False)])
def test_heads_are_asked_for_when_the_model_is_known(tmp_path, heads, is_refused):
    """Not those of the model that is assumed for balance, which no group of three could share."""
    write_texts(tmp_path)
    loader = loader_of(tmp_path, engine="deepspeed", **THREE_RANKS)
    assert loader.model_is_assumed
    model = tiny_model(num_attention_heads=heads, num_key_value_heads=heads, head_dim=8)
    with pytest.raises(ConfigError, match="shares heads among 3 ranks") if is_refused else nullcontext():
        balance_for_trained(loader, lambda: model_spec_of(model))
    assert loader.model_is_assumed == is_refused
    assert next(iter(loader))["input_ids"].shape[1] % 3 == 0


def test_a_loop_without_sequence_groups_refuses_a_loader_of_them(tmp_path):
    write_texts(tmp_path)
    loader = loader_of(tmp_path, engine="deepspeed", sequence_ranks=2, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="sequence_ranks is 2, and FSDP2 has sequence groups of 1"):
        Fsdp2Loop(tiny_model(), None, loader)
