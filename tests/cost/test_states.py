"""States along documents: their work, their bytes at cuts, calls for slices, and what may not share documents."""

import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import cut_documents, documents, recurrent_model, sample_coefficients, sample_model
from evenload.calibrate.fit import fit_relative
from evenload.calibrate.rounds import QUICK_ROUNDS, pack_features, shares_of
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import MeasuredOn, PassCoefficients
from evenload.cost.layer_counts import (
    SCAN_SLICES,
    STATE_SLOWNESS,
    forward_flops,
    kind_shares,
    state_bytes,
    training_flops,
)
from evenload.cost.memory import ReplicaPacks, byte_rates, bytes_by_kind, pipeline_bytes
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import pipeline_tasks, split_pack_seconds
from evenload.cost.validity import require_measured_on
from evenload.errors import ConfigError
from evenload.explore.timelines import split_proposal
from evenload.planning.candidates import Setting, cut_rules, trial_packs
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions, StepProblem
from evenload.planning.strategies.registry import decide_dp_merge
from evenload.schedule.simulate import memory_ledger, simulate
from evenload.stepplan.resimulation import replica_columns, tasks_of_columns
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec, cluster_of
from evenload.types.columns import SliceColumns, cuts_within
from evenload.types.layer_kind import StateKind
from evenload.types.layout import even_layout
from evenload.types.pipeline import action_columns
from evenload.types.plan import StepPlan
from evenload.types.timeline import MEMORY_KINDS
from predicted_timeline import predicted_timeline
from reference import prices
from varied_plans import varied_plan

STATES = MEMORY_KINDS.index("states")
CONVOLUTION, SCAN = 30 * 2, 32 * 4
LINK = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=1e-4)


def test_work_of_a_token_by_hand() -> None:
    """Three elements of every channel in the state: a kernel of 4. A scan has 3·32, and 32 rows of its chunk."""
    convolution, scan = recurrent_model().kinds[0].states
    assert convolution.products == 10 * 4
    assert scan.products == 3 * 32 + 32 * (18 + 8)
    row_by_row = msgspec.structs.replace(scan, function="mamba_selective_scan")
    assert row_by_row.products == 3 * 32
    recurrent, attention, both = recurrent_model().kinds
    assert recurrent.state_products == 40 + scan.products
    assert (attention.state_products, both.state_products) == (0, scan.products)


def test_flops_count_states_forward_and_twice_backward() -> None:
    model = recurrent_model()
    bare = msgspec.structs.replace(model, kinds=tuple(msgspec.structs.replace(one, states=()) for one in model.kinds))
    scan = 3 * 32 + 32 * 26
    added = 2 * (3 * scan + 2 * 40) * 7
    assert forward_flops(model, 7) - forward_flops(bare, 7) == added
    assert training_flops(model, 7) - training_flops(bare, 7) == 3 * added


def test_functions_and_sizes_without_a_price_are_refused() -> None:
    with pytest.raises(ConfigError, match="the work of other_scan is not known; causal_conv1d_fn, "):
        StateKind(function="other_scan", inputs=1, outputs=1, state=1)
    with pytest.raises(ConfigError, match="mamba2_chunk_scan: state is 0, must be at"):
        StateKind(function="mamba2_chunk_scan", inputs=4, outputs=2, state=0)


def test_a_layer_names_its_states_and_measured_costs_belong_to_them() -> None:
    model = recurrent_model()
    assert "mamba2_chunk_scan 18x8 with a state of 32" in model.kinds[0].describe()
    measured = sample_coefficients(measured_on=MeasuredOn(model=model, dp=1, cp=1, pp=1, tp=1))
    assert require_measured_on(measured, model, "cost file").model == model
    wider = msgspec.structs.replace(model.kinds[2].states[0], state=64)
    other = msgspec.structs.replace(model.kinds[2], states=(wider,))
    with pytest.raises(ConfigError, match="whose layers differ"):
        require_measured_on(measured, msgspec.structs.replace(model, kinds=(*model.kinds[:2], other)), "cost file")


def test_what_functions_give_is_not_kept_and_layers_without_attention_keep_no_keys() -> None:
    """An input of 8, and 18 outputs of in_proj under replay."""
    rates = byte_rates(recurrent_model(), even_layout(4, pp=4))
    assert rates.chunk[:, 0].tolist() == [2 * (8 + 18), 2 * 8, 0]
    assert rates.kv.tolist() == [0, 16, 16, 0]
    dense = byte_rates(sample_model(num_layers=4), even_layout(4, pp=4))
    np.testing.assert_array_equal(rates.chunk[:, 1:3], dense.chunk[:, 1:3])


@pytest.mark.parametrize(
    ("element", "expected"), [(2, [188, 0, 128, 188]), (4, [248, 0, 128, 248]), (8, [496, 0, 256, 496])]
)
def test_bytes_of_a_state_by_precision(element: int, expected: list[int]) -> None:
    model = recurrent_model(bytes_per_element=element)
    assert byte_rates(model, even_layout(4, pp=4)).state.tolist() == expected
    assert state_bytes(model).tolist() == expected[:3]


def test_a_tensor_rank_has_its_share_of_a_state_and_of_its_function() -> None:
    """15 of 30 elements of a convolution, 16 of 32 of a scan, and 18 + 8 read and given in fp32, twice backward."""
    model = recurrent_model()
    assert state_bytes(model, 2).tolist() == [94, 0, 64]
    whole, part = (byte_rates(model, even_layout(4, pp=4, tp=tp)) for tp in (1, 2))
    assert (2 * part.state).tolist() == whole.state.tolist()
    bare = msgspec.structs.replace(model, kinds=tuple(msgspec.structs.replace(one, states=()) for one in model.kinds))
    without = byte_rates(bare, even_layout(4, pp=4, tp=2))
    assert (part.forward_temp - without.forward_temp)[:, 0].tolist() == [4 * 13] * 3
    assert (part.backward_temp - without.backward_temp)[:, 0].tolist() == [2 * 4 * 13] * 3


def test_states_of_two_documents_by_hand() -> None:
    """Document 0 has 10 tokens in two forward slices and three backward slices, document 1 has 3 in one. The first
    forward leaves a running state and that of the cut at 4; the second takes the running one and leaves that at 8."""
    layout, model = even_layout(4, pp=2), recurrent_model()
    forward = SliceColumns.from_ranges([[(0, 0, 6)], [(0, 6, 10), (1, 0, 3)]])
    backward = SliceColumns.from_ranges([[(0, 8, 10)], [(0, 4, 8)], [(0, 0, 4), (1, 0, 3)]])
    result = _kinds(model, layout, forward, backward, [10, 3])
    state = np.array([CONVOLUTION + SCAN, SCAN + CONVOLUTION + SCAN])
    np.testing.assert_array_equal(result.forward_kept_bytes[..., STATES], [2 * state, 0 * state])
    np.testing.assert_array_equal(result.forward_temp_bytes[..., STATES], np.zeros((2, 2)))
    np.testing.assert_array_equal(result.backward_freed_bytes[..., STATES], [0 * state, state, state])
    # Where backward is not cut, the last forward takes what the first has left, and has it until then.
    whole = SliceColumns.from_ranges([[(0, 0, 10), (1, 0, 3)]])
    result = _kinds(model, layout, forward, whole, [10, 3])
    np.testing.assert_array_equal(result.forward_kept_bytes[..., STATES], [state, -state])
    np.testing.assert_array_equal(result.forward_temp_bytes[..., STATES], [0 * state, state])
    assert not result.backward_freed_bytes[..., STATES].any()
    # Documents in one slice keep nothing.
    result = _kinds(model, layout, whole, whole, [10, 3])
    assert not result.forward_kept_bytes[..., STATES].any()


def _kinds(model, layout, forward, backward, lengths):
    packs = ReplicaPacks(forward, backward, np.array(lengths, np.int64))
    tasks = pipeline_tasks(PackCosts(model, sample_coefficients(), layout), packs)
    return bytes_by_kind(model, layout, tasks, packs).held


class NaiveStates:
    """One stage's states, by the runtime's rules, one event after the other."""

    def __init__(self, plan: StepPlan, dp_rank: int) -> None:
        self.packs, self.held = plan.pack_plans[dp_rank], set()
        self.num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
        self.cuts = {(one.doc_id, one.start) for pack in self.packs.backward for one in pack.slices if one.start}

    def run(self, kind: str, pack: int) -> int:
        """How many states are held after an action."""
        if kind == "F":
            for one in self.packs.forward[pack].slices:
                self.forward(one.doc_id, one.start, one.stop)
        elif kind in "BI":
            for one in self.packs.backward[pack].slices:
                self.backward(one.doc_id, one.start, one.stop)
        return len(self.held)

    def forward(self, doc: int, start: int, stop: int) -> None:
        if start:
            self.held.remove(("running", doc, start))
        for cut in range(max(1, start), stop):
            if (doc, cut) in self.cuts:
                self.put("saved", doc, cut)
        if stop < self.num_tokens[doc]:
            self.put("running", doc, stop)

    def backward(self, doc: int, start: int, stop: int) -> None:
        if stop < self.num_tokens[doc]:
            self.held.remove(("gradient", doc, stop))
        if start:
            self.held.remove(("saved", doc, start))
            self.put("gradient", doc, start)

    def put(self, *state: object) -> None:
        assert state not in self.held
        self.held.add(state)


@pytest.mark.parametrize("schedule", ["static", "list", "list_split"])
def test_ledgers_of_random_plans_are_those_of_a_naive_simulation(schedule: str) -> None:
    """After every action exactly; a forward holds what it takes until it has read it."""
    model, state, seen = recurrent_model(), np.array([188, 0, 128, 188]), 0
    for seed in range(60):
        pp, virtual = random.Random(seed).choice([(1, 1), (2, 1), (4, 1), (2, 2)])
        virtual = 1 if schedule == "static" else virtual
        plan = varied_plan(seed, num_layers=4, pp=pp, virtual=virtual, schedule=schedule)
        packs = replica_columns(plan, 0)
        tasks, actions = tasks_of_columns(plan, 0, model, packs), action_columns(plan.schedules[0])
        ledger = memory_ledger(bytes_by_kind(model, plan.layout, tasks, packs), actions)[:, STATES].tolist()
        of_stage = [int(state[first:last].sum()) for first, last in plan.layout.stage_layers]
        expected, at = [NaiveStates(plan, 0) for _ in of_stage], 0
        for row in plan.schedules[0].ranks:
            assert ledger[at] == 0
            held = dict.fromkeys(range(len(of_stage)), 0)
            for action, running, after in zip(row, ledger[at + 1 :: 2], ledger[at + 2 :: 2], strict=False):
                before = sum(count * of_stage[one] for one, count in held.items())
                held[action.stage] = expected[action.stage].run(action.kind, action.pack)
                assert after == sum(count * of_stage[one] for one, count in held.items())
                assert running == (max(before, after) if action.kind == "F" else before)
                seen += after > 0
            at += 1 + 2 * len(row)
            assert ledger[at - 1] == 0
        total = memory_ledger(tasks, actions)
        np.testing.assert_array_equal(
            total, memory_ledger(bytes_by_kind(model, plan.layout, tasks, packs), actions).sum(axis=1)
        )
    assert seen > 1000


@settings(max_examples=100, deadline=None)
@given(cut_documents(), st.integers(1, 4), st.booleans(), st.sampled_from([(0, 1, 2, 0), (0, 0, 0, 0), (1, 1, 1, 0)]))
def test_the_core_prices_states_as_the_reference(case, pp: int, analytic: bool, layers) -> None:
    """Also of models without attention, and where a stage has no states."""
    lengths, forward, backward = case
    model, layout = recurrent_model().with_layers(layers), even_layout(4, pp=pp)
    coefficients = sample_coefficients()
    if analytic:
        coefficients = analytic_coefficients(model, cluster_of("h100", 8), layout)
    costs, packs = PackCosts(model, coefficients, layout), ReplicaPacks(forward, backward, np.array(lengths, np.int64))
    result, expected = pipeline_tasks(costs, packs, split=True), prices.pipeline_tasks(costs, packs, split=True)
    for name in ("forward_s", "backward_s"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
    held = pipeline_bytes(model, layout, packs)
    for name in held.pack_columns():
        np.testing.assert_array_equal(getattr(result.held, name), getattr(held, name))
    # After all forwards a document holds a state for each of its backward slices but one.
    saved = int(byte_rates(model, layout).state.sum()) * int((backward.start > 0).sum())
    kinds = bytes_by_kind(model, layout, result, packs).held
    assert kinds.forward_kept_bytes[..., STATES].sum() == kinds.backward_freed_bytes[..., STATES].sum() == saved


@given(cut_documents())
def test_cuts_of_the_other_direction_are_counted(case) -> None:
    _, forward, backward = case
    within, inside = cuts_within(forward, backward)
    cuts = list(zip(backward.doc.tolist(), backward.start.tolist(), strict=True))
    rows = zip(forward.doc.tolist(), forward.start.tolist(), forward.stop.tolist(), strict=True)
    for at, (doc, start, stop) in enumerate(rows):
        own = [cut for other, cut in cuts if other == doc and cut]
        assert within[at] == sum(start <= cut < stop for cut in own)
        assert inside[at] == sum(start < cut < stop for cut in own)


def test_a_slice_costs_the_calls_of_its_layers() -> None:
    """Layers of 1, 0, 1 and 1 scans: 1 + 8·scans slices each, of 28 in all. A convolution takes all slices at once."""
    model = recurrent_model()
    shares = kind_shares(model)
    assert SCAN_SLICES == 8
    assert shares.mean_pieces == 7
    assert shares.pieces.tolist() == [9 / 7, 1 / 7, 9 / 7]
    costs = PackCosts(model, sample_coefficients(), even_layout(4, pp=4))
    np.testing.assert_allclose(costs.stage_seconds["forward"][1], 0.01 * np.array([9, 1, 9, 9]) / 7)
    same = kind_shares(sample_model())
    assert (same.pieces.tolist(), same.mean_pieces) == ([1.0], 1.0)


def test_a_forward_stops_at_cuts_of_backward_and_cuts_that_coincide_cost_nothing() -> None:
    costs = PackCosts(recurrent_model(), sample_coefficients(), even_layout(4))
    forward = SliceColumns.from_ranges([[(0, 0, 128)], [(0, 128, 256)]])
    lengths = np.array([256], np.int64)
    seconds = {}
    for cut in (128, 100, 130):
        backward = SliceColumns.from_ranges([[(0, cut, 256)], [(0, 0, cut)]])
        packs = ReplicaPacks(forward, backward, lengths)
        seconds[cut] = pipeline_tasks(costs, packs).forward_s[:, 0]
        split = split_pack_seconds(costs, forward, "forward", stops=costs.stops_of(forward, backward))
        np.testing.assert_allclose(split.useful_s[:, 0] + split.kernels_s[:, 0], seconds[cut])
    np.testing.assert_allclose(seconds[100] - seconds[128], [4 * 0.01, 0], atol=1e-9)
    np.testing.assert_allclose(seconds[130] - seconds[128], [0, 4 * 0.01], atol=1e-9)
    assert PackCosts(sample_model(), sample_coefficients(), even_layout(3)).stops_of(forward, backward) is None


def test_a_data_sheet_prices_states_three_times_backward() -> None:
    """A function's forward again, then its backward: 2 + 1 of the forward, where products have 2."""
    model = recurrent_model()
    costs = PackCosts(model, analytic_coefficients(model, cluster_of("h100", 8), even_layout(4)), even_layout(4, pp=4))
    kind = model.kinds[0]
    flop_s = costs.stage_seconds["forward"][0, 3] / (2 * (208 + STATE_SLOWNESS * kind.state_products))
    # The last stage's backward has the head, too.
    head_s = costs.coefficients.head_s_per_token
    expected = 2 * flop_s * (2 * 208 + STATE_SLOWNESS * 3 * kind.state_products) + head_s
    assert costs.stage_seconds["backward"][0, 3] == pytest.approx(expected)
    # W defers the products of gradients and inputs, half of a backward's, and nothing of states.
    layer = costs.coefficients.split_share(model) * costs.coefficients.backward.linear_s_per_token
    np.testing.assert_allclose(layer * costs.linear_layers(), 2 * flop_s * np.array([208, 576, 576, 208]))


def test_a_fit_finds_what_a_slice_costs_layers_with_states() -> None:
    """Of layers timed together, each with its share of slices, prices of the mean layer come back."""
    model = recurrent_model()
    timed = shares_of(SimpleNamespace(model=SimpleNamespace(layers=(0, 1, 3))), model, model)  # type: ignore[arg-type]
    assert [one.pieces for one in timed] == [9 / 7, 1 / 7, 9 / 7]
    assert [one.attention for one in timed] == [0, 1, 0]
    truth = np.array([2e-6, 3e-5, 1e-4, 4e-9, 1e-8])
    packs = [ranges for rounds in QUICK_ROUNDS for ranges in rounds]
    features = [pack_features(ranges, timed) for ranges in packs]
    seconds = (np.array(features) @ truth).tolist()
    np.testing.assert_allclose(fit_relative(features, seconds), truth, rtol=1e-6)


def test_replicas_share_documents_only_where_it_is_said() -> None:
    """What travels of states is not priced, so nothing is chosen for it; context ranks are what a layout asks for."""
    model = recurrent_model()
    coefficients = sample_coefficients(intra_node=LINK, devices_per_node=8)
    assert decide_dp_merge(PlanOptions(), "slimpack", model, even_layout(4, dp=2), coefficients) == (PlanOptions(), "")
    asked, said = decide_dp_merge(PlanOptions(dp_merge=True), "slimpack", model, even_layout(4, dp=2), coefficients)
    assert asked.dp_merge
    assert said.startswith("replicas share documents")
    PackCosts(model, coefficients, even_layout(4, cp=2))


@pytest.mark.parametrize("strategy", ["slimpack", "sequential", "auto"])
def test_plans_of_a_hybrid_are_cut_valid_and_simulated_alike(strategy: str) -> None:
    """Under a memory limit: the plan that runs has the bytes that the planner promised."""
    model, layout = recurrent_model(), even_layout(4, dp=2, pp=2)
    coefficients = sample_coefficients(intra_node=LINK, inter_node=LINK, devices_per_node=8)
    planner = StepPlanner(model, coefficients, layout, 200_000, PlanOptions(max_pack_tokens=96), host="unlimited")
    proposal = planner.propose(0, documents([300, 10, 10, 20, 80, 5, 5, 40, 7, 9, 11, 30]), strategy)
    plan = proposal.require_feasible()
    validate_plan(plan, max_pack_tokens=96)
    cuts = [one.start for packs in plan.pack_plans for pack in packs.backward for one in pack.slices if one.start]
    assert cuts
    timeline = predicted_timeline(plan, model)
    assert timeline.memory_bytes.max() == plan.predicted.peak_memory_bytes
    for dp_rank, choice in enumerate(proposal.choices):
        packs = replica_columns(plan, dp_rank)
        tasks = tasks_of_columns(plan, dp_rank, model, packs)
        actions = action_columns(plan.schedules[dp_rank])
        assert simulate(tasks, actions).makespan_s == pytest.approx(choice.candidate.makespan_s)
        assert memory_ledger(bytes_by_kind(model, layout, tasks, packs), actions)[:, STATES].max() > 0 or not any(
            one.start for pack in plan.pack_plans[dp_rank].backward for one in pack.slices
        )
    assert split_proposal(proposal).total_s() == pytest.approx(plan.predicted.step_time_s)


def test_long_slices_are_cut_at_whole_chunks() -> None:
    """Where a chunk is a small part of a slice; a scan computes a begun one whole."""
    coefficients = sample_coefficients(attention_tile=48)
    costs = PackCosts(recurrent_model(), coefficients, even_layout(4, pp=2))
    assert costs.cut_multiple == 192
    assert PackCosts(sample_model(), coefficients, even_layout(3)).cut_multiple == 48
    without_pairs = PassCoefficients(linear_s_per_token=1.0, attention_s_per_pair=0.0)
    coefficients, lengths = (
        sample_coefficients(forward=without_pairs, backward=without_pairs),
        np.array([20_000, 30_001]),
    )
    for model, multiple in ((recurrent_model(), 64), (sample_model(), 1)):
        costs = PackCosts(model, coefficients, even_layout(model.num_layers))
        problem = StepProblem(np.arange(2), lengths, costs, None, PlanOptions())
        for cut in ("symmetric", "asymmetric"):
            columns = trial_packs(problem, cut_rules(problem), lengths, Setting(cut, 14), 1)
            assert columns is not None
            starts = np.concatenate([one.start for one in columns])
            assert starts.any()
            assert (not (starts % 64).any()) == (multiple == 64)
