"""Plans made by hand or at random, without any planner: input for validator, simulator and executor tests."""

import itertools
import random

from evenload.types.document import Document, MicroPack, PackPlan, Slice
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.plan import Action, PackTimes, Prediction, Schedule, StepPlan, seal


def cut_documents(lengths: dict[int, int], cuts: list[float]) -> dict[int, list[tuple[int, int]]]:
    """Slices of every document at the given fractions; ascending."""
    slices = {}
    for doc, n in lengths.items():
        edges = sorted({0, n, *(round(c * n) for c in cuts)})
        slices[doc] = list(itertools.pairwise(edges))
    return slices


def greedy_packs(lengths: dict[int, int], cuts: list[float], budget: int, *, last_first: bool) -> list[list]:
    """Packs of at most `budget` tokens (or one slice), at most one slice of a document each."""
    packs, current, size = [], [], 0
    for doc, pieces in cut_documents(lengths, cuts).items():
        for start, stop in reversed(pieces) if last_first else pieces:
            if current and (size + stop - start > budget or current[-1][0] == doc):
                packs.append(current)
                current, size = [], 0
            current.append((doc, start, stop))
            size += stop - start
    return [*packs, current] if current else packs


def pack_plan(dp_rank: int, forward: list[list], backward: list[list]) -> PackPlan:
    def packs(direction, lists):
        return tuple(
            MicroPack(index=i, direction=direction, slices=tuple(Slice(doc_id=d, start=a, stop=b) for d, a, b in pack))
            for i, pack in enumerate(lists)
        )

    return PackPlan(dp_rank=dp_rank, forward=packs("forward", forward), backward=packs("backward", backward))


def word_schedule(packs: PackPlan, pp: int, f: list[int], w: list[int]) -> Schedule:
    """Stage s runs B_j after exactly min(m_f, f[j] + w[s]) forwards."""
    ranks = []
    for stage in range(pp):
        row, done = [], 0
        for j in range(len(packs.backward)):
            target = min(len(packs.forward), f[j] + w[stage])
            row += [Action(kind="F", stage=stage, pack=k) for k in range(done, target)]
            done = max(done, target)
            row.append(Action(kind="B", stage=stage, pack=j))
        assert done == len(packs.forward)
        ranks.append(tuple(row))
    return Schedule(ranks=tuple(ranks))


def running_need(packs: PackPlan) -> list[int]:
    """The least legal f."""
    return list(itertools.accumulate(packs.forwards_needed(), max))


def random_schedule(rng: random.Random, packs: PackPlan, pp: int) -> Schedule:
    f = [min(need + rng.choice([0, 0, 1, 2]), len(packs.forward)) for need in running_need(packs)]
    f = [max(f[: j + 1]) for j in range(len(f))]
    return word_schedule(packs, pp, f, sorted((rng.randint(0, 2 * pp) for _ in range(pp)), reverse=True))


def step_plan(
    layout: ParallelLayout, lengths: dict[int, int], pack_plans: list[PackPlan], schedules: list[Schedule]
) -> StepPlan:
    """A sealed plan; its times are not predictions of anything."""
    documents = tuple(Document(doc_id=d, num_tokens=n, num_label_tokens=n - 1) for d, n in lengths.items())
    times = [
        PackTimes(
            forward_s=((1.0,) * layout.pp,) * len(p.forward),
            backward_s=((2.0,) * layout.pp,) * len(p.backward),
            p2p_forward_s=(0.0,) * len(p.forward),
            p2p_backward_s=(0.0,) * len(p.backward),
        )
        for p in pack_plans
    ]
    return seal(
        StepPlan(
            step=0,
            strategy="by_hand",
            layout=layout,
            documents=documents,
            num_label_tokens=sum(n - 1 for n in lengths.values()),
            pack_plans=tuple(pack_plans),
            schedules=tuple(schedules),
            times=tuple(times),
            predicted=Prediction(step_time_s=0.0, per_replica_s=(0.0,) * layout.dp, peak_memory_bytes=0),
        )
    )


def random_plan(seed: int, *, num_layers: int, pp: int, dp: int, max_tokens: int = 40) -> StepPlan:
    """Random documents, random different forward and backward cuts, random legal f and w."""
    rng = random.Random(seed)
    layout = even_layout(num_layers, dp=dp, pp=pp)
    lengths = {doc: rng.randint(1, max_tokens) for doc in range(rng.randint(1, 7))}
    owner = {doc: rng.randrange(dp) for doc in lengths}
    pack_plans, schedules = [], []
    for dp_rank in range(dp):
        mine = {doc: n for doc, n in lengths.items() if owner[doc] == dp_rank}
        sides = [
            greedy_packs(
                mine, [rng.random() for _ in range(rng.randint(0, 4))], rng.randint(1, 60), last_first=last_first
            )
            for last_first in (False, True)
        ]
        pack_plans.append(pack_plan(dp_rank, *sides))
        schedules.append(random_schedule(rng, pack_plans[-1], pp))
    return step_plan(layout, lengths, pack_plans, schedules)


def random_schedule(rng: random.Random, packs: PackPlan, pp: int) -> Schedule:
    """A legal order with random f and w."""
    f = [min(need + rng.choice([0, 0, 1, 2]), len(packs.forward)) for need in running_need(packs)]
    f = [max(f[: j + 1]) for j in range(len(f))]
    return word_schedule(packs, pp, f, sorted((rng.randint(0, 2 * pp) for _ in range(pp)), reverse=True))
