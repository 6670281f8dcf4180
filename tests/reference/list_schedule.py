"""The list schedule in Python: the rules of `native/schedule.cpp`, which must make the same schedules.

Simulated time. A rank decides whenever it is free and something may have arrived; decisions go by time,
then by rank. Deciding at time t, over the stages of the rank:

- the next backward of a stage is ready when the forwards it needs have run there and its gradient has
  arrived by t; of several the lowest pack, then the highest stage;
- the next forward of a stage is ready when its input has arrived by t and it is *admissible*: its stage's
  next backward needs it (the escape, k < running maximum of D), or it is within `lookahead` and live bytes
  + what it keeps + the larger of its own and the rank's largest backward temporary buffer stay within
  the cap; of several the lowest pack, then the highest stage;
- a ready backward goes first; with `alternate`, a ready forward goes first right after a backward;
- with `split` a chosen backward runs as I if that fits the cap, else, with no W left, whole; the rank's oldest W
  runs when it would idle, and before anything that does not fit the cap (zero bubble; Qi et al. 2023).

Never stuck: take the least unfinished backward j and the highest stage s that misses it. Its gradient is there, so a
forward k < D[j] is missing on s. That forward is admissible on s and on every stage before it, since those miss j too;
so stage 0 can start its next forward or the input is on its way. Peak with one stage a rank: an admissible forward
leaves at most the cap; an escaping forward k runs after exactly the forwards 0..k-1 and all backwards before the first
that needs k, the least any schedule with these orders holds. O(actions (ranks + stages a rank)).
"""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenload.types.pipeline import ActionColumns, PipelineTasks

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = 0, 1, 2, 3


@dataclass
class _Rank:
    cap_bytes: int
    live_bytes: int
    stages: list[int] = field(default_factory=list)
    reserve_bytes: int = 0
    free_s: float = 0.0
    wake_s: float = 0.0
    last_was_backward: bool = False
    weights: deque[tuple[int, int]] = field(default_factory=deque)  # (stage, pack) of I's whose W is due
    actions: list[tuple[int, int, int]] = field(default_factory=list)  # (kind, stage, pack)


class _ListSchedule:
    def __init__(self, tasks: PipelineTasks, cap_bytes: list[int], alternate: bool, lookahead: float, split: bool):
        self.m_f, self.m_b, self.num_stages = tasks.num_forward, tasks.num_backward, tasks.num_stages
        self.alternate, self.lookahead, self.split = alternate, lookahead, split
        parts = (tasks.split.input_s, tasks.split.weight_s) if split and tasks.split else ()
        self.durations = [seconds.tolist() for seconds in (tasks.forward_s, tasks.backward_s, *parts)]
        self.hops = (tasks.p2p_forward_s.tolist(), tasks.p2p_backward_s.tolist())
        self.kept = tasks.held.forward_kept_bytes.tolist()
        self.freed = {_BACKWARD: tasks.held.backward_freed_bytes.tolist()}
        if split and tasks.split:
            self.freed |= {_INPUT: tasks.split.input_freed_bytes.tolist()}
            self.freed |= {_WEIGHT: tasks.split.weight_freed_bytes.tolist()}
            self.input_temporary = tasks.split.input_temp_bytes.tolist()
        self.temporary = tasks.held.forward_temp_bytes.tolist()
        self.needed = tasks.forwards_needed.tolist()
        self.needed_max = np.maximum.accumulate(tasks.forwards_needed).tolist()
        self.rank_of = tasks.stage_to_rank.tolist()
        self.ranks = [_Rank(cap, live) for cap, live in zip(cap_bytes, tasks.held.static_bytes.tolist(), strict=True)]
        for stage, r in enumerate(self.rank_of):
            rank = self.ranks[r]
            rank.stages.append(stage)
            rank.reserve_bytes = max(rank.reserve_bytes, int(tasks.held.backward_temp_bytes[:, stage].max(initial=0)))
        # next[kind][stage] = pack; arrival_s[kind][pack][stage]
        self.next = ([0] * self.num_stages, [0] * self.num_stages)
        late = [math.inf] * (self.num_stages - 1)
        self.arrival_s = ([[0.0, *late] for _ in range(self.m_f)], [[*late, 0.0] for _ in range(self.m_b)])

    def run(self) -> list[_Rank]:
        remaining = self.num_stages * (self.m_f + self.m_b)
        while remaining:
            rank = min(self.ranks, key=lambda rank: rank.wake_s)  # the first of equals
            if rank.wake_s == math.inf:
                raise RuntimeError("list schedule is stuck; its proof does not hold")
            choice = self.choose(rank, rank.wake_s)
            if choice is None:
                rank.wake_s = self.next_arrival(rank)
            else:
                self.start(rank, *choice, rank.wake_s)
                remaining -= choice[0] != _INPUT  # its W remains
        return self.ranks

    def candidates(self, rank: _Rank) -> list[tuple[int, int, int]]:
        """(kind, stage, pack) that the rank may start once the input is there."""
        result = []
        for stage in rank.stages:
            k, j = self.next[_FORWARD][stage], self.next[_BACKWARD][stage]
            if j < self.m_b and k >= self.needed[j]:
                result.append((_BACKWARD, stage, j))
            if k < self.m_f and self.admissible(rank, stage):
                result.append((_FORWARD, stage, k))
        return result

    def admissible(self, rank: _Rank, stage: int) -> bool:
        k, j = self.next[_FORWARD][stage], self.next[_BACKWARD][stage]
        needed = self.needed_max[j] if j < self.m_b else self.m_f
        if k < needed:
            return True
        if k - needed >= self.num_stages - 1 - stage + self.lookahead:
            return False
        return self.forward_fits(rank, stage, k)

    def forward_fits(self, rank: _Rank, stage: int, k: int) -> bool:
        temporary = max(self.temporary[k][stage], rank.reserve_bytes)
        return rank.live_bytes + self.kept[k][stage] + temporary <= rank.cap_bytes

    def choose(self, rank: _Rank, now_s: float) -> tuple[int, int, int] | None:
        ready = [c for c in self.candidates(rank) if self.arrival_s[c[0]][c[2]][c[1]] <= now_s]
        preferred = _FORWARD if self.alternate and rank.last_was_backward else _BACKWARD
        choice = min(ready, key=lambda c: (c[0] != preferred, c[2], -c[1]), default=None)
        return self.split_choice(rank, choice) if self.split else choice

    def split_choice(self, rank: _Rank, choice: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        fits = False
        if choice is not None:
            kind, stage, pack = choice
            if kind == _FORWARD:
                fits = self.forward_fits(rank, stage, pack)
            else:
                fits = rank.live_bytes + self.input_temporary[pack][stage] <= rank.cap_bytes
            if fits and kind == _BACKWARD:
                choice = (_INPUT, stage, pack)
        return (_WEIGHT, *rank.weights[0]) if rank.weights and not fits else choice

    def next_arrival(self, rank: _Rank) -> float:
        return min((self.arrival_s[kind][pack][stage] for kind, stage, pack in self.candidates(rank)), default=math.inf)

    def start(self, rank: _Rank, kind: int, stage: int, pack: int, now_s: float) -> None:
        rank.actions.append((kind, stage, pack))
        # The rank decides next when this action has ended, so a backward's bytes are free by then.
        rank.live_bytes += self.kept[pack][stage] if kind == _FORWARD else -self.freed[kind][pack][stage]
        rank.free_s = now_s + self.durations[kind][pack][stage]
        if kind == _WEIGHT:
            rank.weights.popleft()
            rank.wake_s = rank.free_s
            return
        if kind == _INPUT:
            rank.weights.append((stage, pack))
        rank.last_was_backward = kind != _FORWARD
        direction = _FORWARD if kind == _FORWARD else _BACKWARD
        self.next[direction][stage] += 1
        neighbour = stage + (1 if kind == _FORWARD else -1)
        if 0 <= neighbour < self.num_stages:
            arrival_s = rank.free_s + self.hops[direction][pack]
            self.arrival_s[direction][pack][neighbour] = arrival_s
            receiver = self.ranks[self.rank_of[neighbour]]
            receiver.wake_s = min(receiver.wake_s, max(arrival_s, receiver.free_s))
        rank.wake_s = rank.free_s


def list_schedule(
    tasks: PipelineTasks,
    *,
    cap_bytes: NDArray[np.int64],
    alternate: bool = False,
    lookahead: int | None = None,
    split: bool = False,
) -> ActionColumns:
    """The list schedule; arguments as `packflow_list`."""
    ahead = math.inf if lookahead is None else lookahead
    ranks = _ListSchedule(tasks, cap_bytes.tolist(), alternate, ahead, split).run()
    flat = np.array([action for rank in ranks for action in rank.actions], dtype=np.int32).reshape(-1, 3)
    return ActionColumns(
        kind=flat[:, 0].astype(np.uint8),
        stage=np.ascontiguousarray(flat[:, 1]),
        pack=np.ascontiguousarray(flat[:, 2]),
        rank_offset=np.cumsum([0, *(len(rank.actions) for rank in ranks)], dtype=np.int64),
    )
