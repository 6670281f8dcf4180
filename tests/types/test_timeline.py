"""Timelines: their figures, seconds of packs, and their file."""

import dataclasses

import numpy as np
import pytest

from evenload.errors import DataError
from evenload.types.timeline import MEMORY_KINDS, SideTasks, Timeline, pack_times, read_timeline, write_timeline
from report_samples import make_timeline


def test_an_idle_replica_counts_into_the_bubble():
    """A replica without packs waits for the whole step; leaving it out would flatter the plan."""
    t = make_timeline(2, 2, 4)
    busy = t.dp_rank == 0
    columns = {
        name: getattr(t, name)[busy] for name in ("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s")
    }
    idle = dataclasses.replace(t, **columns)
    worked_s = float((t.end_s - t.start_s)[busy].sum())
    assert idle.bubble_fraction() == pytest.approx(1 - worked_s / (4 * t.step_time_s))
    unknown = np.zeros(0, np.int32)
    alone = dataclasses.replace(idle, memory_dp_rank=unknown, memory_rank=unknown)
    assert alone.bubble_fraction() == pytest.approx(1 - worked_s / (2 * t.step_time_s))


def hand_made(kinds, packs, stages, starts, ends, dp=None) -> Timeline:
    n = len(kinds)
    return Timeline(
        dp_rank=np.array(dp or [0] * n, np.int32),
        rank=np.array(stages, np.int32),
        stage=np.array(stages, np.int32),
        kind=np.array(["FBIW".index(k) for k in kinds], np.uint8),
        pack=np.array(packs, np.int32),
        start_s=np.array(starts, np.float64),
        end_s=np.array(ends, np.float64),
        step_time_s=max(ends),
        memory_dp_rank=np.zeros(0, np.int32),
        memory_rank=np.zeros(0, np.int32),
        memory_time_s=np.zeros(0),
        memory_bytes=np.zeros(0, np.int64),
    )


def test_a_pack_counts_with_its_slowest_stage():
    t = hand_made("FFFF", [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 4], [1, 4, 2, 6])
    times = pack_times(t, "forward")
    assert times.pack.tolist() == [0, 1]
    assert times.seconds.tolist() == [3.0, 2.0]
    assert times.imbalance() == pytest.approx(3 / 2.5)


def test_a_timeline_survives_a_file_and_optional_columns_stay_optional(tmp_path):
    timeline = make_timeline(2, 3, 4)
    write_timeline(tmp_path / "without.npz", timeline)
    without = read_timeline(tmp_path / "without.npz")
    assert without.step_time_s == timeline.step_time_s
    for name in ("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s", "memory_time_s", "memory_bytes"):
        column = getattr(timeline, name)
        assert np.array_equal(getattr(without, name), column)
        assert getattr(without, name).dtype == column.dtype
    assert (without.is_critical, without.side, without.memory_kind_bytes) == (None, None, None)
    names = [field.name for field in dataclasses.fields(SideTasks)]
    side = SideTasks(**{name: np.arange(3, dtype=np.float64 if name.endswith("_s") else np.int32) for name in names})
    full = dataclasses.replace(
        timeline,
        is_critical=timeline.pack == 1,
        side=side,
        memory_kind_bytes=np.ones((len(timeline.memory_bytes), len(MEMORY_KINDS)), np.int64),
    )
    write_timeline(tmp_path / "full.npz", full)
    again = read_timeline(tmp_path / "full.npz")
    assert np.array_equal(again.is_critical, full.is_critical)
    assert np.array_equal(again.memory_kind_bytes, full.memory_kind_bytes)
    for name in names:
        assert np.array_equal(getattr(again.side, name), getattr(side, name))


def test_another_file_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", start_s=np.zeros(3))
    with pytest.raises(DataError, match="not a timeline file"):
        read_timeline(tmp_path / "other.npz")
