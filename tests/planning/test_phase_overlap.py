"""What a replica runs alone begins in the gaps of what it shares; shared packs stay where they are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.planning.cp_sharding import run_ahead
from evenload.schedule.packflow import packflow_list
from evenload.schedule.schedule_rule import UNLIMITED_BYTES
from evenload.schedule.simulate import check_schedule, simulate
from evenload.types.pipeline import ActionColumns, PackBytes, PipelineTasks
from evenload.types.timeline import KINDS


def tasks_of(forward_s, backward_s, stages: int, *, split: bool = False, kept: int = 0, rng=None) -> PipelineTasks:
    """Packs that take as long on every stage; backward k needs forward k; every pack holds `kept` bytes."""
    forward, backward = (np.tile(np.array(seconds, float)[:, None], (1, stages)) for seconds in (forward_s, backward_s))
    if rng is not None:
        forward *= rng.uniform(0.5, 1.5, forward.shape)
        backward *= rng.uniform(0.5, 1.5, backward.shape)
    parts = (backward * 0.5, backward - backward * 0.5) if split else None
    tasks = PipelineTasks.without_bytes(
        forward_s=forward,
        backward_s=backward,
        p2p_forward_s=np.full(len(forward), 0.25),
        p2p_backward_s=np.full(len(backward), 0.25),
        forwards_needed=np.arange(1, len(backward) + 1).tolist(),
        stage_to_rank=list(range(stages)),
        parts_s=parts,
    )
    rows = np.full(forward.shape, kept, np.int64)
    none = np.zeros_like(rows)
    held = PackBytes(
        static_bytes=tasks.held.static_bytes,
        forward_kept_bytes=rows,
        forward_temp_bytes=none + 1,
        backward_freed_bytes=rows,
        backward_temp_bytes=none + 2,
    )
    object.__setattr__(tasks, "held", held)
    if tasks.split is not None:
        object.__setattr__(tasks.split, "input_freed_bytes", none)
        object.__setattr__(tasks.split, "input_temp_bytes", none + 2)
        object.__setattr__(tasks.split, "weight_freed_bytes", rows)
    return tasks


def one_after_the_other(parts: list[PipelineTasks], cap: int, *, split: bool):
    """All packs, the schedule that runs part after part, and the phase of every pack."""
    joined = PipelineTasks.concat(parts)
    caps = np.full(joined.num_ranks, cap, np.int64)
    each = [packflow_list(part, cap_bytes=caps, split=split) for part in parts]
    before = np.cumsum([0, *(part.num_forward for part in parts)])
    rows = [
        tuple(
            np.concatenate(columns)
            for columns in zip(
                *(
                    (a.kind[a.of_rank(r)], a.stage[a.of_rank(r)], a.pack[a.of_rank(r)] + n)
                    for a, n in zip(each, before, strict=False)
                ),
                strict=True,
            )
        )
        for r in range(joined.num_ranks)
    ]
    phase = np.repeat(np.arange(len(parts)), [part.num_forward for part in parts])
    return joined, ActionColumns.of_ranks(rows), phase


def times_of(tasks: PipelineTasks, actions: ActionColumns) -> dict[tuple[int, int, int], float]:
    result = simulate(tasks, actions)
    names = zip(actions.kind.tolist(), actions.stage.tolist(), actions.pack.tolist(), strict=True)
    return dict(zip(names, result.start_s.tolist(), strict=True))


def test_the_drain_of_a_shared_phase_is_filled_by_hand() -> None:
    """Two stages, hops of 0.25. The shared pack: F at 0 and 1.25, B at 2.25 and 4.5, done at 6.5. Rank 0 has nothing to
    do from 1 to 4.5: three forwards of one second. Rank 1 is free from 4.25 on, so its first own forward runs there."""
    parts = [tasks_of([1.0], [2.0], 2), tasks_of([1.0] * 3, [2.0] * 3, 2)]
    joined, actions, phase = one_after_the_other(parts, UNLIMITED_BYTES, split=False)
    apart = times_of(joined, actions)
    assert apart[1, 0, 0] == 4.5
    assert apart[0, 0, 1] == 6.5
    ahead = run_ahead(joined, actions, phase, phase, None)
    filled = times_of(joined, ahead)
    assert [filled[0, 0, pack] for pack in (0, 1, 2)] == [0.0, 1.0, 2.0]
    assert filled[1, 0, 0] == 4.5
    assert filled[0, 1, 1] == 4.25
    assert simulate(joined, ahead).makespan_s < simulate(joined, actions).makespan_s - 2


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=3),
    st.integers(2, 4),
    st.booleans(),
    st.sampled_from([None, 25, 45]),
    st.integers(0, 10**6),
)
def test_shared_packs_stay_where_they_are_and_nothing_is_later(counts, stages, split, cap, seed) -> None:
    """Exactly: members of a block meet in what is predicted for each of them alone."""
    rng = np.random.default_rng(seed)
    parts = [
        tasks_of(rng.uniform(0.1, 2, n), rng.uniform(0.1, 4, n), stages, split=split, kept=10, rng=rng) for n in counts
    ]
    limit = UNLIMITED_BYTES if cap is None else cap
    joined, actions, phase = one_after_the_other(parts, limit, split=split)
    caps = None if cap is None else np.full(stages, cap)
    ahead = run_ahead(joined, actions, phase, phase, caps)
    check_schedule(
        ahead,
        num_forward=joined.num_forward,
        forwards_needed=joined.forwards_needed.tolist(),
        stage_to_rank=list(range(stages)),
    )
    before, after = times_of(joined, actions), times_of(joined, ahead)
    assert before.keys() == after.keys()
    assert all(after[action] <= start_s + 1e-12 for action, start_s in before.items())
    assert all(after[action] == start_s for action, start_s in before.items() if action[2] < counts[0])
    # Two phases that are alike on all members stay alike when a third one follows.
    two = counts[0] + counts[1]
    kept = (ahead.pack < two).nonzero()[0]
    rows = [kept[(kept >= ahead.of_rank(r).start) & (kept < ahead.of_rank(r).stop)] for r in range(stages)]
    alone = ActionColumns.of_ranks([(ahead.kind[row], ahead.stage[row], ahead.pack[row]) for row in rows])
    assert all(after[action] == start_s for action, start_s in times_of(joined, alone).items())
    if cap is not None:
        peaks = [simulate(joined, one).peak_bytes.max() for one in (actions, ahead)]
        assert peaks[1] <= max(cap, peaks[0])
    assert {KINDS[kind] for kind in ahead.kind.tolist()} == {KINDS[kind] for kind in actions.kind.tolist()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pack": 9}, "of pack 9 of 4"),
        ({"stage": 2}, "of stage 2"),
        ({"kind": 2}, "I and W need split columns"),
        ({"phases": 3}, "phases of 3 forward and 3 backward packs for 4 and 4"),
        ({"caps": 3}, "cap_bytes has 3 entries for 2 ranks"),
    ],
)
def test_the_core_refuses_what_it_would_read_beyond(change, why) -> None:
    parts = [tasks_of([1.0], [2.0], 2), tasks_of([1.0] * 3, [2.0] * 3, 2)]
    joined, actions, phase = one_after_the_other(parts, UNLIMITED_BYTES, split=False)
    columns = {name: getattr(actions, name).copy() for name in ("kind", "stage", "pack", "rank_offset")}
    for name in columns.keys() & change.keys():
        columns[name][0] = change[name]
    phase = phase[: change.get("phases", 4)]
    caps = np.full(change["caps"], 100) if "caps" in change else None
    with pytest.raises(ValueError, match=why):
        run_ahead(joined, ActionColumns(**columns), phase, phase, caps)
