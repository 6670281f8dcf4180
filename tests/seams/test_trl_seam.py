"""TRL's `TokenBudgetBatcher` with our division: its contract, its time, and TRL's own loss of every step."""

import math
import os
import queue
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from evenload.errors import ConfigError
from evenload.seams import trl as seam
from seam_cases import LINEAR_S, MICRO_BATCH_S, QUADRATIC_S

pytest.importorskip("trl")
from accelerate.data_loader import prepare_data_loader

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.async_grpo import async_grpo_trainer as grpo


def samples_of(random, num_prompts, each, longest, shared=4):
    """Completions of prompts: samples of a prompt begin alike; the queue mixes a few prompts."""
    made = []
    for prompt in range(num_prompts):
        head = random.integers(0, 50, random.integers(1, shared + 1))
        for _ in range(random.integers(1, each + 1)):
            size = int(np.clip(random.lognormal(math.log(longest) - 2.5, 1.2), 1, longest - len(head)))
            tokens = np.concatenate((head, random.integers(0, 50, size)))
            made.append(
                {
                    "input_ids": torch.tensor(tokens),
                    "completion_mask": torch.tensor([0] * len(head) + [1] * size),
                    "old_log_probs": torch.tensor(random.normal(-2, 0.1, len(tokens))),
                    "advantage": float(random.normal()),
                    "group_id": prompt,
                    "metrics": {"reward": 1.0},
                    "number": len(made),
                }
            )
    order = np.argsort(np.arange(len(made)) + random.uniform(0, 2 * each, len(made)))
    return [made[at] for at in order]


def batches_of(samples, processes, budget, count):
    """Micro-batches as the trainer's loader would take them."""
    batcher = grpo.TokenBudgetBatcher(samples, processes, budget, defaultdict(list))
    batcher.micro_batches_of_step = count
    return list(batcher)


def numbers(rows):
    return sorted(sample["number"] for row in rows for sample in row.samples)


def seconds(step):
    """The judge, with the attention pairs of a row that shares tokens: each of its tokens sees those before it."""
    total = 0.0
    for rows in step:
        works = [LINEAR_S * len(row.tokens) + QUADRATIC_S * (2 * row.load - len(row.tokens)) for row in rows]
        total += max(works) + MICRO_BATCH_S
    return total


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), processes=st.integers(1, 4), count=st.integers(1, 4), budget=st.integers(40, 90))
def test_steps_hold_the_same_samples_in_rows_that_keep_the_budget(seed, processes, count, budget):
    samples = samples_of(np.random.default_rng(seed), num_prompts=24, each=4, longest=40)
    plain = batches_of(samples, processes, budget, count)
    with seam.install():
        ours = batches_of(samples, processes, budget, count)
    assert len(ours) == len(plain)
    for start in range(0, len(plain), count):
        step, theirs = ours[start : start + count], plain[start : start + count]
        assert sorted(at for rows in step for at in numbers(rows)) == sorted(
            at for rows in theirs for at in numbers(rows)
        )
        assert seconds(step) <= seconds(theirs) * (1 + 1e-9)
        for rows in step:
            assert len(rows) == processes
            for row in rows:
                assert row.samples
                assert len(row.tokens) <= budget
                assert row.trained <= budget


@settings(max_examples=100)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6))
def test_the_size_of_samples_is_that_of_trls_row(texts):
    samples = [
        {"input_ids": torch.tensor(text), "completion_mask": torch.ones(len(text), dtype=torch.int64), "group_id": 0}
        for text in texts
    ]
    row = grpo.TreeRow()
    for sample in samples:
        row.add(sample)
    assert seam._size(samples) == (len(row.tokens), row.trained, row.load)


class _Model:
    """Log probabilities that depend on a token and on what comes before it in its document alone."""

    def __call__(self, input_ids, position_ids, shift_labels, **_):
        values = -1.0 - ((input_ids * 31 + position_ids * 17 + shift_labels * 7) % 13).double() / 50
        return SimpleNamespace(log_probs=values, entropy=torch.zeros_like(values))


def loss_of(step):
    """The loss of an optimizer step by the trainer's collator and `compute_loss`, of all processes."""
    processes = len(step[0])
    accelerator = SimpleNamespace(num_processes=processes, reduce=lambda one, reduction: one, gather=lambda one: one)
    trainer = SimpleNamespace(
        **{"accelerator": accelerator, "aux_loss_enabled": False, "epsilon_low": 0.2, "epsilon_high": 0.2},
        **{"current_gradient_accumulation_steps": len(step), "_metrics": {"train": defaultdict(list)}},
        **dict.fromkeys(("_step_forward_tokens", "_step_trained_tokens", "_step_seq_len_weighted"), 0.0),
        **dict.fromkeys(("_step_samples", "_step_forward_s"), 0.0),
    )
    collate = grpo.DataCollatorForRollout(0, processes)
    total = 0.0
    for rows in step:
        batch = collate.torch_call([rows])
        for rank in range(processes):
            mine = {name: value[rank : rank + 1] for name, value in batch.items()}
            total += float(grpo.AsyncGRPOTrainer.compute_loss(trainer, _Model(), mine)) / processes
    return total


@pytest.mark.parametrize("processes", [2, 3])
def test_the_loss_of_a_step_is_that_without_the_seam(processes):
    samples = samples_of(np.random.default_rng(7), num_prompts=40, each=4, longest=60)
    plain = batches_of(samples, processes, 80, 4)
    with seam.install():
        ours = batches_of(samples, processes, 80, 4)
    different = 0
    for start in range(0, len(plain) - 3, 4):
        step, theirs = ours[start : start + 4], plain[start : start + 4]
        different += list(map(numbers, step)) != list(map(numbers, theirs))
        assert loss_of(step) == pytest.approx(loss_of(theirs), rel=1e-6, abs=1e-7)
    assert different


def test_the_trainers_loader_divides_whole_steps(monkeypatch):
    """`get_train_dataloader` of TRL, on a trainer that has only what it reads; accelerate's loader has its data set."""
    given = DataLoader(grpo.TokenBudgetBatcher([], 2, 9, {}), batch_size=2)
    spread = {"num_processes": 2, "process_index": 0, "split_batches": True, "dispatch_batches": True}
    assert prepare_data_loader(given, "cpu", put_on_device=True, **spread).dataset is given.dataset
    samples = samples_of(np.random.default_rng(1), num_prompts=30, each=3, longest=60)
    monkeypatch.setattr(grpo, "RolloutQueueDataset", lambda **_: samples)
    monkeypatch.setattr(grpo, "DataCollatorForRollout", lambda *_, **__: lambda examples: examples[0])

    def trainer(count):
        accelerator = SimpleNamespace(num_processes=2, is_main_process=True, prepare=lambda loader: loader)
        names = ("heartbeat_stale_after_s", "max_staleness", "report_to")
        args = SimpleNamespace(token_budget=90, gradient_accumulation_steps=count, **dict.fromkeys(names))
        return SimpleNamespace(
            **{"accelerator": accelerator, "args": args, "rollout_queue": queue.Queue(), "_trained_groups": set()},
            **{"rollout_worker": SimpleNamespace(check_health=None), "_metrics": {"train": defaultdict(list)}},
            processing_class=SimpleNamespace(pad_token_id=0),
        )

    with seam.install():
        loader = grpo.AsyncGRPOTrainer.get_train_dataloader(trainer(4))
        ours = [numbers(rows) for rows in loader]
        expected = [numbers(rows) for rows in batches_of(samples, 2, 90, 4)]
    plain = [numbers(rows) for rows in grpo.AsyncGRPOTrainer.get_train_dataloader(trainer(4))]
    assert ours == expected
    assert len(ours) == len(plain)
    assert ours != plain


def test_it_is_installed_once_and_taken_back(monkeypatch):
    names = ((grpo.TokenBudgetBatcher, "__iter__"), (grpo.AsyncGRPOTrainer, "get_train_dataloader"))
    theirs = [vars(owner)[name] for owner, name in names]
    with seam.install():
        assert all(vars(owner)[name] is not one for (owner, name), one in zip(names, theirs, strict=True))
        with pytest.raises(ConfigError, match="is replaced already"):
            seam.install()
    assert [vars(owner)[name] for owner, name in names] == theirs
    monkeypatch.setattr("evenload.seams.replacing.version", lambda package: "1.17.0")
    with pytest.raises(ConfigError, match=r"trl is 1.17.0, this seam was tested with 1.16"):
        seam.install()
