"""Peaks of data sheets by what torch calls a GPU."""

import pytest

from evenload.types.cluster_catalog import cluster_from, data_sheet_flops_per_s


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA GB200", None),
        ("NVIDIA A10", None),
        ("Intel(R) Xeon(R), 2 threads a process", None),
    ],
)
def test_names_that_torch_gives(name, peak):
    assert data_sheet_flops_per_s(name) == peak


@pytest.mark.parametrize("cluster", ["h100x8", "h200x8", "b200x8", "a100x8", "a100-40x8"])
def test_they_are_those_of_the_built_in_clusters(cluster):
    device = cluster_from(cluster).device
    assert data_sheet_flops_per_s(device.name.replace("-", " ")) == device.peak_flops_per_s
