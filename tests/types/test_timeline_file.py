import dataclasses

import numpy as np
import pytest

from evenload.errors import DataError
from evenload.types.timeline import MEMORY_KINDS, SideTasks, read_timeline, write_timeline
from report_samples import make_timeline


def test_a_timeline_survives_a_file(tmp_path):
    timeline = make_timeline(2, 3, 4)
    write_timeline(tmp_path / "t.npz", timeline)
    again = read_timeline(tmp_path / "t.npz")
    assert again.step_time_s == timeline.step_time_s
    for name in ("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s", "memory_time_s", "memory_bytes"):
        column = getattr(timeline, name)
        assert np.array_equal(getattr(again, name), column)
        assert getattr(again, name).dtype == column.dtype


def test_optional_columns_survive_and_stay_optional(tmp_path):
    timeline = make_timeline(1, 2, 3)
    write_timeline(tmp_path / "without.npz", timeline)
    without = read_timeline(tmp_path / "without.npz")
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
