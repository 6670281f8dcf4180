"""Packs that a GPU is timed with at the start of a run."""

from types import SimpleNamespace

import pytest
import torch

from cost_samples import sample_model
from evenload.calibrate.calibrate import _rounds
from evenload.calibrate.rounds import QUICK_ROUNDS, longest_of, rounds_up_to


def tokens_of(packs):
    return [sum(stop - start for _, start, stop in pack) for pack in packs]


@pytest.mark.parametrize(("pack", "document"), [(32_768, 32_768), (65_536, 4096), (20_000, 300), (9000, 100_000)])
def test_they_go_up_to_the_largest_pack_of_the_run_and_never_beyond(pack, document):
    rounds = rounds_up_to(pack, document)
    largest = [max(tokens_of(packs)) for packs in rounds]
    assert pack / 2 * 0.98 < max(largest) <= pack
    assert all(longest_of(packs) <= document for packs in rounds)
    assert len(set(rounds)) == len(rounds)


def test_documents_as_long_as_packs_come_whole_and_cut():
    whole, cut = ([8192], [7168, 1024])
    assert [tokens_of(packs) for packs in rounds_up_to(8192, 8192)] == [[8192], whole, cut]
    assert longest_of(rounds_up_to(8192, 8192)[0]) == 1024


def test_runs_of_small_packs_have_no_more_than_others():
    assert rounds_up_to(max(map(longest_of, QUICK_ROUNDS)), 4096) == ()


@pytest.mark.parametrize(
    ("device", "gigabytes", "largest"), [("cpu", 0, 4096), ("cuda", 80, 32_768), ("cuda", 3, 8192)]
)
def test_a_gpu_is_timed_with_the_packs_of_its_run_that_fit_it(monkeypatch, device, gigabytes, largest):
    memory = SimpleNamespace(total_memory=gigabytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    model = sample_model(hidden_size=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn_hidden_size=2048)
    stage = SimpleNamespace(device=SimpleNamespace(type=device), model=SimpleNamespace(layers={0: None}))
    mesh = SimpleNamespace(layout=SimpleNamespace(tp=1))
    found = _rounds(stage, model, mesh, 32_768, 32_768)
    assert found[: len(QUICK_ROUNDS)] == list(QUICK_ROUNDS)
    assert max(max(tokens_of(packs)) for packs in found) == largest
