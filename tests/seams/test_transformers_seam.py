"""transformers' `BatchRebalanceSampler` with our division: its contract, its time, and the same training."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.seams import transformers as seam
from rank_server import run_as_torchrun
from seam_cases import skewed, step_s, train_on_rank

pytest.importorskip("transformers")
import transformers
from transformers import DataCollatorWithFlattening, Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler


def steps_of(lengths, ranks, grad_accum, batch, **settings):
    """All steps of an epoch: `[step][rank][micro-batch]`, as the ranks' samplers give them."""
    of_rank = []
    for rank in range(ranks):
        sampler = BatchRebalanceSampler(lengths, batch, ranks, grad_accum, rank=rank, **settings)
        given_out = list(sampler)
        assert len(given_out) == len(sampler)
        of_rank.append(given_out)
    return [[mine[start : start + grad_accum] for mine in of_rank] for start in range(0, len(of_rank[0]), grad_accum)]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    ranks=st.integers(1, 4),
    grad_accum=st.integers(1, 3),
    each=st.integers(1, 4),
    drop_last=st.booleans(),
    max_tokens=st.sampled_from([None, 120]),
)
def test_every_rank_has_its_micro_batches_and_every_document_is_trained_once(
    lengths, ranks, grad_accum, each, drop_last, max_tokens
):
    batch = ranks * grad_accum * each
    plain = steps_of(lengths, ranks, grad_accum, batch, drop_last=drop_last)
    try:
        with seam.install(max_tokens):
            ours = steps_of(lengths, ranks, grad_accum, batch, drop_last=drop_last)
    except InfeasiblePlanError:
        assert max_tokens is not None
        return
    assert len(ours) == len(plain)
    for step, theirs in zip(ours, plain, strict=True):
        assert sorted(one for rank in step for mb in rank for one in mb) == sorted(
            one for rank in theirs for mb in rank for one in mb
        )
        for rank in step:
            assert len(rank) == grad_accum
            for micro_batch in rank:
                assert micro_batch
                assert max_tokens is None or sum(lengths[one] for one in micro_batch) <= max_tokens


@pytest.mark.parametrize(("ranks", "grad_accum", "each"), [(2, 4, 8), (8, 4, 16), (8, 1, 16), (16, 8, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_takes_no_longer_than_with_its_own_division(ranks, grad_accum, each, seed):
    lengths = skewed(np.random.default_rng(seed), ranks * grad_accum * each)
    (plain,) = steps_of(lengths, ranks, grad_accum, len(lengths))
    with seam.install():
        (ours,) = steps_of(lengths, ranks, grad_accum, len(lengths))
    assert step_s(lengths, ours) <= step_s(lengths, plain)


def test_seams_import_no_framework_before_they_are_installed():
    code = (
        "import sys\n"
        "from evenload.seams import megatron, transformers, trl\n"
        "print({'torch', 'transformers', 'trl', 'megatron', 'accelerate'} & set(sys.modules))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "set()"


def test_the_cost_may_be_that_of_a_named_model():
    lengths = skewed(np.random.default_rng(3), 64)
    with seam.install(cost="llama-7b"):
        (step,) = steps_of(lengths, 4, 2, 64)
    assert sorted(one for rank in step for micro_batch in rank for one in micro_batch) == list(range(64))


def test_a_limit_that_a_step_does_not_fit_is_said():
    with seam.install(100), pytest.raises(InfeasiblePlanError, match="8 documents of 480 tokens do not fit into 2"):
        steps_of([60] * 8, 2, 2, 8)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["transformers", "trl"])
def test_training_on_two_ranks_is_the_same(tmp_path, kind):
    """Losses of steps and weights after them; the tokens of micro-batches tell that they are divided otherwise."""
    outcomes = []
    for name, settings_ in (("plain", None), ("seam", {"max_tokens": 160})):
        (tmp_path / name).mkdir()
        run_as_torchrun(2, train_on_rank, kind, settings_, tmp_path / name)
        outcomes.append([torch.load(tmp_path / name / f"outcome-{rank}.pt", weights_only=False) for rank in range(2)])
    plain, ours = outcomes
    assert len(ours[0][0]) == 3
    torch.testing.assert_close(ours[0][0], plain[0][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[0][2], plain[0][2], rtol=1e-9, atol=1e-12)
    assert [rank[1] for rank in ours] != [rank[1] for rank in plain]
    assert [len(rank[1]) for rank in ours] == [9, 9]
    assert max(max(rank[1]) for rank in ours) <= 160


def test_it_is_installed_once_and_taken_back():
    """In a module too that has imported the class before, as this one has."""
    theirs = BatchRebalanceSampler._assign, Trainer._get_train_sampler
    installed = seam.install()
    assert BatchRebalanceSampler._assign is not theirs[0]
    with pytest.raises(ConfigError, match=r"BatchRebalanceSampler._assign is replaced already; uninstall\(\)"):
        seam.install()
    installed.uninstall()
    installed.uninstall()
    assert (BatchRebalanceSampler._assign, Trainer._get_train_sampler) == theirs
    with seam.install():
        pass
    assert (BatchRebalanceSampler._assign, Trainer._get_train_sampler) == theirs


def test_collators_that_pad_are_refused(monkeypatch):
    sampler = BatchRebalanceSampler([1, 2], 2, 1, 1)
    monkeypatch.setattr(Trainer, "_get_train_sampler", lambda self, train_dataset=None: sampler)
    pads = (
        transformers.default_data_collator,
        transformers.DataCollatorWithPadding(None),
        SimpleNamespace(padding_free=False),
    )
    keep = (DataCollatorWithFlattening(), SimpleNamespace(padding_free=True), lambda documents: documents)
    with seam.install():
        for collator in pads:
            with pytest.raises(ConfigError, match="pads documents"):
                Trainer._get_train_sampler(SimpleNamespace(data_collator=collator))
        for collator in keep:
            assert Trainer._get_train_sampler(SimpleNamespace(data_collator=collator)) is sampler


def test_other_releases_are_refused(monkeypatch):
    monkeypatch.setattr("evenload.seams.replacing.version", lambda package: "5.2.3")
    with pytest.raises(ConfigError, match=r"transformers is 5.2.3, this seam was tested with 5.23 or 5.24"):
        seam.install()
