"""What costs hold for, which are refused, and those of data sheets."""

import msgspec
import pytest

from cost_samples import reduction_seconds, sample_coefficients, sample_model
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import (
    CostCoefficients,
    MeasuredOn,
    PassCoefficients,
    read_coefficients,
    write_coefficients,
)
from evenload.cost.pack_cost import PackCosts
from evenload.cost.validity import fill_between_layouts, fill_from_cluster, missing_costs, require_complete
from evenload.data.hub import model_from
from evenload.errors import ConfigError
from evenload.types.cluster import LinkSpec, cluster_from
from evenload.types.layout import ParallelLayout, even_layout


def test_cost_file_round_trips(tmp_path) -> None:
    path = tmp_path / "cost.json"
    write_coefficients(path, sample_coefficients(attention_tile=128))
    assert read_coefficients(path) == sample_coefficients(attention_tile=128)


def test_a_cost_file_of_an_earlier_version_names_the_sizes_of_its_layers(tmp_path) -> None:
    sizes = {"name": "tiny", "num_layers": 3, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    sizes |= {"ffn_hidden_size": 16, "vocab_size": 32, "sliding_windows": [0, 16, 16]}
    tree = msgspec.to_builtins(sample_coefficients())
    tree["measured_on"] = {"model": sizes, "dp": 1, "cp": 1, "pp": 1, "tp": 1}
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(tree))
    measured = read_coefficients(tmp_path / "cost.json").measured_on
    assert measured is not None
    assert measured.model == sample_model(sliding_windows=(0, 16, 16))
    tree["measured_on"]["model"]["heads"] = 2
    (tmp_path / "cost.json").write_bytes(msgspec.json.encode(tree))
    with pytest.raises(ConfigError, match="unknown field `heads`"):
        read_coefficients(tmp_path / "cost.json")


def test_cost_files_with_unknown_fields_and_missing_ones_are_refused(tmp_path) -> None:
    """A misspelt coefficient must not silently become its default 0."""
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(sample_coefficients()), "head_s": 1.0}))
    with pytest.raises(ConfigError, match="head_s"):
        read_coefficients(path)
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        read_coefficients(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"head_s_per_token": -1.0},
        {"p2p_bandwidth_bytes_per_s": 0.0},
        {"attention_tile": 0},
        {"devices_per_node": 0},
        {"peak_flops_per_s": 0.0},
        {"copy_s_per_byte": -1.0},
        {"weight_share": 1.5},
        {"forward": PassCoefficients(linear_s_per_token=float("nan"), attention_s_per_pair=0.0)},
    ],
)
def test_impossible_coefficients_are_refused(changes) -> None:
    with pytest.raises(ConfigError):
        sample_coefficients(**changes)


LINK = LinkSpec(bandwidth_bytes_per_s=7e9, latency_s=1e-6)
CLUSTER = cluster_from("h100x32")
MODEL = sample_model(num_heads=4, num_kv_heads=4, head_dim=2, num_layers=8)


def measured(dp: int = 1, cp: int = 1, pp: int = 1, tp: int = 1, **changes) -> CostCoefficients:
    """As a calibration on so many devices leaves them: nothing is known of what it did not send over."""
    world_size, links = dp * cp * pp * tp, {}
    if world_size == 1 or (pp == 1 and dp * cp == 1):
        links |= {"p2p_bandwidth_bytes_per_s": None, "p2p_latency_s": 0.0}
    if dp * cp == 1:
        links |= {"reduce_bandwidth_bytes_per_s": None, "reduce_latency_s": 0.0}
    if cp * tp > 1:
        links["intra_node"] = LINK
    on = MeasuredOn(model=MODEL, dp=dp, cp=cp, pp=pp, tp=tp)
    of_file = {"devices_per_node": world_size, "measured_on": on}
    return sample_coefficients(**{**links, **of_file, **changes})


def layout(**sizes: int) -> ParallelLayout:
    return even_layout(MODEL.num_layers, **sizes)


@pytest.mark.parametrize(
    ("costs", "sizes", "lacks"),
    [
        (measured(), {}, ()),
        (measured(), {"dp": 2}, ("reduction link",)),
        (measured(), {"pp": 2}, ("pipeline link",)),
        (measured(), {"tp": 2}, ("group link",)),
        (measured(), {"cp": 2}, ("reduction link", "group link")),
        (measured(dp=2), {"dp": 2}, ()),
        (measured(dp=2), {"pp": 2}, ()),
        (measured(dp=2), {"dp": 4}, ("reduction link",)),
        (measured(pp=2), {"dp": 2, "pp": 2}, ("pipeline link", "reduction link")),
        (measured(tp=2), {"tp": 2}, ()),
        (measured(tp=2), {}, ("layers",)),
        (measured(tp=2), {"tp": 4}, ("layers", "group link")),
        (measured(dp=4, cp=2), {"dp": 2, "cp": 2}, ()),
    ],
    ids=range(13),
)
def test_what_a_measurement_lacks_for_a_layout(costs, sizes, lacks) -> None:
    assert missing_costs(costs, layout(**sizes)) == lacks


def test_links_that_are_not_known_are_refused_rather_than_free() -> None:
    """Without this check one device's cost file made 32 replicas reduce their gradients in no time."""
    costs = PackCosts(MODEL, measured(), layout(dp=2))
    with pytest.raises(ConfigError, match="reduce_bandwidth_bytes_per_s"):
        reduction_seconds(costs)
    assert reduction_seconds(PackCosts(MODEL, measured(), layout())) == 0.0
    with pytest.raises(ConfigError, match="p2p_bandwidth_bytes_per_s"):
        _ = PackCosts(MODEL, measured(), layout(pp=2)).native


def test_another_model_is_refused_with_both_names_and_the_fields() -> None:
    other = msgspec.structs.replace(MODEL, name="big", hidden_size=16, bytes_per_element=4)
    with pytest.raises(ConfigError) as error:
        require_complete(measured(), other, layout(), "cost file x.json")
    for part in ("x.json", "tiny", "big", "hidden_size 8 there and 16 here", "bytes_per_element 2 there and 4 here"):
        assert part in str(error.value)


def test_a_layout_that_is_not_covered_is_refused_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"one device.*dp=4 pp=2.*between pipeline stages and the reduction"):
        require_complete(measured(), MODEL, layout(dp=4, pp=2), "cost file x.json")
    with pytest.raises(ConfigError, match="measured under tp=2"):
        require_complete(measured(tp=2), MODEL, layout(), "cost file x.json")


def test_missing_links_are_the_clusters_and_said_by_name() -> None:
    wide = layout(dp=8, pp=4)
    result, notes = fill_from_cluster(measured(), MODEL, wide, CLUSTER, "cost file x.json")
    assert result.forward == measured().forward
    assert (result.p2p_bandwidth_bytes_per_s, result.reduce_bandwidth_bytes_per_s) == (42e9, 400e9)
    assert (result.intra_node, result.inter_node) == (CLUSTER.intra_node, CLUSTER.inter_node)
    assert result.group_link(8, stride=1) == CLUSTER.intra_node
    # Eight adapters of a node at once: what all replicas of two nodes get; one each at tp 8.
    assert result.group_link(16, stride=1).bandwidth_bytes_per_s == 8 * 42e9
    assert result.group_link(2, stride=8).bandwidth_bytes_per_s == 42e9
    assert any("pipeline stages over 32 devices" in note and "42 GB/s" in note for note in notes)
    assert any("reduction of gradients over 8 devices" in note for note in notes)


def test_links_between_the_same_processes_stand_for_each_other_and_say_so() -> None:
    """A run measured in a pipeline knows no reduction; it would not be free in another layout."""
    costs = msgspec.structs.replace(
        measured(pp=4), p2p_bandwidth_bytes_per_s=500.0, p2p_latency_s=0.125, reduce_bandwidth_bytes_per_s=None,
        intra_node=None, devices_per_node=1,
    )  # fmt: skip
    result, notes = fill_between_layouts(costs, layout(dp=2, pp=2))
    assert (result.reduce_bandwidth_bytes_per_s, result.reduce_latency_s) == (500.0, 0.125)
    assert result.device_link(leaves_node=False) == LinkSpec(bandwidth_bytes_per_s=500.0, latency_s=0.125)
    assert result.devices_per_node == 4
    assert [note.split(" not measured: taken from ")[0] for note in notes] == [
        "the reduction of gradients", "transfers inside groups and of a switch of layout"
    ]  # fmt: skip
    assert all("taken from transfers between stages" in note for note in notes)
    # What was measured stays.
    assert (result.p2p_bandwidth_bytes_per_s, result.forward) == (500.0, costs.forward)
    whole = msgspec.structs.replace(costs, reduce_bandwidth_bytes_per_s=7.0, intra_node=LINK)
    assert fill_between_layouts(whole, layout(dp=4)) == (whole, ())
    ring = msgspec.structs.replace(costs, p2p_bandwidth_bytes_per_s=None, reduce_bandwidth_bytes_per_s=7.0)
    assert fill_between_layouts(ring, layout(pp=4))[0].p2p_bandwidth_bytes_per_s == 7.0


def test_analytic_coefficients_equal_hand_arithmetic_for_llama_7b() -> None:
    model, cluster = model_from("llama-7b"), cluster_from("h100x32")
    result = analytic_coefficients(model, cluster, even_layout(32, dp=4, pp=8))
    weights = 4 * 4096 * 4096 + 3 * 4096 * 11008
    matmul = 989e12 * 0.65
    assert result.forward.linear_s_per_token == pytest.approx(2 * weights / matmul)
    assert result.backward.linear_s_per_token == pytest.approx(4 * weights / matmul)
    assert result.forward.attention_s_per_pair == pytest.approx(4 * 4096 / (989e12 * 0.37))
    assert result.backward.attention_s_per_pair == pytest.approx(10 * 4096 / (989e12 * 0.33))
    assert result.forward.pack_s == pytest.approx(20e-6 + 256 * 2 * weights / matmul)
    assert result.head_s_per_token == pytest.approx(6 * 4096 * 32000 / matmul)
    # 32 devices leave a node, so stages talk over the NIC; 4 data ranks are neighbours inside one.
    assert result.p2p_bandwidth_bytes_per_s == 42e9
    assert result.reduce_bandwidth_bytes_per_s == 400e9


def test_layout_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 16 devices"):
        analytic_coefficients(model_from("llama-7b"), cluster_from("h100x8"), even_layout(32, dp=4, pp=4))


def test_attention_is_as_fast_as_the_kernels_that_run() -> None:
    """torch's FlashAttention 2 reaches half of what 3 does on an H100."""
    model, cluster = model_from("llama-7b"), cluster_from("h100x8")
    own, third, other = (
        analytic_coefficients(model, cluster, even_layout(32), backend)
        for backend in ("auto", "varlen_cuda_fa3", "varlen_cuda_fa4")
    )
    assert own.forward.attention_s_per_pair / third.forward.attention_s_per_pair == pytest.approx(0.68 / 0.37)
    assert own.backward.attention_s_per_pair / third.backward.attention_s_per_pair == pytest.approx(0.56 / 0.33)
    assert other == own  # not known of this device
    assert own.forward.linear_s_per_token == third.forward.linear_s_per_token


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"do not divide over tp=3; they do over tp=1, 2, 4, 8, 16, 32$"):
        analytic_coefficients(model_from("llama-7b"), cluster_from("h100x8"), even_layout(32, tp=3))
    # 2 key/value heads, which several ranks may hold copies of.
    with pytest.raises(ConfigError, match=r"do not divide over tp=4; they do over tp=1, 2, 14$"):
        analytic_coefficients(model_from("qwen2.5-0.5b"), cluster_from("h100x8"), even_layout(24, tp=4))
