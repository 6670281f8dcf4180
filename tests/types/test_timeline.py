import dataclasses

import numpy as np
import pytest

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
