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
from dataclasses import fields, replace
from typing import Any, NamedTuple, Unpack

import msgspec

from evenload.data.batches import LoaderState, decode_state, encode_state, state_at_epoch
from evenload.data.ledger import untaught_warning
from evenload.data.loader import GlobalBatchLoader
from evenload.data.open_encoder import stop_warnings
from evenload.data.tokenize import FileTokenizer
from evenload.errors import ConfigError, DataError
from evenload.feed.read_ahead import ReadAhead
from evenload.feed.step_maker import StepMaker
from evenload.integrations.batch_formats import BatchFormat
from evenload.integrations.data_source import data_config
from evenload.integrations.loader_options import LoaderOptions
from evenload.integrations.loader_peers import find_place
from evenload.integrations.loader_settings import LoaderSettings
from evenload.integrations.packed_step import PackedStep, pack_step
from evenload.integrations.start_lines import balance_line, first_step_line, start_lines
from evenload.integrations.step_planner import known_vocabulary, make_planner
from evenload.integrations.tokenizer_source import loader_tokenizer_fact, require_choice, tokenizer_settings
from evenload.plan.deferral.delay import DelayState
from evenload.plan.planner import RunPlanner
from evenload.plan.strategies.registry import strategy_named
from evenload.types.counted import counted

STATE_VERSION = 1

_log = logging.getLogger("evenload.loader")


class _MidStep(NamedTuple):
    """Micro-batches given of a step, and which it must be to go on there; none, between two steps."""

    given: int = 0
    plan_digest: str = ""


class PackedLoader:
    """Packed micro-batches of this rank.

    Args:
        data: a path, directory, glob or fsspec URL, or a list of them; a `DataConfig` (mixtures); a Hugging Face
            `Dataset` or `IterableDataset`.
        max_tokens, tokenizer, strategy, format, model, evaluation: see `LoaderOptions`.
        settings: all other `LoaderOptions`, and fields of `DataConfig` (`LoaderSettings` names them all):
            `batch_documents` or `batch_tokens` (of the global batch), `seed`, `epochs`, `shuffle_window`, `overlong`,
            `workers`, `prefetch_steps`, `record`, ...

    Attributes:
        options: as given; `format` resolved.
        config: the data settings, as resolved.
        rank, world_size: of this loader among those that share a global batch; ranks of a sequence group
            (`sequence_ranks`) have the same.
        model_is_assumed: packs are balanced for `ASSUMED_MODEL`, because nobody has named the model that is trained.
        start_lines: what was logged at the start.
        epoch: of the current iteration, or of the next one if none has begun or the last one ended.
        has_ended: all `epochs` were given out.
        ledger_lines: what became of all documents and tokens, after the last step that was given out.

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
        format: BatchFormat | None = None,
        model: Any = None,
        evaluation: bool = False,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        given: dict[str, Any] = {**settings}
        further = {field.name: given.pop(field.name) for field in fields(LoaderOptions) if field.name in given}
        options = LoaderOptions(
            max_tokens=max_tokens,
            tokenizer=tokenizer,
            strategy=strategy,
            format=format,
            model=model,
            evaluation=evaluation,
            **further,
        )
        place = find_place(
            options.rank, options.world_size, options.group, options.peer_timeout_s, options.sequence_ranks
        )
        config, datasets = data_config(
            data,
            given,
            max_tokens=max_tokens,
            default_batch_tokens=max_tokens * place.world_size,
            evaluation=evaluation,
        )
        planning = options.planning()
        options.check_data(config, place)
        vocab_size = known_vocabulary(model)
        require_choice(config, tokenizer, vocab_size)
        with tokenizer_settings(config, tokenizer) as (named, own):
            self._loader = GlobalBatchLoader(named, own, peers=place.peers, datasets=datasets, vocab_size=vocab_size)
            opened = self._loader.tokenizer
            if isinstance(opened, FileTokenizer) and not hasattr(tokenizer, "save_pretrained") and opened.has_settings:
                from evenload.runtime.model.export_files import require_same_ids  # transformers takes seconds to import

                require_same_ids(opened)
            ends = getattr(getattr(model, "generation_config", model), "eos_token_id", None)
            unstopped = stop_warnings(named, self._loader.tokenizer, ends)
        planner = make_planner(
            model,
            options.costs,
            (place.world_size, options.sequence_ranks),
            planning,
            *options.engine_shape,
        )
        may_delay = strategy_named(strategy).delays(planning) and not evaluation
        self._planner = RunPlanner(planner, strategy, may_delay)
        self._maker = StepMaker(
            self._loader,
            self._planner,
            replicas=lambda layout: place.replicas,
            max_pack_tokens=max_tokens,
        )
        self.options, self.config, self._place = options, self._loader.config, place
        self.rank, self.world_size = place.rank, place.world_size
        self.model_is_assumed = model is None
        self.ledger_lines: tuple[str, ...] = ()
        self._ahead: ReadAhead[PackedStep] | None = None
        self._has_logged = False
        self._stand_at(self._loader.state(), DelayState(), 0)
        fact = loader_tokenizer_fact(config, tokenizer, self._loader.tokenizer, vocab_size)
        self.start_lines: Sequence[str] = start_lines(config, fact, options, place, planner.costs)
        if place.is_first:
            self.start_lines = [*self.start_lines, *(f"source        {line}" for line in self._loader.source_lines())]
            _log.info("PackedLoader\n  %s", "\n  ".join(self.start_lines))
            for line in (*unstopped, *self._loader.label_warnings()):
                _log.warning("%s", line)

    def balance_for(self, model: Any) -> None:
        """Balance packs by the times of this model, from the first step on. Collective: all ranks, the same model.

        Args:
            model: as the constructor's.

        Raises:
            ConfigError: not a model; no tokeniser was given, and the model's vocabulary is not one of bytes; steps have
                been made already.
        """
        require_choice(self.config, self.options.tokenizer, known_vocabulary(model))
        if self._ahead is not None:
            raise ConfigError(
                "balance_for(model) after steps were made for another one; call it before the first iteration, or give "
                "PackedLoader(model=...)"
            )
        options = self.options
        ranks = self.world_size, options.sequence_ranks
        planner = make_planner(model, options.costs, ranks, options.planning(), *options.engine_shape)
        self._planner = replace(self._planner, planner=planner)
        self._maker.planner = self._planner
        self.model_is_assumed = False
        line = balance_line(planner.costs, assumed=False)
        self.start_lines = [line, *self.start_lines[1:]]
        if self._place.is_first:
            _log.info("PackedLoader\n  %s", line)

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
        if epoch == self.epoch:
            return
        if epoch < 0 or (self.config.epochs is not None and epoch >= self.config.epochs):
            raise ConfigError(f"set_epoch({epoch}): epochs is {self.config.epochs}, the first one is 0")
        if self.config.mixture_end == "repeat":
            raise ConfigError(f'set_epoch({epoch}) with mixture_end "repeat", which has no epochs; leave it out')
        loader, planner = self._after
        untouched = self._open is None and not any(part.documents for part in loader.parts)
        if not (untouched or self._peeked is not None or self.has_ended):
            raise ConfigError(
                f"set_epoch({epoch}) in the middle of epoch {self.epoch} would leave out the rest of it; iterate to "
                "the end, or make a new loader"
            )
        self._go_on(state_at_epoch(loader, epoch), planner, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain values: the same on all ranks at the end of a step.

        Between two steps it may be loaded with any number of ranks; inside a step with the same number only.
        """
        mid = self._mid_step
        if not mid.given and self._open is not None and self._given < len(self._open):
            mid = _MidStep(self._given, self._open.plan.digest)
        loader, planner = self._before if mid.given else self._after
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "loader": encode_state(loader).decode(),
            "planner": msgspec.json.encode(planner).decode(),
            "world_size": self.world_size,
            **mid._asdict(),
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
                f"the state was saved inside a step, after {counted(given, 'micro-batch')}, with "
                f"{counted(state_dict['world_size'], 'rank')}; now there are {self.world_size}. Save between two steps "
                "to go on with another number"
            )
        planner = msgspec.json.decode(state_dict["planner"], type=DelayState)
        self._go_on(decode_state(state_dict["loader"].encode()), planner, int(state_dict["epoch"]))
        self._mid_step = _MidStep(given, state_dict["plan_digest"] if given else "")

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
        self._stand_at(loader, planner, epoch)

    def _stand_at(self, loader: LoaderState, planner: DelayState, epoch: int) -> None:
        self._before = self._after = (loader, planner)
        self._open: PackedStep | None = None
        self._peeked: PackedStep | None = None
        self._mid_step = _MidStep()
        self._given = 0
        self.epoch, self.has_ended = epoch, False

    def _current_step(self) -> PackedStep | None:
        """The step that has micro-batches left, or the next one of this epoch; None at the epoch's end."""
        if self._open is not None and self._given < len(self._open):
            return self._open
        step, self._peeked = self._peeked or self._next_step(), None
        if step is None:
            assert self.config.epochs is not None
            self.epoch, self.has_ended = self.config.epochs, True
            return None
        planned = step.planned
        if planned.epoch != self.epoch:
            self._peeked, self.epoch = step, planned.epoch
            return None
        self._before, self._after = self._after, (planned.loader_state, planned.planner_state)
        self._open, self._given = step, self._skipped(step)
        self.ledger_lines = planned.ledger_lines
        if not self._has_logged and self._place.is_first:
            _log.info(first_step_line(step, self.options))
            if step.num_label_tokens and (untaught := untaught_warning(planned.plan.documents, planned.origin)):
                _log.warning("%s", untaught)
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
        if self.has_ended:
            return None
        if self._ahead is None:
            if self.model_is_assumed and not self._has_logged and self._place.is_first:
                _log.warning("%s", self.start_lines[0])
            maker, options, place = self._maker, self.options, self._place

            def make() -> PackedStep | None:  # without `self`, so that dropping it ends the thread
                planned = maker.next()
                return None if planned is None else pack_step(planned, options, place)

            self._ahead = ReadAhead(make, self.config.prefetch_steps, "evenload-prepare")
        try:
            return self._ahead.next()
        except BaseException:
            # The thread has ended with its error; the next call starts another one where this one stood.
            mid = self._mid_step
            self._go_on(*self._after, self.epoch)
            self._mid_step = mid
            raise

    def _skipped(self, step: PackedStep) -> int:
        """Micro-batches of the step that were given out before its state was saved."""
        mid, self._mid_step = self._mid_step, _MidStep()
        if mid.given and (mid.plan_digest != step.plan.digest or mid.given > len(step)):
            raise DataError(
                f"step {step.plan.step} was planned anew as {step.plan.digest}, when its state was saved as "
                f"{mid.plan_digest}; strategy, max_tokens, micro_batches, model and the sources must be those of the "
                "saved run to go on inside a step"
            )
        return mid.given
