"""What a `PackedLoader` does where nobody says otherwise: it plans by `auto`, fills its packs, knows its length."""

import gzip
import io
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

import evenload
from evenload import PackedLoader
from evenload.config.keys import plan_options
from evenload.config.train_config import PlanConfig
from evenload.data.config import DataConfig, MixturePart
from evenload.errors import ConfigError
from evenload.integrations.batch_formats import format_pack, pin_batch, with_tensors
from evenload.integrations.catalog import ENGINES, LOOP
from evenload.integrations.engine_loop import spec_of_weights
from evenload.integrations.planner import make_planner, model_spec_of
from evenload.integrations.price import engine_price
from evenload.planning.packing import WholePacks, best_fit_decreasing
from packed_cases import all_documents, documents_of, loader_of, tiny_model, tokens_of, write_texts

TABLES = Path(__file__).parents[2] / "examples" / "lengths"


def write_lengths(root: Path, lengths) -> Path:
    """Texts of so many tokens, as bytes."""
    root.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": "a" * (int(size) - 1)}) + "\n" for size in lengths)
    (root / "sized.jsonl").write_text("".join(lines))
    return root


def test_every_surface_has_one_default_strategy(tmp_path):
    write_texts(tmp_path)
    assert loader_of(tmp_path).options.strategy == PlanConfig().strategy == "auto"
    assert loader_of(tmp_path, engine="fsdp2").options.strategy == "auto"


# --------------------------------------------------------------------------------------------------------- full packs


def table(name: str) -> np.ndarray:
    """Lengths of a table of the examples, cut to 16,384 tokens; or such as chats have."""
    if name == "chats":
        return np.clip(np.random.default_rng(0).lognormal(6, 0.9, 9000), 10, 2655).astype(int)
    with gzip.open(TABLES / f"{name}.npy.gz") as file:
        return np.random.default_rng(0).permutation(np.minimum(np.load(file), 16384))


@pytest.mark.parametrize(
    ("name", "max_tokens"), [("github_dirs", 16384), ("docs", 16384), ("stdlib", 16384), ("chats", 8192)]
)
@pytest.mark.parametrize("strategy", ["auto", "best_fit", "balanced"])
def test_packs_of_real_lengths_are_99_percent_full(tmp_path, name, max_tokens, strategy):
    root = write_lengths(tmp_path, table(name)[: 1400 if max_tokens == 16384 else 3000])
    loader = PackedLoader(
        str(root),
        max_tokens=max_tokens,
        micro_batches=8,
        rank=0,
        world_size=8,
        strategy=strategy,
        format="pack",
        workers=0,
    )
    fills = []
    for step in islice(loader.steps(), 2):
        assert {len(packs.forward) for packs in step.plan.pack_plans} == {8}
        assert len(step) == 8
        fills.append(sum(document.num_tokens for document in step.plan.documents) / (64 * max_tokens))
    assert np.mean(fills) >= 0.99


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 6))
def test_what_packs_take_they_hold(lengths, num_packs):
    packs, taken = WholePacks(num_packs, 40), 0
    while taken < len(lengths) and packs.take(lengths[taken]):
        taken += 1
    assert sorted(index for pack in packs.packs for index in pack) == list(range(taken))
    assert all(sum(lengths[index] for index in pack) <= 40 for pack in packs.packs)
    assert len(packs.packs) == num_packs
    if taken < len(lengths):  # and no more: neither do packs made of all of them at once
        assert len(best_fit_decreasing(np.array(lengths[: taken + 1]), 40)) > num_packs


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 3), st.integers(1, 4))
@pytest.mark.parametrize("engine", [LOOP, ENGINES["fsdp2"]], ids=["loop", "fsdp2"])
def test_a_plan_has_no_more_packs_than_were_filled(engine, lengths, dp, count):
    """Also where packing by length needs one more than packing in their order did."""
    packs = WholePacks(dp * count, 40)
    taken = [length for length in lengths if packs.take(length)]
    documents = evenload_documents(taken)
    planner = make_planner(
        "llama-7b", None, plan_options({"max_pack_tokens": 40, "micro_batches": count}), dp=dp, engine=engine
    )
    for strategy in ("auto", "balanced", "best_fit"):
        plan = planner.plan(0, documents, strategy)
        assert max(len(packs.forward) for packs in plan.pack_plans) <= count


def evenload_documents(lengths):
    from evenload.types.document import Document

    return tuple(Document(doc_id=at, num_tokens=size, num_label_tokens=size - 1) for at, size in enumerate(lengths))


@pytest.mark.parametrize("size", [{}, {"batch_tokens": "auto"}], ids=["nothing", "auto"])
def test_every_document_comes_once_and_all_ranks_see_the_same_batches(tmp_path, size):
    texts = write_texts(tmp_path, num_documents=120)
    make = lambda rank: PackedLoader(  # noqa: E731
        str(tmp_path), max_tokens=64, micro_batches=2, rank=rank, world_size=2, epochs=2, workers=0, **size
    )
    ranks = [make(rank) for rank in range(2)]
    for _ in range(2):
        steps = [list(loader.steps()) for loader in ranks]
        assert [step.plan.digest for step in steps[0]] == [step.plan.digest for step in steps[1]]
        assert all(len(step) == 2 for of_rank in steps for step in of_rank)
        seen = [batch for of_rank in steps for step in of_rank for batch in step]
        assert all_documents(seen) == Counter(map(tokens_of, texts))


def test_batches_resume_with_other_ranks(tmp_path):
    """Their boundaries then are those of the new ranks; what was trained stays trained."""
    texts = write_texts(tmp_path, num_documents=120)
    make = lambda **place: PackedLoader(  # noqa: E731
        str(tmp_path), max_tokens=64, micro_batches=2, epochs=1, workers=0, **place
    )
    first = make()
    seen = all_documents(batch for step in islice(first.steps(), 3) for batch in step)
    ranks = [make(rank=rank, world_size=3) for rank in range(3)]
    for loader in ranks:
        loader.load_state_dict(first.state_dict())
    seen += all_documents(batch for loader in ranks for batch in loader)
    assert seen == Counter(map(tokens_of, texts))
    again = make()
    again.load_state_dict(first.state_dict())
    rest = [sorted(documents_of(batch)) for batch in first]
    assert rest == [sorted(documents_of(batch)) for batch in again]


def test_a_mixture_fills_its_packs_too(tmp_path):
    write_texts(tmp_path / "short", num_documents=90, longest=10, seed=1)
    write_texts(tmp_path / "long", num_documents=40, longest=60, seed=2)
    parts = tuple(MixturePart(name=one, weight=1, sources=(str(tmp_path / one),)) for one in ("short", "long"))
    config = DataConfig(mixture=parts, max_document_tokens=60, batch_documents=4, workers=0, epochs=1)
    loader = PackedLoader(config, max_tokens=60, batch_tokens="auto", micro_batches=4)
    fills = [sum(pack.num_tokens for pack in step.packs) / 240 for step in loader.steps()]
    assert np.mean(fills[:-1]) > 0.9


def test_packs_without_a_number_are_eight_a_step_at_least(tmp_path):
    write_texts(tmp_path)
    for world_size, count in ((1, 8), (3, 3), (8, 1), (32, 1)):
        loader = PackedLoader(str(tmp_path), max_tokens=64, workers=0, rank=0, world_size=world_size)
        assert loader.options.micro_batches == count
        assert loader.config.batch_tokens == count * world_size * 64
        assert f"up to {count * world_size * 64} tokens, as many as fill the packs" in "\n".join(loader.start_messages)


def test_the_number_of_packs_may_come_later(tmp_path):
    write_texts(tmp_path, num_documents=120)
    named = PackedLoader(str(tmp_path), max_tokens=64, workers=0, micro_batches=3)
    later = PackedLoader(str(tmp_path), max_tokens=64, workers=0)
    later.set_micro_batches(3)
    assert later.start_messages == named.start_messages
    assert later.config == named.config
    steps = [next(loader.steps()) for loader in (named, later)]
    assert steps[0].plan.digest == steps[1].plan.digest
    for loader in (named, later):
        with pytest.raises(ConfigError, match=r"set_micro_batches\(2\) of a loader with micro_batches=3"):
            loader.set_micro_batches(2)


# ---------------------------------------------------------------------------------------------------- plan and loader


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "megatron"])
def test_the_loader_does_what_plan_recommends(tmp_path, engine):
    """The same batch, model and ranks: the fastest of the table of `evenload plan --engine` is the loader's step."""
    lengths = table("chats")[:400]
    np.save(tmp_path / "lengths.npy", lengths)
    comparison = evenload.plan(
        str(tmp_path / "lengths.npy"), model="llama3-8b", cluster="h100x8", layout="dp=8", context=4096, documents=400,
        engine=engine,
    )  # fmt: skip
    loader = PackedLoader(
        str(write_lengths(tmp_path / "data", lengths)), max_tokens=4096, batch_documents=400, model="llama3-8b",
        workers=0, rank=0, world_size=8, engine=engine, shuffle_window=1,
    )  # fmt: skip
    plan = next(loader.steps()).plan
    planner = make_planner("llama3-8b", None, plan_options({"max_pack_tokens": 4096}), dp=8, engine=ENGINES[engine])
    step_s = engine_price(plan, ENGINES[engine], planner.costs, loader.options.shape).step_time_s
    recommended = {one.name: one.mean_step_time_s for one in comparison.engine.results}
    assert step_s == pytest.approx(recommended["auto"], rel=1e-9)
    assert step_s <= recommended[comparison.engine.best] * (1 + 1e-9)


def test_auto_of_a_plain_loop_is_the_fastest_whole_document_strategy(tmp_path):
    write_texts(tmp_path, num_documents=60, longest=60)
    place = {"rank": 0, "world_size": 4, "batch_documents": 40, "max_tokens": 64}
    planner = make_planner("llama-7b", None, plan_options({"max_pack_tokens": 64}), dp=4, engine=LOOP)
    seconds = {}
    for strategy in ("auto", "balanced", "best_fit", "fixed_greedy", "padded"):
        loader = loader_of(tmp_path, strategy=strategy, **place)
        seconds[strategy] = engine_price(
            next(loader.steps()).plan, LOOP, planner.costs, loader.options.shape
        ).step_time_s
    assert seconds["auto"] == pytest.approx(min(seconds.values()))
    alone = [next(loader_of(tmp_path, **(place | {"rank": rank})).steps()).plan.digest for rank in range(4)]
    assert len(set(alone)) == 1, "ranks that read alone plan alike"


# ------------------------------------------------------------------------------------------------------------- length


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batches": 3, "batch_documents": None},
        {"micro_batches": 8},
        {"batch_tokens": 200},
        {"strategy": "best_fit", "batch_tokens": 300, "equal_micro_batches": False},
        {"evaluation": True, "shuffle_window": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_length_of_an_epoch_is_known_before_it_is_read(tmp_path, changes, world_size):
    write_texts(tmp_path, num_documents=90)
    loader = loader_of(tmp_path, rank=world_size - 1, world_size=world_size, **changes)
    for _ in range(2):
        before = len(loader)
        count = sum(1 for _ in loader)
        if loader.options.micro_batches is None:  # of so many packs as the steps that were planned for it
            assert before == pytest.approx(count, rel=0.35)
        else:
            assert before == count
    assert loader.epoch == 2


def test_counting_leaves_the_place_and_shows_in_progress_bars(tmp_path):
    texts = write_texts(tmp_path)
    loader = loader_of(tmp_path, micro_batches=8, epochs=1)
    bar = tqdm(loader, disable=True)
    assert tqdm(loader, file=io.StringIO()).total == len(loader)
    assert all_documents(bar) == Counter(map(tokens_of, texts))
    assert loader
    assert len(loader) == 5 * 8, "an epoch that has been read had so many"


@pytest.mark.parametrize("overlong", ["error", "split"])
def test_more_than_is_read_for_it_is_estimated(tmp_path, monkeypatch, overlong):
    write_texts(tmp_path, num_documents=800, longest=200 if overlong == "split" else 60)
    monkeypatch.setattr("evenload.integrations.packed_loader.COUNTED_TOKENS", 2000)
    loader = loader_of(tmp_path, micro_batches=4, batch_documents=None, overlong=overlong)
    before = len(loader)
    assert before == pytest.approx(sum(1 for _ in loader), rel=0.15)


def test_what_has_no_end_has_no_length(tmp_path, monkeypatch):
    write_texts(tmp_path)
    parts = (MixturePart(name="one", weight=1, sources=(str(tmp_path),)),)
    config = DataConfig(mixture=parts, mixture_end="repeat", max_document_tokens=64, batch_documents=4, workers=0)
    loader = PackedLoader(config, max_tokens=64)
    with pytest.raises(TypeError, match='mixture_end "repeat" has no length'):
        len(loader)
    assert loader
    monkeypatch.setattr("evenload.integrations.packed_loader.COUNTED_TOKENS", 100)
    data = datasets.Dataset.from_dict({"text": ["abc"] * 200}).to_iterable_dataset()
    with pytest.raises(TypeError, match="does not tell how many records it has"):
        len(PackedLoader(data, max_tokens=64, workers=0))


# ----------------------------------------------------------------------------------------------------- pinned memory


@pytest.mark.parametrize("format", ["hf", "varlen", "torchtitan", "megatron", "pack"])
def test_every_tensor_of_a_batch_would_be_pinned(tmp_path, format):
    write_texts(tmp_path)
    step = next(loader_of(tmp_path).steps())
    batch, seen = format_pack(step.packs[0], format, 7), []
    result = with_tensors(batch, lambda tensor: seen.append(tensor) or tensor.clone())
    tensors = [part for part in leaves(batch) if torch.is_tensor(part)]
    assert [id(tensor) for tensor in seen] == [id(tensor) for tensor in tensors]
    assert len(tensors) == {"hf": 7, "varlen": 5, "torchtitan": 5, "megatron": 6, "pack": 0}[format]
    assert list(map(str, leaves(result))) == list(map(str, leaves(batch)))
    assert type(result) is type(batch)


def leaves(batch):
    """What a batch holds, in order."""
    if isinstance(batch, dict | tuple):
        parts = batch.values() if isinstance(batch, dict) else batch
        return [leaf for part in parts for leaf in leaves(part)]
    return [batch]


def test_memory_is_pinned_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    for is_there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert pin_batch({"input_ids": torch.zeros(1), "use_cache": False}) == {
            "input_ids": torch.tensor([float(is_there)]),
            "use_cache": False,
        }


# --------------------------------------------------------------------------------------------------- the model trained


def test_weights_tell_what_a_configuration_would():
    """Layers, width and the matrices of a layer, which decide how attention compares with the rest."""
    model = tiny_model(num_key_value_heads=4, num_attention_heads=4)
    known, told = model_spec_of(model), spec_of_weights(model, 1)
    assert (told.num_layers, told.hidden_size) == (known.num_layers, known.hidden_size)
    lengths = np.array([8, 64, 512, 4096])
    costs = [make_planner(spec, None, plan_options({}), dp=1, engine=LOOP).costs for spec in (known, told)]
    work_s = [one.document_seconds(lengths) for one in costs]
    assert work_s[1] / work_s[1][0] == pytest.approx(work_s[0] / work_s[0][0], rel=0.3)
    assert spec_of_weights(torch.nn.Identity(), 2).num_layers == 1
