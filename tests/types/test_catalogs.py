import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from cost_samples import documents
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.errors import ConfigError
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.cluster import BUILT_IN, ClusterSpec, DeviceSpec, cluster_from
from evenload.types.layout import even_layout
from evenload.types.model import MODELS


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-7b", 6.74), ("llama-13b", 13.0), ("llama-70b", 69.0), ("llama-150b", 148.2), ("wlb-550m", 0.55),
     ("wlb-30b", 32.5), ("gpt-3.35b", 3.43), ("bert-340m", 0.333), ("bert-1.36b", 1.24), ("qwen2.5-0.5b", 0.494),
     ("qwen2.5-7b", 7.62), ("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3.1-405b", 405.9), ("llama3.2-1b", 1.24),
     ("llama3.2-3b", 3.21), ("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19),
     ("qwen3-14b", 14.8), ("qwen3-32b", 32.8), ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1),
     ("mixtral-8x7b", 46.7), ("mixtral-8x22b", 140.6), ("gemma3-1b", 1.00), ("gemma3-4b", 3.884),
     ("gemma3-12b", 11.77), ("gemma3-27b", 27.02), ("qwen3.5-9b", 9.0), ("qwen3.5-35b-a3b", 34.7),
     ("gemma4-31b", 30.7), ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8), ("deepseek-v3", 671.0), ("kimi-k2", 1026.0),
     ("glm-4.5", 352.8), ("glm-4.5-air", 106.9), ("minimax-m2", 228.7), ("llama4-scout", 107.8),
     ("ministral3-3b", 3.43), ("ministral3-8b", 8.49), ("ministral3-14b", 13.5), ("olmo3-7b", 7.30),
     ("olmo3-32b", 32.2), ("nemotron-h-8b", 8.1)],
)  # fmt: skip
def test_built_in_models_have_the_published_size(name: str, billions: float) -> None:
    spec = model_from(name)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 3.35), ("qwen3-235b-a22b", 22.1), ("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.1),
     ("gpt-oss-20b", 4.19), ("gpt-oss-120b", 5.75), ("deepseek-v3", 37.5), ("kimi-k2", 32.9), ("glm-4.5", 33.6),
     ("minimax-m2", 11.0), ("llama4-scout", 17.2), ("qwen3.5-35b-a3b", 3.45)],
)  # fmt: skip
def test_experts_are_active_in_the_published_number(name: str, billions: float) -> None:
    spec = model_from(name)
    assert spec.num_active_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert ", " in spec.describe_size()
    assert spec.describe_size().endswith("B active")


@pytest.mark.parametrize("device", BUILT_IN)
def test_every_built_in_model_is_planned_on_every_built_in_cluster(device: str) -> None:
    step = documents(np.random.default_rng(0).integers(50, 3000, 24))
    cluster = cluster_from(f"{device}x8")
    for name, spec in MODELS.items():
        layout = even_layout(spec.num_layers, dp=2, pp=2, tp=2)
        planner = StepPlanner(
            spec,
            analytic_coefficients(spec, cluster, layout),
            layout,
            cluster.device.usable_bytes,
            PlanOptions(max_pack_tokens=4096, policy="replay"),
            host=host_memory(cluster),
        )
        # The largest do not fit eight devices, but what they would take is planned all the same.
        proposal = planner.propose(0, step, "best_fit")
        assert proposal.feasible or spec.num_parameters > 5e9, name
        assert proposal.plan.predicted.step_time_s > 0, name


def test_unknown_model_offers_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama-7b'"):
        model_from("lama-7b")


def test_model_from_config_json_or_its_folder(tmp_path) -> None:
    config = {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 100}
    config |= {"hidden_size": 64, "model_type": "llama"}
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert model_from(str(folder)) == model_from(str(folder / "config.json"))
    assert model_from(str(folder)).name == "my-model"
    assert model_from(str(folder)).head_dim == 16


@pytest.mark.parametrize("content", ["[]", "{", "{}"])
def test_config_that_is_no_model_is_refused(tmp_path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        model_from(str(path))


@pytest.mark.parametrize("name", ["h100x12", "h100x0", "h300x8", "a100-40x12", "nowhere.toml"])
def test_impossible_or_unknown_clusters_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        cluster_from(name)


@pytest.mark.parametrize(
    ("name", "teraflops", "gigabytes", "nvlink_gb_per_s"),
    [("h200x16", 989, 141, 400), ("b200x8", 2250, 180, 800), ("a100-40x8", 312, 40, 250)],
)
def test_devices_have_the_numbers_of_their_data_sheets(name, teraflops, gigabytes, nvlink_gb_per_s) -> None:
    cluster = cluster_from(name)
    assert cluster.name == name
    assert cluster.device.peak_flops_per_s == teraflops * 1e12
    assert cluster.device.memory_bytes == gigabytes * 1e9
    assert cluster.intra_node.bandwidth_bytes_per_s == nvlink_gb_per_s * 1e9


def test_the_example_cluster_file_is_read_and_has_every_field() -> None:
    """docs/plan.md shows it; a new field of a cluster or a device belongs into it."""
    path = Path(__file__).parents[2] / "examples" / "clusters" / "two_nodes.toml"
    cluster = cluster_from(str(path))
    assert (cluster.num_devices, cluster.device.memory_bytes) == (8, 40_000_000_000)
    written = tomllib.loads(path.read_text())
    assert set(written) == set(ClusterSpec.__struct_fields__)
    assert set(written["device"]) == set(DeviceSpec.__struct_fields__)


def test_cluster_from_toml(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    text = """name = "two"
num_nodes = 2
devices_per_node = 1
device = { name = "cpu", peak_flops_per_s = 1e11, memory_bytes = 1000000000 }
intra_node = { bandwidth_bytes_per_s = 1e10, latency_s = 1e-6 }
inter_node = { bandwidth_bytes_per_s = 1e9, latency_s = 1e-5 }
"""
    path.write_text(text)
    assert cluster_from(str(path)).num_devices == 2
    path.write_text(text.replace("num_nodes", "nodes"))
    with pytest.raises(ConfigError, match="nodes"):
        cluster_from(str(path))
