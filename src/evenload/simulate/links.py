"""Hops between stages as tasks on links, each link from one pipeline rank to another.

    `hops`              as the simulator charges them: a hop starts when its producer has ended, and hops of one link
                        do not queue behind each other (an edge delay)
    `simulate_links`    hops of one link run one after the other, in the order in which the sender makes them; forward
                        and backward traffic of a pair of ranks are two directions, so two links

The queueing simulation ends no earlier than the other and equally late where no two hops of a link overlap. It is for
looking at one plan, in Python, about 3 us an action; planners use the edge delays.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.simulate.critical_path import action_seconds, hop_seconds, producers
from evenload.simulate.simulate import Simulation, simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks


@dataclass(frozen=True, eq=False)
class Hops:
    """Transfers between stages, one for every action whose input comes from another stage.

    Args:
        producer, consumer: int64[h], indices into the action columns.
        start_s, end_s: float64[h].
    """

    producer: NDArray[np.int64]
    consumer: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


def hops(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> Hops:
    """The hops of a simulated schedule, as edge delays.

    Args:
        simulation: of `tasks` and `actions`.
    """
    producer = producers(tasks, actions)
    consumer = np.flatnonzero(producer >= 0)
    producer = producer[consumer]
    start_s = simulation.end_s[producer]
    return Hops(producer, consumer, start_s, start_s + hop_seconds(tasks, actions)[consumer])


def simulate_links(tasks: PipelineTasks, actions: ActionColumns) -> tuple[Simulation, Hops]:
    """Run the schedule with hops that queue on their link.

    Raises:
        ConfigError, ValueError, ScheduleDeadlockError: as `simulate`.
    """
    as_delays = simulate(tasks, actions)  # checks the schedule; bytes do not depend on times
    producer, consumer = producers(tasks, actions).tolist(), _consumers(tasks, actions)
    seconds, hop_s = action_seconds(tasks, actions).tolist(), hop_seconds(tasks, actions).tolist()
    edges = actions.rank_offset.tolist()
    rank_of = np.repeat(np.arange(actions.num_ranks), np.diff(actions.rank_offset)).tolist()
    start, end = [0.0] * len(seconds), [0.0] * len(seconds)
    sent, arrived = [0.0] * len(seconds), [-1.0] * len(seconds)  # by consumer; -1 = not sent yet
    link_free: dict[tuple[int, int], float] = {}
    next_action, rank_free = edges[:-1], [0.0] * actions.num_ranks
    runnable = list(range(actions.num_ranks))
    while runnable:
        rank = runnable.pop()
        while next_action[rank] < edges[rank + 1]:
            at = next_action[rank]
            if producer[at] >= 0 and arrived[at] < 0:
                break
            start[at] = max(rank_free[rank], arrived[at], 0.0)
            end[at] = rank_free[rank] = start[at] + seconds[at]
            next_action[rank] += 1
            receiver = consumer[at]
            if receiver >= 0:
                link = rank, rank_of[receiver]
                sent[receiver] = max(end[at], link_free.get(link, 0.0))
                arrived[receiver] = link_free[link] = sent[receiver] + hop_s[receiver]
                if next_action[rank_of[receiver]] == receiver and rank_of[receiver] != rank:
                    runnable.append(rank_of[receiver])
    received = np.flatnonzero(np.array(producer) >= 0)
    found = Simulation(np.array(start), np.array(end), max(end, default=0.0), as_delays.peak_bytes)
    return found, Hops(np.array(producer)[received], received, np.array(sent)[received], np.array(arrived)[received])


def _consumers(tasks: PipelineTasks, actions: ActionColumns) -> list[int]:
    """The action that each action feeds on the next stage, -1 where there is none; inverse of `producers`."""
    producer = producers(tasks, actions)
    consumer = np.full(len(producer), -1, np.int64)
    fed = np.flatnonzero(producer >= 0)
    consumer[producer[fed]] = fed
    return consumer.tolist()
