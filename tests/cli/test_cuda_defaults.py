"""What a process that uses a GPU sets for CUDA and torch's allocator, and what it leaves."""

import pytest

from evenload.cli.worker_setup import set_cuda_defaults


def test_every_stream_gets_a_queue_and_memory_can_grow():
    found: dict[str, str] = {}
    set_cuda_defaults(found)
    assert found == {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_deterministic_products_have_one_workspace():
    found: dict[str, str] = {}
    set_cuda_defaults(found, deterministic=True)
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_cuda_defaults(given := {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, deterministic=True)
    assert given["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_a_user_has_set_stays(name):
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", name: "max_split_size_mb:64"}
    found = dict(given)
    set_cuda_defaults(found)
    assert found == given
