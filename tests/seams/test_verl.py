"""verl's functions and ours keep one contract; losses and gradients are those of the batch in one piece.

With verl (`make test-engines`) on its TensorDicts and beside its own functions; without it the same on dictionaries.
"""

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_cases as cases
from evenload.errors import ConfigError, DataError, InfeasiblePlanError, MissingPackageError
from evenload.planning.micro_batches import Cost, micro_batches
from evenload.seams import verl

needs_verl = pytest.mark.skipif(not cases.HAS_VERL, reason="verl is not installed: make test-engines")
NAMES = (
    "calculate_workload",
    "get_seqlen_balanced_partitions",
    "get_group_balanced_partitions",
    "rearrange_micro_batches",
)


def check_partition(parts, num_sequences: int, equal_size: bool) -> None:
    assert sorted(chain.from_iterable(parts)) == list(range(num_sequences))
    assert all(parts)
    assert all(part == sorted(part) and all(type(one) is int for one in part) for part in parts)
    assert len(set(map(len, parts))) == 1 or not equal_size


@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=40),
    parts=st.integers(1, 5),
    equal_size=st.booleans(),
    max_tokens=st.sampled_from([None, 200, 500]),
    is_tensor=st.booleans(),
)
def test_partitions_keep_the_contract(lengths, parts, equal_size, max_tokens, is_tensor):
    if equal_size:
        lengths = (lengths * parts)[: max(1, len(lengths) // parts) * parts]
    if len(lengths) < parts:
        with pytest.raises(InfeasiblePlanError):
            verl.get_seqlen_balanced_partitions(lengths, parts, equal_size, max_tokens=max_tokens)
        return
    given = torch.tensor(lengths, dtype=torch.float32) if is_tensor else lengths
    made = verl.get_seqlen_balanced_partitions(verl.calculate_workload(given), parts, equal_size, max_tokens=max_tokens)
    check_partition(made, len(lengths), equal_size)


@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=12), parts=st.integers(1, 4), seed=st.integers(0, 99))
def test_groups_stay_whole_and_equally_many(sizes, parts, seed):
    sizes = (sizes * parts)[: max(1, len(sizes) // parts) * parts]
    uids = [f"prompt {group}" for group, size in enumerate(sizes) for _ in range(size)]
    rng = np.random.default_rng(seed)
    uids = [uids[at] for at in rng.permutation(len(uids))]
    made = verl.get_group_balanced_partitions(rng.integers(1, 99, len(uids)).tolist(), uids, parts)
    check_partition(made, len(uids), False)
    held = [{uids[one] for one in part} for part in made]
    assert sum(map(len, held)) == len(sizes)
    assert set(map(len, held)) == {len(sizes) // parts}


def test_wrong_partitions_are_refused():
    with pytest.raises(ConfigError, match="3 documents are no 2 equal shares"):
        verl.get_seqlen_balanced_partitions([1, 2, 3], 2, True)
    with pytest.raises(ConfigError, match="1 uids for 2 sequences"):
        verl.get_group_balanced_partitions([1, 2], ["a"], 1)
    with pytest.raises(DataError, match="document 1 takes 9 tokens, a micro-batch holds 8"):
        verl.get_seqlen_balanced_partitions([1, 9], 2, True, max_tokens=8)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=24),
    max_tokens=st.integers(60, 200),
    divided_by=st.sampled_from([None, 2]),
    least=st.sampled_from([None, 3]),
    group=st.integers(1, 3),
    ends=st.booleans(),
    is_jagged=st.booleans(),
)
def test_micro_batches_of_one_rank(lengths, max_tokens, divided_by, least, group, ends, is_jagged):
    cases.stand_in()
    lengths = (lengths * group)[: max(1, len(lengths) // group) * group]
    batch = cases.batch_of(lengths, is_jagged)
    rules = {"num_batches_divided_by": divided_by, "min_num_micro_batch": least, "use_dynamic_bsz_balance": ends}
    try:
        made, parts = verl.rearrange_micro_batches(batch, max_tokens, force_group_size=group, **rules)
    except DataError:
        assert max(sum(lengths[at : at + group]) for at in range(0, len(lengths), group)) > max_tokens
        return
    except InfeasiblePlanError:
        assert (divided_by or 1) > 1 or (least or 1) > len(lengths) // group
        return
    check_partition(parts, len(lengths), False)
    assert len(parts) % (divided_by or 1) == 0
    assert len(parts) >= (least or 1)
    for one, part in zip(made, parts, strict=True):
        assert one["number"].tolist() == part
        assert sum(lengths[row] for row in part) <= max_tokens
        assert all(set(range(row - row % group, row - row % group + group)) <= set(part) for row in part)


LENGTHS = ([30, 7, 9, 3, 14, 21, 2, 11], [5, 28, 6, 25, 8, 2, 9, 4])
RULES = [
    {},
    {"num_batches_divided_by": 2},
    {"min_num_micro_batch": 5},
    {"force_group_size": 2},
    {"use_dynamic_bsz_balance": False},
]


@pytest.mark.parametrize("is_jagged", [False, True])
@pytest.mark.parametrize("rules", RULES)
def test_losses_and_gradients_are_those_of_the_batch_in_one_piece(gloo_pool, rules, is_jagged):
    answers = gloo_pool.run(2, cases.train_step, LENGTHS, 40, is_jagged, rules)
    weights, num_tokens = cases.new_weights(), sum(map(sum, LENGTHS))
    whole = sum(cases.loss_of(weights, cases.batch_of(LENGTHS[rank], is_jagged, rank), num_tokens) for rank in (0, 1))
    whole.backward()
    assert sum(answer[0] for answer in answers) == pytest.approx(whole.item(), rel=1e-12)
    for _, gradients, parts, kinds in answers:
        for got, weight in zip(gradients, weights.values(), strict=True):
            np.testing.assert_allclose(got, weight.grad.numpy(), rtol=1e-10, atol=1e-13)
        assert set(kinds) == {"TensorDict" if cases.HAS_VERL else "dict"}
        assert len(parts) == len(answers[0][2])
        assert len(parts) % rules.get("num_batches_divided_by", 1) == 0
    for lengths, (_, _, parts, _) in zip(LENGTHS, answers, strict=True):
        check_partition(parts, len(lengths), False)
        assert max(sum(lengths[row] for row in part) for part in parts) <= 40


@needs_verl
@pytest.mark.parametrize("rules", RULES)
def test_losses_are_those_of_verls_own_and_no_step_is_longer(gloo_pool, rules):
    answers = gloo_pool.run(2, cases.train_step, LENGTHS, 40, False, rules)
    theirs = gloo_pool.run(2, cases.train_step, LENGTHS, 40, False, rules, True)
    assert sum(one[0] for one in answers) == pytest.approx(sum(one[0] for one in theirs), rel=1e-12)
    for got, wanted in zip(answers[0][1], theirs[0][1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-13)
    assert [one[3][:1] for one in answers] == [one[3][:1] for one in theirs]
    steps = [cases.step_s(LENGTHS, [one[2] for one in made]) for made in (answers, theirs)]
    assert steps[0] <= steps[1] * (1 + 1e-9)


def test_the_lightest_come_first_and_last():
    """Where a pipeline fills and drains."""
    cases.stand_in()
    lengths = [40, 40, 30, 20, 10, 5]
    _, parts = verl.rearrange_micro_batches(cases.batch_of(lengths), 60, min_num_micro_batch=6)
    assert [lengths[part[0]] for part in parts] == [10, 30, 40, 40, 20, 5]


@pytest.mark.parametrize(
    ("lengths", "rules", "message"),
    [
        (([30, 50], [7, 9]), {}, "DataError: document 1 takes 50 tokens, a micro-batch holds 40"),
        (([30, 5, 3], [7, 9]), {"force_group_size": 2}, r"ConfigError: force_group_size is 2, ranks have \[3, 2\]"),
        (([30, 30, 30], [7, 9]), {}, "InfeasiblePlanError: no division found of 5 documents"),
    ],
)
def test_every_rank_is_told_what_is_refused(gloo_pool, lengths, rules, message):
    for told in gloo_pool.run(2, cases.refused, lengths, 40, rules):
        assert re.match(message, told), told


def batches():
    """Tables of lengths, limits and ranks."""
    tables = np.load(Path(__file__).parents[1] / "planning" / "data" / "length_tables.npz")
    for max_tokens in (16_384, 32_768, 65_536):
        for name in tables:
            drawn = np.random.default_rng(0).choice(tables[name], 512).astype(np.int64)
            yield pytest.param(np.minimum(drawn, max_tokens), max_tokens, id=f"{name} {max_tokens}")


@needs_verl
@pytest.mark.parametrize(("lengths", "max_tokens"), list(batches()))
def test_no_step_is_longer_than_verls_own(lengths, max_tokens):
    """Ranks by the one function, micro-batches by the other; also where verl has chosen the ranks."""
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

    theirs = get_seqlen_balanced_partitions(calculate_workload(torch.tensor(lengths)), 8, True)
    ours = verl.get_seqlen_balanced_partitions(torch.tensor(lengths), 8, True, max_tokens=max_tokens)
    check_partition(ours, len(lengths), True)
    seconds = {}
    for name, parts in (("theirs", theirs), ("ours", ours)):
        rank_of = np.empty(len(lengths), np.int64)
        for rank, part in enumerate(parts):
            rank_of[part] = rank
        made = micro_batches(lengths, 8, max_tokens, rank_of=rank_of, no_empty=True)
        seconds[name] = made.step_s
    of_rank = [lengths[part].tolist() for part in theirs]
    least = 1
    while True:  # what verl's ranks find by their all-reduces: the first number that all can hold
        split = [
            rearrange_micro_batches(_masks(one), max_tokens, min_num_micro_batch=least, use_dynamic_bsz_balance=True)[1]
            for one in of_rank
        ]
        counts = {len(one) for one in split}
        if len(counts) == 1:
            break
        least = max(counts)
    own_s = cases.step_s(of_rank, split)
    assert seconds["theirs"] <= own_s * (1 + 1e-9)
    assert seconds["ours"] <= own_s * (1 + 1e-9)


def _masks(lengths):
    """A batch whose lengths are those of a mask, without the memory of its tokens."""
    from tensordict import TensorDict

    offsets = torch.tensor([0, *np.cumsum(lengths)])
    ids = torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1]), dtype=torch.int8), offsets)
    return TensorDict({"input_ids": ids}, batch_size=len(lengths))


@needs_verl
@pytest.mark.filterwarnings("ignore")  # of what verl's engine imports
def test_it_is_installed_in_every_module_and_removed():
    import verl.utils.seqlen_balancing as deciding

    theirs = [getattr(deciding, name) for name in NAMES]
    import verl.workers.engine.utils as engine

    data = cases.batch_of(LENGTHS[0])
    data["max_token_len_per_gpu"] = _non_tensor(40)
    with verl.install(max_tokens=40, cost=Cost(1e-6, 0.0, 1e-3)):
        assert engine.rearrange_micro_batches is deciding.rearrange_micro_batches
        assert [getattr(deciding, name).func for name in NAMES] == [getattr(verl, name) for name in NAMES]
        with pytest.raises(ConfigError, match="calculate_workload is replaced already"):
            verl.install()
        made, parts = engine.prepare_micro_batches(data)
        assert [one["number"].tolist() for one in made] == parts
    assert [getattr(deciding, name) for name in NAMES] == theirs
    assert engine.rearrange_micro_batches is theirs[-1]


@needs_verl
def test_verl_imports_a_module_that_installs_it(tmp_path):
    (tmp_path / "even.py").write_text("from evenload.seams import verl\nverl.install(max_tokens=4096)\n")
    code = "import verl.utils.seqlen_balancing as it; print(it.rearrange_micro_batches.func.__module__)"
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "even", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.strip() == "evenload.seams.verl", done.stderr


def _non_tensor(value):
    from tensordict.tensorclass import NonTensorData

    return NonTensorData(value)


@pytest.mark.skipif(cases.HAS_VERL, reason="verl is installed")
def test_without_verl_nothing_is_installed(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        MissingPackageError, match=r"verl.utils.seqlen_balancing cannot be imported .* install verl 0.9.1"
    ):
        verl.install()
