"""The engines that train Evenload's plans, and `LOOP`: any loop over a `PackedLoader`.

Every limitation says from which source it is known; versions are in `title`. Adding an engine: a profile here, an
adapter in `integrations/engines/`, and its row of the conformance suite (docs/engines.md).
"""

from evenload.engines.profile import EngineProfile, EngineTiming, Limitation, Topic
from evenload.errors import ConfigError
from evenload.types.nearest_name import did_you_mean

_WHOLE = "Choose balanced, best_fit, fixed_greedy or wlb, or auto for the fastest of them by this engine's price"


def _limit(topic: Topic, why: str, instead: str) -> Limitation:
    return Limitation(topic=topic, why=why, instead=instead)


def _everywhere(forward: str) -> tuple[Limitation, ...]:
    """What no engine but Evenload's runtime does; `forward` names the call that runs a micro-batch."""
    return (
        _limit(
            "slices",
            f"{forward} runs forward and backward of a micro-batch by autograd and keeps no keys and values of an "
            "earlier one, so a document has to be whole",
            f"{_WHOLE}; 'evenload train' runs slices",
        ),
        _limit(
            "sharing",
            "Its data-parallel ranks have no collective in attention, so none of them sees another's tokens",
            f"{_WHOLE}; a context-parallel group or 'evenload train' shares long documents",
        ),
        _limit(
            "layouts",
            "Ranks and stages are set up once, when it starts",
            "Plan in one even layout, which evenload plan --search-layout finds; 'evenload train' changes layouts",
        ),
    )


_NO_PIPELINE = "Use a layout with pp=1, or engine megatron, or 'evenload train'"
_ONE_STAGE = "Use virtual=1"
_NOT_INTERLEAVED = _limit(
    "virtual",
    "MegatronTrainStep refuses interleaved stages: with two pipeline ranks the schedule waits for ever for shapes",
    "Train in a layout with virtual=1, or with 'evenload train'",
)

MEGATRON = EngineProfile(
    name="megatron",
    title="Megatron-Core 0.16.1",
    formats=("megatron",),
    equal_counts=False,
    virtual_count_multiple=True,
    context_parallel="fixed",
    document_chunks=2,
    schedules=("1f1b", "interleaved"),
    shards="optimizer",
    timing=EngineTiming(weights="step", sends_block=True, shape_exchange=True),
    limits=(
        *_everywhere("forward_step of get_forward_backward_func (pipeline_parallel/schedules.py)"),
        _limit(
            "virtual",
            "forward_backward_pipelining_with_interleaving needs a pipeline of several ranks",
            f"{_ONE_STAGE}, or pp of at least 2",
        ),
        _limit(
            "mixed_context",
            "The released version has one context-parallel group for all micro-batches (parallel_state.py), and every "
            "document of a pack is cut into 2 x cp chunks over it",
            "Choose balanced, best_fit or wlb, or engine megatron-dynamic-cp, where a micro-batch is shared or not",
        ),
    ),
    not_adapted=(
        _NOT_INTERLEAVED,
        _limit(
            "context",
            "MegatronTrainStep refuses static context parallelism: its packs are not cut for the ranks of a group",
            "Train in a layout with cp=1, with Megatron's dynamic context parallelism, or with 'evenload train'",
        ),
    ),
)
MEGATRON_DYNAMIC = EngineProfile(
    name="megatron-dynamic-cp",
    title="Megatron-LM, branch dev, --dynamic-context-parallel",
    formats=("megatron",),
    equal_counts=True,
    virtual_count_multiple=True,
    context_parallel="group",
    document_chunks=2,
    schedules=("1f1b", "interleaved"),
    shards="optimizer",
    timing=MEGATRON.timing,
    limits=(
        *(one for one in MEGATRON.limits if one.topic != "mixed_context"),
        _limit(
            "counts",
            "wrap_data_iterator (datasets/data_schedule.py) gives one number of micro-batches for all ranks",
            "Leave equal_micro_batches out; ranks short of work get empty micro-batches",
        ),
        _limit(
            "loader",
            "Megatron's own loop deals documents to ranks, by the scheduler that it is given",
            "Call register_scheduler (integrations/engines/megatron_dynamic_cp.py), or use engine megatron, which "
            "shares no documents",
        ),
    ),
    not_adapted=(
        _limit(
            "scheduler",
            "register_scheduler groups documents itself (engines/placed_groups.py), by the same cost model: these "
            "strategies are not what it trains",
            "benchmarks/dynamic_cp.py predicts its groups",
        ),
    ),
)
TORCHTITAN = EngineProfile(
    name="torchtitan",
    title="torchtitan 0.3.0 and its main branch",
    formats=("torchtitan", "torchtitan_folded", "torchtitan_batched"),
    equal_counts=True,
    pipeline_fixed_shapes=True,
    pipeline_constant_counts=True,
    virtual_count_multiple=True,
    schedules=("1f1b", "interleaved", "gpipe"),
    shards="parameters",
    # Its Trainer never turns FSDP2's set_requires_gradient_sync off; the stages of a pipeline do.
    timing=EngineTiming(weights="pass", sums="pass", sums_beside=True),
    limits=(
        *_everywhere("forward_backward_step of its Trainer"),
        _limit(
            "virtual",
            "torch.distributed.pipelining's ScheduleInterleaved1F1B needs a pipeline of several ranks",
            f"{_ONE_STAGE}, or pp of at least 2",
        ),
        _limit(
            "context",
            "Its context parallelism cuts block masks of flex attention; packs give VarlenMetadata, which it refuses",
            "Use cp=1; 'evenload train' shares long documents",
        ),
        _limit(
            "mixed_context",
            "It shares no packs among context-parallel ranks",
            "Choose balanced, best_fit or wlb with cp=1",
        ),
        _limit(
            "counts",
            "fully_shard gathers a unit's weights in every forward and backward, a collective of all ranks, so a rank "
            "with fewer micro-batches would let the others wait for ever",
            "Leave equal_micro_batches out; ranks short of work get micro-batches of padding, whose gradient is 0",
        ),
    ),
    not_adapted=(
        _limit(
            "pipeline",
            "PackedTrainer refuses pipeline_parallel_degree above 1: not tried with packs padded to one length",
            "Train in a layout with pp=1, with engine megatron, or with 'evenload train'",
        ),
        _limit(
            "tensor",
            "PackedTrainer refuses tensor_parallel_degree above 1: not tried with packs",
            "Train in a layout with tp=1, or with 'evenload train'",
        ),
    ),
)


def _deepspeed(stage: int) -> EngineProfile:
    """ZeRO-1 and ZeRO-2 have whole weights on every rank, so a forward needs nobody else; ZeRO-3 has not."""
    gathers = stage == 3
    counts = _limit(
        "counts",
        "ZeRO-3 gathers a module's weights in every forward and backward (zero/partitioned_param_coordinator.py), a "
        "collective of all ranks, so a rank with fewer micro-batches would let the others wait for ever",
        "Leave equal_micro_batches out (ranks short of work get micro-batches of padding, whose gradient is 0), or use "
        "engine deepspeed (ZeRO-1), where counts may differ",
    )
    return EngineProfile(
        name="deepspeed" if stage == 1 else f"deepspeed-zero{stage}",
        title=f"DeepSpeed 0.19.8, ZeRO-{stage}",
        formats=("hf", "varlen", "pack"),
        equal_counts=gathers,
        context_parallel="heads",
        shards=("optimizer", "gradients", "parameters")[stage - 1],  # type: ignore[bad-argument-type]
        # What DeepSpeedLoop does where nothing is said; ZeRO-3 sums beside the backward, bucket by bucket (overlap_comm
        # and reduce_bucket_size, zero/config.py).
        timing=EngineTiming(weights="pass", sums="pass", sums_beside=True, sum_bucket_parameters=500_000_000)
        if gathers
        else EngineTiming(weights="step"),
        limits=(
            *_everywhere("DeepSpeedEngine.forward"),
            _limit(
                "pipeline",
                "Its PipelineEngine takes micro-batches of one shape and one number from its own loader, and no ZeRO-2 "
                "or ZeRO-3",
                _NO_PIPELINE,
            ),
            _limit("virtual", "It has no pipeline here", _NO_PIPELINE),
            _limit(
                "mixed_context",
                "Its sequence parallelism (Ulysses) shares every micro-batch: a rank has some heads of all documents",
                "Choose balanced, best_fit or wlb",
            ),
            *((counts,) if gathers else ()),
        ),
    )


FSDP2 = EngineProfile(
    name="fsdp2",
    title="torch.distributed.fsdp.fully_shard of torch 2.11 to 2.13",
    formats=("hf", "varlen", "pack"),
    equal_counts=True,
    shards="parameters",
    timing=EngineTiming(weights="pass", sums_beside=True),
    limits=(
        *_everywhere("A module under fully_shard"),
        _limit("pipeline", "fully_shard alone has no pipeline", _NO_PIPELINE),
        _limit("virtual", "fully_shard alone has no pipeline", _NO_PIPELINE),
        _limit(
            "context",
            "fully_shard shards weights, not sequences, and torch's context parallelism knows no documents",
            "Use cp=1; 'evenload train' shares long documents",
        ),
        _limit("mixed_context", "It shares no documents", "Choose balanced, best_fit or wlb with cp=1"),
        _limit(
            "counts",
            "A unit's weights are gathered in every forward and backward (FSDPParamGroup.unshard), a collective of all "
            "ranks, so a rank with fewer micro-batches would let the others wait for ever",
            "Leave equal_micro_batches out; ranks short of work get micro-batches of padding, whose gradient is 0",
        ),
    ),
)
TRAINER = EngineProfile(
    name="trainer",
    title="Trainer of transformers 5, TRL's SFTTrainer and Accelerate, under DistributedDataParallel",
    formats=("hf",),
    equal_counts=True,
    constant_counts=True,
    shards="nothing",
    timing=EngineTiming(weights="never", sums_beside=True, sharded_update=False),
    limits=(
        *_everywhere("Trainer.training_step"),
        _limit("pipeline", "The Trainer has no pipeline", _NO_PIPELINE),
        _limit("virtual", "The Trainer has no pipeline", _NO_PIPELINE),
        _limit(
            "context",
            "Accelerate's context parallelism is that of scaled_dot_product_attention, which knows no documents",
            "Use cp=1; 'evenload train' shares long documents",
        ),
        _limit("mixed_context", "It shares no documents", "Choose balanced, best_fit or wlb with cp=1"),
        _limit(
            "counts",
            "The Trainer makes gradient_accumulation_steps passes in every step on every rank",
            "Leave equal_micro_batches out and give micro_batches = gradient_accumulation_steps",
        ),
    ),
)
ENGINES: dict[str, EngineProfile] = {
    one.name: one
    for one in (
        *(MEGATRON, MEGATRON_DYNAMIC, TORCHTITAN),
        *(_deepspeed(stage) for stage in (1, 2, 3)),
        *(FSDP2, TRAINER),
    )
}
"""By name. `deepspeed` is ZeRO-1."""

LOOP = EngineProfile(
    name="loop",
    title="a loop of the user's own over a PackedLoader",
    formats=("hf", "varlen", "torchtitan", "torchtitan_folded", "torchtitan_batched", "megatron", "pack"),
    equal_counts=False,
    shards="nothing",
    timing=EngineTiming(weights="never", sharded_update=False),
    slices=True,
    limits=(
        *(one for one in _everywhere("A plain loop") if one.topic != "slices"),
        *(
            _limit(
                topic, "A plain loop runs a whole model on every rank", "Use pp=1 and cp=1, or an engine that has it"
            )
            for topic in ("pipeline", "virtual", "context", "mixed_context")
        ),
    ),
)
"""What a `PackedLoader` without an engine knows of its caller: nothing."""


def engine_named(name: str) -> EngineProfile:
    """The engine of a name; a `ConfigError` with the nearest names where there is none."""
    if name in ENGINES:
        return ENGINES[name]
    raise ConfigError(f"engine is '{name}'; {did_you_mean(name, ENGINES)}choose one of {', '.join(ENGINES)}")
