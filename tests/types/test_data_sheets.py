"""Peaks of data sheets by what torch calls a GPU."""

import pytest

from evenload.types.cluster import cluster_from, data_sheet_flops_per_s


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("A100-SXM4-40GB", 312e12),  # older drivers
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L40", 181.05e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
    ],
)
def test_names_that_torch_gives(name, peak):
    assert data_sheet_flops_per_s(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        # What begins or ends like a known name: another card of the chip, a share of one, a mobile one.
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10G",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA GB200",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla V100-SXM2-32GB",
        "Intel(R) Xeon(R), 2 threads a process",
        "",
    ],
)
def test_what_is_not_known_is_not_guessed(name):
    assert data_sheet_flops_per_s(name) is None


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("h100x8", "NVIDIA H100 80GB HBM3"),
        ("h200x8", "NVIDIA H200"),
        ("b200x8", "NVIDIA B200"),
        ("a100x8", "NVIDIA A100-SXM4-80GB"),
        ("a100-40x8", "NVIDIA A100-SXM4-40GB"),
    ],
)
def test_they_are_those_of_the_built_in_clusters(cluster, name):
    assert data_sheet_flops_per_s(name) == cluster_from(cluster).device.peak_flops_per_s
