"""The interface of Megatron-LM's dynamic context parallelism, as its development branch has it in October 2026.

`DefaultDynamicCPScheduler` and `scheduler_map` of megatron/core/datasets/data_schedule.py: constructor, attributes and
what `get_groups_and_subsamples` takes and returns; none of its planning. No released Megatron-Core has them.
"""

import enum
from types import ModuleType

import msgspec
import torch
import torch.distributed as dist

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.hub import model_from
from evenload.errors import ConfigError
from evenload.integrations.engines.megatron_dynamic_cp import scheduler_class
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import even_layout


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

    def run(self, data_iterator, num_microbatches, dp_group, tp_group, pp_group, dp_cp_group, dev, config):
        """Of what Megatron does here the plan alone; the iterator gives (id, tokens)."""
        return self.get_groups_and_subsamples(list(data_iterator))


def run_on_ranks(tp, pp, other_rank, other="coefficients"):
    """As one rank: two steps of a scheduler whose costs are other ones on one rank (-1 = on none); plan, or error.

    Args:
        other: what of the costs is another there.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dp = ranks // (tp * pp)
    # As Megatron numbers ranks: tensor, then data, then pipeline.
    meshes = torch.arange(ranks).view(pp, dp, tp).tolist()
    data = [[row[tensor] for row in rows] for rows in meshes for tensor in range(tp)]
    stages = [[rows[one][tensor] for rows in meshes] for one in range(dp) for tensor in range(tp)]
    tensors = [row for rows in meshes for row in rows]
    dp_group, pp_group, tp_group = (dist.new_subgroups_by_enumeration(kind)[0] for kind in (data, stages, tensors))
    model = model_from("llama-7b")
    layout = even_layout(model.num_layers, dp=dp)
    coefficients = analytic_coefficients(model, cluster_from("h100x8"), layout)
    options = {}
    if rank == other_rank and other == "coefficients":
        coefficients = msgspec.structs.replace(coefficients, p2p_latency_s=1.0)
    elif rank == other_rank:
        options = {other: False}
    costs = PackCosts(model, coefficients, layout, **options)
    scheduler = scheduler_class(MegatronScheduler, costs)(4096, 1, dp, None)
    groups = dp_group, tp_group, pp_group, dp_group
    try:
        for _ in range(2):
            answer = scheduler.run(iter([(name, 100) for name in range(2 * dp)]), 1, *groups, "cpu", None)
    except ConfigError as error:
        return str(error)
    return answer


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
