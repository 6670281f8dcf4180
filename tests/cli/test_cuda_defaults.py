"""What a process that uses a GPU sets for CUDA and torch's allocator, and what it leaves."""

import pytest

from evenload.cli.worker_setup import set_cuda_defaults, what_is_timed
from evenload.config import sections
from evenload.config.train_config import read_train_config

QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("given", "deterministic", "expected"),
    [
        ({}, False, QUEUES | GROWING),
        ({}, True, QUEUES | GROWING | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, True, QUEUES | GROWING | {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
        *(
            ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", name: "max_split_size_mb:64"}, False, {})
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        ),
    ],
)
def test_streams_get_queues_memory_can_grow_and_what_a_user_has_set_stays(given, deterministic, expected):
    result = dict(given)
    set_cuda_defaults(result, deterministic=deterministic)
    assert result == given | expected


def test_costs_of_a_gpu_are_kept_for_runs_with_packs_as_large(monkeypatch):
    """Those of a small trial know nothing of the packs of the run behind it."""
    data = {"sources": ["corpus"], "max_document_tokens": 4096, "batch_documents": 6}
    tree = {"model": {"path": "model"}, "data": data, "train": {"output_dir": "run", "steps": 5}}

    def name(*overrides: str) -> str:
        return what_is_timed(read_train_config(tree, overrides))

    monkeypatch.setattr(sections, "version", lambda name: "0.8.5")
    on_gpu, larger = "train.device=cuda", "plan.options.max_pack_tokens"
    assert name() == name(f"{larger}=131072") == "auto"
    assert name(on_gpu) == "auto, liger, packs of 4096 tokens, documents of 4096"
    assert name(on_gpu, "train.kernels=torch") == "auto, packs of 4096 tokens, documents of 4096"
    assert name(on_gpu, f"{larger}=16384") == name(on_gpu, f"{larger}=20000") != name(on_gpu, f"{larger}=10000")
    assert name(on_gpu, "data.max_document_tokens=8192", f"{larger}=4096") != name(on_gpu)
    assert name(on_gpu, "train.deterministic=true") != name(on_gpu)
