"""`FoundStep`: what a search over all replicas of a step has found, trial by trial, and the candidates of its best."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.plan.packing.dp_merge import in_phases
from evenload.plan.problem.candidate import Candidate
from evenload.plan.problem.step_problem import ReplicaChoice
from evenload.plan.search.replica_search import ReplicaSearch, idle_candidate
from evenload.plan.search.trial_space import Trial
from evenload.types.replica_block import ReplicaBlock


@dataclass(frozen=True, eq=False)
class FoundStep:
    """Searches with a best trial each, not yet made into candidates.

    Args:
        own: per replica what it runs alone.
        blocks: what groups of replicas share, before that; larger blocks first.
    """

    own: list[ReplicaSearch]
    blocks: dict[ReplicaBlock, ReplicaSearch]

    def blocks_of(self, replica: int) -> list[ReplicaBlock]:
        """Blocks with this replica, largest first."""
        return [block for block in self.blocks if replica in block.replicas]

    def start_s(self, replica: int) -> float:
        """When a replica's own documents begin: after those it shares."""
        return blocks_end_s(self.blocks, replica)

    def seconds(self) -> NDArray[np.float64]:
        """Simulated time of every replica; float64[dp]."""
        return starts_s(self.blocks, len(self.own)) + np.array([search.best().makespan_s for search in self.own])

    def worth(self) -> tuple[int, float, float]:
        """Smaller is better: memory beyond the limit, then the slowest replica, then all."""
        excess = max(search.best().excess_bytes for search in (*self.own, *self.blocks.values()))
        seconds = self.seconds()
        return excess, float(seconds.max()), float(seconds.sum())

    def choices(self) -> tuple[ReplicaChoice, ...]:
        """Candidates of the best trials."""
        shared = self.shared()
        return tuple(self.choice(replica, shared) for replica in range(len(self.own)))

    def shared(self) -> "SharedPacks":
        """What groups of replicas share, by its best trials."""
        # Phases are joined column by column, so all are priced with I and W where any runs them.
        used = [search for search in (*self.own, *self.blocks.values()) if len(search.documents)]
        split = bool(self.blocks) and any(search.ranking()[0].split for search in used)
        built = {block: _built(search, search.ranking()[0], split) for block, search in self.blocks.items()}
        return SharedPacks(built, split)

    def choice(self, replica: int, shared: "SharedPacks") -> ReplicaChoice:
        """The candidate of one replica."""
        search = self.own[replica]
        parts = [(shared.of_block[block], self.blocks[block].documents) for block in self.blocks_of(replica)]
        if len(search.documents):
            parts.append((_built(search, search.ranking()[0], shared.split), search.documents))
        if not parts:
            parts.append((idle_candidate(search.problem), search.documents))
        if len(parts) == 1:
            return ReplicaChoice(parts[0][1], parts[0][0])
        candidates, documents = [part[0] for part in parts], [part[1] for part in parts]
        return ReplicaChoice(np.concatenate(documents), in_phases(search.problem, candidates, documents))


class SharedPacks(NamedTuple):
    """Candidates of documents that groups of replicas share; `split`: all phases are priced with I and W."""

    of_block: dict[ReplicaBlock, Candidate]
    split: bool


def starts_s(blocks: dict[ReplicaBlock, ReplicaSearch], replicas: int) -> NDArray[np.float64]:
    """`blocks_end_s` of every replica, in one go: it is asked for at every document that moves; float64[replicas]."""
    ends_s = np.zeros(replicas)
    for block, search in blocks.items():
        ends_s[block.first : block.first + block.size] += search.best().makespan_s
    return ends_s


def blocks_end_s(blocks: dict[ReplicaBlock, ReplicaSearch], replica: int) -> float:
    """When the blocks of a replica have ended, one after the other."""
    return sum(search.best().makespan_s for block, search in blocks.items() if replica in block.replicas)


def _built(search: ReplicaSearch, trial: Trial, split: bool) -> Candidate:
    found = search.build(trial, split=split)
    assert found is not None, "only possible trials are ranked"
    return found
