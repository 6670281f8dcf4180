import numpy as np
import pytest

from evenload.errors import DataError
from evenload.types.timeline_file import read_timeline, write_timeline
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


def test_another_file_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", start_s=np.zeros(3))
    with pytest.raises(DataError, match="not a timeline file"):
        read_timeline(tmp_path / "other.npz")
