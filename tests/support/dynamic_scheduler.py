"""The interface of Megatron-LM's dynamic context parallelism, as its development branch has it in October 2026.

`DefaultDynamicCPScheduler` and `scheduler_map` of megatron/core/datasets/data_schedule.py: constructor, attributes and
what `get_groups_and_subsamples` takes and returns; none of its planning. No released Megatron-Core has them.
"""

import enum
from types import ModuleType


class MegatronScheduler:
    """Arguments and attributes of Megatron's; its answer is that of someone who shares everything."""

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank,
        cp_size,
        dp_size,
        microbatch_group_size_per_vp_stage,
        max_num_seqs=None,
        min_cp_size=1,
    ):
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size, self.dp_size = cp_size, dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage
        self.max_num_seqs = max_num_seqs
        self.is_dynamic_cp = True
        self.min_cp_size = min_cp_size

    def get_groups_and_subsamples(self, sample_id_seqlens):
        return [[[name]] * (self.dp_size * self.cp_size) for name, _ in sample_id_seqlens]


class FailingScheduler(MegatronScheduler):
    """Megatron's breaks its own assertions on some batches."""

    def get_groups_and_subsamples(self, sample_id_seqlens):
        raise AssertionError("Empty GPUs were detected but not enough to expand.")


class SchedulerName(enum.Enum):
    """Newer versions name schedulers so; older ones by these values."""

    DP_BALANCED = "dp_balanced"
    DEFAULT_DYNAMIC_CP = "default_dynamic_cp"


def data_schedule_module(*, enumerated: bool) -> ModuleType:
    """A module like megatron.core.datasets.data_schedule."""
    module = ModuleType("megatron.core.datasets.data_schedule")
    module.scheduler_map = {name if enumerated else name.value: MegatronScheduler for name in SchedulerName}
    return module


def require_valid(answer, pairs, scheduler):
    """What Megatron asserts of an answer, or takes for granted in building micro-batches and choosing groups."""
    num_ranks = scheduler.dp_size * scheduler.cp_size
    lengths, seen = dict(pairs), []
    assert len(answer) % (scheduler.microbatch_group_size_per_vp_stage or 1) == 0
    for micro_batch in answer:
        assert len(micro_batch) == num_ranks
        first = 0
        while first < num_ranks:
            ids = micro_batch[first]
            assert ids, "a rank without work builds no batch"
            # How Megatron finds the size of a rank's group (build_packed_microbatches).
            size = sum(ids[0] in of_rank for of_rank in micro_batch)
            assert size >= min(scheduler.min_cp_size, num_ranks)
            assert size == num_ranks or size & (size - 1) == 0, "groups exist of powers of two ranks"
            assert first % size == 0
            assert micro_batch[first : first + size] == [ids] * size
            assert sum(lengths[name] for name in ids) <= scheduler.max_seqlen_per_dp_cp_rank * size
            assert scheduler.max_num_seqs is None or len(ids) <= scheduler.max_num_seqs
            seen += ids
            first += size
    assert sorted(seen) == sorted(lengths)
