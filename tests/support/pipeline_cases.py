"""Small and random `PipelineTasks` for the tests of schedules and of the simulator."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from evenload.schedule.simulate import check_schedule
from evenload.types.pipeline import ActionColumns, PackBytes, PipelineTasks, SplitBackward, action_columns
from evenload.types.plan import Schedule, parse_action


def uniform_tasks(
    needed: list[int],
    num_forward: int,
    num_stages: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    p2p_s: float = 0.0,
    kept: int = 10,
    static: int = 100,
    stage_to_rank: list[int] | None = None,
) -> PipelineTasks:
    """Equal packs on equal stages; a backward frees `kept` bytes; temporary buffers of 1 (F) and 2 (B)."""
    m_f, m_b, shape = num_forward, len(needed), (num_stages,)
    ranks = list(range(num_stages)) if stage_to_rank is None else stage_to_rank
    return PipelineTasks(
        forward_s=np.full((m_f, *shape), forward_s),
        backward_s=np.full((m_b, *shape), backward_s),
        p2p_forward_s=np.full(m_f, p2p_s),
        p2p_backward_s=np.full(m_b, p2p_s),
        forwards_needed=np.array(needed, dtype=np.int32),
        stage_to_rank=np.array(ranks, dtype=np.int32),
        held=PackBytes(
            static_bytes=np.full(max(ranks) + 1, static, dtype=np.int64),
            forward_kept_bytes=np.full((m_f, *shape), kept, dtype=np.int64),
            forward_temp_bytes=np.full((m_f, *shape), 1, dtype=np.int64),
            backward_freed_bytes=np.full((m_b, *shape), kept, dtype=np.int64),
            backward_temp_bytes=np.full((m_b, *shape), 2, dtype=np.int64),
        ),
    )


def equal_packs(num_packs: int, num_stages: int, **options) -> PipelineTasks:
    """Whole documents, the same packs in both directions: `D[j] = j + 1`."""
    return uniform_tasks(list(range(1, num_packs + 1)), num_packs, num_stages, **options)


def with_split(
    tasks: PipelineTasks, rng: np.random.Generator | None = None, weight_share: float = 0.5
) -> PipelineTasks:
    """The same tasks with I and W; bytes divided at random, or W holding nothing."""
    shape = tasks.backward_s.shape
    if rng is None:
        weight_s, held = tasks.backward_s * weight_share, np.zeros(shape, np.int64)
        temporary = tasks.held.backward_temp_bytes
    else:
        weight_s = tasks.backward_s * rng.choice([0.0, 0.25, 0.5, 0.75], shape)
        held = rng.integers(0, 40, shape)  # left by I for W, some of it new
        temporary = tasks.held.backward_temp_bytes + held
    return dataclasses.replace(
        tasks,
        split=SplitBackward(
            input_s=tasks.backward_s - weight_s,
            weight_s=weight_s,
            input_freed_bytes=tasks.held.backward_freed_bytes - held,
            input_temp_bytes=temporary,
            weight_freed_bytes=held,
        ),
    )


def random_needed(rng: np.random.Generator) -> tuple[int, list[int]]:
    """(m_f, D) of random documents under independent forward and backward cuts.

    Documents follow each other in both directions; every pack border falls anywhere on the line of
    tokens, so a pack holds a suffix of one document, whole ones and a prefix of another.
    """
    lengths = np.ceil(rng.lognormal(1.0, 1.2, rng.integers(1, 9))).astype(int)
    ends = np.cumsum(lengths)

    def borders(count: int) -> list[int]:
        inner = rng.choice(np.arange(1, ends[-1]), min(count - 1, ends[-1] - 1), replace=False) if ends[-1] > 1 else []
        return [*sorted(int(b) for b in inner), int(ends[-1])]

    forward, backward = borders(int(rng.integers(1, 12))), borders(int(rng.integers(1, 12)))
    # The forward pack that holds a document's last token; backward pack j ends inside document last_document[j].
    last_pack = np.searchsorted(forward, ends)
    last_document = np.searchsorted(ends, backward)
    return len(forward), (1 + last_pack[last_document]).tolist()


def random_tasks(
    rng: np.random.Generator,
    *,
    num_stages: int | None = None,
    ranks: NDArray | None = None,
    whole_seconds: bool = False,
) -> PipelineTasks:
    """Random cuts, durations (some zero), hops and bytes on 1..8 stages, one stage a rank unless `ranks` says."""
    m_f, needed = random_needed(rng)
    if rng.random() < 0.2:  # also documents whose backward does not follow the forward order
        needed = rng.permutation(needed).tolist()
    m_b = len(needed)
    stages = int(rng.integers(1, 9)) if num_stages is None else num_stages
    stage_to_rank = np.arange(stages) if ranks is None else ranks
    stages = len(stage_to_rank)

    def seconds(*shape: int) -> NDArray[np.float64]:
        drawn = rng.integers(0, 9, shape) if whole_seconds else rng.lognormal(0, 1, shape)
        return np.where(rng.random(shape) < 0.1, 0.0, drawn).astype(np.float64)

    def sizes(*shape: int) -> NDArray[np.int64]:
        return rng.integers(0, 50, shape, dtype=np.int64)

    return PipelineTasks(
        forward_s=seconds(m_f, stages),
        backward_s=seconds(m_b, stages),
        p2p_forward_s=seconds(m_f) * rng.choice([0.0, 0.25]),
        p2p_backward_s=seconds(m_b) * rng.choice([0.0, 0.25]),
        forwards_needed=np.array(needed, dtype=np.int32),
        stage_to_rank=np.asarray(stage_to_rank, dtype=np.int32),
        held=PackBytes(
            static_bytes=sizes(int(np.max(stage_to_rank)) + 1),
            forward_kept_bytes=sizes(m_f, stages),
            forward_temp_bytes=sizes(m_f, stages),
            backward_freed_bytes=sizes(m_b, stages),
            backward_temp_bytes=sizes(m_b, stages),
        ),
    )


def random_ranks(rng: np.random.Generator) -> NDArray:
    """Up to three virtual stages on each of up to four ranks, dealt round robin or at random."""
    num_ranks, virtual = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    ranks = np.arange(num_ranks * virtual) % num_ranks
    return rng.permutation(ranks) if rng.random() < 0.5 else ranks


def caps(tasks: PipelineTasks, cap: int) -> NDArray[np.int64]:
    """The same cap on every rank."""
    return np.full(tasks.num_ranks, cap, dtype=np.int64)


def check_order(tasks: PipelineTasks, actions: ActionColumns) -> None:
    """Check an order of these packs as plans are checked."""
    check_schedule(
        actions,
        num_forward=tasks.num_forward,
        forwards_needed=tasks.forwards_needed.tolist(),
        stage_to_rank=tasks.stage_to_rank.tolist(),
        num_ranks=tasks.num_ranks,
    )


def columns_of(*rows: str) -> ActionColumns:
    """Action columns from one line of names a rank, `columns_of("0F0 0B0", "1F0 1B0")`."""
    return action_columns(Schedule(ranks=tuple(tuple(map(parse_action, row.split())) for row in rows)))


def names_of(actions: ActionColumns) -> list[str]:
    """Inverse of `columns_of`."""
    return [" ".join(map(str, row)) for row in actions.to_schedule().ranks]
