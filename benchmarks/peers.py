"""Public packers and planners from PyPI, each behind the same three calls: prepare, pack (timed), read; and their packs
judged as ours are.

Nothing of theirs is copied; what is not installed is left out with the reason. Install them beside Evenload with
`pip install 'evenload[bench]'` and, for those whose other requirements conflict (they need one file of each),
`pip install --no-deps -r benchmarks/peers.txt`.

Two packages cannot be imported whole without trainers that a planner does not need (ray, peft, ...), so their one
planning module is loaded alone: the package is entered in `sys.modules` without running its `__init__`, and for
verl the three modules that move tensors are stubs.

`propose_given` is the judge: packs of whole documents become a plan of a `StepPlanner`, by a strategy that is
registered here only. So a peer's packs run in 1F1B, as the frameworks they come from run them, with everything that
Evenload's runtime does with any pack: the sharding of packs that context ranks share, and within memory the same
ladder of activation policies.
"""

# pyright: reportMissingImports=false
import functools
import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.planning.packing import run_packs
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.problem import ReplicaChoice, StepProblem
from evenload.planning.strategies.registry import STRATEGIES, register
from evenload.planning.strategies.strategy import Strategy
from setups import documents_of

Replicas = list[list[list[int]]]
"""Per data-parallel replica its packs, each a list of document indices."""

GRAIN_BINS = 64
WINDOWS = "a window of the token limit each, accumulated over what the replica was dealt"
WINDOW = 1000
"""Documents that TRL packs at a time (`datasets.map`'s batch)."""


_given: list[Replicas] = []


def _plan_given(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    return run_packs(problem, _given[-1])


GIVEN = Strategy(
    name="given",
    description="packs that somebody else made: peers of benchmarks",
    plan=_plan_given,
    ignores_memory=True,
    # No solver, but what has a limit runs where it is named only: `auto` must not choose among more than users have.
    solver_limit_s=lambda options: 0.0,
)


def propose_given(planner: StepPlanner, lengths: NDArray[np.int64], replicas: Replicas) -> Proposal:
    """The plan whose replicas run these packs of whole documents, in this order.

    Raises:
        AssertionError: a document stands twice, or in no pack.
    """
    if GIVEN.name not in STRATEGIES:
        register(GIVEN)
    assert sorted(index for packs in replicas for pack in packs for index in pack) == list(range(len(lengths)))
    _given.append([[pack for pack in packs if pack] for packs in replicas])
    try:
        return planner.propose(0, documents_of(lengths), GIVEN.name)
    finally:
        _given.pop()


@dataclass(frozen=True, eq=False)
class Batch:
    """One global batch.

    Args:
        lengths: int64[n], in arrival order.
        capacity: token limit of a pack.
    """

    lengths: NDArray[np.int64]
    capacity: int
    dp: int
    pp: int


class Calls(NamedTuple):
    """How one planner is used.

    Args:
        prepare: batch to the planner's own input, not timed.
        pack: the planner itself, timed.
        read: its result to document indices, not timed.
    """

    prepare: Callable[[Batch], Any]
    pack: Callable[[Any], Any]
    read: Callable[[Any, Batch], Replicas]


class Peer(NamedTuple):
    """A planner of somebody else.

    Args:
        package: its name on PyPI.
        load: imports it; raises ImportError where it is not installed.
        micro_batches: by which rule its users get their number of micro-batches a replica; `pack` follows it.
    """

    name: str
    package: str
    load: Callable[[], Calls]
    micro_batches: str = WINDOWS


def deal(bins: list[list[int]], dp: int) -> Replicas:
    """Bin i goes to replica `i mod dp`, in the planner's own order, as Evenload's `best_fit` does."""
    return [[list(map(int, one)) for one in bins[rank::dp]] for rank in range(dp)]


def ids_of(bins_of_lengths: list[list[int]], lengths: NDArray[np.int64]) -> list[list[int]]:
    """Document indices for planners that return lengths only: documents of one length are interchangeable."""
    pool: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths.tolist()):
        pool[length].append(index)
    return [[pool[int(length)].pop() for length in one] for one in bins_of_lengths]


def _module_alone(package: str, module: str) -> ModuleType:
    """A module of an installed package without the `__init__` of the packages above it."""
    parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    folder = next(iter(spec.submodule_search_locations))
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        if name not in sys.modules:
            hollow = ModuleType(name)
            hollow.__path__ = ["/".join([folder, *parts[1:depth]])]
            sys.modules[name] = hollow
    return importlib.import_module(module)


def _trl() -> Calls:
    import pyarrow as pa
    from trl.data_utils import _pack_bfd  # pack_dataset adds a disk cache around it

    def prepare(batch: Batch) -> tuple[Any, int]:
        offsets = np.concatenate([[0], np.cumsum(batch.lengths)])
        values = pa.array(np.zeros(int(offsets[-1]), np.int8))
        column = pa.LargeListArray.from_arrays(pa.array(offsets), values)
        return pa.table({"input_ids": column}), batch.capacity

    def pack(given: tuple[Any, int]) -> Any:
        table, capacity = given
        # Copied: a slice of a table keeps the offsets of the whole, which _pack_bfd does not expect.
        windows = [table.take(list(range(lo, min(lo + WINDOW, len(table))))) for lo in range(0, len(table), WINDOW)]
        return [_pack_bfd(window, capacity) for window in windows]

    def read(raw: Any, batch: Batch) -> Replicas:
        bins = [one for table in raw for one in table.column("seq_lengths").to_pylist()]
        return deal(ids_of(bins, batch.lengths), batch.dp)

    return Calls(prepare, pack, read)


@functools.cache
def verl_balancing() -> ModuleType:
    """verl's module that balances lengths; raises ImportError where verl is not installed."""
    protocol = ModuleType("verl.protocol")
    protocol.DataProto = object  # type: ignore[attr-defined]
    device = ModuleType("verl.utils.device")
    device.get_device_name = lambda: "cpu"  # type: ignore[attr-defined]
    tensors = ModuleType("verl.utils.tensordict_utils")
    tensors.index_select_tensor_dict = lambda batch, ids: None  # type: ignore[attr-defined]
    for stub in (protocol, device, tensors):
        sys.modules.setdefault(stub.__name__, stub)
    return _module_alone("verl", "verl.utils.seqlen_balancing")


def _verl() -> Calls:
    import torch

    balancing = verl_balancing()

    def pack(batch: Batch) -> Replicas:
        workload = balancing.calculate_workload(torch.from_numpy(batch.lengths)).tolist()
        parts = balancing.get_seqlen_balanced_partitions(workload, batch.dp, equal_size=True)
        tokens = [int(batch.lengths[part].sum()) for part in parts]
        # Every rank runs as many micro-batches as the fullest needs, and at least pp (verl syncs this count).
        count = max(batch.pp, -(-max(tokens) // batch.capacity))
        replicas = []
        for part in parts:
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths[part])]))
            rows = torch.nested.nested_tensor_from_jagged(torch.empty(int(offsets[-1]), dtype=torch.int8), offsets)
            _, micro = balancing.rearrange_micro_batches({"input_ids": rows}, batch.capacity, min_num_micro_batch=count)
            replicas.append([[part[i] for i in one] for one in micro])
        return replicas

    return Calls(lambda batch: batch, pack, lambda raw, batch: raw)


def _megatron() -> Calls:
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    def prepare(batch: Batch) -> tuple[list[tuple[int, int]], Batch]:
        return list(enumerate(batch.lengths.tolist())), batch

    def pack(given: tuple[list[tuple[int, int]], Batch]) -> Any:
        items, batch = given
        scheduler = BalancedCPScheduler(batch.capacity, SimpleNamespace(size=lambda: batch.dp))
        return scheduler.get_groups_and_subsamples(items, None)

    def read(raw: Any, batch: Batch) -> Replicas:
        _, groups = raw
        return [[[int(i)] for group in groups for i in group[rank]] for rank in range(batch.dp)]

    return Calls(prepare, pack, read)


def _grain() -> Calls:
    import grain
    from grain.experimental import FirstFitPackIterDataset

    def prepare(batch: Batch) -> tuple[list[dict[str, Any]], int]:
        rows = [{"x": np.zeros(n, np.int8), "id": i} for i, n in enumerate(batch.lengths.tolist())]
        return rows, batch.capacity

    def pack(given: tuple[list[dict[str, Any]], int]) -> list[Any]:
        rows, capacity = given
        packed = FirstFitPackIterDataset(
            grain.MapDataset.source(rows).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
            length_struct={"x": capacity},
            num_packing_bins=GRAIN_BINS,
            shuffle_bins=False,
            meta_features=["id"],
        )
        return [row["id"] for row in packed]

    return Calls(prepare, pack, lambda raw, batch: deal([list(one) for one in raw], batch.dp))


def _axolotl() -> Calls:
    from axolotl.utils.samplers import multipack

    return Calls(
        lambda batch: (batch.lengths.astype(np.int32), batch.capacity),
        lambda given: multipack.pack_parallel(*given, 100_000, 200, num_processes=1),
        lambda raw, batch: deal([list(one) for one in raw], batch.dp),
    )


def _llamafactory() -> Calls:
    greedy_knapsack = _module_alone("llamafactory", "llamafactory.data.processor.processor_utils").greedy_knapsack
    return Calls(
        lambda batch: (batch.lengths.tolist(), batch.capacity),
        lambda given: greedy_knapsack(list(given[0]), given[1]),
        lambda raw, batch: deal(ids_of(raw, batch.lengths), batch.dp),
    )


PEERS = (
    # Karmarkar-Karp over replicas and micro-batches.
    Peer("verl", "verl", _verl,
         "as few as hold the fullest replica's tokens, on every replica the same, at least the pipeline's stages"),
    # Its barriers between groups are not charged.
    Peer("megatron-core balanced CP", "megatron-core", _megatron, "a document each"),
    Peer("trl bfd", "trl", _trl),
    Peer("grain first-fit 64", "grain", _grain),
    Peer("axolotl multipack", "axolotl", _axolotl),
    Peer("LLaMA-Factory knapsack", "llamafactory", _llamafactory),
)  # fmt: skip
"""In the order of the table."""
