"""Random plans whose packs several ranks share: static context parallelism, DACP and DP-Merge."""

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from evenload.planning.cp_sharding import run_ahead
from evenload.planning.dp_merge import nested_sizes
from evenload.schedule.packflow import packflow_list
from evenload.schedule.schedule_rule import UNLIMITED_BYTES
from evenload.stepplan.resimulation import timed_tasks
from evenload.types.document import ActivationPolicy, MicroPack, PackPlan, Slice
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.plan import PackTimes, Schedule, StepPlan, block_of, seal
from plan_building import greedy_packs, pack_plan, random_schedule, step_plan

RULES = ["per_sequence", "per_document", "owners", "dacp"]
"""How packs are shared: by a rule, with an owner or -1 for every slice, or with documents whole on a rank (DACP)."""


def context_plan(
    seed: int,
    *,
    cp: int,
    rule: str,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    num_layers: int = 4,
    max_tokens: int = 40,
    lengths: dict[int, int] | None = None,
    whole: bool = False,
    owner: dict[int, int] | None = None,
) -> StepPlan:
    """Random documents, cuts and slack; every pack is shared by cp ranks under `rule`.

    Args:
        whole: documents are not cut, and backward packs are the forward packs.
        owner: for "dacp", -1 = all ranks; None = at random.
    """
    rng = random.Random(seed)
    layout = even_layout(num_layers, dp=dp, cp=cp, pp=pp, tp=tp)
    if lengths is None:
        lengths = {doc: rng.choice([1, *[rng.randint(1, max_tokens)] * 4]) for doc in range(rng.randint(1, 7))}
    home = {doc: rng.randrange(dp) for doc in lengths}
    owner = owner or {doc: rng.randrange(-1, cp) for doc in lengths}
    pack_plans, schedules = [], []
    for dp_rank in range(dp):
        mine = {doc: n for doc, n in lengths.items() if home[doc] == dp_rank}
        budget = rng.randint(1, 60)
        sides = [
            greedy_packs(
                mine,
                [] if whole else [rng.random() for _ in range(rng.randint(0, 4))],
                budget if whole else rng.randint(1, 60),
                last_first=last_first,
            )
            for last_first in (False, True)
        ]
        packs = _shared(rng, pack_plan(dp_rank, *sides), cp, rule, owner)
        pack_plans.append(packs)
        schedules.append(random_schedule(rng, packs, pp))
    return step_plan(layout, lengths, pack_plans, schedules)


def with_context(plan: StepPlan, *, cp: int, rule: str) -> StepPlan:
    """The same plan with every pack shared by cp ranks under `rule`."""
    rng = random.Random(plan.digest)
    owner = {document.doc_id: rng.randrange(-1, cp) for document in plan.documents}
    layout = msgspec.structs.replace(plan.layout, cp=cp)
    packs = tuple(_shared(rng, one, cp, rule, owner) for one in plan.pack_plans)
    return seal(msgspec.structs.replace(plan, layout=layout, pack_plans=packs))


def merged_plan(
    seed: int,
    *,
    dp: int,
    pp: int = 1,
    cp: int = 1,
    tp: int = 1,
    rule: str = "per_document",
    num_layers: int = 4,
    own: float = 1.0,
    blocks: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """Documents of every block of replicas, larger blocks first, then every replica's own, phase by phase.

    Args:
        own: share of replicas that have own ones.
        blocks: (first, size) of all; () = as many nested ones as there can be.
    """
    rng = random.Random(seed)
    layout = even_layout(num_layers, dp=dp, cp=cp, pp=pp, tp=tp)
    lengths: dict[int, int] = {}
    phases: dict[tuple[int, int], tuple[PackPlan, Schedule]] = {}
    sizes = sorted({1, *(size for _, size in blocks)} if blocks else {1, *nested_sizes(dp)})
    for size in reversed(sizes):
        for first in range(0, dp - size + 1, size):
            if blocks and size > 1 and (first, size) not in blocks:
                continue
            low = 0 if 1 < size < dp and not blocks else 1
            count = rng.randint(low, 2) if size > 1 or own == 1 or rng.random() < own else 0
            new = {len(lengths) + i: rng.randint(1, 60 if size > 1 else 25) for i in range(count)}
            lengths |= new
            owner = {doc: rng.randrange(-1, size * cp) for doc in new}
            sides = [
                greedy_packs(new, [rng.random() for _ in range(rng.randint(0, 3))], rng.randint(1, 60), last_first=last)
                for last in (False, True)
            ]
            packs = pack_plan(0, *sides)
            if size * cp > 1:
                packs = _shared(rng, packs, size * cp, rule, owner, cp_of_local=cp if size == 1 else size * cp)
            phases[first, size] = packs, random_schedule(rng, packs, pp)
    pack_plans, schedules = [], []
    for dp_rank in range(dp):
        homes = [(dp_rank // size * size, size) for size in reversed(sizes)]
        mine = [phases[block] for block in homes if block in phases]
        pack_plans.append(
            PackPlan(
                dp_rank=dp_rank,
                forward=_renumbered([pack for packs, _ in mine for pack in packs.forward]),
                backward=_renumbered([pack for packs, _ in mine for pack in packs.backward]),
            )
        )
        schedules.append(one_after_the_other(mine, pp))
    policies = {doc: rng.choice(["replay", "recompute", "offload"]) for doc in lengths}
    pack_plans = [with_policies(packs, policies) for packs in pack_plans]
    return step_plan(layout, lengths, pack_plans, schedules)


def with_policies(packs: PackPlan, policies: dict[int, ActivationPolicy]) -> PackPlan:
    chosen = {piece.doc_id: policies[piece.doc_id] for pack in packs.forward for piece in pack.slices}
    return msgspec.structs.replace(packs, policies={doc: one for doc, one in chosen.items() if one != "replay"})


def _shared(
    rng: random.Random, packs: PackPlan, ranks: int, rule: str, owner: dict[int, int], cp_of_local: int | None = None
) -> PackPlan:
    def shared(pack: MicroPack) -> MicroPack:
        slices = []
        for piece in pack.slices:
            alone = rule == "dacp" and owner[piece.doc_id] >= 0 and cp_of_local is None
            slices.append(Slice(doc_id=piece.doc_id, start=piece.start, stop=piece.stop, cp=1 if alone else ranks))
        result = rule
        if rule in ("owners", "dacp"):
            drawn = [rng.randrange(-1, ranks) for _ in slices]
            result = tuple(drawn if rule == "owners" else [owner[piece.doc_id] for piece in slices])
        result = result if pack.direction == "forward" else ""
        return msgspec.structs.replace(pack, slices=tuple(slices), sharding=result)

    return msgspec.structs.replace(
        packs, forward=tuple(map(shared, packs.forward)), backward=tuple(map(shared, packs.backward))
    )


def _renumbered(packs: list[MicroPack]) -> tuple[MicroPack, ...]:
    return tuple(msgspec.structs.replace(pack, index=index) for index, pack in enumerate(packs))


def one_after_the_other(phases: list[tuple[PackPlan, Schedule]], pp: int) -> Schedule:
    rows: list[list] = [[] for _ in range(pp)]
    forwards = backwards = 0
    for packs, schedule in phases:
        for row, actions in zip(rows, schedule.ranks, strict=True):
            row += [
                msgspec.structs.replace(action, pack=action.pack + (forwards if action.kind == "F" else backwards))
                for action in actions
            ]
        forwards, backwards = forwards + len(packs.forward), backwards + len(packs.backward)
    return Schedule(ranks=tuple(map(tuple, rows)))


def phased_plan(
    seed: int,
    *,
    dp: int,
    pp: int,
    virtual: int = 1,
    split: bool = False,
    ahead: bool = True,
    num_layers: int = 12,
    own: float = 1.0,
    blocks: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """The packs of `merged_plan` with random seconds, every phase under the list schedule, later ones in the gaps of
    earlier ones (`run_ahead`) or after them."""
    merged = merged_plan(seed, dp=dp, num_layers=num_layers, own=own, blocks=blocks)
    layout = even_layout(num_layers, dp=dp, pp=pp, virtual=virtual)
    plan = msgspec.structs.replace(
        merged, layout=layout, times=tuple(_times(one, layout, seed, split) for one in merged.pack_plans)
    )
    schedules = tuple(_phase_by_phase(plan, dp_rank, ahead=ahead, split=split).to_schedule() for dp_rank in range(dp))
    return seal(msgspec.structs.replace(plan, schedules=schedules))


def _times(packs: PackPlan, layout: ParallelLayout, seed: int, split: bool) -> PackTimes:
    """Seconds by what a pack holds, so that all members of a block have the same."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    p2p: dict[str, list[float]] = {}
    for pack in (*packs.forward, *packs.backward):
        rng = random.Random(f"{seed} {pack.direction} {pack.slices}")
        longer = 1 + (pack.direction == "backward")
        rows.setdefault(pack.direction, []).append(
            tuple(longer * rng.uniform(0.2, 2) for _ in range(layout.num_stages))
        )
        p2p.setdefault(pack.direction, []).append(rng.uniform(0, 0.2))
    forward, backward = (tuple(rows.get(side, ())) for side in ("forward", "backward"))
    half = tuple(tuple(s / 2 for s in row) for row in backward) if split else ()
    hops = (tuple(p2p.get(side, ())) for side in ("forward", "backward"))
    p2p_forward, p2p_backward = hops
    return PackTimes(
        forward_s=forward,
        backward_s=backward,
        p2p_forward_s=p2p_forward,
        p2p_backward_s=p2p_backward,
        input_s=half,
        weight_s=half,
    )


def _phase_by_phase(plan: StepPlan, dp_rank: int, *, ahead: bool, split: bool) -> ActionColumns:
    packs, tasks = plan.pack_plans[dp_rank], timed_tasks(plan, dp_rank)
    if not packs.forward:
        return ActionColumns.of_ranks([((), (), ())] * tasks.num_ranks)
    sizes = [np.array([block_of(plan, dp_rank, one).size for one in side]) for side in (packs.forward, packs.backward)]
    numbers = np.unique(-np.concatenate(sizes))
    phases = [np.searchsorted(numbers, -of_side) for of_side in sizes]
    rows: list[list] = [[] for _ in range(tasks.num_ranks)]
    for phase in range(len(numbers)):
        forward, backward = (np.flatnonzero(of_side == phase) for of_side in phases)
        part = PipelineTasks.without_bytes(
            forward_s=tasks.forward_s[forward],
            backward_s=tasks.backward_s[backward],
            p2p_forward_s=tasks.p2p_forward_s[forward],
            p2p_backward_s=tasks.p2p_backward_s[backward],
            forwards_needed=(tasks.forwards_needed[backward] - forward[0]).tolist(),
            stage_to_rank=plan.layout.stage_to_rank,
            parts_s=(tasks.split.input_s[backward], tasks.split.weight_s[backward]) if tasks.split else None,
        )
        actions = packflow_list(part, cap_bytes=np.full(tasks.num_ranks, UNLIMITED_BYTES), split=split)
        for rank, row in enumerate(rows):
            mine = actions.of_rank(rank)
            first = np.where(actions.kind[mine] == 0, forward[0], backward[0])
            row.append((actions.kind[mine], actions.stage[mine], actions.pack[mine] + first))
    joined = ActionColumns.of_ranks([tuple(map(np.concatenate, zip(*row, strict=True))) for row in rows])
    return run_ahead(tasks, joined, *phases, None) if ahead else joined
