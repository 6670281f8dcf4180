"""How a `PackedLoader` packs (`LoaderOptions`), and which rank it serves (`LoaderPlace`).

A caller's loop runs forward and backward of a whole micro-batch and knows documents only. So strategies that cut
documents are refused unless the caller declares that its attention reads the keys of earlier slices.

| the caller gives | ranks that share a global batch | reading |
|---|---|---|
| nothing, no `torch.distributed` | this one | all of it |
| nothing, `torch.distributed` initialised | all | each its share, tokens exchanged |
| `group` | the group's | each its share, tokens exchanged |
| `rank`, `world_size` | those | each all of it, without communication |

With `sequence_ranks`, so many neighbouring ranks share every micro-batch: they are one place.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenload.config.keys import plan_options
from evenload.cost.coefficients import CostCoefficients
from evenload.data.batches import Alone, Peers
from evenload.data.config import DataConfig
from evenload.errors import ConfigError
from evenload.integrations.batch_formats import PREFIX_FORMATS, BatchFormat, require_format
from evenload.integrations.catalog import LOOP, engine_named
from evenload.integrations.engine_profile import BEST, EngineProfile, require_auto, require_strategy
from evenload.integrations.projection import StepShape
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.registry import strategy_named, whole_strategies
from evenload.runtime.comm.collectives import TorchPeers
from evenload.types.layout import even_layout
from evenload.types.text import counted


@dataclass(eq=False, kw_only=True)
class LoaderOptions:
    """Holds the options of a `PackedLoader`, all of which are keyword arguments of it.

    Args:
        max_tokens: most tokens of a pack; also of a document, unless a `DataConfig` has less.
        tokenizer: "bytes", a `tokenizer.json` or its directory, a fast tokeniser of transformers, or one of ours.
            Default: that of a `DataConfig`, else bytes. Required where `model` is the caller's own and records are
                tokenised.
        strategy: `balanced` (equal predicted time), `best_fit` (fullest packs), `fixed_greedy`, `fixed_exact`, `wlb`
            (may defer documents), `padded` (for comparison).
        micro_batches: packs of every rank and step, exactly (a Trainer's `gradient_accumulation_steps`); None = as many
            as the plan needs.
        equal_micro_batches: where `micro_batches` is None, ranks short of work get packs of padding without a loss, so
            that all ranks make equally many passes. Default: yes, or as the engine needs.
        pack_multiple: the tokens of every pack are padded to a multiple of it: the tensor-parallel ranks where the loop
            splits sequences over them (Megatron-Core's sequence parallelism).
        sequence_ranks: neighbouring ranks that share every pack, each 1 / sequence_ranks of its tokens (DeepSpeed's
            Ulysses).
        fixed_shapes: every pack is padded to `max_tokens` tokens (what a pipeline of torch.distributed needs).
        engine: the engine that trains the batches, a name of `catalog`: sets what is left out here, refuses the rest,
            and balances packs for how it runs them; `strategy="auto"` is then the fastest by its price. None = unknown.
        format: of the batches, see `batch_formats`. Default: the engine's, else "hf".
        model, costs: cost model for the balance, see `planner.make_planner`; without a model `ASSUMED_MODEL`. Token ids
            beyond the vocabulary of the caller's own model are corrupt records.
        plan_options: further options of planning, as `[plan.options]` of a training configuration:
            `{"window": 4}`, `{"wlb": {"release": "queues"}}`.
        accept_slices: the loop can run slices that attend to keys of earlier packs.
        evaluation: everything exactly once an iteration, in order; the last batch is short.
        rank, world_size: place among the ranks that share a global batch. Default: `torch.distributed`'s, if it is
            initialised, else alone. Given, each rank reads all data by itself.
        group: the ranks that share a global batch, such as the data-parallel group; they read together.
        peer_timeout_s: how long a rank waits for another.

    Raises:
        ConfigError: a value out of its range, or a strategy that the caller's loop cannot run.
    """

    max_tokens: int
    tokenizer: Any = None
    strategy: str = "balanced"
    micro_batches: int | None = None
    equal_micro_batches: bool | None = None
    pack_multiple: int = 1
    sequence_ranks: int = 1
    fixed_shapes: bool = False
    engine: str | None = None
    format: BatchFormat | None = None
    model: Any = None
    costs: CostCoefficients | str | Path | None = None
    plan_options: dict[str, Any] | None = None
    accept_slices: bool = False
    evaluation: bool = False
    rank: int | None = None
    world_size: int | None = None
    group: Any = None
    peer_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.engine is not None:
            self._check_engine(self.profile)
        self.format = self.format or self.profile.formats[0]  # type: ignore[bad-assignment]
        require_format(self.batch_format)
        if self.equal_micro_batches is None:
            self.equal_micro_batches = self.engine is None or self.profile.equal_counts
        for name in ("max_tokens", "micro_batches", "pack_multiple", "sequence_ranks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        if self.max_tokens % self.row_multiple:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, pack_multiple {self.pack_multiple}, sequence_ranks "
                f"{self.sequence_ranks}: a full pack padded to a multiple would pass max_tokens; set max_tokens to a "
                f"multiple, such as {self.computed_tokens(self.max_tokens)}"
            )
        if self.sequence_ranks > 1:
            self._check_shared()
        if self.engine is None:
            self._check_strategy()

    @functools.cached_property
    def profile(self) -> EngineProfile:
        """Return the engine's profile; `LOOP` where none is named. A `ConfigError` for an unknown name."""
        return LOOP if self.engine is None else engine_named(self.engine)

    @property
    def batch_format(self) -> BatchFormat:
        """Return `format`, which is set when the options are made."""
        assert self.format is not None
        return self.format

    @property
    def shape(self) -> StepShape:
        """Return what these options fix of a step's micro-batches."""
        return StepShape(
            micro_batches=self.micro_batches,
            pack_multiple=self.row_multiple,
            pack_tokens=self.max_tokens if self.fixed_shapes else None,
            equal_counts=self.equal_micro_batches,
        )

    @property
    def row_multiple(self) -> int:
        """Return the number of which the tokens of every pack are a multiple."""
        return math.lcm(self.pack_multiple, self.sequence_ranks)

    @property
    def has_equal_counts(self) -> bool:
        """Return whether all ranks run equally many micro-batches in every step."""
        return bool(self.equal_micro_batches) or self.micro_batches is not None

    @property
    def keeps_whole(self) -> bool:
        """Return whether packs hold whole documents."""
        return self.engine is not None or strategy_named(self.strategy).keeps_whole

    def planning(self) -> PlanOptions:
        """Return the planner's options."""
        own = {"max_pack_tokens": self.max_tokens, "micro_batches": self.micro_batches}
        return plan_options(own | (self.plan_options or {}))

    def computed_tokens(self, num_tokens: int) -> int:
        """Return the tokens of a pack of so many, with the padding at its end."""
        return -(-num_tokens // self.row_multiple) * self.row_multiple

    def check_data(self, config: DataConfig, place: "LoaderPlace") -> None:
        """Refuse data settings and a place that contradict the options: a `ConfigError` with the values and the fix."""
        if config.max_document_tokens > self.max_tokens and self.keeps_whole:
            raise ConfigError(
                f"max_document_tokens is {config.max_document_tokens}, max_tokens of a pack {self.max_tokens}: such a "
                "document fits no pack; raise max_tokens, or lower max_document_tokens and choose overlong"
            )
        if self.micro_batches is not None and config.batch_tokens is not None:
            room = self.micro_batches * place.world_size * self.max_tokens
            if config.batch_tokens > room:
                raise ConfigError(
                    f"batch_tokens is {config.batch_tokens}, but {counted(place.world_size, 'rank')} x "
                    f"{self.micro_batches} micro_batches x {self.max_tokens} max_tokens hold {room}; lower "
                    "batch_tokens (packs of whole documents are seldom full), or raise one of the others"
                )
        if strategy_named(self.strategy).needs_solver and place.reads_alone and place.world_size > 1:
            raise ConfigError(
                f"strategy '{self.strategy}' depends on the time its solver takes, and ranks that do not communicate "
                "(rank and world_size given) would plan differently; use fixed_greedy, or group"
            )
        if self.evaluation and (self.micro_batches is not None or not self.equal_micro_batches):
            raise ConfigError(
                f"evaluation=True with micro_batches = {self.micro_batches}, equal_micro_batches = "
                f"{self.equal_micro_batches}; every rank runs as many as the rank with the most: leave both out"
            )

    def _check_engine(self, engine: EngineProfile) -> None:
        planning = self.planning()
        require_strategy(engine, self.strategy, planning, even_layout(1, cp=max(1, self.sequence_ranks)))
        if self.strategy == BEST:
            require_auto(engine, planning)
        if planning.dp_merge:
            engine.refuse("sharing", "plan_options has dp_merge = true")
        if self.accept_slices:
            engine.refuse("slices", "accept_slices is True")
        if self.format is not None and self.format not in engine.formats:
            raise ConfigError(
                f"engine {engine.name}: format is '{self.format}', its models take {' or '.join(engine.formats)}; "
                "leave format out"
            )
        if self.equal_micro_batches is False and engine.equal_counts:
            engine.refuse("counts", "equal_micro_batches is False")
        if engine.constant_counts and self.micro_batches is None and not self.evaluation:
            engine.refuse("counts", "micro_batches is left out")

    def _check_shared(self) -> None:
        request = f"sequence_ranks is {self.sequence_ranks}"
        if self.profile.context_parallel == "none":
            self.profile.refuse("context", request)
        if self.profile.context_parallel != "heads":
            raise ConfigError(
                f"engine {self.profile.name}: {request}. Its context-parallel ranks cut documents, not a pack's rows. "
                "Give group = the data-parallel ranks, or train on engine deepspeed (Ulysses)"
            )
        if self.format != "hf":
            raise ConfigError(
                f'{request}, and the loader has format "{self.format}", which is not cut for ranks; leave format out'
            )

    def _check_strategy(self) -> None:
        if strategy_named(self.strategy).changes_layout:
            raise ConfigError(
                f"strategy '{self.strategy}' changes the pipeline's layout; a loader alone has none to change"
            )
        if self.keeps_whole:
            return
        cuts, whole = f"strategy '{self.strategy}' cuts documents", ", ".join(whole_strategies())
        if self.pack_multiple > 1 or self.fixed_shapes:
            raise ConfigError(
                f"pack_multiple is {self.pack_multiple}, fixed_shapes {self.fixed_shapes}, and {cuts}, so that later "
                "packs attend to tokens of earlier ones; packs can be padded only where documents stay whole: choose "
                f"one of {whole}, or leave both out"
            )
        if not self.accept_slices:
            raise ConfigError(
                f"{cuts}: a micro-batch needs keys and values of an earlier one, which a plain loop does not keep. "
                f"Choose one of {whole}, train with 'evenload train', or give accept_slices=True if your loop keeps "
                "them and follows step.plan"
            )
        if self.format not in PREFIX_FORMATS:
            raise ConfigError(
                f"{cuts}, and format '{self.format}' cannot express that a slice attends to more keys than it has "
                f"queries; use format {' or '.join(PREFIX_FORMATS)}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class LoaderPlace:
    """Holds a rank's place.

    Args:
        rank, world_size: among the shares of a global batch; ranks of a sequence group have the same.
        peers: those that read together.
        replicas: of every one of `peers`, the place whose packs it wants.
        reads_alone: this rank does not communicate with the others.
        is_first: of all ranks, the one that logs.
    """

    rank: int
    world_size: int
    peers: Peers
    replicas: Sequence[int]
    reads_alone: bool
    is_first: bool


def find_place(options: LoaderOptions) -> LoaderPlace:
    """Return this process's place. Collective: ranks that read together get a group of their own with a CPU backend,
    because a thread uses it while training communicates.

    Raises:
        ConfigError: half of a place, two of them, or a sequence group that is not whole.
    """
    rank, world_size, group = options.rank, options.world_size, options.group
    is_distributed = dist.is_available() and dist.is_initialized()
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank is {rank} and world_size {world_size}; give both or none")
    if rank is not None and group is not None:
        raise ConfigError("rank and world_size are given with group, which implies both; leave them out")
    if group is not None and not is_distributed:
        raise ConfigError("group is given, but torch.distributed is not initialised")
    reads_alone = rank is not None or not is_distributed
    peers: Peers = Alone()
    if reads_alone:
        if rank is None or world_size is None:
            rank, world_size = 0, 1
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank}, must be in 0 .. {world_size - 1}")
    else:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        timeout = timedelta(seconds=options.peer_timeout_s)
        own = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=group is not None)
        assert isinstance(own, dist.ProcessGroup)
        peers = TorchPeers(own)
        rank, world_size = peers.rank, peers.size
    shared = options.sequence_ranks
    if world_size % shared:
        raise ConfigError(
            f"sequence_ranks is {shared}, which does not divide {counted(world_size, 'rank')}; every rank belongs to a "
            "group of so many"
        )
    return LoaderPlace(
        rank=rank // shared,
        world_size=world_size // shared,
        peers=peers,
        replicas=(rank // shared,) if reads_alone else [peer // shared for peer in range(world_size)],
        reads_alone=reads_alone,
        is_first=rank == 0,
    )
