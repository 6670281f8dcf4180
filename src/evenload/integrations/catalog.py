"""The engines that train Evenload's plans, a typed record each, and `LOOP`: any loop over a `PackedLoader`.

docs/engines.md names the source of each fact. A new engine is a record here, a file with its adapter in this folder, a
test of the conformance suite and a section of that page.
"""

from typing import Literal

from evenload.errors import ConfigError
from evenload.integrations.engine_profile import EngineProfile, Topic
from evenload.types.base import did_you_mean

_GATHERS = (
    "gathers a unit's weights in every forward and backward, so a rank with fewer micro-batches would let the others "
    "wait for ever"
)


def _deepspeed(stage: Literal[1, 2, 3]) -> EngineProfile:
    """ZeRO-1 and ZeRO-2 have whole weights on every rank, so a forward needs nobody else; ZeRO-3 has not."""
    is_sharded = stage == 3
    cannot: dict[Topic, str] = {
        "pipeline": "Its PipelineEngine takes micro-batches of one shape and one number, and no ZeRO-2 or ZeRO-3",
        "mixed_context": "Under Ulysses a rank has some heads of all documents",
    }
    if is_sharded:
        cannot["counts"] = f"ZeRO-3 {_GATHERS}; use engine deepspeed (ZeRO-1), where counts may differ"
    return EngineProfile(
        name="deepspeed" if stage == 1 else f"deepspeed-zero{stage}",
        title=f"DeepSpeed 0.19.8, ZeRO-{stage}",
        formats=("hf", "varlen", "pack"),
        equal_counts=is_sharded,
        context_parallel="heads",
        # What DeepSpeedLoop does by default; ZeRO-3 reduces during the backward, bucket by bucket (zero/config.py).
        gathers="pass" if is_sharded else "step",
        reduces="pass" if is_sharded else "step",
        overlaps_reduction=is_sharded,
        reduction_bucket=500_000_000 if is_sharded else 0,
        cannot=cannot,
    )


_ENGINES = (
    EngineProfile(
        name="megatron",
        title="Megatron-Core 0.16.1",
        formats=("megatron",),
        equal_counts=False,
        context_parallel="fixed",
        document_chunks=2,
        schedules=("1f1b", "interleaved"),
        gathers="step",
        blocking_sends=True,
        cannot={
            "mixed_context": "It has one context-parallel group for all micro-batches, over which every document is "
            "cut into 2 x cp chunks"
        },
        not_adapted={
            "virtual": "MegatronTrainStep refuses interleaved stages, whose schedule waits for ever for shapes",
            "context": "MegatronTrainStep refuses context parallelism: its packs are not cut for the ranks of a group",
        },
    ),
    EngineProfile(
        name="torchtitan",
        title="torchtitan 0.3.0",
        formats=("torchtitan",),
        equal_counts=True,
        static_pipeline=True,
        schedules=("1f1b", "interleaved", "gpipe"),
        # Its Trainer never turns FSDP2's set_requires_gradient_sync off; the stages of a pipeline do.
        gathers="pass",
        reduces="pass",
        overlaps_reduction=True,
        cannot={
            "context": "Its context parallelism cuts block masks of flex attention, and refuses VarlenMetadata",
            "counts": f"fully_shard {_GATHERS}",
        },
        not_adapted={
            "pipeline": "PackedTrainer refuses pipeline_parallel_degree above 1: not tested with padded packs",
            "tensor": "PackedTrainer refuses tensor_parallel_degree above 1: not tested with packs",
        },
    ),
    _deepspeed(1),
    _deepspeed(2),
    _deepspeed(3),
    EngineProfile(
        name="fsdp2",
        title="torch.distributed.fsdp.fully_shard of torch 2.11 to 2.13",
        formats=("hf", "varlen", "pack"),
        equal_counts=True,
        gathers="pass",
        overlaps_reduction=True,
        cannot={
            "pipeline": "fully_shard alone has no pipeline",
            "context": "fully_shard shards weights, not sequences, and torch's context parallelism knows no documents",
            "counts": f"FSDPParamGroup {_GATHERS}",
        },
    ),
    EngineProfile(
        name="trainer",
        title="Trainer of transformers 5, TRL's SFTTrainer and Accelerate, under DistributedDataParallel",
        formats=("hf",),
        equal_counts=True,
        constant_counts=True,
        gathers="never",
        overlaps_reduction=True,
        sharded_update=False,
        cannot={
            "pipeline": "The Trainer has no pipeline",
            "context": "Accelerate's context parallelism is that of scaled_dot_product_attention, without documents",
            "counts": "The Trainer makes gradient_accumulation_steps passes in every step; give micro_batches as many",
        },
    ),
)
ENGINES: dict[str, EngineProfile] = {one.name: one for one in _ENGINES}
"""By name. `deepspeed` is ZeRO-1."""

LOOP = EngineProfile(
    name="loop",
    title="a loop of the user's own over a PackedLoader",
    formats=("hf", "varlen", "torchtitan", "megatron", "pack"),
    equal_counts=False,
    gathers="never",
    sharded_update=False,
    slices=True,
    cannot=dict.fromkeys(("pipeline", "context"), "A plain loop runs a whole model on every rank"),
)
"""The caller of a `PackedLoader` without an engine, of which nothing is known."""


def engine_named(name: str) -> EngineProfile:
    """Return the engine of a name; a `ConfigError` with the nearest names where there is none."""
    if name in ENGINES:
        return ENGINES[name]
    raise ConfigError(f"engine is '{name}'; {did_you_mean(name, ENGINES)}choose one of {', '.join(ENGINES)}")
