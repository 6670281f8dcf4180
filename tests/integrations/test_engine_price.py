"""What a step takes on an engine: as Evenload's runtime where nothing differs, and by hand where something does."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.cost.coefficients import OverlapCost
from evenload.integrations.catalog import ENGINES, EngineProfile
from evenload.integrations.price import StepShape, engine_costs, engine_price, overlapped_seconds
from evenload.planning.planner import Proposal, StepPlanner
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout

LINK = LinkSpec(bandwidth_bytes_per_s=1000.0, latency_s=0.25)
AS_OURS = EngineProfile(
    name="ours",
    title="runs as Evenload's runtime",
    formats=("pack",),
    equal_counts=False,
    context_parallel="fixed",
    schedules=("1f1b",),
    gathers="step",
    overlaps_reduction=True,
)


def proposed(lengths, strategy="balanced", *, coefficients=None, model=None, sharding="mixed", **sizes) -> Proposal:
    layout = even_layout(4, **{"dp": 2, **sizes})
    result = coefficients or sample_coefficients(intra_node=LINK, inter_node=LINK, devices_per_node=8)
    fields = {"max_pack_tokens": 64, "candidates": 3, "dp_merge": False, "policy": "replay", "cp_sharding": sharding}
    options = plan_options(fields)
    planner = StepPlanner(model or sample_model(num_layers=4), result, layout, None, options, host="unlimited")
    documents = tuple(Document(doc_id=i, num_tokens=int(n), num_label_tokens=int(n) - 1) for i, n in enumerate(lengths))
    return planner.propose(0, documents, strategy)


def price(result: Proposal, profile: EngineProfile, shape: StepShape | None = None):
    return engine_price(result.plan, profile, result.costs, shape)


def altered(profile: EngineProfile, **facts) -> EngineProfile:
    return msgspec.structs.replace(profile, **facts)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    strategy=st.sampled_from(["balanced", "best_fit", "fixed_greedy", "wlb"]),
    sizes=st.sampled_from([{}, {"dp": 1}, {"pp": 2}, {"dp": 1, "pp": 4}, {"tp": 2}]),
    beside=st.sampled_from([None, OverlapCost(communication_slowdown=1.5, compute_slowdown=0.3)]),
)
def test_an_engine_that_runs_as_we_do_takes_what_we_predict(lengths, strategy, sizes, beside):
    links = {"intra_node": LINK, "inter_node": LINK, "devices_per_node": 8}
    coefficients = sample_coefficients(**links, overlap=beside, overlap_gather=False)
    result = proposed(lengths, strategy, coefficients=coefficients, **sizes)
    ours = price(result, AS_OURS)
    assert ours.step_time_s == pytest.approx(result.plan.predicted.step_time_s, rel=1e-12)
    assert ours.idle_fraction == pytest.approx(result.bubble_fraction, abs=1e-12)
    assert ours.packs_s == pytest.approx(max(result.plan.predicted.per_replica_s), rel=1e-12)


def test_a_sender_that_computes_nothing_meanwhile():
    result = proposed([10], dp=1, pp=2)
    (forward,), (backward,) = result.plan.times[0].forward_s, result.plan.times[0].backward_s
    (p2p_f,), (p2p_b,) = result.plan.times[0].p2p_forward_s, result.plan.times[0].p2p_backward_s
    # One micro-batch: nothing else could run, so blocking costs nothing; sending the shape costs a latency each way.
    alone_s = sum(forward) + sum(backward) + p2p_f + p2p_b
    assert price(result, AS_OURS).packs_s == pytest.approx(alone_s)
    assert price(result, altered(AS_OURS, blocking_sends=True)).packs_s == pytest.approx(alone_s + 2 * 0.5)
    # Of two, the second waits for a sender that is blocked by the first: more than two shapes late.
    two = proposed([64, 64], "best_fit", dp=1, pp=2)
    assert price(two, altered(AS_OURS, blocking_sends=True)).packs_s > price(two, AS_OURS).packs_s + 2 * 0.5


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=16))
def test_waiting_for_each_other_in_every_micro_batch_is_never_faster(lengths):
    result = proposed(lengths, "best_fit", dp=3)
    sharded = altered(AS_OURS, gathers="pass", equal_counts=True)
    waiting = price(result, sharded)
    alone = price(result, altered(AS_OURS, gathers="never", equal_counts=True))
    assert waiting.packs_s >= alone.packs_s * (1 - 1e-12)
    assert waiting.micro_batches == alone.micro_batches


SHARDED = altered(AS_OURS, gathers="pass", overlaps_reduction=False, equal_counts=True)
HIDES = OverlapCost(communication_slowdown=1.0, compute_slowdown=0.0)
# Of 40 tokens: embedding; four layers; in the backward the head, and those again.
FORWARD_S = 0.5 * 40 + 4 * (40 + 0.1 * 820 + 0.01 + 5)
BACKWARD_S = 3 * 40 + 11 + 4 * (2 * 40 + 0.25 * 820 + 0.02 + 7) + 0.5 * 40
COMPUTE_S = FORWARD_S + BACKWARD_S


def ring_s(parameters: int, buffers: int, element_bytes: int) -> float:
    """Over two ranks: half of the bytes over 1000 bytes/s, and a latency a buffer."""
    return element_bytes * parameters / 2 / 1000 + buffers * 0.25


GATHER_S = {"embedding": ring_s(256, 1, 2), "layer": ring_s(592, 2, 2), "head": ring_s(264, 2, 2)}
SUM_S = {"embedding": ring_s(256, 1, 4), "layer": ring_s(592, 2, 4), "head": ring_s(264, 2, 4)}
UPDATE_S = 1e-3 * (4 * 592 + 256 + 264) / 2


def of_all(seconds: dict[str, float]) -> float:
    return seconds["embedding"] + 4 * seconds["layer"] + seconds["head"]


def test_gathers_of_a_pass_by_hand():
    """Nothing hides a gather here, so every pass takes its compute and the gathers of its units."""
    result = price(proposed([40, 40], "best_fit", dp=2), SHARDED)
    assert result.packs_s == pytest.approx(COMPUTE_S + 2 * of_all(GATHER_S) - GATHER_S["head"], rel=1e-9)
    assert result.step_time_s == pytest.approx(result.packs_s + of_all(SUM_S) + UPDATE_S, rel=1e-9)


def test_hidden_gathers_of_a_pass_are_paid_once():
    """Not in every pass and beside the first packs of the step again."""
    coefficients = sample_coefficients(overlap=HIDES, overlap_reduction=False)
    result = price(proposed([40, 40], "best_fit", dp=2, coefficients=coefficients), SHARDED)
    assert result.packs_s == pytest.approx(COMPUTE_S + GATHER_S["embedding"] + GATHER_S["head"], rel=1e-9)
    assert result.step_time_s == pytest.approx(result.packs_s + of_all(SUM_S) + UPDATE_S, rel=1e-9)
    # Where they cost compute something, no transfer is in the step that is not in its micro-batches either.
    costly = sample_coefficients(overlap=OverlapCost(communication_slowdown=2.0, compute_slowdown=0.25))
    result = price(proposed([40, 40], "best_fit", dp=2, coefficients=costly), SHARDED)
    assert result.end_s == pytest.approx(of_all(SUM_S) + UPDATE_S, rel=1e-9)
    hidden_s = 2 * of_all(GATHER_S) - GATHER_S["embedding"] - 2 * GATHER_S["head"]
    first_s = GATHER_S["embedding"] + GATHER_S["head"]
    assert result.packs_s == pytest.approx(COMPUTE_S + first_s + 2.0 * 0.25 * hidden_s, rel=1e-9)


def test_sums_after_every_micro_batch_by_hand():
    """Two micro-batches on each of two ranks: each pays for its sums, and the end of the step has none left."""
    profile = altered(SHARDED, reduces="pass")
    result = price(proposed([40] * 4, "best_fit", dp=2), profile)
    each_s = COMPUTE_S + 2 * of_all(GATHER_S) - GATHER_S["head"] + of_all(SUM_S)
    assert (result.micro_batches, result.packs_s) == (4, pytest.approx(2 * each_s, rel=1e-9))
    assert result.end_s == pytest.approx(UPDATE_S, rel=1e-9)
    # Beside compute only the embedding's sum is left, which comes last.
    hiding = sample_coefficients(overlap=HIDES)
    result = price(proposed([40] * 4, "best_fit", dp=2, coefficients=hiding), altered(profile, overlaps_reduction=True))
    first_s = GATHER_S["embedding"] + GATHER_S["head"]
    assert result.packs_s == pytest.approx(2 * (COMPUTE_S + first_s + SUM_S["embedding"]), rel=1e-9)
    assert result.end_s == pytest.approx(UPDATE_S, rel=1e-9)


@pytest.mark.parametrize(
    ("bucket_parameters", "left"),
    [
        (0, ["embedding"]),
        # Head and layer 4 (856 gradients), layers 3 and 2 (1,184), layer 1 and the embedding (848).
        (1200, ["layer", "embedding"]),
        # No two units fit into it.
        (500, ["embedding"]),
        # DeepSpeed's default holds everything, so nothing is left to hide its sum.
        (500_000_000, ["head", *["layer"] * 4, "embedding"]),
    ],
)
def test_sums_in_buckets_by_hand(bucket_parameters, left):
    """Beside compute, which hides all but the last bucket's."""
    profile = altered(SHARDED, reduces="pass", overlaps_reduction=True, reduction_bucket=bucket_parameters)
    hiding = sample_coefficients(overlap=HIDES)
    result = price(proposed([40, 40], "best_fit", dp=2, coefficients=hiding), profile)
    first_s = GATHER_S["embedding"] + GATHER_S["head"]
    assert result.packs_s == pytest.approx(COMPUTE_S + first_s + sum(SUM_S[unit] for unit in left), rel=1e-9)


def test_weights_that_are_not_trained_are_gathered_too():
    """LoRA of 10 weights a layer: all 602 of a layer, embedding and head are gathered; 10 are summed."""
    model = sample_model(num_layers=4, adapter_parameters_per_layer=10)
    result = price(proposed([40, 40], "best_fit", dp=2, model=model), SHARDED)
    # The adapters are a buffer of their own.
    layer_s = GATHER_S["layer"] + ring_s(10, 1, 2)
    passes_s = 2 * (GATHER_S["embedding"] + 4 * layer_s) + GATHER_S["head"]
    assert result.packs_s == pytest.approx(COMPUTE_S + passes_s, rel=1e-9)
    assert result.end_s == pytest.approx(4 * ring_s(10, 1, 4) + 1e-3 * 4 * 10 / 2, rel=1e-9)


def test_transfers_beside_compute_by_hand():
    beside = OverlapCost(communication_slowdown=2.0, compute_slowdown=0.25)
    compute_s = np.array([30.0, 3.0, 0.0])
    # 4 s alone are 8 s beside, in which 6 of 30 s are computed; 3 s of compute take 4 s, and 2 of 4 s are left then.
    assert overlapped_seconds(compute_s, [(4.0, beside)]).tolist() == pytest.approx([32.0, 6.0, 4.0])
    assert overlapped_seconds(compute_s, [(4.0, None)]).tolist() == [34.0, 7.0, 4.0]
    stops = OverlapCost(communication_slowdown=1.0, compute_slowdown=1.0)
    assert overlapped_seconds(compute_s, [(4.0, stops)]).tolist() == [34.0, 7.0, 4.0]
    assert overlapped_seconds(compute_s, [(0.0, beside)]).tolist() == compute_s.tolist()
    # Another second behind it: 1.5 of the 24 s that are left are computed in its 2 s; nothing is left of 3 s.
    assert overlapped_seconds(compute_s, [(4.0, beside), (1.0, beside)]).tolist() == pytest.approx([32.5, 7.0, 5.0])
    assert overlapped_seconds(compute_s, [(4.0, beside), (1.0, None)]).tolist() == pytest.approx([33.0, 7.0, 5.0])


def test_an_update_that_is_not_sharded_is_whole_on_every_rank_and_sums_move_twice_as_much():
    result = proposed([40, 40], dp=2)
    whole = price(result, altered(AS_OURS, gathers="never", sharded_update=False))
    sharded = price(result, altered(AS_OURS, gathers="never"))
    parameters = 4 * (192 + 384 + 16) + 2 * 256 + 8
    sums_s = sum(
        engine_costs(AS_OURS, result.costs).coefficients.ring_seconds(4 * n, 2, calls, "sum")
        for n, calls in [(256, 1), *[(592, 2)] * 4, (264, 2)]
    )
    assert whole.end_s - sharded.end_s == pytest.approx(parameters * 1e-3 / 2 + sums_s)


def test_the_schedule_that_was_asked_for_is_priced():
    result = proposed([64, 40, 30, 8], "best_fit", dp=1, pp=2)
    packs_s = {
        name: engine_price(result.plan, ENGINES["torchtitan"], result.costs, None, name).packs_s
        for name in ("choose", "1f1b", "gpipe")
    }
    assert packs_s["1f1b"] == packs_s["choose"] != packs_s["gpipe"]


def test_padding_is_paid_and_counted():
    result = proposed([60, 20], "best_fit", dp=2)
    free, fixed = price(result, AS_OURS), price(result, AS_OURS, StepShape(pack_tokens=60))
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
    profile, lengths = ENGINES[engine], [60, 33, 20, 20, 9, 3, 1]
    plan = proposed(lengths, sharding="per_document", cp=cp, pp=2 if profile.schedules else 1)
    result = price(plan, profile)
    assert result.step_time_s == pytest.approx(result.packs_s + result.end_s)
    assert 0 <= result.idle_fraction < 1


# Two ranks, of 40 tokens on four layers: of two query heads and two key heads (one, repeated) of 4 numbers in 2 bytes,
# queries and outputs, keys and values, half of half of them; half of the positions in 8 bytes; latencies of four
# all-to-alls and of a ring of two.
EXCHANGED_BYTES = 40 * 2 * (2 + 2) * 4 * 2 / 4
EXCHANGE_FORWARD_S = 4 * ((EXCHANGED_BYTES + 40 * 8 / 2) / 1000 + 5 * 0.25)
EXCHANGE_BACKWARD_S = 4 * (EXCHANGED_BYTES / 1000 + 4 * 0.25)
# Of a rank: half of what tokens and pairs take, and all that a slice and a pack do.
SHARED_FORWARD_S = 0.5 * 20 + 4 * (20 + 0.1 * 410 + 0.01 + 5)
SHARED_BACKWARD_S = 3 * 20 + 11 + 4 * (2 * 20 + 0.25 * 410 + 0.02 + 7) + 0.5 * 20


def test_ranks_that_share_heads_by_hand():
    result = proposed([40], "best_fit", dp=1, cp=2, sharding="per_document")
    shared_s = SHARED_FORWARD_S + SHARED_BACKWARD_S + EXCHANGE_FORWARD_S + EXCHANGE_BACKWARD_S
    assert price(result, ENGINES["deepspeed"]).packs_s == pytest.approx(shared_s, rel=1e-9)
    # ZeRO-3 gathers and sums over the ranks of the group, too, though it is the only one.
    sharded = price(result, ENGINES["deepspeed-zero3"])
    transfers_s = 2 * of_all(GATHER_S) - GATHER_S["head"] + of_all(SUM_S)
    assert sharded.packs_s == pytest.approx(shared_s + transfers_s, rel=1e-9)
    assert sharded.end_s == pytest.approx(UPDATE_S, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(halves=st.lists(st.integers(1, 32), min_size=1, max_size=12))
def test_a_group_that_shares_heads_has_no_imbalance(halves):
    """Whatever the documents, a rank of two does half of what one would, and its constants."""
    lengths = [2 * half for half in halves]
    alone, shared = (proposed(lengths, "best_fit", dp=1, cp=cp, sharding="per_document") for cp in (1, 2))
    packs = len(alone.plan.pack_plans[0].forward)
    assert len(shared.plan.pack_plans[0].forward) == packs
    constant_s = packs * (4 * (5 + 7) + 11) + len(lengths) * 4 * (0.01 + 0.02)
    exchange_s = 4 * (sum(lengths) * (2 * 16 + 4) / 1000 + packs * 9 * 0.25)
    alone_s, shared_s = (price(result, ENGINES["deepspeed"]).packs_s for result in (alone, shared))
    assert shared_s == pytest.approx((alone_s - constant_s) / 2 + constant_s + exchange_s, rel=1e-9)
