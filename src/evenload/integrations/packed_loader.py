"""`PackedLoader`: packed micro-batches for a training loop of one's own.

    source ─► tokens ─► global batch ─► plan of all ranks ─► exchange ─► packs ─► batches in the loop's own names

All of it happens ahead of the loop, in a thread and in worker processes. The global batch is fixed before anything is
packed, so strategy, ranks and micro-batches only rearrange inside a step: divide the *sum* of the losses by
`num_label_tokens` of the step, and loss and gradients are those of one document after the other.

    loader = PackedLoader("corpus", tokenizer="model", max_tokens=8192, batch_tokens=65536)
    for step in loader.steps():
        for batch in step:
            model(**batch).loss.backward()
        optimizer.step(); optimizer.zero_grad()

One iteration is one epoch; an iteration that was left goes on where it was. Price: a few microseconds a document, two
copies of every token; in memory are `prefetch_steps` steps beyond what the global loader holds.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from evenload.cost.coefficients import CostCoefficients
from evenload.data.config import DataConfig
from evenload.data.loader import GlobalBatchLoader
from evenload.data.read_ahead import ReadAhead
from evenload.data.state import LoaderState, decode_state, encode_state, state_at_epoch
from evenload.data.step_maker import StepMaker
from evenload.errors import ConfigError, DataError
from evenload.integrations.batch_formats import BatchFormat, resolve_format
from evenload.integrations.data_source import data_config
from evenload.integrations.loader_checks import check_numbers, check_together
from evenload.integrations.loader_peers import find_place
from evenload.integrations.packed_step import PackedStep, StepShape, pack_step
from evenload.integrations.start_lines import balance_line, first_step_line, start_lines
from evenload.integrations.step_planner import ASSUMED_MODEL, check_strategy, known_vocabulary, make_planner, may_delay
from evenload.integrations.tokenizer_source import loader_tokenizer_fact, require_choice, tokenizer_settings
from evenload.plan.delay import DelayState
from evenload.plan.options import PlanOptions

STATE_VERSION = 1

_log = logging.getLogger("evenload.loader")


@dataclass(frozen=True)
class _MidStep:
    """A state inside a step: micro-batches given, and what must be equal to go on there."""

    given: int
    world_size: int
    plan_digest: str


class PackedLoader:
    """Packed micro-batches of this rank.

    Args:
        data: a path, directory, glob or fsspec URL, or a list of them; a `DataConfig` (mixtures); a Hugging Face
            `Dataset` or `IterableDataset`.
        max_tokens: most tokens of a pack; also of a document, unless `data` is a `DataConfig` that says less.
        tokenizer: "bytes", a `tokenizer.json` or its directory, a fast tokeniser of transformers, or one of ours. No
            special tokens are added but the end of a document. Default: that of a `DataConfig`, else bytes; the first
            lines name it. Has to be given where `model` is the caller's own and records are to be tokenised.
        strategy: `balanced` (equal predicted time), `best_fit` (fullest packs), `fixed_greedy`, `fixed_exact`, `wlb`
            (may put documents off), `padded` (for comparison).
        micro_batches: packs of every rank and step, always exactly so many (what a Trainer's
            `gradient_accumulation_steps` wants); None = as many as the plan needs.
        equal_micro_batches: with None, ranks short of work get packs of one padding token without a loss, so that all
            ranks make equally many passes.
        pack_multiple: the tokens of every pack are a multiple of it, by a document of padding at the end: the number
            of tensor-parallel ranks where the loop splits sequences over them (Megatron-Core's sequence parallelism).
        format: names, shapes and label convention of the batches, see `batch_formats`.
        model, costs: cost model for the balance, see `step_planner`; without a model `ASSUMED_MODEL`, and the loader
            says so. With the caller's own model (not a built-in name), token ids beyond its vocabulary are corrupt
            records.
        plan_options: further `PlanOptions` by name.
        accept_slices: the loop can run slices that attend to keys of earlier packs.
        evaluation: everything exactly once an iteration, in order; the last batch is short.
        rank, world_size: place among the ranks that share a global batch. Default: `torch.distributed`'s, if it is
            initialised, else alone. Given, the ranks do not talk: each reads all data by itself.
        group: the ranks that share a global batch, such as the data-parallel group; they read together.
        peer_timeout_s: how long a rank waits for another.
        settings: fields of `DataConfig`: `batch_documents` or `batch_tokens` (of the global batch), `seed`, `epochs`,
            `shuffle_window`, `overlong`, `workers`, `prefetch_steps`, `record`, ...

    Raises:
        ConfigError: settings that cannot work, with the reason. Collective where ranks read together.
    """

    def __init__(
        self,
        data: Any,
        *,
        max_tokens: int,
        tokenizer: Any = None,
        strategy: str = "balanced",
        micro_batches: int | None = None,
        equal_micro_batches: bool = True,
        pack_multiple: int = 1,
        format: BatchFormat = "hf",
        model: Any = None,
        costs: CostCoefficients | str | Path | None = None,
        plan_options: dict[str, Any] | None = None,
        accept_slices: bool = False,
        evaluation: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        group: Any = None,
        peer_timeout_s: float = 1800.0,
        **settings: Any,
    ) -> None:
        format = resolve_format(format)
        check_numbers(max_tokens, micro_batches, pack_multiple, strategy)
        check_strategy(strategy, format, accept_slices=accept_slices)
        place = find_place(rank, world_size, group, peer_timeout_s)
        config, datasets = data_config(
            data,
            settings,
            max_tokens=max_tokens,
            default_batch_tokens=max_tokens * place.world_size,
            evaluation=evaluation,
        )
        options = PlanOptions(
            **({"max_pack_tokens": max_tokens, "micro_batches": micro_batches} | (plan_options or {}))
        )
        delays = may_delay(strategy, options) and not evaluation
        check_together(config, place, strategy, max_tokens, micro_batches, equal_micro_batches, evaluation)
        vocab_size = known_vocabulary(model)
        require_choice(config, tokenizer, vocab_size)
        with tokenizer_settings(config, tokenizer) as (named, own):
            self._loader = GlobalBatchLoader(named, own, peers=place.peers, datasets=datasets, vocab_size=vocab_size)
        planner = make_planner(ASSUMED_MODEL if model is None else model, costs, place.world_size, options)
        self._maker = StepMaker(
            self._loader,
            planner,
            strategy,
            replicas=place.replicas,
            max_pack_tokens=max_tokens,
            may_delay=delays,
        )
        self._shape = StepShape(
            rank=place.rank,
            world_size=place.world_size,
            micro_batches=micro_batches,
            equal=equal_micro_batches,
            max_tokens=max_tokens,
            multiple=pack_multiple,
        )
        self._costs, self._options, self._tokenizer = costs, options, tokenizer
        self._model_is_assumed = model is None
        self._format: BatchFormat = format
        self._strategy, self._evaluation = strategy, evaluation
        self._ahead: ReadAhead[PackedStep] | None = None
        self._epoch = 0
        self._ended = False
        self._before = self._after = (self._loader.state(), DelayState())
        self._open: PackedStep | None = None
        self._given = 0
        self._peeked: PackedStep | None = None
        self._mid_step: _MidStep | None = None
        self._has_logged = False
        self._ledger_lines: tuple[str, ...] = ()
        fact = loader_tokenizer_fact(config, tokenizer, self._loader.tokenizer, vocab_size)
        self.start_lines: Sequence[str] = start_lines(
            config,
            fact,
            options,
            place,
            planner.costs,
            self._shape,
            strategy,
            format,
            delays=delays,
            evaluation=evaluation,
            assumed=model is None,
        )
        if place.rank == 0:
            _log.info("PackedLoader\n  %s", "\n  ".join(self.start_lines))

    @property
    def config(self) -> DataConfig:
        """The data settings, as resolved."""
        return self._loader.config

    @property
    def micro_batches(self) -> int | None:
        """Packs of every rank and step, where that is fixed."""
        return self._shape.micro_batches

    @property
    def format(self) -> BatchFormat:
        """Of the batches."""
        return self._format

    @property
    def rank(self) -> int:
        """Of this loader among those that share a global batch."""
        return self._shape.rank

    @property
    def world_size(self) -> int:
        """Ranks that share a global batch."""
        return self._shape.world_size

    @property
    def is_evaluation(self) -> bool:
        """Everything exactly once an iteration."""
        return self._evaluation

    @property
    def model_is_assumed(self) -> bool:
        """Packs are balanced for `ASSUMED_MODEL`, because nobody has named the model that is trained."""
        return self._model_is_assumed

    def balance_for(self, model: Any) -> None:
        """Balance packs by the times of this model, from the first step on. Collective: all ranks, the same model.

        Args:
            model: as the constructor's.

        Raises:
            ConfigError: not a model; no tokeniser was given, and the model's vocabulary is not one of bytes; steps have
                been made already.
        """
        require_choice(self.config, self._tokenizer, known_vocabulary(model))
        if self._ahead is not None:
            raise ConfigError(
                "balance_for(model) after steps were made for another one; call it before the first iteration, or give "
                "PackedLoader(model=...)"
            )
        planner = make_planner(model, self._costs, self.world_size, self._options)
        self._maker.planner = planner
        self._model_is_assumed = False
        line = balance_line(planner.costs, assumed=False)
        self.start_lines = [line, *self.start_lines[1:]]
        if self.rank == 0:
            _log.info("PackedLoader\n  %s", line)

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one if none has begun or the last one ended."""
        return self._epoch

    @property
    def has_ended(self) -> bool:
        """All `epochs` were given out."""
        return self._ended

    @property
    def ledger_lines(self) -> tuple[str, ...]:
        """What became of all documents and tokens, after the last step that was given out."""
        return self._ledger_lines

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches of an epoch, or of the rest of one that was left."""
        while (step := self._current_step()) is not None:
            while self._given < len(step):
                self._given += 1
                yield step.batches[self._given - 1]

    def steps(self) -> Iterator[PackedStep]:
        """Steps of an epoch, or of the rest of one that was left; of a step that was left, its other micro-batches.

        `state_dict` in the loop's body is that after the step.
        """
        while (step := self._current_step()) is not None:
            given, self._given = self._given, len(step)
            yield step.after(given) if given else step

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration reads; nothing happens where it is that one already.

        Raises:
            ConfigError: an epoch is in its middle: another one would leave out the rest of it.
        """
        if epoch == self._epoch:
            return
        if epoch < 0 or (self.config.epochs is not None and epoch >= self.config.epochs):
            raise ConfigError(f"set_epoch({epoch}): epochs is {self.config.epochs}, the first one is 0")
        if self.config.mixture_end == "repeat":
            raise ConfigError(f'set_epoch({epoch}) with mixture_end "repeat", which has no epochs; leave it out')
        loader, planner = self._after
        untouched = self._open is None and not any(part.documents for part in loader.parts)
        if not (untouched or self._peeked is not None or self._ended):
            raise ConfigError(
                f"set_epoch({epoch}) in the middle of epoch {self._epoch} would leave out the rest of it; iterate to "
                "the end, or make a new loader"
            )
        self._go_on(state_at_epoch(loader, epoch), planner, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain values: the same on all ranks at the end of a step.

        Between two steps it may be loaded with any number of ranks; inside a step with the same number only.
        """
        mid = self._mid_step
        if mid is None and self._open is not None and self._given < len(self._open):
            mid = _MidStep(self._given, self.world_size, self._open.plan.digest)
        loader, planner = self._before if mid is not None else self._after
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "loader": encode_state(loader).decode(),
            "planner": msgspec.json.encode(planner).decode(),
            "given": mid.given if mid else 0,
            "world_size": mid.world_size if mid else self.world_size,
            "plan_digest": mid.plan_digest if mid else "",
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly where a state was made. Reads nothing yet.

        Raises:
            ConfigError: not a state of this loader; other data or settings (named); a state inside a step under
                another number of ranks.
        """
        missing = {"version", "epoch", "loader", "planner", "given", "world_size", "plan_digest"} - set(state_dict)
        if missing or state_dict["version"] != STATE_VERSION:
            raise ConfigError(
                f"not a state of PackedLoader (version {state_dict.get('version')}, this one reads {STATE_VERSION}; "
                f"missing: {sorted(missing)})"
            )
        given = int(state_dict["given"])
        if given and state_dict["world_size"] != self.world_size:
            raise ConfigError(
                f"the state was saved inside a step, after {given} micro-batches, with {state_dict['world_size']} "
                f"ranks; now there are {self.world_size}. Save between two steps to go on with another number"
            )
        planner = msgspec.json.decode(state_dict["planner"], type=DelayState)
        self._go_on(decode_state(state_dict["loader"].encode()), planner, int(state_dict["epoch"]))
        self._mid_step = _MidStep(given, self.world_size, state_dict["plan_digest"]) if given else None

    def close(self) -> None:
        """End threads and worker processes; iterating again goes on where the loader stands. Collective where ranks
        read together, after the same step."""
        # Steps that were made ahead are lost with the thread, so the state says where to read again.
        self.load_state_dict(self.state_dict())

    def __enter__(self) -> "PackedLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _go_on(self, loader: LoaderState, planner: DelayState, epoch: int) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._loader.load_state(loader)
        self._maker.planner_state = planner
        self._before = self._after = (loader, planner)
        self._open, self._given, self._peeked, self._mid_step = None, 0, None, None
        self._epoch, self._ended = epoch, False

    def _current_step(self) -> PackedStep | None:
        """The step that has micro-batches left, or the next one of this epoch; None at the epoch's end."""
        if self._open is not None and self._given < len(self._open):
            return self._open
        step, self._peeked = self._peeked or self._next_step(), None
        if step is None:
            assert self.config.epochs is not None
            self._epoch, self._ended = self.config.epochs, True
            return None
        if step.epoch != self._epoch:
            self._peeked, self._epoch = step, step.epoch
            return None
        self._before, self._after = self._after, (step.loader_state, step.planner_state)
        self._open, self._given = step, self._skipped(step)
        self._ledger_lines = step.ledger_lines
        if not self._has_logged and self.rank == 0:
            _log.info(first_step_line(step, self._shape))
        self._has_logged = True
        if not step.num_label_tokens:
            _log.warning(
                "step %d has no token with a loss, so its gradient is 0 (documents %s ...); look at the labels of the "
                "source",
                step.plan.step,
                [document.doc_id for document in step.plan.documents[:5]],
            )
        return step

    def _next_step(self) -> PackedStep | None:
        if self._ended:
            return None
        if self._ahead is None:
            if self._model_is_assumed and not self._has_logged and self.rank == 0:
                _log.warning("%s", self.start_lines[0])
            maker, shape, format = self._maker, self._shape, self._format

            def make() -> PackedStep | None:
                planned = maker.next()
                return None if planned is None else pack_step(planned, shape, format)

            self._ahead = ReadAhead(make, self.config.prefetch_steps, "evenload-prepare")
        try:
            return self._ahead.next()
        except BaseException:
            # The thread has ended with its error; the next call starts another one where this one stood.
            mid = self._mid_step
            self._go_on(*self._after, self._epoch)
            self._mid_step = mid
            raise

    def _skipped(self, step: PackedStep) -> int:
        """Micro-batches of the step that were given out before its state was saved."""
        mid, self._mid_step = self._mid_step, None
        if mid is None:
            return 0
        if mid.plan_digest != step.plan.digest or mid.given > len(step):
            raise DataError(
                f"step {step.plan.step} was planned anew as {step.plan.digest}, when its state was saved as "
                f"{mid.plan_digest}; strategy, max_tokens, micro_batches, model and the sources must be those of the "
                "saved run to go on inside a step"
            )
        return mid.given
