"""What `evenload.seams.prime_rl` calls of `prime_rl.trainer.batch`, on the fields that matter to it: a stand-in, as
prime-rl is on no index. tests/seams compares what it builds with what prime-rl built."""

import copy
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

MODULE = "prime_rl.trainer.batch"


@dataclass
class Sample:
    token_ids: list[int]
    mask: list[bool]
    advantages: list[float]
    mm_kwargs: dict | None = None
    routed_experts: object = None


@dataclass
class MicroBatch:
    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    position_ids: list[int]
    sequence_lengths: list[int] = field(default_factory=list)
    mm_kwargs: dict | None = None
    routed_experts: object = None


@dataclass
class _MicroBatchBin:
    samples: list[MicroBatch]
    length: int


def prepare_sample(training_example, seq_len):
    ids = training_example.token_ids[:seq_len]
    return MicroBatch(
        ids,
        training_example.mask[:seq_len],
        training_example.advantages[:seq_len],
        list(range(len(ids))),
        [len(ids)],
        training_example.mm_kwargs,
        training_example.routed_experts,
    )


def _materialize_bin(bin_content):
    joined = MicroBatch([], [], [], [])
    for sample in bin_content.samples:
        for name in ("input_ids", "loss_mask", "advantages", "position_ids", "sequence_lengths"):
            getattr(joined, name).extend(getattr(sample, name))
        joined.mm_kwargs = joined.mm_kwargs or sample.mm_kwargs
    assert len(joined.input_ids) == bin_content.length
    return joined


def pad_micro_batch(micro_batch, pad_to_multiple_of):
    padding = -len(micro_batch.input_ids) % pad_to_multiple_of
    micro_batch.input_ids += [1] * padding
    micro_batch.loss_mask += [False] * padding
    micro_batch.advantages += [0.0] * padding
    micro_batch.position_ids += range(padding)
    micro_batch.sequence_lengths[-1] += padding
    return micro_batch


def _make_dummy_batch(source):
    dummy = copy.deepcopy(source)
    dummy.loss_mask = [False] * len(dummy.input_ids)
    dummy.advantages = [0.0] * len(dummy.input_ids)
    return dummy


def _assert_token_arrays_aligned(micro_batch):
    assert sum(micro_batch.sequence_lengths) == len(micro_batch.input_ids) == len(micro_batch.loss_mask)


def prepare_batch(rollouts, seq_len, num_train_workers, bin_cost, pad_to_multiple_of=1):
    raise NotImplementedError("prime-rl's own is not here")


def modules() -> dict[str, ModuleType]:
    """What `sys.modules` holds in the place of prime-rl."""
    names = ("prime_rl", "prime_rl.trainer", MODULE)
    made = {name: ModuleType(name) for name in names}
    made[MODULE].__dict__.update(
        {name: value for name, value in vars(sys.modules[__name__]).items() if name[:2] != "__"}
    )
    return made


def sample_of(length: int, has_image: bool = False) -> Sample:
    arrays = {"pixel_values": SimpleNamespace(dtype="float32", shape=[1, 2], data=b"")}
    ids = list(range(100, 100 + length))
    return Sample(ids, [False] + [True] * (length - 1), [0.5] * length, arrays if has_image else None)
