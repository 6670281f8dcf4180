"""What a step takes on an engine: as Evenload's runtime where nothing differs, and by hand where something does."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import BesideCompute
from evenload.engines.catalog import ENGINES
from evenload.engines.pass_gathers import beside_seconds
from evenload.engines.price import engine_costs, engine_price
from evenload.engines.profile import EngineProfile, EngineTiming
from evenload.engines.projection import StepShape
from evenload.plan.planner import Proposal, StepPlanner
from evenload.runtime.config.config_keys import plan_options
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout

LINK = LinkSpec(bandwidth_bytes_per_s=1000.0, latency_s=0.25)
AS_OURS = EngineProfile(
    name="ours",
    title="runs as Evenload's runtime",
    formats=("pack",),
    equal_counts=False,
    context_parallel="group",
    schedules=("1f1b",),
    shards="optimizer",
    timing=EngineTiming(weights="step", sums_beside=True),
)


def proposed(lengths, strategy="balanced", *, coefficients=None, **sizes) -> Proposal:
    layout = even_layout(4, **{"dp": 2, **sizes})
    found = coefficients or sample_coefficients(intra_node=LINK, inter_node=LINK, devices_per_node=8)
    options = plan_options({"max_pack_tokens": 64, "candidates": 3, "dp_merge": False, "policy": "replay"})
    planner = StepPlanner(sample_model(num_layers=4), found, layout, None, options)
    documents = tuple(Document(doc_id=i, num_tokens=int(n), num_label_tokens=int(n) - 1) for i, n in enumerate(lengths))
    return planner.propose(0, documents, strategy)


def price(found: Proposal, profile: EngineProfile, shape: StepShape | None = None):
    return engine_price(found.plan, profile, found.costs, shape)


def altered(profile: EngineProfile, **timing) -> EngineProfile:
    return msgspec.structs.replace(profile, timing=msgspec.structs.replace(profile.timing, **timing))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    strategy=st.sampled_from(["balanced", "best_fit", "fixed_greedy", "wlb"]),
    sizes=st.sampled_from([{}, {"dp": 1}, {"pp": 2}, {"dp": 1, "pp": 4}, {"tp": 2}]),
    beside=st.sampled_from([None, BesideCompute(stretch=1.5, slowdown=0.3)]),
)
def test_an_engine_that_runs_as_we_do_takes_what_we_predict(lengths, strategy, sizes, beside):
    coefficients = sample_coefficients(intra_node=LINK, inter_node=LINK, devices_per_node=8, reduction_beside=beside)
    found = proposed(lengths, strategy, coefficients=coefficients, **sizes)
    ours = price(found, AS_OURS)
    assert ours.step_time_s == pytest.approx(found.plan.predicted.step_time_s, rel=1e-12)
    assert ours.idle_fraction == pytest.approx(found.bubble_fraction, abs=1e-12)
    assert ours.packs_s == pytest.approx(max(found.plan.predicted.per_replica_s), rel=1e-12)


def test_a_sender_that_computes_nothing_meanwhile():
    found = proposed([10], dp=1, pp=2)
    (forward,), (backward,) = found.plan.times[0].forward_s, found.plan.times[0].backward_s
    (p2p_f,), (p2p_b,) = found.plan.times[0].p2p_forward_s, found.plan.times[0].p2p_backward_s
    # One micro-batch: nothing else could run, so blocking costs nothing; telling the shape costs a latency each way.
    alone_s = sum(forward) + sum(backward) + p2p_f + p2p_b
    assert price(found, altered(AS_OURS, sends_block=True)).packs_s == pytest.approx(alone_s)
    assert price(found, altered(AS_OURS, shape_exchange=True)).packs_s == pytest.approx(alone_s + 2 * 0.5)


def test_two_micro_batches_wait_for_a_blocked_sender():
    found = proposed([64, 64], "best_fit", dp=1, pp=2)
    times = found.plan.times[0]
    (first, second), p2p_s = times.forward_s[0], times.p2p_forward_s[0]
    free, blocked = price(found, AS_OURS), price(found, altered(AS_OURS, sends_block=True))
    assert blocked.packs_s > free.packs_s
    # Rank 0: F0 send F1 send ..., so its second send ends after both forwards and both transfers.
    assert 2 * (first + p2p_s) < blocked.packs_s
    assert second > 0


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=16))
def test_waiting_for_each_other_in_every_micro_batch_is_never_faster(lengths):
    found = proposed(lengths, "best_fit", dp=3)
    sharded = msgspec.structs.replace(altered(AS_OURS, weights="pass"), equal_counts=True)
    waiting = price(found, sharded)
    alone = price(found, msgspec.structs.replace(altered(AS_OURS, weights="never"), equal_counts=True))
    assert waiting.packs_s >= alone.packs_s * (1 - 1e-12)
    assert waiting.micro_batches == alone.micro_batches


def test_gathers_of_a_pass_by_hand():
    """Nothing hides a gather here, so every pass takes its compute and the gathers of its units."""
    found = proposed([40, 40], "best_fit", dp=2)
    sharded = msgspec.structs.replace(altered(AS_OURS, weights="pass"), equal_counts=True)
    model, coefficients = found.costs.model, found.costs.coefficients
    layer, embedding = 192 + 384 + 16, 256
    assert model.num_layers == 4

    def gather_s(parameters: int, buffers: int) -> float:
        return coefficients.ring_seconds(model.bytes_per_element * parameters, 2, buffers, "gather")

    layers_s = 4 * gather_s(layer, 2)
    head_s = gather_s(embedding + 8, 2)
    passes_s = gather_s(embedding, 1) + layers_s + (head_s + layers_s + gather_s(embedding, 1))
    times = found.plan.times[0]
    compute_s = times.forward_s[0][0] + times.backward_s[0][0]
    assert price(found, sharded).packs_s == pytest.approx(compute_s + passes_s, rel=1e-9)


def test_a_transfer_beside_compute_by_hand():
    beside = BesideCompute(stretch=2.0, slowdown=0.25)
    compute_s = np.array([30.0, 3.0, 0.0])
    # 4 s alone are 8 s beside, in which 6 of 30 s are computed; 3 s of compute take 4 s, and 2 of 4 s are left then.
    assert beside_seconds(compute_s, 4.0, beside).tolist() == pytest.approx([32.0, 6.0, 4.0])
    assert beside_seconds(compute_s, 4.0, None).tolist() == [34.0, 7.0, 4.0]
    assert beside_seconds(compute_s, 4.0, BesideCompute(stretch=1.0, slowdown=1.0)).tolist() == [34.0, 7.0, 4.0]
    assert beside_seconds(compute_s, 0.0, beside).tolist() == compute_s.tolist()


def test_an_update_that_is_not_sharded_is_whole_on_every_rank_and_sums_move_twice_as_much():
    found = proposed([40, 40], dp=2)
    whole = price(found, altered(AS_OURS, weights="never", sharded_update=False))
    sharded = price(found, altered(AS_OURS, weights="never"))
    parameters = 4 * (192 + 384 + 16) + 2 * 256 + 8
    sums_s = sum(
        engine_costs(AS_OURS, found.costs).coefficients.ring_seconds(4 * n, 2, calls, "sum")
        for n, calls in [(256, 1), *[(592, 2)] * 4, (264, 2)]
    )
    assert whole.end_s - sharded.end_s == pytest.approx(parameters * 1e-3 / 2 + sums_s)


def test_padding_is_paid_and_counted():
    found = proposed([60, 20], "best_fit", dp=2)
    free, fixed = price(found, AS_OURS), price(found, AS_OURS, StepShape(pack_tokens=60))
    assert (free.padding_fraction, fixed.padding_fraction) == (0.0, pytest.approx(40 / 120))
    assert fixed.max_padded_tokens == free.max_padded_tokens == 60
    assert fixed.packs_s == pytest.approx(free.packs_s)  # of the rank with the long one
    assert fixed.idle_fraction < free.idle_fraction


@pytest.mark.parametrize(
    ("engine", "cp"),
    [(name, 1) for name in sorted(ENGINES)]
    + [(name, 2) for name in sorted(ENGINES) if ENGINES[name].context_parallel != "none"],
)
def test_every_engine_has_a_price(engine, cp):
    profile = ENGINES[engine]
    pp = 2 if profile.schedules else 1
    documents = [60, 33, 20, 20, 9, 3, 1]
    layout = even_layout(4, dp=2, cp=cp, pp=pp)
    coefficients = sample_coefficients(intra_node=LINK, inter_node=LINK, devices_per_node=8)
    options = plan_options({"max_pack_tokens": 64, "cp_sharding": "per_document"})
    planner = StepPlanner(sample_model(num_layers=4), coefficients, layout, None, options)
    batch = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(documents))
    found = price(planner.propose(0, batch, "balanced"), profile)
    assert found.step_time_s == pytest.approx(found.packs_s + found.end_s)
    assert 0 <= found.idle_fraction < 1


def test_local_micro_batches_of_a_group_wait_only_where_it_shares_one():
    """Two ranks of a group, whole documents on each, then one that both share."""
    coefficients = sample_coefficients(intra_node=LINK, inter_node=LINK, devices_per_node=8)
    options = plan_options({"max_pack_tokens": 400})
    layout = even_layout(4, dp=1, cp=2)
    planner = StepPlanner(sample_model(num_layers=4), coefficients, layout, None, options)
    batch = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate([9, 5, 4, 200]))
    found = planner.propose(0, batch, "skrull")
    owners = found.plan.pack_plans[0].forward[0].sharding
    assert len(found.plan.pack_plans[0].forward) == 1
    assert -1 in owners
    assert max(owners) >= 0
    dynamic = price(found, ENGINES["megatron-dynamic-cp"])
    assert dynamic.micro_batches == 2
    # Ours runs local and shared documents of a micro-batch in one go: one pack's constants less.
    assert dynamic.packs_s > max(found.plan.predicted.per_replica_s) - 1e-9
