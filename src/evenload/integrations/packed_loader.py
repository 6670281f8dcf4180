"""`PackedLoader`: packed micro-batches for a training loop of one's own.

    source ─► tokens ─► global batch ─► plan of all ranks ─► exchange ─► packs ─► batches in the loop's own names

A thread and worker processes do it before the loop needs it. The global batch is fixed before anything is packed, so
strategy, ranks and micro-batches only rearrange inside a step: divide the *sum* of the losses by `num_label_tokens` of
the step, and loss and gradients are those of one document after the other. docs/loader.md has the loop.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from evenload.data.batches import LoaderState, decode_state, encode_state, state_at_epoch
from evenload.data.chat_encoding import stop_warnings
from evenload.data.config import DataConfig
from evenload.data.encoders import IGNORE_INDEX
from evenload.data.ledger import warn_without_loss
from evenload.data.loader import GlobalBatchLoader
from evenload.data.tokenize import FileTokenizer
from evenload.errors import ConfigError, DataError, refusing_unknown
from evenload.feed.collate import PADDING_TOKEN, PackBatch, collate_pack
from evenload.feed.prefetcher import Prefetcher
from evenload.feed.step_maker import PlannedStep, StepMaker
from evenload.integrations.batch_formats import format_pack, pin_batch
from evenload.integrations.catalog import BEST
from evenload.integrations.loader_options import (
    LoaderOptions,
    LoaderPlace,
    data_config,
    find_place,
    require_choice,
    run_tokenizer_text,
    tokenizer_settings,
    unknown_setting,
)
from evenload.integrations.planner import ENGINES_AUTO, known_vocabulary, make_planner
from evenload.integrations.price import project
from evenload.planning.deferral import DelayState
from evenload.planning.packing import WholePacks
from evenload.planning.planner import RunPlanner
from evenload.planning.strategies.registry import strategy_named
from evenload.types.plan import StepPlan
from evenload.types.text import counted

STATE_VERSION = 1

_log = logging.getLogger("evenload.loader")


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedStep:
    """Holds one optimizer step of this rank; iterating gives the micro-batches.

    Args:
        packs: this rank's packs in the order in which they are trained, those of padding alone last.
    """

    planned: PlannedStep
    packs: tuple[PackBatch, ...]
    batches: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def plan(self) -> StepPlan:
        """Return the plan of all ranks."""
        return self.planned.plan

    @property
    def num_label_tokens(self) -> int:
        """Return the label tokens of the global batch, by which the sum of the losses is divided."""
        return self.plan.num_label_tokens


class _MidStep(NamedTuple):
    """Holds the micro-batches given of a step, and the plan that it must have to go on; none, between two steps."""

    given: int = 0
    plan_digest: str = ""


class PackedLoader:
    """Gives the packed micro-batches of this rank.

    One iteration is one epoch; the next one goes on where an iteration was left.

    Args:
        data: a path, directory, glob or fsspec URL, or a list of them; a `DataConfig` (mixtures); a Hugging Face
            `Dataset` or `IterableDataset`.
        settings: all other `LoaderOptions`, and fields of `DataConfig`, such as `batch_tokens` (of the global batch;
            "auto", as where no size is given: as many as `micro_batches` packs of every rank hold in whole documents).

    Attributes:
        options, config: as resolved.
        rank, world_size: among those that share a global batch; ranks of a sequence group have the same.
        micro_batches_are_given: by the constructor or `set_micro_batches`.
        model_is_assumed: packs are balanced for `ASSUMED_MODEL`, because no model was given.
        start_messages: what was logged at the start.
        epoch: of the current iteration, else of the next one.
        has_ended: all `epochs` were given.
        ledger_lines: what became of all documents and tokens, after the last step that was given.

    Raises a `ConfigError` for settings that cannot work, with the reason. Collective where ranks read together.
    """

    @refusing_unknown(
        "PackedLoader", (*LoaderOptions.__dataclass_fields__, *DataConfig.__struct_fields__), unknown_setting
    )
    def __init__(self, data: Any, *, max_tokens: int, **settings: Any) -> None:
        own = [field.name for field in fields(LoaderOptions) if field.init]
        named = {name: settings.pop(name) for name in own if name in settings}
        self.options = options = LoaderOptions(max_tokens=max_tokens, **named)
        self._place = place = find_place(options)
        self.micro_batches_are_given = options.micro_batches is not None
        config, datasets = data_config(data, settings, options, place.world_size)
        options.check_data(config, place)
        model, tokenizer = options.model, options.tokenizer
        vocab_size = known_vocabulary(model)
        require_choice(config, tokenizer, vocab_size)
        with tokenizer_settings(config, tokenizer) as (resolved, own_tokenizer):
            read: dict[str, Any] = {"peers": place.peers, "datasets": datasets, "vocab_size": vocab_size}
            if options.fills_packs:
                read["fill"] = lambda: WholePacks((options.micro_batches or 1) * place.world_size, max_tokens).take
            self._loader = GlobalBatchLoader(resolved, own_tokenizer, **read)
            opened = self._loader.tokenizer
            if isinstance(opened, FileTokenizer) and not hasattr(tokenizer, "save_pretrained") and opened.has_settings:
                # Imports transformers, which takes seconds.
                from evenload.runtime.model.export_files import require_same_token_ids

                require_same_token_ids(opened)
            ends = getattr(getattr(model, "generation_config", model), "eos_token_id", None)
            unstopped = stop_warnings(resolved, opened, ends)
        self._planner, replicas = _planner_of(model, options, place), place.replicas
        self._maker = StepMaker(self._loader, self._planner, replicas=lambda _: replicas, max_pack_tokens=max_tokens)
        self.config = self._loader.config
        self.rank, self.world_size = place.rank, place.world_size
        self.model_is_assumed, self._model = model is None, model
        self.ledger_lines: tuple[str, ...] = ()
        self._lengths: dict[int, int] = {}
        self._ahead: Prefetcher[PackedStep] | None = None
        self._has_logged = False
        self._go_on(self._loader.state(), DelayState(), 0)
        self._tokenizer_fact = run_tokenizer_text(config, tokenizer, opened, vocab_size)
        self.start_messages: list[str] = self._start_lines()
        if place.is_first:
            self.start_messages += [f"source        {line}" for line in self._loader.source_lines()]
            _log.info("PackedLoader\n  %s", "\n  ".join(self.start_messages))
            for line in (*unstopped, *self._loader.label_warnings()):
                _log.warning("%s", line)

    def balance_for(self, model: Any) -> None:
        """Balance packs for this model, given as to the constructor. Collective. Raises a `ConfigError` for what is
        none or needs a tokeniser, and after the first step."""
        require_choice(self.config, self.options.tokenizer, known_vocabulary(model))
        if self._ahead is not None:
            raise ConfigError("balance_for(model) after steps were made for another one; call it before the first step")
        self._plan_anew(model)

    def set_micro_batches(self, count: int) -> None:
        """Make exactly so many packs for every rank and step, as `micro_batches` of the constructor does. Raises a
        `ConfigError` where that was given, and after the first step."""
        if self.micro_batches_are_given or self._ahead is not None:
            why = f"micro_batches={self.options.micro_batches}, or after its first step"
            raise ConfigError(f"set_micro_batches({count}) of a loader with {why}; call it once, before that")
        self.options.micro_batches, self.micro_batches_are_given = count, True
        if self.options.fills_packs:
            tokens = count * self.world_size * self.options.max_tokens
            self.config = msgspec.structs.replace(self.config, batch_tokens=tokens)
        self.options.check_data(self.config, self._place)
        self._plan_anew(self._model, self.model_is_assumed)

    def _start_lines(self) -> list[str]:
        """Describe what the loader does and does not do, a line a subject; first what packs are balanced for."""
        config, options, place, costs = self.config, self.options, self._place, self._planner.planner.costs
        model = costs.model.name
        if self.model_is_assumed:
            model += ", which is assumed: give the model you train as PackedLoader(model=...), since the share of "
            model += "attention in a document's time depends on it"
        planning, strategy = options.planning(), strategy_named(options.strategy)
        is_engines_auto = options.strategy == BEST
        whose = "this engine's price" if options.engine else "the price of a plain loop"
        auto = ENGINES_AUTO.replace("this engine's price", whose)
        delays = strategy.delays(planning) and not is_engines_auto
        documents = config.batch_documents
        batch = counted(documents, "document") if documents else f"up to {config.batch_tokens} tokens"
        batch += ", as many as fill the packs" * options.fills_packs
        packs = "as many packs as needed" + (", equally many on all ranks" if options.equal_micro_batches else "")
        if options.micro_batches is not None:
            packs = f"exactly {counted(options.micro_batches, 'pack')} a rank"
        packs += f" of at most {options.max_tokens} tokens"
        if options.fixed_shapes:
            packs += f", each padded to {options.max_tokens} tokens"
        elif options.row_multiple > 1:
            packs += f", each padded to a multiple of {options.row_multiple} tokens"
        if options.sequence_ranks > 1:
            packs += f", each shared by {counted(options.sequence_ranks, 'rank')}"
        order = "as in the files"
        if config.shuffle_window > 1:
            order = f"shuffled within {counted(config.shuffle_window, 'document')}, seed {config.seed}"
        # Other strategies that defer documents do not read the window.
        if delays and not strategy.delays(msgspec.structs.replace(planning, window=1)):
            order += f", packed over {counted(planning.window, 'batch')}"
        reading = "alone" if place.reads_alone else f"together with {place.peers.size - 1} others"
        workers = counted(config.workers, "process") if config.workers else "a thread"
        not_done = [
            "no document attends to another, and none is cut",
            "no attention mask is made, no special tokens but the end of a document, tensors stay on the CPU",
        ]
        if delays and not options.evaluation and config.epochs is None:
            not_done.append("documents that wait when you stop are not trained (set epochs)")
        measured = f"{costs.coefficients.source} ({costs.coefficients.device})"
        lines = {
            "balance": f"packs of equal time for {model}; times from {measured}",
            "engine": f"{options.engine}: {options.profile.title}" if options.engine else "",
            "strategy": f"{options.strategy}: {auto if is_engines_auto else strategy.description}",
            "global batch": f"{batch}, rank {place.rank} of {place.world_size}, {packs}",
            "tokenizer": self._tokenizer_fact,
            "boundaries": f"format {options.format}: positions and cumulative lengths of documents, no attention_mask",
            "order": order,
            "reading": f"{reading}, {workers}, {counted(config.prefetch_steps, 'step')} ahead; longer documents: "
            f"{config.overlong}",
            "not done": "; ".join(not_done),
            "evaluation": "every document once an iteration, none dropped, the last batch short" * options.evaluation,
        }
        return [f"{name:<14}{text}" for name, text in lines.items() if text]

    def _plan_anew(self, model: Any, is_assumed: bool = False) -> None:
        self._maker.planner = self._planner = _planner_of(model, self.options, self._place)
        self._model, self.model_is_assumed = model, is_assumed
        self._lengths.clear()
        lines = self._start_lines()
        changed = [line for line in lines if line not in self.start_messages]
        self.start_messages[: len(lines)] = lines
        if self._place.is_first and changed:
            _log.info("PackedLoader\n  %s", "\n  ".join(changed))

    def __len__(self) -> int:
        """Return how many micro-batches the whole epoch has on this rank, counted where it has no more than
        `COUNTED_TOKENS` tokens, which this rank reads once for it, without the others; of more it is estimated from
        them. Raises a `TypeError` where epochs have no end, or the data does not tell how many records it has."""
        epoch, options = min(self.epoch, (self.config.epochs or self.epoch + 1) - 1), self.options
        if self.config.mixture_end == "repeat":
            raise TypeError('a PackedLoader with mixture_end "repeat" has no length; count steps')
        if epoch not in self._lengths:
            batches, share = self._loader.first_batches(epoch, COUNTED_TOKENS)
            if not share:
                raise TypeError("this PackedLoader has no length: its data does not tell how many records it has")
            counts = [options.micro_batches or 0]
            if options.micro_batches is None:
                chosen = enumerate(batches[:: -(-len(batches) // _PLANNED_STEPS)])
                plans = [self._planner.planner.plan(step, one, options.strategy) for step, one in chosen]
                counts = [len(project(plan, options.profile, options.shape)[self.rank]) for plan in plans]
            self._lengths[epoch] = round(math.ceil(len(batches) / share) * float(np.mean(counts)))
        return self._lengths[epoch]

    def __bool__(self) -> bool:
        return True

    @property
    def is_at_epoch_end(self) -> bool:
        """Return whether no step of this epoch follows the one in the loop's body; waits for the next one."""
        self._peeked = self._peeked or self._next_step()
        return self._peeked is None or self._peeked.planned.epoch != self.epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the micro-batches of an epoch, or of the rest of one that was left."""
        while (step := self._current_step()) is not None:
            while self._given < len(step):
                self._given += 1
                yield step.batches[self._given - 1]

    def steps(self) -> Iterator[PackedStep]:
        """Iterate over the steps of an epoch, or its rest. In the loop's body `state_dict` is that after the step."""
        while (step := self._current_step()) is not None:
            given, self._given = self._given, len(step)
            yield replace(step, packs=step.packs[given:], batches=step.batches[given:]) if given else step

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a `ConfigError` for no such epoch, and inside of another one."""
        if epoch == self.epoch:
            return
        if epoch < 0 or (self.config.epochs is not None and epoch >= self.config.epochs):
            raise ConfigError(f"set_epoch({epoch}): epochs is {self.config.epochs}, the first one is 0")
        if self.config.mixture_end == "repeat":
            raise ConfigError(f'set_epoch({epoch}) with mixture_end "repeat", which has no epochs; leave it out')
        loader, planner = self._after
        untouched = self._open is None and not any(part.documents for part in loader.parts)
        is_inside = self._open is not None and self._open.planned.epoch == self.epoch
        if not (untouched or (self._peeked is not None and not is_inside) or self.has_ended):
            where = f"set_epoch({epoch}) in the middle of epoch {self.epoch}"
            raise ConfigError(f"{where} would leave out the rest of it; iterate to the end, or make a new loader")
        self._go_on(state_at_epoch(loader, epoch), planner, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is, as plain values, between two steps the same on all ranks and for any number."""
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
        """Go on exactly where a state was made; reads nothing yet. Raises a `ConfigError` for what is no state of this
        data, or one inside a step of another number of ranks."""
        missing = {"version", "epoch", "loader", "planner", "given", "world_size", "plan_digest"} - set(state_dict)
        if missing or state_dict["version"] != STATE_VERSION:
            version = f"version {state_dict.get('version')}, this one reads {STATE_VERSION}"
            raise ConfigError(f"not a state of PackedLoader ({version}; missing: {sorted(missing)})")
        given = int(state_dict["given"])
        if given and state_dict["world_size"] != self.world_size:
            place = f"after {counted(given, 'micro-batch')}, with {counted(state_dict['world_size'], 'rank')}"
            fix = f"now there are {self.world_size}; save between two steps to go on with another number"
            raise ConfigError(f"the state was saved inside a step, {place}; {fix}")
        planner = msgspec.json.decode(state_dict["planner"], type=DelayState)
        self._go_on(decode_state(state_dict["loader"].encode()), planner, int(state_dict["epoch"]))
        self._mid_step = _MidStep(given, state_dict["plan_digest"] if given else "")

    def close(self) -> None:
        """End threads and worker processes; iterating again goes on. Collective, after the same step on all ranks."""
        # Steps made early are lost with the thread, so they are read again from the state.
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
        self._open: PackedStep | None = None
        self._peeked: PackedStep | None = None
        self._mid_step, self._given = _MidStep(), 0
        self.epoch, self.has_ended = epoch, False

    def _current_step(self) -> PackedStep | None:
        """Return the step that has micro-batches left, or the next one of this epoch; None at the epoch's end."""
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
            _log.info(_first_step_line(step, self.options))
            if step.num_label_tokens and (untaught := warn_without_loss(planned.plan.documents, planned.origin)):
                _log.warning("%s", untaught)
        self._has_logged = True
        if not step.num_label_tokens:
            _log.warning("%s, so its gradient is 0; check the labels", without_loss(step.plan))
        return step

    def _next_step(self) -> PackedStep | None:
        if self.has_ended:
            return None
        if self._ahead is None:
            maker, options, place = self._maker, self.options, self._place
            if options.profile.constant_counts and options.micro_batches is None and not options.evaluation:
                options.profile.refuse("counts", "micro_batches is left out")
            if self.model_is_assumed and not self._has_logged and self._place.is_first:
                _log.warning("%s", self.start_messages[0])

            def make() -> PackedStep | None:  # without `self`, so that dropping it ends the thread
                planned = maker.next()
                return None if planned is None else _pack_step(planned, options, place)

            self._ahead = Prefetcher(make, self.config.prefetch_steps, "evenload-prepare")
        try:
            return self._ahead.next()
        except BaseException:
            # The thread has ended with its error; the next call starts another one at the same step.
            mid = self._mid_step
            self._go_on(*self._after, self.epoch)
            self._mid_step = mid
            raise

    def _skipped(self, step: PackedStep) -> int:
        """Return how many micro-batches of the step were given before its state was saved."""
        mid, self._mid_step = self._mid_step, _MidStep()
        if mid.given and (mid.plan_digest != step.plan.digest or mid.given > len(step)):
            raise DataError(
                f"step {step.plan.step} was planned anew as {step.plan.digest}, and saved as {mid.plan_digest}; to go "
                "on inside a step, strategy, max_tokens, micro_batches, model and sources must be the same"
            )
        return mid.given


COUNTED_TOKENS = 1 << 22
"""Most tokens that `len(loader)` reads: seconds of tokenising."""
_PLANNED_STEPS = 4  # of the steps that it reads, for the number of their packs


def without_loss(plan: StepPlan) -> str:
    """Describe a step without a token with a loss."""
    documents = [document.doc_id for document in plan.documents[:5]]
    return f"step {plan.step} has no token with a loss (documents {documents} ...)"


def _planner_of(model: Any, options: LoaderOptions, place: LoaderPlace) -> RunPlanner:
    planning, ranks = options.planning(), {"dp": place.world_size, "cp": options.sequence_ranks}
    planner = make_planner(model, options.costs, planning, **ranks, engine=options.profile, shape=options.shape)
    may_delay = strategy_named(options.strategy).delays(planning) and not options.evaluation
    return RunPlanner(planner, options.strategy, may_delay, may_cut=False)


def _pack_step(step: PlannedStep, options: LoaderOptions, place: LoaderPlace) -> PackedStep:
    """Make this rank's micro-batches; a `ConfigError` on every rank where one needs more than `micro_batches`, or where
    documents are trees, which no format of batches describes."""
    if tree := next((one for one in step.plan.documents if one.segments), None):
        raise ConfigError(
            f"document {tree.doc_id} of step {step.plan.step}, {step.origin(tree.doc_id)}, is a tree of sequences of "
            f"{tree.num_path_tokens} tokens that share prefixes, which packed batches do not hold; give every sequence "
            "a record of its own, without data.group_by, train with evenload.train, or use TreePacker in your loop"
        )
    micro_batches = project(step.plan, options.profile, options.shape)[place.rank]
    planned = step.plan.pack_plans[place.rank].forward
    packs = tuple(
        pad_pack(collate_pack(planned[one.pack], step.tokens), one.padded_tokens)
        if one.doc_ids
        else zero_weight_pack(one.padded_tokens)
        for one in micro_batches
    )
    batches = tuple(pin_batch(format_pack(pack, options.format, step.plan.num_label_tokens)) for pack in packs)
    return PackedStep(planned=step, packs=packs, batches=batches)


def zero_weight_pack(num_tokens: int = 1) -> PackBatch:
    """Return one document of padding tokens without a loss: it runs like any other, and its gradient is 0."""
    return PackBatch(
        doc_ids=np.array([-1], np.int64),
        starts=np.zeros(1, np.int64),
        stops=np.array([num_tokens], np.int64),
        token_ids=np.full(num_tokens, PADDING_TOKEN, np.int64),
        targets=np.full(num_tokens, IGNORE_INDEX, np.int64),
        positions=np.arange(num_tokens, dtype=np.int64),
        num_padding_tokens=num_tokens,
    )


def pad_pack(pack: PackBatch, num_tokens: int) -> PackBatch:
    """Return the pack with so many tokens, by a document of padding at its end that no other document sees."""
    missing = num_tokens - pack.num_tokens
    if not missing:
        return pack
    padding = zero_weight_pack(missing)
    columns = ("doc_ids", "starts", "stops", "token_ids", "targets", "positions")
    joined: dict[str, Any] = {name: np.concatenate([getattr(pack, name), getattr(padding, name)]) for name in columns}
    return PackBatch(**joined, num_padding_tokens=pack.num_padding_tokens + missing)


def _first_step_line(step: PackedStep, options: LoaderOptions) -> str:
    """Describe how well the first step's packs are filled and balanced."""
    plan = step.plan
    packs = [pack for packs in plan.pack_plans for pack in packs.forward]
    tokens = sum(pack.num_tokens for pack in packs)
    computed = sum(options.computed_tokens(pack.num_tokens + pack.num_padding_tokens) for pack in packs)
    times = [sum(sum(row) for row in (*times.forward_s, *times.backward_s)) for times in plan.times]
    slowest = max(times) * len(times) / sum(times) if any(times) else 1.0
    return (
        f"first step    {counted(len(plan.documents), 'document')}, {tokens} tokens in {counted(len(packs), 'pack')} "
        f"({tokens / (len(packs) * options.max_tokens):.0%} of max_tokens), {tokens / computed:.1%} not padding, "
        f"slowest rank {slowest:.3f} of the mean by prediction"
    )
