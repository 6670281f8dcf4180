"""A profile of a real stage: measures what a run needs, and says how."""

import functools

import msgspec
import pytest
import torch

from evenload.attention.backends import CpuFlashAttention
from evenload.calibrate.profile import MIN_PASSES, ProfileTask, profile
from evenload.cost.coefficients import CostCoefficients, read_coefficients, write_coefficients
from evenload.cost.layer_counts import POLICIES, activation_bytes_per_token
from evenload.data.hub import model_from_config
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S
from reference_training import tiny_config
from sweeps import sweep


def profiled(sizes, kind="llama", **settings):
    """A profile of a tiny model on this rank, as JSON."""
    layout = even_layout(4, **sizes)
    mesh = create_meshes([layout], torch.device("cpu"), TIMEOUT_S).start
    config = tiny_config(kind, **settings)
    build = functools.partial(
        build_stage_model, config, dtype=torch.float32, device=mesh.device, weights=None, seed=0, tp_rank=mesh.tp_rank
    )
    models = build_rank_models(layout, mesh.pp_rank, build)
    flatten_units(tuple(models.values()), mesh.data_size)
    stages = {index: PipelineStage(part, CpuFlashAttention(), mesh.tensor) for index, part in models.items()}
    model = model_from_config(config.to_dict(), "tiny", 4)
    task = ProfileTask(
        model=model, timed=model, layers=4 // layout.pp, device_name="this machine", dtype="float32",
        longest=256, budget_s=0.1, free_bytes=1 << 30, before_bytes=0, static_bytes=1, demand=100.0,
        versions={"torch": "1"},
    )  # fmt: skip
    output, done = [], []
    result = profile(stages, task, mesh, say=output.append, on_pass=lambda passes, _: done.append(passes))
    assert done == list(range(1, MIN_PASSES + 1)), "the budget is over at once"
    assert "rounds of packs" in output[0]
    return msgspec.json.encode(result)


def test_a_profile_measures_what_a_run_needs(gloo_pool, tmp_path):
    """On one rank: layers, head, embedding, optimizer, copies; bytes as the cost model says; no link is made up."""
    (data,) = gloo_pool.run(1, profiled, {})
    result = msgspec.json.decode(data, type=CostCoefficients)
    record = result.profile
    assert record is not None
    assert result.embedding_s_per_token > 0
    assert result.head_s_per_token > 0
    assert result.optimizer_s_per_parameter > 0
    assert result.copy_s_per_byte > 0
    assert result.p2p_bandwidth_bytes_per_s is None
    assert result.intra_node is None
    assert result.measured_on is not None
    model = result.measured_on.model
    assert record.activation_bytes == {one: activation_bytes_per_token(model, one) for one in POLICIES}
    assert record.forward.packs == record.backward.packs == len(record.packs) // 2
    assert record.timings >= MIN_PASSES * len(record.packs)
    # It can be written, read again, and tells when it was changed.
    write_coefficients(tmp_path / "cost.json", result)
    again = read_coefficients(tmp_path / "cost.json")
    assert again == result
    assert not again.is_changed
    faster = msgspec.structs.replace(again.forward, linear_s_per_token=1e-9)
    assert msgspec.structs.replace(again, forward=faster).is_changed


@pytest.mark.parametrize("sizes", sweep([{"cp": 2}, {"pp": 2}, {"tp": 2}], 2), ids=str)
def test_links_of_a_layout_are_measured(gloo_pool, sizes):
    """Every rank returns the same costs, with the links of the transfers that the layout makes and of no others."""
    answers = gloo_pool.run(2, profiled, sizes)
    assert answers[0] == answers[1]
    result = msgspec.json.decode(answers[0], type=CostCoefficients)
    assert result.context_hidden_share == 0, "gloo's threads share the cores that compute"
    assert (result.p2p_bandwidth_bytes_per_s is None) == ("tp" in sizes)
