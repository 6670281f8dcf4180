"""The plan of a row of `matrix`: what the row's strategy plans of one batch, and whether the plan holds what the
row says, so that no row can pass without having tested anything.

The planner's own options force strategy, layout, policy, sharding, DP-Merge and schedule. Where a planner has none to
choose (`skrull`, without a pipeline), or would not split backwards (the list, where no stage waits), schedules are put
over its packs: phase by phase, as replicas that share documents must run them.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import msgspec
import numpy as np

from context_plans import one_after_the_other, with_policies
from dist_training import STEEP_COSTS as COSTS
from evenload.config.sections import with_adapters
from evenload.cost.coefficients import CostCoefficients
from evenload.data.hub import model_from_config
from evenload.errors import InfeasiblePlanError
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.schedule.packflow import packflow_list, packflow_static
from evenload.schedule.static_schedules import gpipe, zero_bubble_h1
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.document import PackPlan
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import ActionColumns, PipelineTasks, action_columns
from evenload.types.plan import PackTimes, Schedule, StepPlan, block_of, seal
from matrix import NONE, Row, shares_documents, sizes_before
from matrix_cases import MatrixCase
from varied_plans import tasks_of_one_byte

LENGTHS = (64, 1, 9, 30, 1, 17, 5, 2, 26, 12, 1, 20)
"""Of the batch: one document far above the mean, documents of one token."""
MERGED_LENGTHS = (120, 9, 1, 14, 5, 2, 12, 1, 7)
"""With DP-Merge: one document too long for a replica."""
WINDOW = 64
SLICED_WINDOW = 24
"""Below the longest document, so that what may cut has to."""
SHORT_OF_MEMORY = (0.5, 0.3, 0.7, 0.15, 0.85)
RESOLVED = {
    "adaptive": {"per_sequence", "per_document"},
    "mixed": {"per_sequence", "per_document", "owners"},
    "dacp": {"owners"},
}
"""What the planner makes of a rule."""
OF_SKRULL = ("auto", {"owners"})
HOST_LINKS = (1e9, 1e8, 1e7, 3e6, 1e6)
"""Limits of memory, on the way from everything offloaded to everything stored, and bytes a second to the host, under
which "choose" is asked to mix policies."""


def lengths_of(row: Row) -> tuple[int, ...]:
    if row.trees == "on":
        return (LENGTHS[1], LENGTHS[0], *LENGTHS[2:])  # the long one is a tree
    return MERGED_LENGTHS if row.dp_merge == "on" else LENGTHS


def case_of(row: Row) -> MatrixCase:
    return MatrixCase(row.model, row.num_layers, lengths_of(row), row.trees == "on")


def layout_of(row: Row) -> ParallelLayout:
    return even_layout(row.num_layers, virtual=int(row.virtual), **row.sizes)


def layout_before(row: Row) -> ParallelLayout | None:
    """None = the run does not change."""
    return even_layout(row.num_layers, **sizes_before(row.layout)) if row.switch == "on" else None


def model_of(row: Row) -> ModelSpec:
    """As the planner sees it."""
    from adapter_cases import LORA

    case = case_of(row)
    spec = model_from_config(case.config().to_dict(), case.kind, 8)
    return with_adapters(spec, LORA if case.has_adapter else None)


def plan_of(row: Row) -> StepPlan:
    """A valid plan that has every feature of the row.

    Raises:
        AssertionError: it has not.
    """
    plan = _planned(row)
    if row.schedule != "own" and not _is_asked(row):
        plan = _rescheduled(plan, row.schedule)
    validate_plan(plan)
    missing = list(_missing_features(row, plan))
    assert not missing, f"{row.describe()}: the plan has {'; '.join(missing)}"
    return plan


def _is_asked(row: Row) -> bool:
    return row.schedule not in ("own", "list_split") and not STRATEGIES[row.strategy].needs_one_stage


def _planned(row: Row) -> StepPlan:
    cuts = row.strategy in ("slimpack", "sequential")
    options = PlanOptions(
        max_pack_tokens=SLICED_WINDOW if cuts else max(lengths_of(row)) if row.dp_merge == "on" else WINDOW,
        dp_merge=row.dp_merge == "on",
    )
    if row.sharding not in (NONE, "dacp"):
        options = msgspec.structs.replace(options, cp_sharding=row.sharding)
    if _is_asked(row):
        options = msgspec.structs.replace(options, schedule=row.schedule)
    if row.policy != "mixed":
        return _plan(row, msgspec.structs.replace(options, policy=row.policy), None)
    most, least = (
        _plan(row, msgspec.structs.replace(options, policy=policy), None).predicted.peak_memory_bytes
        for policy in ("replay", "offload")
    )
    for bytes_per_s, share in itertools.product(HOST_LINKS, SHORT_OF_MEMORY):
        link = LinkSpec(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0)
        costs = msgspec.structs.replace(COSTS, host_link=link)
        try:
            plan = _plan(row, options, int(least + share * (most - least)), costs)
        except InfeasiblePlanError:
            continue
        if not list(_missing_features(row, plan, is_final=False)):
            return plan
    return _mixed_by_hand(_plan(row, msgspec.structs.replace(options, policy="replay"), None))


def _mixed_by_hand(plan: StepPlan) -> StepPlan:
    """Where no limit makes the planner mix policies: everything that `skrull` plans fits, or nothing but one policy."""
    turns = itertools.cycle(("recompute", "replay", "offload"))
    chosen = {document.doc_id: policy for document, policy in zip(plan.documents, turns, strict=False)}
    packs = tuple(with_policies(one, chosen) for one in plan.pack_plans)
    return seal(msgspec.structs.replace(plan, pack_plans=packs))


def _plan(row: Row, options: PlanOptions, memory_bytes: int | None, costs: CostCoefficients = COSTS) -> StepPlan:
    planner = StepPlanner(model_of(row), costs, layout_of(row), memory_bytes, options, host="unlimited")
    return planner.plan(0, case_of(row).documents(), row.strategy)


def _policies(plan: StepPlan) -> set[str]:
    return {packs.policies.get(piece.doc_id, "replay") for packs, piece in _pieces(plan)}


def _pieces(plan: StepPlan):
    return [(packs, piece) for packs in plan.pack_plans for pack in packs.forward for piece in pack.slices]


def _missing_features(row: Row, plan: StepPlan, *, is_final: bool = True) -> Iterator[str]:
    """What the row claims and the plan has not, in words.

    Args:
        is_final: the plan has the row's schedule.
    """
    layout, pieces = plan.layout, [piece for _, piece in _pieces(plan)]
    if layout != layout_of(row) or plan.strategy != row.strategy:
        yield f"strategy {plan.strategy} on {layout.describe()}"
    # `skrull` may leave a replica idle where one document takes as long as all others.
    if sum(bool(packs.forward) for packs in plan.pack_plans) < min(2, layout.dp):
        yield "a replica without documents"
    for packs, schedule in zip(plan.pack_plans, plan.schedules, strict=True):
        if not packs.forward:
            continue
        if {action.stage for rank in schedule.ranks for action in rank} != set(range(layout.num_stages)):
            yield "a stage that does nothing"
        if is_final:
            yield from _missing_of_schedule(row, schedule)
    if STRATEGIES[row.strategy].keeps_whole and any(piece.start for piece in pieces):
        yield "cut documents"
    cuts_documents = row.strategy in ("slimpack", "sequential")
    if cuts_documents and not any(piece.start for piece in pieces):
        yield "no cut documents"
    trees = {document.doc_id for document in plan.documents if document.segments}
    if row.trees == "on" and not {piece.doc_id for piece in pieces if piece.start or not cuts_documents} & trees:
        yield "no tree that is cut"
    if row.strategy == "padded" and not any(pack.pad_to for packs in plan.pack_plans for pack in packs.forward):
        yield "no padding"
    expected = {"replay", "recompute", "offload"} if row.policy == "mixed" else {row.policy}
    if not _policies(plan) <= expected or (row.policy == "mixed" and len(_policies(plan)) < 2):
        yield f"policies {sorted(_policies(plan))}"
    yield from _missing_of_sharing(row, plan)


def _missing_of_schedule(row: Row, schedule: Schedule) -> Iterator[str]:
    for rank in schedule.ranks:
        kinds = {action.kind for action in rank}
        if row.schedule in ("list_split", "zb_h1") and not {"I", "W"} <= kinds:
            yield f"actions {sorted(kinds)}"
        if row.schedule in ("static", "list", "gpipe") and kinds != {"F", "B"}:
            yield f"actions {sorted(kinds)}"
        order = [action.kind for action in rank]
        if row.schedule == "gpipe" and row.dp_merge == "off" and "F" in order[order.index("B") :]:
            yield "a forward behind a backward"


def _missing_of_sharing(row: Row, plan: StepPlan) -> Iterator[str]:
    layout, pieces = plan.layout, [piece for _, piece in _pieces(plan)]
    shared = {piece.cp for piece in pieces if piece.cp > 1}
    if bool(shared) != shares_documents(row.layout, row.dp_merge):
        yield f"slices shared by {sorted(shared)} ranks"
    if (row.dp_merge == "on") != any(size > layout.cp for size in shared):
        yield f"slices shared by {sorted(shared)} ranks of {layout.describe()}"
    kinds = {
        pack.sharding if isinstance(pack.sharding, str) else "owners"
        for packs in plan.pack_plans
        for pack in packs.forward
        if any(piece.cp > 1 for piece in pack.slices)
    }
    # `auto` may find that `skrull` is fastest.
    if shared and not (kinds <= RESOLVED.get(row.sharding, {row.sharding}) or (row.strategy, kinds) == OF_SKRULL):
        yield f"shardings {sorted(kinds)}"
    if row.sharding == "dacp" and {piece.cp for piece in pieces} != {1, layout.cp}:
        yield "no document that is whole on a rank"


def _rescheduled(plan: StepPlan, name: str) -> StepPlan:
    schedules, times = zip(*(_reschedule(plan, dp_rank, name) for dp_rank in range(plan.layout.dp)), strict=True)
    return seal(msgspec.structs.replace(plan, schedules=schedules, times=times))


def _reschedule(plan: StepPlan, dp_rank: int, name: str) -> tuple[Schedule, PackTimes]:
    packs, times, layout = plan.pack_plans[dp_rank], plan.times[dp_rank], plan.layout
    needed = np.array(packs.forwards_needed(), np.int32)
    both = times.forward_s, times.backward_s
    phases, forwards, backwards = [], 0, 0
    sizes = [[block_of(plan, dp_rank, pack)[1] for pack in side] for side in (packs.forward, packs.backward)]
    for size in sorted(set(sizes[0]), reverse=True):
        rows = slice(forwards, forwards + sizes[0].count(size)), slice(backwards, backwards + sizes[1].count(size))
        assert set(sizes[0][rows[0]]) == set(sizes[1][rows[1]]) == {size}, "phases follow each other"
        tasks = tasks_of_one_byte(
            layout,
            *(np.array(seconds[span], np.float64) for seconds, span in zip(both, rows, strict=True)),
            np.array(times.p2p_forward_s[rows[0]], np.float64),
            np.array(times.p2p_backward_s[rows[1]], np.float64),
            needed[rows[1]] - forwards,
        )
        phase = PackPlan(dp_rank=dp_rank, forward=packs.forward[rows[0]], backward=packs.backward[rows[1]])
        phases.append((phase, _scheduled(tasks, name).to_schedule()))
        forwards, backwards = rows[0].stop, rows[1].stop
    if name in ("list_split", "zb_h1"):
        half = tuple(tuple(seconds / 2 for seconds in row) for row in times.backward_s)
        times = msgspec.structs.replace(times, input_s=half, weight_s=half)
    else:
        times = msgspec.structs.replace(times, input_s=(), weight_s=())
    return one_after_the_other(phases, layout.pp), times


def _scheduled(tasks: PipelineTasks, name: str) -> ActionColumns:
    if name == "static":
        return packflow_static(tasks, inject=True)
    if name == "gpipe":
        return gpipe(tasks)
    if name == "zb_h1":
        return zero_bubble_h1(tasks)
    cap = np.full(tasks.num_ranks, 3 * tasks.num_stages // tasks.num_ranks, np.int64)
    if name == "list":
        return packflow_list(dataclasses.replace(tasks, split=None), cap_bytes=cap)
    result = packflow_list(tasks, cap_bytes=cap, split=True)
    # Where nobody waits the list splits nothing.
    is_split = all("I" in {action.kind for action in rank} for rank in result.to_schedule().ranks)
    return result if is_split else _split_by_hand(packflow_list(tasks, cap_bytes=cap))


def _split_by_hand(actions: ActionColumns) -> ActionColumns:
    """Every backward as I, and as W behind the rank's next backward."""
    ranks = []
    for rank in actions.to_schedule().ranks:
        row, late = [], []
        for action in rank:
            row.append(msgspec.structs.replace(action, kind="I") if action.kind == "B" else action)
            if action.kind == "B":
                row += late
                late = [msgspec.structs.replace(action, kind="W")]
        ranks.append(tuple(row + late))
    return action_columns(Schedule(ranks=tuple(ranks)))


def grouped(rows: tuple[Row, ...]) -> dict[tuple[str, str], list[Row]]:
    """Rows of one layout and number of virtual stages together."""
    key = lambda row: (row.layout, row.virtual)  # noqa: E731
    return {place: list(group) for place, group in itertools.groupby(sorted(rows, key=key), key)}
