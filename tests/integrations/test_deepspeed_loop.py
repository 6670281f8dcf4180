"""DeepSpeed on packs, ranks alone and in groups that share every pack (Ulysses)."""

import importlib.util
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepspeed_case import (
    deepspeed_case,
    import_deepspeed,
    refusals_of_deepspeed,
    refusals_of_ulysses,
    shared_epoch,
    updates_that_overflow,
)
from engine_conformance import FreshRanks, check_gradients, check_isolation, check_training
from engine_records import EngineCase, plain_adam
from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.deepspeed_loop import DeepSpeedLoop, require_same_ranks, sequence_share
from evenload.integrations.engine_loop import balance_for_trained, hf_pack_loss
from evenload.integrations.fsdp2_loop import Fsdp2Loop
from evenload.integrations.planner import model_spec_of
from packed_cases import all_documents, batch_fingerprint, epoch_of_ranks, loader_of, tiny_model, tokens_of, write_texts
from sweeps import sweep

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'evenload[deepspeed]'",
)


def shared_case(stage: int, loader: dict | None = None, **changes) -> EngineCase:
    """ZeRO of a stage, every pack shared by two ranks."""
    engine = "deepspeed" if stage == 1 else f"deepspeed-zero{stage}"
    return deepspeed_case(stage, loader={"engine": engine, "sequence_ranks": 2} | (loader or {}), **changes)


ADAM = {"optimizer": plain_adam, "learning_rate": 0.01, "growth": 10.0}
"""DeepSpeed's universal checkpoint, by which another number of ranks goes on, knows Adam only."""
UNEQUAL = {"engine": "deepspeed-zero2", "strategy": "best_fit"}
ALONE = {
    "ZeRO-2, unequal counts": (deepspeed_case(2, loader=UNEQUAL, uneven_counts=True), 2),
    "ZeRO-3": (deepspeed_case(3, loader={"engine": "deepspeed-zero3"}), 2),
    "ZeRO-1": (deepspeed_case(1, loader={"engine": "deepspeed"}), 2),
    "ZeRO-2": (deepspeed_case(2), 2),
    "ZeRO-3, reduced once": (deepspeed_case(3, {"reduce_every_pack": False}), 2),
}
SHARED = {
    "two groups, unequal counts": (shared_case(2, {"strategy": "best_fit"}, uneven_counts=True), 4),
    "shared, ZeRO-3": (shared_case(3), 2),
    "shared, ZeRO-1": (shared_case(1), 2),
    "shared, ZeRO-2": (shared_case(2, {"equal_micro_batches": True}), 2),
    "two groups, ZeRO-3": (shared_case(3), 4),
    "four ranks, two key heads": (shared_case(1, {"sequence_ranks": 4}), 4),
}
THREE_RANKS = {"rank": 0, "world_size": 3, "sequence_ranks": 3, "max_tokens": 66}


@pytest.mark.long
@pytest.mark.parametrize("name", [*sweep([*ALONE], 2), *sweep([*SHARED], 2)])
def test_gradients_are_those_of_documents_one_by_one(tmp_path, name):
    """In a step in which a rank has no documents at all, too."""
    case, world_size = (ALONE | SHARED)[name]
    check_gradients(FreshRanks(import_deepspeed), case, tmp_path / "corpus", world_size)


@pytest.mark.long
@pytest.mark.parametrize("case", [ALONE["ZeRO-3"][0], shared_case(1)], ids=["alone", "shared"])
def test_documents_do_not_see_each_other(tmp_path, case):
    check_isolation(FreshRanks(import_deepspeed), case, tmp_path / "corpus")


@pytest.mark.long
@pytest.mark.parametrize("stage", sweep([1, 3, 2], 2))
def test_training_is_plain_training_and_goes_on_with_other_ranks(tmp_path, stage):
    check_training(
        FreshRanks(import_deepspeed), deepspeed_case(stage, **ADAM), tmp_path / "corpus", 2, sweep((1, 3, 2), 1)
    )


@pytest.mark.long
@pytest.mark.parametrize(("stage", "is_shared_first"), [*((one, True) for one in sweep([1, 3, 2], 1)), (1, False)])
def test_a_checkpoint_goes_on_in_and_without_sequence_groups(tmp_path, stage, is_shared_first):
    """With as many ranks from DeepSpeed's checkpoint as it is, with another number from what is made universal."""
    shared = shared_case(stage, **ADAM)
    alone = replace(shared, loader=shared.loader | {"sequence_ranks": 1})
    first, then = (shared, alone) if is_shared_first else (alone, shared)
    resumed = (2, 1) if is_shared_first else sweep((2, 4), 1)
    check_training(FreshRanks(import_deepspeed), first, tmp_path / "corpus", 2, resumed, then)


@pytest.mark.long
def test_engines_that_would_train_something_else_are_refused(tmp_path):
    write_texts(tmp_path)
    (messages, _) = FreshRanks(import_deepspeed).run(2, refusals_of_deepspeed, tmp_path)
    assert "gradient_accumulation_steps is 4" in messages["accumulation"]
    assert "ZeRO stage is 0" in messages["stage"]
    assert 'gradient_allreduce_op is "sum"' in messages["sum"]
    assert "managed_gradient_accumulation is False" in messages["unmanaged"]
    assert "cannot be put off to the end of the step" in messages["own sums"]
    assert "gathers parameters in every forward pass under ZeRO-3" in messages["counts"]
    assert "is no checkpoint of this loop" in messages["checkpoint"]


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"])
def test_a_checkpoint_of_other_ranks_says_how_it_goes_on(tmp_path, name):
    """By what it says: the files of other ranks lie on their own nodes."""
    (tmp_path / "step-4").mkdir()
    torch.save({"dp_world_size": 2, "module": {}}, tmp_path / "step-4" / name)
    (tmp_path / "step-4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "latest").write_text("step-4")
    require_same_ranks(tmp_path, None, 2)
    for tag in (None, "step-4"):
        with pytest.raises(CheckpointError, match="was saved by 2 ranks, and there are 1") as refused:
            require_same_ranks(tmp_path, tag, 1)
        assert "ds_to_universal --inject_missing_state --input_folder" in str(refused.value)


def test_an_update_that_the_engine_left_out_is_told_and_not_counted(gloo_pool, tmp_path):
    write_texts(tmp_path)
    assert gloo_pool.run(1, updates_that_overflow, tmp_path) == [[(0, False), (1, True), (1, False), (2, True)]]


def test_a_broken_checkpoint_is_named(tmp_path):
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"half of a fi")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt' cannot be read"):
        require_same_ranks(tmp_path, None, 1)


def test_what_is_no_engine_is_refused(tmp_path):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match="object has no coalesce_grad_reduction"):
        DeepSpeedLoop(object(), loader_of(tmp_path))


@pytest.mark.long
def test_groups_that_would_train_something_else_are_refused(tmp_path):
    write_texts(tmp_path)
    (messages, _) = FreshRanks(import_deepspeed).run(2, refusals_of_ulysses, tmp_path)
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
        hf_pack_loss(lambda part=part, **inputs: SimpleNamespace(logits=part), share)
        for part, share in zip(parts, shares, strict=True)
    ]
    assert sum(losses).item() == pytest.approx(whole.item(), rel=1e-12)


def test_ranks_of_a_group_get_the_same_packs_and_groups_different_ones(tmp_path):
    texts = write_texts(tmp_path)
    settings = {"engine": "deepspeed", "sequence_ranks": 2, "pack_multiple": 3, "max_tokens": 66, "epochs": 1}
    first, twin, second, last = epoch_of_ranks(tmp_path, 4, **settings)
    for group in ((first, twin), (second, last)):
        assert [[*map(batch_fingerprint, batches)] for batches in group] == [[*map(batch_fingerprint, group[0])]] * 2
    result = all_documents(first + second)
    assert Counter({document: times for document, times in result.items() if any(document)}) == Counter(
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
        balance_for_trained(loader, model, lambda: model_spec_of(model))
    assert loader.model_is_assumed == is_refused
    assert next(iter(loader))["input_ids"].shape[1] % 3 == 0


def test_a_loop_without_sequence_groups_refuses_a_loader_of_them(tmp_path):
    write_texts(tmp_path)
    loader = loader_of(tmp_path, engine="deepspeed", sequence_ranks=2, rank=0, world_size=2)
    with pytest.raises(ConfigError, match="sequence_ranks is 2, and FSDP2 has sequence groups of 1"):
        Fsdp2Loop(tiny_model(), None, loader)
