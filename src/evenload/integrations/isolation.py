"""`check_isolation`: do documents of a packed row get anything of each other? For anybody's model and batch.

    print(check_isolation(model, batch))

    gradients   of a document's loss with respect to the input embeddings of the others: 0, but for 1e-5 that kernels
                leave which subtract sums over rows (mamba_ssm's with `seq_idx`: 2.9e-6 in float32)
    logits      of a document while the tokens of another one change: equal but for rounding
    alone       logits and gradients of weights with every document in a row of its own: equal but for rounding

All three are looked at again with decays at which states last for ever, because gates near 0 hide what they forget.
Price: about three passes a document, twice where there are such gates, and gradients of all weights held twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenload.errors import ConfigError, UnsupportedModelError

Run = Callable[[Any, dict[str, Any]], Tensor]
"""`run(model, batch)`: logits [B, T, vocabulary] of a batch, by however many calls of the model, rows in order."""
_EDGES = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q", "cu_seq_q")
_POSITIONS = ("position_ids", "positions")
_NOT_OF_LOGITS = {"labels", "shift_labels", "num_items_in_batch"}
_DECAYS = {"A_log", "time_decay", "recurrent_param", "lambda_param"}
"""Weights p of decays exp(-f(p) ...) with f = exp or softplus (Mamba, DeltaNet, KDA; RWKV; RG-LRU)."""
_FOR_EVER = -10.0  # f is 5e-5 there
# Rounding: of what batches of experts of other sizes make of the same row, and of the same document in another row.
_ROUNDINGS, _SHAKEN, _LEAST = 16.0, 8.0, 1e-5
_WITHOUT_MEANING = 0.1
_NO_LABEL = -100
_SHOWN = 12
_FIX = "give every document a row of its own, or train with 'evenload train'"


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Describes what document `target` gets of document `source`.

    Args:
        share: of the target's gradient with respect to input embeddings; where that is 0, of its logits.
        where: the first module in which it shows, with its class; "" = in none that could be read.
        is_hidden: the model's own gates forget it; it shows where states last.
    """

    source: int
    target: int
    share: float
    where: str
    is_hidden: bool


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Describes what is not as with every document in a row of its own.

    Args:
        what: a document's logits, or a weight's gradient.
        size, allowed: relative; allowed is what roundings of the embeddings do, times eight.
        is_hidden: as of a `Leak`.
    """

    what: str
    size: float
    allowed: float
    is_hidden: bool


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """Holds what `check_isolation` found; true where documents are kept apart and trained as alone; text says it.

    Args:
        documents: that were looked at, by their place in the batch.
        notes: what could not be looked at.
        first_labels: documents whose first token is a label, so that the document before predicts it.
        fix: what works instead.
    """

    num_documents: int
    documents: tuple[int, ...]
    leaks: tuple[Leak, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    first_labels: int = 0
    fix: str = _FIX

    def __bool__(self) -> bool:
        return not (self.leaks or self.differences or self.first_labels)

    def raise_if_leaking(self) -> None:
        """Raise an `UnsupportedModelError` with the first line where anything was found."""
        if not self:
            raise UnsupportedModelError(self.summary())

    def summary(self) -> str:
        """Return the first line of the text, which answers the question."""
        count = len(self.documents)
        if self.leaks:
            getting, largest = {leak.target for leak in self.leaks}, max(leak.share for leak in self.leaks)
            where = next((f", first in {leak.where}" for leak in self.leaks if leak.where), "")
            hidden = ", where states last: these gates hide it" * all(leak.is_hidden for leak in self.leaks)
            what = f"{len(getting)} of {count} documents get something of others{where}: up to {largest:.2%} of their"
            return f"Leaks: {what} gradient{hidden}; {self.fix}"
        if self.differences:
            worst = max(self.differences, key=lambda one: one.size / one.allowed)
            return (
                f"Not as alone: {count} documents get nothing of each other, but are not trained as in rows of their "
                f"own: {worst.what} is off by {worst.size:.2%} (rounding: {worst.allowed:.1e}); positions, "
                f"or states and their gradients at cuts, are wrong; {self.fix}"
            )
        if self.first_labels:
            what = f"the first tokens of {self.first_labels} documents are labels"
            return f"Not as alone: {what}, which the documents before them predict; set these labels to -100"
        rest = "more was not seen" if self.notes else "each is trained as in a row of its own"
        return f"Isolated: none of {count} documents gets anything of another, and {rest}"

    def __str__(self) -> str:
        leaks = [f"document {one.source} -> {one.target}: {one.share:.2%}" for one in self.leaks]
        lines = leaks or [f"{one.what}: off by {one.size:.1e}, allowed {one.allowed:.1e}" for one in self.differences]
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        return "\n  ".join([self.summary(), *lines[:_SHOWN], *more, *self.notes])


def check_isolation(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    lengths: Sequence[int] | None = None,
    run: Run | None = None,
    run_alone: Run | None = None,
    max_documents: int = 8,
    alone: bool = True,
) -> Isolation:
    """Find out whether documents of a batch get anything of each other; a `ConfigError` for one that cannot show it.

    The model is run in training mode without dropout; its weights, gradients, buffers, mode, and torch's random state
    stay. Of `labels` only those of first tokens are looked at; the loss is that of every next token.

    Args:
        batch: as the trainer gives it: `input_ids` [1, T] of several documents, or [B, T] with a document a row and
            `attention_mask`.
        lengths: of the documents of [1, T]; default: by cumulative lengths, else `seq_idx`, else positions that start
            again, where tokens at position 0 at the end of the row are padding.
        run: how the model is run, `run(model, batch)` -> logits [B, T, vocabulary], also of one document; default:
            `model(**batch).logits`. It gets no labels.
        run_alone: on a document in a row of its own; default: as `run`. Where that cuts documents into slices, give one
            that does not: what is wrong at cuts shows in the comparison.
        max_documents: most that are looked at, evenly chosen; all others stay in the batch.
        alone: compare with documents in rows of their own, which holds gradients of all weights twice.
    """
    _require_batch(model, batch)
    inputs = {key: value for key, value in batch.items() if key not in _NOT_OF_LOGITS}
    owner = _owner_of(inputs, lengths)
    num_documents = int(owner.max()) + 1
    if num_documents < 2:
        raise ConfigError("the batch holds one document, so none can reach another; give one of several, or lengths=")
    chosen = torch.linspace(0, num_documents - 1, min(num_documents, max(2, max_documents))).round().int().tolist()
    of_model = run or _logits_of
    probe = _Probe(model, inputs, owner, of_model, (run_alone or of_model) if alone else None, tuple(chosen))
    fix = _FIX
    with _untouched(model), torch.enable_grad():
        leaks, differences, notes = probe.look()
        with _remembering(model) as has_decays:
            if has_decays:
                more_leaks, more_differences, more_notes = probe.look()
                known, names = {(one.source, one.target) for one in leaks}, {one.what for one in differences}
                more = (one for one in more_leaks if (one.source, one.target) not in known)
                leaks += [replace(one, is_hidden=True) for one in more]
                differences += [replace(one, is_hidden=True) for one in more_differences if one.what not in names]
                notes += [f"where states last: {note}" for note in more_notes]
        if leaks and run is None and (other := _without_cache(model, inputs)):
            without, what = other
            if not _Probe(model, without, owner, of_model, None, tuple(chosen)).look()[0]:
                fix = f"{what}: then this model keeps documents apart"
    notes += _contradictions(inputs, lengths, owner)
    found = {"leaks": tuple(leaks), "differences": tuple(differences), "notes": tuple(notes), "fix": fix}
    first = _num_first_labels(batch.get("labels"), owner)
    return Isolation(num_documents=num_documents, documents=tuple(chosen), first_labels=first, **found)


def _require_batch(model: Any, batch: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ConfigError(
            "the batch must be a dict, as model(**batch) takes it, with a tensor input_ids [rows, tokens]"
        )
    device = next((one.device for one in model.parameters()), ids.device)
    if ids.device != device:
        raise ConfigError(f"input_ids are on {ids.device} and the model is on {device}; move one to the other")


def _without_cache(model: nn.Module, batch: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return the batch as transformers splits it at positions that start again, which it does without a cache and
    without a mask of one row, and what was changed; None = nothing could be."""
    changes = []
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False) and batch.get("use_cache") is not False:
        batch, changes = batch | {"use_cache": False}, ["give use_cache=False"]
    if batch.get("attention_mask") is not None and len(batch["input_ids"]) == 1:
        batch = {key: value for key, value in batch.items() if key != "attention_mask"}
        changes.append("leave out attention_mask")
    return (batch, " and ".join(changes)) if changes else None


def _num_first_labels(labels: Any, owner: Tensor) -> int:
    """Count documents behind others in a row whose first token is a label."""
    if not isinstance(labels, Tensor) or labels.shape != owner.shape:
        return 0
    begins = (owner[:, 1:] != owner[:, :-1]) & (owner[:, 1:] >= 0) & (owner[:, :-1] >= 0)
    return int((begins & (labels[:, 1:] != _NO_LABEL)).sum())


def _first_of(batch: dict[str, Any], keys: Iterable[str]) -> Any:
    return next((batch[key] for key in keys if batch.get(key) is not None), None)


def _contradictions(batch: dict[str, Any], lengths: Sequence[int] | None, owner: Tensor) -> list[str]:
    """Say where positions start documents elsewhere than what was taken."""
    positions = _first_of(batch, _POSITIONS)
    taken = lengths is not None or _first_of(batch, (*_EDGES, "seq_idx")) is not None
    if not taken or positions is None or len(owner) > 1 or positions.shape != owner.shape:
        return []
    starts = (positions[0].diff() != 1) != (owner[0].diff() != 0)
    where = starts.nonzero()[:1].flatten().tolist()
    return [f"positions and the given boundaries of documents differ first at token {at + 1}" for at in where]


def _logits_of(model: Any, batch: dict[str, Any]) -> Tensor:
    output = model(**batch)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        kind = type(output).__name__
        raise ConfigError(
            f"model(**batch) gave a {kind} without logits; give run=, a function (model, batch) -> logits"
        )
    return logits


def _owner_of(batch: dict[str, Any], lengths: Sequence[int] | None) -> Tensor:
    """Return whose token each is, int64[B, T], -1 = padding."""
    ids = batch["input_ids"]
    rows, tokens = ids.shape
    positions = _first_of(batch, _POSITIONS)
    if rows > 1:
        mask = batch.get("attention_mask")
        is_own = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        is_packed = False
        if positions is not None and positions.shape == ids.shape == is_own.shape:
            is_packed = bool(((positions.diff() < 0) & is_own[:, 1:]).any())
        if lengths is not None or is_packed or is_own.shape != ids.shape:
            raise ConfigError(
                f"the batch has {rows} rows of several documents; give one row of packed documents, or a document a row"
            )
        return torch.where(is_own, torch.arange(rows, device=ids.device)[:, None], -1)
    edges = _first_of(batch, _EDGES)
    starts = torch.zeros(tokens, dtype=torch.bool, device=ids.device)
    if lengths is not None:
        if any(not isinstance(one, int) or one < 1 for one in lengths):
            raise ConfigError(f"lengths are {list(lengths)}; give the tokens of every document, at least 1 each")
        edges = torch.tensor([0, *lengths], device=ids.device).cumsum(0)
    if edges is not None:
        if int(edges[-1]) != tokens:
            raise ConfigError(
                f"documents have {int(edges[-1])} tokens in all, the row {tokens}; lengths must add up to it"
            )
        starts[edges[:-1].long()] = True
    elif (index := batch.get("seq_idx")) is not None:
        starts[1:] = index.reshape(-1, tokens)[0].diff() != 0
    elif positions is not None:
        starts[1:] = positions.reshape(-1, tokens)[0].diff() != 1
    else:
        raise ConfigError("nothing says where documents begin; give lengths= of the documents of the row")
    starts[0] = True
    owner = starts.cumsum(0) - 1
    if edges is None and batch.get("seq_idx") is None and positions is not None:
        at_zero = (positions.reshape(-1, tokens)[0] == 0).int()
        num_zeros = int(at_zero.flip(0).cumprod(0).sum())
        if 1 < num_zeros < tokens:
            owner[tokens - num_zeros :] = -1
    return owner[None]


class _Seen(NamedTuple):
    """What one run shows: logits [B * T, vocabulary], zeros that were added to embeddings, gradients of weights."""

    logits: Tensor
    leaves: list[Tensor]
    gradients: dict[str, Tensor]


class _Probe:
    """Runs a model on a batch, parts of it, and with other tokens."""

    def __init__(
        self,
        model: nn.Module,
        batch: dict[str, Any],
        owner: Tensor,
        run: Run,
        run_alone: Run | None,
        chosen: tuple[int, ...],
    ) -> None:
        self.model, self.batch, self.owner, self.chosen = model, batch, owner, chosen
        self.run, self.run_alone = run, run_alone
        named: Any = model
        own = named.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        found = own or next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)
        if not isinstance(found, nn.Module):
            raise ConfigError(f"{type(model).__name__} has no input embeddings that could be found")
        self.embedding = found
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.unit = max(torch.finfo(torch.float32).eps, torch.finfo(next(model.parameters()).dtype).eps)

    def look(self) -> tuple[list[Leak], list[Difference], list[str]]:
        seen = self._see(self.batch, self.owner, self.chosen, of_weights=self.run_alone is not None)
        shares = {target: self._shares(seen, target) for target in self.chosen}
        noise = self._moved(seen.logits, self._see(self.batch, self.owner).logits)
        for source in self.chosen:
            moved = self._moved(seen.logits, self._see(self._changed(self.owner == source), self.owner).logits)
            for target in self.chosen:
                if target != source and moved[target] > max(_ROUNDINGS * self.unit, 4 * noise[target]):
                    shares[target][source] = shares[target].get(source) or moved[target]
        pairs = [(source, target, share) for target, of in shares.items() for source, share in of.items()]
        where = self._first_module(pairs[0][1]) if pairs else ""
        leaks = [Leak(source=a, target=b, share=share, where=where, is_hidden=False) for a, b, share in pairs]
        if self.run_alone is None:
            return leaks, [], ["documents were not compared with rows of their own"]
        differences = list(self._differences(seen, self.run_alone))
        if (blind := max(one.allowed for one in differences)) > _WITHOUT_MEANING:
            why = f"roundings make {blind:.2g}, by dropout or a low precision; set dropout to 0, or check in float32"
            return leaks, [], [f"documents were not compared with rows of their own: {why}"]
        return leaks, [one for one in differences if not one.size <= one.allowed], []

    def _see(
        self,
        batch: dict[str, Any],
        owner: Tensor,
        documents: Sequence[int] = (),
        run: Run | None = None,
        *,
        of_weights: bool = False,
        shake: float = 0.0,
    ) -> _Seen:
        """Run; with gradients of weights of the sum of the documents' losses."""
        leaves: list[Tensor] = []

        def add_zeros(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            leaves.append(torch.zeros_like(output, requires_grad=True))
            shaken = output * (1 + shake * torch.randn_like(output)) if shake else output
            return shaken + leaves[-1]

        torch.manual_seed(int(shake > 0))
        handle = self.embedding.register_forward_hook(add_zeros)
        try:
            with torch.enable_grad() if documents else torch.no_grad():
                logits = (run or self.run)(self.model, batch).flatten(0, -2)
        finally:
            handle.remove()
        rows = sum(leaf.flatten(0, -2).shape[0] for leaf in leaves)
        if not logits.shape[0] == rows == owner.numel():
            what = f"{logits.shape[0]} rows of logits, {rows} of {type(self.embedding).__name__}"
            raise ConfigError(f"a batch of {owner.numel()} tokens gave {what}; each must have one of both")
        gradients: dict[str, Tensor] = {}
        if of_weights and self.weights:
            loss = torch.stack([_loss(logits, batch, owner, document) for document in documents]).sum()
            found = torch.autograd.grad(loss, list(self.weights.values()), retain_graph=True, materialize_grads=True)
            gradients = dict(zip(self.weights, found, strict=True))
        return _Seen(logits, leaves, gradients)

    def _shares(self, seen: _Seen, target: int) -> dict[int, float]:
        """Return the share of a document's gradient that lies in the embeddings of each other one, if any does."""
        loss = _loss(seen.logits, self.batch, self.owner, target)
        parts = torch.autograd.grad(loss, seen.leaves, retain_graph=True, materialize_grads=True)
        rows = torch.cat([part.flatten(0, -2) for part in parts]).double().square().sum(-1)
        total = rows.sum()
        if not (total > 0 and total.isfinite()):
            raise ConfigError(f"the loss of document {target} has gradient {float(total):g} with respect to its tokens")
        of = torch.zeros(int(self.owner.max()) + 2, dtype=rows.dtype, device=rows.device)
        of.index_add_(0, self.owner.flatten() + 1, rows)  # padding first
        shares = (of[1:] / total).sqrt().tolist()
        return {source: share for source, share in enumerate(shares) if share > _LEAST and source != target}

    def _moved(self, before: Tensor, after: Tensor) -> dict[int, float]:
        """Return by how much logits of each document differ, relative."""
        rows = {one: (self.owner == one).flatten() for one in self.chosen}
        return {one: _error(after[own].detach(), before[own].detach()) for one, own in rows.items()}

    def _changed(self, which: Tensor) -> dict[str, Any]:
        """Return the batch with other tokens: the next one among those of the batch, which no model reads otherwise."""
        ids = self.batch["input_ids"]
        known = ids.unique()
        known = known if len(known) > 1 else torch.cat([known, (known == 0).to(known)])
        known, places = known.sort()[0], torch.searchsorted(known.sort()[0], ids)
        return self.batch | {"input_ids": torch.where(which, known[(places + 1) % len(known)], ids)}

    def _differences(self, seen: _Seen, run_alone: Run) -> Iterator[Difference]:
        """Yield how far logits and gradients are from those of documents in rows of their own."""
        shaken = self._see(self.batch, self.owner, self.chosen, of_weights=True, shake=self.unit)
        noise = self._moved(seen.logits, shaken.logits)
        scale = 1e-3 * max((float(one.norm()) for one in seen.gradients.values()), default=0.0)
        allowed = {name: _error(one, seen.gradients[name], scale) for name, one in shaken.gradients.items()}
        rest = {name: one.clone() for name, one in seen.gradients.items()}
        for document in self.chosen:
            alone, length = _alone(self.batch, self.owner, document)
            own = self._see(alone, self.owner.new_zeros(1, length), (0,), run_alone, of_weights=True)
            for name, gradient in own.gradients.items():
                rest[name] -= gradient
            size = _error(own.logits.detach(), seen.logits[(self.owner == document).flatten()].detach())
            limit = max(_LEAST, _SHAKEN * noise[document])
            yield Difference(what=f"logits of document {document}", size=size, allowed=limit, is_hidden=False)
        # Some weights' gradients are sums that cancel: their rounding is that of the worst.
        limit = max(_LEAST, _SHAKEN * max(allowed.values(), default=0.0))
        for name, left in rest.items():
            size = float(left.norm()) / max(float(seen.gradients[name].norm()), scale, 1e-30)
            yield Difference(what=f"gradient of {name}", size=size, allowed=limit, is_hidden=False)

    def _first_module(self, target: int) -> str:
        """Return the first module whose rows of a document depend on others while those that it is given do not."""
        mine = (self.owner == target).flatten()
        calls: list[list[tuple[str, list[Tensor], list[Tensor]]]] = []

        def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = [_sums(one, self.owner.shape, mine) for one in (*args, *kwargs.values())]
            made = [_sums(one, self.owner.shape, mine) for one in (output if isinstance(output, tuple) else (output,))]
            title = f"{name or 'the model'} ({type(module).__name__})"
            calls[-1].append((title, [x for x in given if x is not None], [x for x in made if x is not None]))

        named = self.model.named_modules()
        handles = [one.register_forward_hook(partial(note, name), with_kwargs=True) for name, one in named]
        try:
            for batch in (self.batch, self._changed((self.owner != target) & (self.owner >= 0))):
                calls.append([])
                self._see(batch, self.owner)
        finally:
            for handle in handles:
                handle.remove()
        limit = _ROUNDINGS * self.unit
        for (title, given, made), (_, other_given, other_made) in zip(*calls, strict=False):
            same = all(_error(a, b) <= limit for a, b in zip(other_given, given, strict=True))
            if same and any(_error(a, b) > limit for a, b in zip(other_made, made, strict=True)):
                return title
        return ""


def _loss(logits: Tensor, batch: dict[str, Any], owner: Tensor, document: int) -> Tensor:
    """Return the cross-entropy of a document's rows: each predicts the next token, the last one the first."""
    rows = (owner == document).flatten()
    wide = logits[rows].to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, batch["input_ids"].flatten()[rows].roll(-1).long(), reduction="sum")


def _error(found: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    difference, size = float((found.double() - expected.double()).norm()), float(expected.double().norm())
    return difference / max(size, scale, 1e-30)


def _sums(value: Any, shape: torch.Size, mine: Tensor) -> Tensor | None:
    """Return a number for each of a document's rows of a tensor, float64[n]; None for one without a row a token."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return None
    if value.ndim > 2 and value.shape[:2] != shape and value.shape[::2] == shape:
        value = value.transpose(1, 2)  # [B, channels, T]
    rows = value.flatten(0, 1) if value.shape[:2] == shape else value
    if rows.shape[0] != len(mine):
        return None
    own = rows[mine].detach().double().flatten(1)
    return own @ torch.arange(1, own.shape[1] + 1, dtype=own.dtype, device=own.device).cos()


def _alone(batch: dict[str, Any], owner: Tensor, document: int) -> tuple[dict[str, Any], int]:
    """Return the batch of a document in a row of its own, and its length."""
    row, places = (owner == document).nonzero(as_tuple=True)
    row, start, stop = int(row[0]), int(places[0]), int(places[-1]) + 1
    rows, tokens = owner.shape
    alone: dict[str, Any] = {}
    for key, value in batch.items():
        if key.startswith(("cu_seq", "cu_seqlens")) and value is not None:
            value = torch.tensor([0, stop - start], dtype=value.dtype, device=value.device)
        elif key.startswith("max_") and value is not None:
            value = torch.full_like(value, stop - start) if isinstance(value, Tensor) else stop - start
        elif isinstance(value, Tensor):
            value = value[row : row + 1] if rows > 1 and value.shape[:1] == (rows,) else value
            for dimension in range(value.ndim):
                if value.shape[dimension] == tokens:
                    value = value.narrow(dimension, start, stop - start)
            if key in _POSITIONS:
                value = torch.arange(stop - start, device=value.device).expand_as(value)
            elif key == "seq_idx":
                value = torch.zeros_like(value)
        alone[key] = value
    return alone, stop - start


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put the model into training mode without dropout, whose noise would hide differences, and afterwards all back:
    modes, buffers, torch's random state."""
    modes = {module: module.training for module in model.modules()}
    dropouts = [
        (module, name, value)
        for module in modes
        for name, value in vars(module).items()
        if isinstance(value, float) and ("dropout" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {one.device.index for one in model.parameters() if one.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            model.train()
            for module, name, _ in dropouts:
                setattr(module, name, 0.0)
            yield
        finally:
            for module, name, value in dropouts:
                setattr(module, name, value)
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])


@contextmanager
def _remembering(model: nn.Module) -> Iterator[bool]:
    """Set decays to 1, so that states last for ever, and back to the bit; yields whether there are any."""
    decays = [one for name, one in model.named_parameters() if name.rpartition(".")[2] in _DECAYS]
    before = [one.detach().clone() for one in decays]
    try:
        with torch.no_grad():
            for one in decays:
                one.fill_(_FOR_EVER)
        yield bool(decays)
    finally:
        with torch.no_grad():
            for one, value in zip(decays, before, strict=True):
                one.copy_(value)
