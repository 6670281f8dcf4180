"""Clusters: links of groups and devices by hand, and peaks of data sheets by what torch calls a GPU."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.cost.analytic import analytic_coefficients
from evenload.errors import ConfigError
from evenload.types.cluster import ClusterSpec, LinkSpec, cluster_from, data_sheet_flops_per_s
from evenload.types.layout import even_layout
from evenload.types.model import MODELS

H100 = cluster_from("h100x32")


def gigabytes_per_s(cluster: ClusterSpec, members: int, stride: int) -> float:
    return cluster.group_link(members, stride).bandwidth_bytes_per_s / 1e9


@pytest.mark.parametrize(
    ("members", "stride", "expected"),
    [
        (8, 1, 400),  # inside a node
        (2, 4, 400),
        (16, 1, 336),  # eight adapters of 42, below NVLink's 400
        (8, 2, 168),  # four members a node
        (4, 4, 84),
        (4, 8, 42),  # alone in their nodes
        (2, 16, 42),  # a member in every other node
    ],
)
def test_a_group_uses_an_adapter_a_member_up_to_the_speed_of_the_node(members, stride, expected) -> None:
    assert gigabytes_per_s(H100, members, stride) == expected
    assert H100.group_link(members, stride).latency_s == (5e-6 if expected == 400 else 10e-6)


@given(
    st.integers(1, 16),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 16),
    st.floats(1e9, 1e12),
    st.floats(1e9, 1e12),
)
def test_more_adapters_are_never_slower_and_never_faster_than_the_node(
    devices, members, stride, nics, inside, outside
) -> None:
    def cluster(count: int) -> ClusterSpec:
        return msgspec.structs.replace(
            H100,
            devices_per_node=devices,
            nics_per_node=count,
            intra_node=LinkSpec(bandwidth_bytes_per_s=inside, latency_s=0.0),
            inter_node=LinkSpec(bandwidth_bytes_per_s=outside, latency_s=0.0),
        )

    few, many = gigabytes_per_s(cluster(nics), members, stride), gigabytes_per_s(cluster(nics + 1), members, stride)
    assert few <= many <= inside / 1e9
    span = members * stride
    few_s, many_s = (cluster(count).device_link(span).bandwidth_bytes_per_s for count in (nics, nics + 1))
    assert few_s <= many_s <= max(inside, outside)


def test_a_node_without_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match="nics_per_node is 0"):
        msgspec.structs.replace(H100, nics_per_node=0)
    costs = analytic_coefficients(MODELS["llama-7b"], H100, even_layout(32))
    with pytest.raises(ConfigError, match="nics_per_node is 0"):
        msgspec.structs.replace(costs, nics_per_node=0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
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
