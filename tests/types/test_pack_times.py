import numpy as np
import pytest

from evenload.types.timeline import Timeline, pack_times


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
