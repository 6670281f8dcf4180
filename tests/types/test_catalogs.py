import json

import pytest

from evenload.errors import ConfigError
from evenload.types.cluster_catalog import cluster_from
from evenload.types.model_catalog import MODELS, model_from


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-7b", 6.74), ("llama-13b", 13.0), ("llama-70b", 69.0), ("llama-150b", 148.2), ("wlb-550m", 0.55),
     ("wlb-30b", 32.5), ("gpt-3.35b", 3.43), ("bert-340m", 0.333), ("bert-1.36b", 1.24), ("qwen2.5-0.5b", 0.494),
     ("qwen2.5-7b", 7.62)],
)  # fmt: skip
def test_built_in_models_have_the_published_size(name: str, billions: float) -> None:
    spec = model_from(name)
    copies = 1 if spec.tied_embeddings else 2
    parameters = spec.num_layers * spec.stored_parameters_per_layer + copies * spec.embedding_parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_encoders_are_bidirectional() -> None:
    assert [name for name, spec in MODELS.items() if not spec.causal] == ["bert-340m", "bert-1.36b"]


def test_unknown_model_offers_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama-7b'"):
        model_from("lama-7b")


def test_model_from_config_json_or_its_folder(tmp_path) -> None:
    config = {
        "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128,
        "vocab_size": 100, "model_type": "llama",
    }  # fmt: skip
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


def test_built_in_clusters_fill_nodes_of_eight() -> None:
    assert (cluster_from("h100x32").num_nodes, cluster_from("h100x32").devices_per_node) == (4, 8)
    assert (cluster_from("a100x4").num_nodes, cluster_from("a100x4").devices_per_node) == (1, 4)
    assert cluster_from("a100x4").device.peak_flops_per_s == 312e12


@pytest.mark.parametrize("name", ["h100x12", "h100x0", "h200x8", "nowhere.toml"])
def test_impossible_or_unknown_clusters_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        cluster_from(name)


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
