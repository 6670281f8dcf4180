"""A profile of a real stage: goes on where it was stopped, and says how it measured."""

import functools

import msgspec
import pytest
import torch

from evenload.attention.cpu_flash import CpuFlashAttention
from evenload.calibrate.profile import MIN_PASSES, PartialProfile, ProfileTask, partial_path, profile, read_partial
from evenload.cost.coefficients import CostCoefficients, read_coefficients, write_coefficients
from evenload.cost.layer_counts import POLICIES, activation_bytes_per_token
from evenload.data.hub import model_from_config
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.layout import even_layout
from gloo_pool import TIMEOUT_S
from reference_training import tiny_config
from sweeps import sweep


class _StoppedError(Exception):
    pass


def profiled(directory, sizes, stop_after=None, kind="llama", **settings):
    """A profile of a tiny model on this rank, as JSON; ends by an exception after so many passes."""
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
        partial=partial_path(directory / "cost.json"), versions={"torch": "1"},
    )  # fmt: skip
    output = []

    def on_pass(done, total):
        if done == stop_after:
            raise _StoppedError

    try:
        result = profile(stages, task, mesh, say=output.append, on_pass=on_pass)
    except _StoppedError:
        return None, output
    return msgspec.json.encode(result), output


def test_a_profile_goes_on_where_it_was_stopped(gloo_pool, tmp_path):
    """Two passes, then the process ends; a second call makes only what is missing, of the same packs."""
    gloo_pool.run(1, profiled, tmp_path, {}, 2)
    file = partial_path(tmp_path / "cost.json")
    first = msgspec.json.decode(file.read_bytes(), type=PartialProfile)
    assert len(first.passes) == 2
    ((data, output),) = gloo_pool.run(1, profiled, tmp_path, {})
    assert any("goes on from" in line and "2 passes" in line for line in output)
    second = msgspec.json.decode(file.read_bytes(), type=PartialProfile)
    assert second.passes[:2] == first.passes
    assert second.rounds == first.rounds
    result = msgspec.json.decode(data, type=CostCoefficients)
    assert result.profile is not None
    assert result.profile.passes == len(second.passes) == MIN_PASSES
    # Another task begins anew, and says so.
    _, note = read_partial(file, "another model")
    assert "is of another measurement" in note
    assert read_partial(file, "another model")[0].passes == ()
    file.write_text("{")
    assert "cannot be read" in read_partial(file, second.task)[1]


def test_a_profile_measures_what_a_run_needs(gloo_pool, tmp_path):
    """On one rank: layers, head, embedding, optimizer, copies; bytes as the cost model says; no link is made up."""
    ((data, _),) = gloo_pool.run(1, profiled, tmp_path, {})
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
def test_links_of_a_layout_are_measured(gloo_pool, tmp_path, sizes):
    """Every rank returns the same costs, with the links of the transfers that the layout makes and of no others."""
    answers = gloo_pool.run(2, profiled, tmp_path, sizes)
    assert answers[0][0] == answers[1][0]
    result = msgspec.json.decode(answers[0][0], type=CostCoefficients)
    assert result.context_hidden_share == 0, "gloo's threads share the cores that compute"
    assert (result.p2p_bandwidth_bytes_per_s is None) == ("tp" in sizes)
