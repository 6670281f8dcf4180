"""What a `PackedLoader` is given: how it packs (`LoaderOptions`), its rank's place, its data and tokeniser.

A caller's loop knows whole documents only, so strategies that cut documents are refused. A fast tokeniser of
transformers is written out and read back as `tokenizer.json`, so content, end of document and chat template are those
that transformers would load.

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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from evenload.config.keys import plan_options
from evenload.cost.coefficients import CostCoefficients
from evenload.data.arrow_records import is_iterable_dataset
from evenload.data.batches import Peers, SingleRank
from evenload.data.config import DataConfig, reads_token_ids
from evenload.data.part_files import with_kinds
from evenload.data.tokenize import BYTES, MAX_BYTE_VOCABULARY, DocumentTokenizer, describe_tokenizer
from evenload.errors import ConfigError
from evenload.integrations.batch_formats import BatchFormat
from evenload.integrations.catalog import BEST, LOOP, EngineProfile, engine_named, require_auto, require_strategy
from evenload.integrations.price import StepShape
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import strategy_named
from evenload.runtime.comm.collectives import TorchPeers
from evenload.types.base import require_at_least_one
from evenload.types.layout import even_layout
from evenload.types.text import counted


@dataclass(eq=False, kw_only=True)
class LoaderOptions:
    """Holds the options of a `PackedLoader`, all of which are keyword arguments of it.

    Args:
        max_tokens: most tokens of a pack; also of a document, unless a `DataConfig` has less.
        tokenizer: "bytes", a `tokenizer.json` or its directory, a fast tokeniser of transformers, or a
            `DocumentTokenizer`; default: a `DataConfig`'s, else bytes. Required where texts are for the caller's model.
        strategy: `auto` (of those below the fastest, by the price of the engine or of a plain loop), `balanced` (equal
            predicted time), `best_fit` (fullest packs), `fixed_greedy`, `fixed_exact`, `wlb` (may defer documents),
            `padded` (for comparison).
        micro_batches: packs of every rank and step, exactly; None = as many as the plan needs, or as batches fill.
        equal_micro_batches: ranks short of work get packs of padding; default: yes, or as the engine needs.
        pack_multiple: packs are padded to a multiple of so many tokens (ranks of Megatron-Core's sequence parallelism).
        sequence_ranks: neighbouring ranks that share the tokens of every pack (DeepSpeed's Ulysses).
        fixed_shapes: every pack is padded to `max_tokens` tokens (what a pipeline of torch.distributed needs).
        engine: that trains the batches, a name of `catalog`: sets what is left out here, refuses what it cannot run,
            and balances packs for how it runs them.
        format: of the batches, see `batch_formats`; default: the engine's, else "hf".
        model, costs: for the balance, see `planner.make_planner`. Token ids beyond the model's are corrupt records.
        plan_options: as `[plan.options]` of a training configuration: `{"window": 4, "wlb": {"release": "queues"}}`.
        evaluation: everything exactly once an iteration, in order; the last batch is short.
        rank, world_size, group: of the ranks that share a global batch, see the table of this module.
        peer_timeout_s: seconds that a rank waits for another.

    Raises a `ConfigError` for a value out of its range, or a strategy that the caller's loop cannot run.
    """

    max_tokens: int
    tokenizer: Any = None
    strategy: str = BEST
    micro_batches: int | None = None
    equal_micro_batches: bool | None = None
    pack_multiple: int = 1
    sequence_ranks: int = 1
    fixed_shapes: bool = False
    engine: str | None = None
    format: BatchFormat = None  # type: ignore[bad-assignment]
    model: Any = None
    costs: CostCoefficients | str | Path | None = None
    plan_options: dict[str, Any] | None = None
    evaluation: bool = False
    rank: int | None = None
    world_size: int | None = None
    group: Any = None
    peer_timeout_s: float = 1800.0
    fills_packs: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_at_least_one("", self, "max_tokens", "micro_batches", "pack_multiple", "sequence_ranks")
        self.format = self.format or self.profile.formats[0]  # type: ignore[bad-assignment]
        if self.sequence_ranks > 1:
            self._check_shared()
        self._check_engine(self.profile)
        if self.equal_micro_batches is None:
            self.equal_micro_batches = self.engine is None or self.profile.equal_counts
        if self.max_tokens % self.row_multiple:
            given = f"pack_multiple {self.pack_multiple}, sequence_ranks {self.sequence_ranks}"
            fix = f"set max_tokens to a multiple, such as {self.computed_tokens(self.max_tokens)}"
            why = f"{given}: a full pack padded to a multiple would pass max_tokens"
            raise ConfigError(f"max_tokens is {self.max_tokens}, {why}; {fix}")

    @functools.cached_property
    def profile(self) -> EngineProfile:
        """Return the engine's profile, `LOOP` where none is named; a `ConfigError` for an unknown name."""
        return LOOP if self.engine is None else engine_named(self.engine)

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

    def planning(self) -> PlanOptions:
        """Return the planner's options."""
        own = {"max_pack_tokens": self.max_tokens, "micro_batches": self.micro_batches}
        return plan_options(own | (self.plan_options or {}))

    def computed_tokens(self, num_tokens: int) -> int:
        """Return the tokens of a pack of so many, with the padding at its end."""
        return -(-num_tokens // self.row_multiple) * self.row_multiple

    def check_data(self, config: DataConfig, place: "LoaderPlace") -> None:
        """Raise a `ConfigError` for data settings or a place that contradict the options."""
        if config.max_document_tokens > self.max_tokens:
            lengths = f"max_document_tokens is {config.max_document_tokens}, max_tokens of a pack {self.max_tokens}"
            raise ConfigError(f"{lengths}: such a document fits no pack; change one of them, and choose overlong")
        if self.micro_batches is not None and config.batch_tokens is not None:
            most = self.micro_batches * place.world_size * self.max_tokens
            if config.batch_tokens > most:
                packs = f"{counted(place.world_size, 'rank')} x {self.micro_batches} micro_batches"
                fix = "lower batch_tokens (packs of whole documents are seldom full), or raise one of the others"
                given = f"batch_tokens is {config.batch_tokens}"
                raise ConfigError(f"{given}, but {packs} x {self.max_tokens} max_tokens hold {most}; {fix}")
        if strategy_named(self.strategy).needs_solver and place.reads_alone and place.world_size > 1:
            why = "ranks that read alone (rank and world_size given) would plan differently; use fixed_greedy, or group"
            raise ConfigError(f"strategy '{self.strategy}' depends on the time its solver takes, so {why}")
        if self.evaluation and (self.micro_batches is not None or not self.equal_micro_batches):
            given = f"micro_batches = {self.micro_batches}, equal_micro_batches = {self.equal_micro_batches}"
            raise ConfigError(f"evaluation=True with {given}; all ranks run equally many: leave both out")

    def _check_engine(self, engine: EngineProfile) -> None:
        planning = self.planning()
        require_strategy(engine, self.strategy, planning, even_layout(1, cp=max(1, self.sequence_ranks)))
        if self.strategy == BEST:
            require_auto(engine, planning)
        if planning.dp_merge:
            engine.refuse("sharing", "plan_options has dp_merge = true")
        if self.format not in engine.formats:
            takes = " or ".join(engine.formats)
            raise ConfigError(f"engine {engine.name}: format is '{self.format}', its models take {takes}; leave it out")
        if self.equal_micro_batches is False and engine.equal_counts:
            engine.refuse("counts", "equal_micro_batches is False")

    def _check_shared(self) -> None:
        request = f"sequence_ranks is {self.sequence_ranks}"
        if self.profile.context_parallel == "none":
            self.profile.refuse("context", request)
        if self.profile.context_parallel != "heads":
            why = f"{request}, and its context-parallel ranks cut documents, not a pack's rows"
            fix = "Give group = the data-parallel ranks, or train on engine deepspeed (Ulysses)"
            raise ConfigError(f"engine {self.profile.name}: {why}. {fix}")
        if self.format != "hf":
            why = f'the loader has format "{self.format}", which is not cut for ranks'
            raise ConfigError(f"{request}, and {why}; leave format out")


class LoaderPlace(NamedTuple):
    """Holds a rank's place among the shares of a global batch, which ranks of a sequence group have in common.

    Args:
        peers: the ranks that read together; replicas: the place whose packs each of them trains.
        reads_alone: this rank does not communicate with the others.
        is_first: of all ranks, this one logs.
    """

    rank: int
    world_size: int
    peers: Peers
    replicas: Sequence[int]
    reads_alone: bool
    is_first: bool


def find_place(options: LoaderOptions) -> LoaderPlace:
    """Return this process's place; a `ConfigError` for half of one, two of them, or a sequence group that is not whole.

    Collective: ranks that read together get a group of their own with a CPU backend, because a thread uses it while
    training communicates.
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
    peers: Peers = SingleRank()
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
        raise ConfigError(f"sequence_ranks is {shared}, which does not divide {counted(world_size, 'rank')}; change it")
    return LoaderPlace(
        rank=rank // shared,
        world_size=world_size // shared,
        peers=peers,
        replicas=(rank // shared,) if reads_alone else [peer // shared for peer in range(world_size)],
        reads_alone=reads_alone,
        is_first=rank == 0,
    )


FULL = "auto"
"""The `batch_tokens` of a batch that takes documents for as long as the packs of its step hold them whole."""
LEAST_PACKS = 8
"""Of such a step without `micro_batches`: whole documents leave a fifth of one pack empty, a twentieth of eight."""
DATASET_NAME = "dataset"
"""Source name of a data set object."""

_NAMES_ELSEWHERE = {
    "strategy": "packing_strategy",
    "max_tokens": "max_length max_seq_length sequence_len cutoff_len",
    "batch_documents or batch_tokens, over all ranks,": "batch_size",
    "workers": "num_workers",
    "prefetch_steps": "prefetch_factor",
    "shuffle_window (1 keeps the order)": "shuffle",
    "format": "collate_fn",
    'loss_on = "completion"': "completion_only_loss assistant_only_loss",
    "text_column": "dataset_text_field",
}
"""Settings, and what other loaders call them."""
_ALWAYS_SO = ("packing", "sample_packing", "padding_free", "neat_packing", "drop_last")
_EVALUATION_ALLOWS = {
    "shuffle_window": (1,),
    "epochs": (None,),
    "overlong": ("error", "split"),
    "on_corrupt": ("error",),
    "mixture_end": ("once",),
}


def unknown_setting(name: str) -> str:
    """Say what to write instead of a setting of other loaders; "" of one that is not known."""
    if name in _ALWAYS_SO:
        return "it packs whole documents, and drops none; leave it out"
    own = next((own for own, names in _NAMES_ELSEWHERE.items() if name in names.split()), "")
    return own and f"it is called {own} here"


def data_config(
    data: Any, settings: dict[str, Any], options: LoaderOptions, world_size: int
) -> tuple[DataConfig, dict[str, Any]]:
    """Return the data settings, and the data set objects that they name.

    Args:
        settings: fields of `DataConfig`; those of a configuration are replaced. `batch_tokens` may be `FULL`.
        world_size: shares of a global batch; one of evaluation has a pack's tokens for each, unless its size is set.

    Raises:
        ConfigError: contradicting settings, and as `with_kinds`.
    """
    documents, tokens = settings.get("batch_documents"), settings.get("batch_tokens")
    if tokens == FULL or (documents is None and tokens is None and not isinstance(data, DataConfig)):
        settings = {name: value for name, value in settings.items() if name != "batch_tokens"}
        if not options.evaluation:
            options.fills_packs, options.micro_batches = True, options.micro_batches or -(-LEAST_PACKS // world_size)
            settings["batch_tokens"] = options.micro_batches * world_size * options.max_tokens
    base: dict[str, Any] = {"max_document_tokens": options.max_tokens}
    datasets = {}
    if isinstance(data, DataConfig):
        base = {field: getattr(data, field) for field in data.__struct_fields__}
        for one, other in (("batch_documents", "batch_tokens"), ("batch_tokens", "batch_documents")):
            if settings.get(one) is not None:
                base[other] = None
    elif any(kind.__module__.startswith("datasets.") for kind in type(data).__mro__):
        is_iterable_dataset(data)  # refuses what is neither kind, such as a dictionary of splits
        base["sources"] = (DATASET_NAME,)
        datasets = {DATASET_NAME: data}
    elif isinstance(data, str | Path):
        base["sources"] = (str(data),)
    elif isinstance(data, Sequence) and all(isinstance(source, str | Path) for source in data):
        base["sources"] = tuple(str(source) for source in data)
    else:
        kinds = "a path or URL, a list of them, a DataConfig, or a Hugging Face Dataset or IterableDataset"
        raise ConfigError(f"data is a {type(data).__name__}; give {kinds}")
    if options.evaluation:
        base |= _evaluation_settings(data, base | settings, settings, options.max_tokens * world_size)
    return with_kinds(DataConfig(**(base | settings)), datasets), datasets


def _evaluation_settings(
    data: Any, given: Mapping[str, Any], settings: Mapping[str, Any], batch_tokens: int
) -> dict[str, Any]:
    for name, allowed in _EVALUATION_ALLOWS.items():
        # The order and the epochs of a configuration are those of training; what it leaves out counts here too.
        counts = isinstance(data, DataConfig) and name in ("overlong", "on_corrupt", "mixture_end")
        if (name in settings or counts) and given[name] not in allowed:
            must = f"evaluation leaves nothing out and keeps the order, so it must be {' or '.join(map(repr, allowed))}"
            raise ConfigError(f"evaluation=True with {name} = {given[name]!r}; {must}")
    fixed: dict[str, Any] = {"shuffle_window": 1, "streams": None, "epochs": None}
    if given.get("batch_documents") is None and given.get("batch_tokens") is None:
        fixed["batch_tokens"] = batch_tokens
    return fixed


@contextmanager
def tokenizer_settings(config: DataConfig, tokenizer: Any) -> Iterator[tuple[DataConfig, DocumentTokenizer | None]]:
    """Yield data settings that name the tokeniser, whose files may exist inside the `with` block only, and the
    tokeniser where settings cannot; a `ConfigError` for a slow tokeniser and for what is none."""
    if tokenizer is None:
        yield config, None
    elif isinstance(tokenizer, str | Path):
        yield msgspec.structs.replace(config, tokenizer=str(tokenizer)), None
    elif all(hasattr(tokenizer, name) for name in ("encode_with_offsets", "encode_batch", "eos_id")):
        yield config, tokenizer
    elif hasattr(tokenizer, "save_pretrained"):
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            name, fix = type(tokenizer).__name__, "load it with use_fast=True, or give the path of its tokenizer.json"
            raise ConfigError(f"tokenizer {name} is a slow one, without a tokenizer.json; {fix}")
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            yield msgspec.structs.replace(config, tokenizer=directory), None
    else:
        kinds = '"bytes", a tokenizer.json or its directory, a fast tokeniser of transformers, or a DocumentTokenizer'
        raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}; give {kinds}")


def require_choice(config: DataConfig, tokenizer: Any, vocab_size: int | None) -> None:
    """Raise a `ConfigError` for bytes that nobody chose, where the caller's model has another vocabulary."""
    if tokenizer is not None or config.tokenizer is not None or vocab_size is None or reads_token_ids(config):
        return
    if vocab_size > MAX_BYTE_VOCABULARY:
        why = f"tokenizer is not given, and the model's vocabulary of {vocab_size:,} ids is not one of bytes"
        raise ConfigError(f'{why}; give the model\'s tokeniser, or tokenizer="{BYTES}" to train from scratch on bytes')


def run_tokenizer_text(config: DataConfig, given: Any, opened: DocumentTokenizer, vocab_size: int | None) -> str:
    """Describe the tokeniser in use (`opened`) for the log, and whether the caller chose it."""
    if reads_token_ids(config):
        checked = "not checked, as the model is not known" if vocab_size is None else f"checked: below {vocab_size:,}"
        return f"none: records hold token ids, {checked}"
    chosen = ", because none was given" if given is None and config.tokenizer is None else ""
    is_loaded = hasattr(given, "save_pretrained")
    origin = str(getattr(given, "name_or_path", "") or type(given).__name__) if is_loaded else ""
    return describe_tokenizer(opened, origin) + chosen
