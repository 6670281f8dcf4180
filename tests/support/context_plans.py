"""Random plans whose packs several ranks share: static context parallelism, DACP and DP-Merge."""

import random

import msgspec

from evenload.planning.dp_merge import nested_sizes
from evenload.types.document import ActivationPolicy, MicroPack, PackPlan, Slice
from evenload.types.layout import even_layout
from evenload.types.plan import Schedule, StepPlan, seal
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
    seed: int, *, dp: int, pp: int = 1, cp: int = 1, tp: int = 1, rule: str = "per_document", num_layers: int = 4
) -> StepPlan:
    """Documents of every aligned block of replicas, larger blocks first, then every replica's own, phase by phase."""
    rng = random.Random(seed)
    layout = even_layout(num_layers, dp=dp, cp=cp, pp=pp, tp=tp)
    lengths: dict[int, int] = {}
    phases: dict[tuple[int, int], tuple[PackPlan, Schedule]] = {}
    sizes = [1, *nested_sizes(dp)]
    for size in reversed(sizes):
        for first in range(0, dp, size):
            low = 0 if 1 < size < dp else 1
            new = {len(lengths) + i: rng.randint(1, 60 if size > 1 else 25) for i in range(rng.randint(low, 2))}
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
        mine = [phases[dp_rank // size * size, size] for size in reversed(sizes)]
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
