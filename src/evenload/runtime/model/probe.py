"""Prove at start that a model may be replayed: `probe`.

Replay computes a document's rows beside those of others, and in other packs forward than backward. That is exact where
all that is not attention by transformers' interface is token-wise: what comes out for a row depends on that row and its
position. No list of names shows this, so it is tried, on a narrowed copy of the model in float64:

    layers      the first of every kind, with the outputs of attention held: one row is changed, also to one a thousand
                times larger than all; rows come in another order; half of them. Other rows must come out as before, and
                so must their queries, keys and values. Two runs must be equal bit for bit and draw no random number.
    masks       transformers' own, read: causal, in a window, or in chunks.
    around      what reaches layers and logits: the same, a row at a far position, and positions that count from 0.

A module of a layer that mixes rows in a way of its own (linear attention, state space, convolution) is no error: held
like attention it is found, and documents are kept whole for it. All else is an `UnsupportedModelError`.
"""

import hashlib
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evenload.errors import UnsupportedModelError
from evenload.runtime.model.around import LayerCall, LayersRan, OnLayer, WholeModel, configs_of, find_layers
from evenload.runtime.model.mask_rules import MaskRule, is_causal, unknown_tensors
from evenload.runtime.model.narrow import WIDTHS, Float64Casts, build_narrow, narrowed
from evenload.runtime.model.state_calls import Spans, StateCall, carrying
from evenload.types.base import Frozen

_PROBE = "evenload_probe"
# Primes that are no size of a narrowed model, so that a dimension of this size has a document's rows.
_ROWS, _FEWER_ROWS = 29, 13
_TOLERANCE = 1e-11
_DRAWS = "draws random numbers (dropout or noise: set it to 0 in config.json)"


class Mixer(Frozen):
    """Names a module that mixes the rows of a document in a way of its own.

    Args:
        path: its name in the layer; "" = the layer.
        module: its class.
        why: what was seen.
    """

    path: str
    module: str
    why: str


class Findings(Frozen):
    """Holds what the probe found of a model that can be trained: mixers of every layer; () = documents may be cut."""

    mixers: tuple[tuple[Mixer, ...], ...]

    @property
    def whole_documents(self) -> tuple[str, ...]:
        """Classes of the modules for which documents must not be cut; () = there are none."""
        return tuple(sorted({mixer.module for layer in self.mixers for mixer in layer}))


def probe(config: PretrainedConfig, cache: Path | None = None) -> Findings:
    """Return what the proof finds of a model; `UnsupportedModelError` names what would be trained wrong, and why.

    Seconds for a model that it has not seen. Takes no process group; leaves torch's random state and default as they
    are.

    Args:
        config: is not changed.
        cache: folder of earlier findings; None = in the user's cache folder.
    """
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenload" / "probe"
    file = folder / f"{_digest(config)}.json"
    if os.path.isfile(file):  # no folder that may not be searched
        found = msgspec.json.decode(file.read_bytes(), type=Findings | str)
    else:
        try:
            found = _prove(config)
        except UnsupportedModelError as error:
            if error.__cause__ is not None:
                raise  # a failure of this run, such as for want of memory, is no finding
            found = str(error)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            begun = file.with_suffix(f".{os.getpid()}.partial")
            begun.write_bytes(msgspec.json.encode(found))
            begun.replace(file)
        except OSError as error:  # such as of a home that is no directory of the user's
            why = f"{folder} cannot be written ({error.strerror}); set HOME or XDG_CACHE_HOME"
            warnings.warn(f"the model is probed again by the next run: {why}", stacklevel=2)
    if isinstance(found, str):
        raise UnsupportedModelError(found)
    return found


def _digest(config: PretrainedConfig) -> str:
    values = config.to_dict() | {"_name_or_path": "", "transformers_version": ""}
    files = [
        Path(__file__).with_name(f"{name}.py") for name in ("around", "mask_rules", "narrow", "probe", "state_calls")
    ]
    if (model := MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)) is not None:
        files.append(Path(inspect.getfile(model)))  # type: ignore[bad-argument-type]
    versions = [transformers.__version__, torch.__version__, *(file.read_text() for file in files)]
    return hashlib.sha256(json.dumps([values, versions], sort_keys=True, default=str).encode()).hexdigest()[:24]


def _prove(config: PretrainedConfig) -> Findings:
    doing = "a narrowed copy of it cannot be made"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), Float64Casts():
            model = build_narrow(narrowed(config))
            doing = "a narrowed copy of it does not run"
            return _Proof(model).findings()
    except UnsupportedModelError:
        raise
    except Exception as error:  # of the model's own code
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        name = type(config).__name__.removesuffix("Config")
        raise UnsupportedModelError(f"{name}: {doing}, so nothing proves that it is trained right ({why})") from error


class _Trace(NamedTuple):
    """What a module got and gave in a call: rows [T, ...] of tokens. `given` includes what it hands to attention."""

    path: str
    got: list[Tensor]
    given: list[Tensor]
    random: list[bytes]  # torch's state when it began, and when it ended


_Traces = dict[tuple[str, int], _Trace]
"""By module and number of its call, in the order in which calls end."""


class _Proof:
    """Runs a narrowed model as the proof asks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = type(model).__name__
        self.whole = WholeModel(model, find_layers(model))
        for config in configs_of(model):
            config._attn_implementation_internal = _PROBE  # type: ignore[attr-defined]
        self.text = model.config.get_text_config(decoder=True)
        self.kinds = _kinds(self.text, list(self.whole.layers.values()))
        # Of the first layer of every kind, the modules that mix rows; no other layers run.
        self.mixers: dict[int, dict[str, Mixer]] = {self.kinds.index(kind): {} for kind in range(max(self.kinds) + 1)}
        self.ids = torch.randint(2, WIDTHS["vocab_size"], (_ROWS,), generator=torch.Generator().manual_seed(11))
        self.rows, self.layer = torch.arange(_ROWS), -1
        self.is_recording = False
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.held: dict[tuple[int, str, int], Any] = {}
        self.calls: dict[str, int] = {}  # in the running layer
        self.open: list[_Trace] = []
        self.traces: _Traces = {}
        for layer in self.mixers:
            for path, module in self.whole.layers[layer].named_modules():
                module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
                module.register_forward_hook(self._leave)

    def findings(self) -> Findings:
        _RUNNING.append(self)
        try:
            with carrying(self._carry):
                self._record()
                for layer in self.mixers:
                    self._prove_layer(layer)
                self._prove_around()
        finally:
            _RUNNING.pop()
        found = [tuple(one.values()) for one in self.mixers.values()]
        return Findings(mixers=tuple(found[kind] for kind in self.kinds))

    def refuse(self, what: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.name}: {what} {why}, so that what a token gets would depend on its pack; replay cannot train it"
        )

    # Passes.

    def _run(self, on_layer: OnLayer, ids: Tensor, positions: Tensor | None) -> Tensor | None:
        return self.whole.run(positions, on_layer, token_ids=ids, like=torch.empty(len(ids), 1, dtype=torch.float64))

    def _record(self) -> None:
        """Run the document, until no more mixers are found; hold what layers, attention and mixers give."""

        def on_layer(layer: int, call: LayerCall) -> Tensor:
            self.inputs[layer] = call.hidden.clone()
            self.outputs[layer] = self._run_layer(layer, call).clone() if layer in self.mixers else call.hidden
            return self.outputs[layer]

        found = -1
        while found != (found := sum(map(len, self.mixers.values()))):
            self.held.clear()
            self.is_recording, self.rows = True, torch.arange(_ROWS)
            logits = self._run(on_layer, self.ids, self.rows)
            self.is_recording = False
            if logits is None or not bool(logits.isfinite().all()):
                raise UnsupportedModelError(f"{self.name}: a narrowed copy gives numbers that are not finite")

    def _run_layer(self, layer: int, call: LayerCall) -> Tensor:
        self.layer, self.traces, self.open, self.calls = layer, {}, [], {}
        output = self.whole.layers[layer](*call.args, **call.kwargs)
        self.layer, self.whole.returns_tuple = -1, not isinstance(output, Tensor)
        hidden = output if isinstance(output, Tensor) else output[0]
        if call.hidden.shape[:-1] != (1, len(self.rows)) or hidden.shape != call.hidden.shape:
            raise UnsupportedModelError(
                f"{self.name}: layer {layer} takes hidden states {list(call.hidden.shape)} and gives "
                f"{list(hidden.shape)}; replay knows [1, tokens, channels] only"
            )
        return hidden

    def _trace(self, layer: int, rows: Tensor, hidden: Tensor | None = None) -> _Traces:
        """Run some of the document's rows through a layer, behind those before it: it may read what they make."""

        def on_layer(at: int, call: LayerCall) -> Tensor:
            if at not in self.mixers:
                return self.outputs[at][:, rows]
            own = self.inputs[at][:, rows] if hidden is None or at != layer else hidden
            output = self._run_layer(at, call.on(own))
            if at == layer:
                raise LayersRan
            return output

        self.rows = rows
        self._run(on_layer, self.ids[rows], rows)
        return self.traces

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.layer >= 0:
            self.open.append(_Trace(path, _rows((args, kwargs), len(self.rows)), [], [_random_state()]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.layer >= 0:
            trace = self.open.pop()
            trace.given.extend(_rows(output, len(self.rows)))
            trace.random.append(_random_state())
            self.traces[trace.path, self._number(f"trace {trace.path}")] = trace

    def _number(self, what: str) -> int:
        self.calls[what] = self.calls.get(what, -1) + 1
        return self.calls[what]

    def hold(self, name: str, given: Any, run: Callable[[], Any]) -> Any:
        """Return what is held of a call for these rows; in the recorded pass, run it. `given` must be token-wise."""
        key = (self.layer, name, self._number(name))
        if self.is_recording:
            self.held[key] = tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, run())
        for trace in self.open:
            trace.given.extend(_rows(given, len(self.rows)))
        return tree_map(lambda one: _pick(one, self.rows) if isinstance(one, Tensor) else one, self.held[key])

    def _carry(self, call: StateCall) -> Tensor:
        """Hold what a function that carries a state gives, as that of attention."""
        rows = [one.movedim(dim, 0) for one, dim in call.rows]
        name = f"{call.function} in {self.open[-1].path}"
        return self.hold(name, rows, lambda: call.over(Spans([call.num_rows], [None], [False]))[0])

    def mixes(self, layer: int, path: str, why: str) -> None:
        """Hold a module from the next recorded pass on."""
        if path in self.mixers[layer]:
            return
        module = self.whole.layers[layer].get_submodule(path)
        self.mixers[layer][path] = Mixer(path=path, module=type(module).__name__, why=why)
        forward = module.forward
        module.forward = lambda *args, **kwargs: self.hold(
            f"module {path}", (args, kwargs), lambda: forward(*args, **kwargs)
        )

    # Checks.

    def _prove_layer(self, layer: int) -> None:
        """Find what mixes rows in a layer; hold it, and prove the rest."""
        while guilty := self._guilty(layer):
            if "" in self.mixers[layer]:
                raise self.refuse(self._named(layer, ""), guilty[""])
            inner = {path: why for path, why in guilty.items() if path and path not in self.mixers[layer]} or guilty
            for path, why in inner.items():
                if not any(path.startswith(f"{other}.") for other in inner):
                    self.mixes(layer, path, why)
            self._record()

    def _guilty(self, layer: int) -> dict[str, str]:
        """Return modules that mix rows, by name; {} where the layer as a whole does not."""
        everything, guilty = torch.arange(_ROWS), dict[str, str]()
        base = self._trace(layer, everything)
        self._prove_repeatable(layer, base, self._trace(layer, everything))
        for why, rows, hidden in self._changes(layer):
            changed = self._trace(layer, rows, hidden)
            same = everything[(hidden == self.inputs[layer]).all(-1)[0]] if hidden is not None else rows
            at = same if hidden is not None else torch.arange(len(rows))
            for one, other in ((base[key], changed[key]) for key in base if key in changed):
                has_same_input = bool(one.got) and _is_same(one.got, other.got, same, at)
                if has_same_input and not _is_same(one.given, other.given, same, at):
                    guilty.setdefault(one.path, why)
        return guilty if "" in guilty else {}

    def _changes(self, layer: int) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield what a change would show, the document's rows, and other hidden states of them."""
        everything, generator = torch.arange(_ROWS), torch.Generator().manual_seed(3)
        hidden = self.inputs[layer]
        for row, size in ((0, 1.0), (_ROWS // 2, 1e3 * float(hidden.abs().max()))):
            moved = hidden.clone()
            moved[0, row] = size * torch.randn(moved[0, row].shape, generator=generator, dtype=moved.dtype)
            yield "a row changes what others get", everything, moved
        yield "it depends on the order of rows", torch.randperm(_ROWS, generator=generator), None
        yield "it depends on the number of rows", everything[:_FEWER_ROWS], None

    def _prove_repeatable(self, layer: int, base: _Traces, again: _Traces) -> None:
        everything = torch.arange(_ROWS)
        # In the order in which calls end, so that the innermost module is named.
        for one in base.values():
            if one.random[0] != one.random[1]:
                raise self.refuse(self._named(layer, one.path), _DRAWS)
        for key, one in base.items():
            other = again[key]
            is_same = _is_same(one.given, other.given, everything, everything, 0.0)
            if not is_same and _is_same(one.got, other.got, everything, everything, 0.0):
                raise self.refuse(self._named(layer, one.path), "gives other values when it runs again")

    def _named(self, layer: int, path: str) -> str:
        module = self.whole.layers[layer].get_submodule(path)
        return f"{self.whole.path}.{layer}{'.' * bool(path)}{path} ({type(module).__name__})"

    def _around(self, rows: Tensor, ids: Tensor, positions: Tensor | None, changed: int = -1) -> list[Tensor]:
        """Return what reaches the first layer of every kind, and the logits; `changed`: a row behind the last layer.
        Without positions the model counts them itself."""
        arrived: list[Tensor] = []

        def on_layer(layer: int, call: LayerCall) -> Tensor:
            if layer in self.mixers:
                arrived.extend(_rows((call.args, call.kwargs), len(rows)))
            output = self.outputs[layer][:, rows]
            if changed >= 0 and layer == len(self.outputs) - 1:
                output[0, changed] = 1.5
            return output

        logits = self._run(on_layer, ids, positions)
        assert logits is not None
        return [*arrived, logits]

    def _prove_around(self) -> None:
        every, row, ids = torch.arange(_ROWS), _ROWS // 2, self.ids
        random = _random_state()
        base = self._around(every, ids, every)
        if random != _random_state():
            raise self.refuse("the model around its layers", _DRAWS)
        token = torch.where(every == row, (ids + 1) % WIDTHS["vocab_size"], ids)
        order = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(3))
        others, few, last = every[every != row], every[:_FEWER_ROWS], every[:-1]
        for why, after, kept, at in (
            ("lets a token change what others get", self._around(every, token, every), others, others),
            ("lets a row change logits of others", self._around(every, ids, every, row), others, others),
            ("depends on a token's place, not on its position", self._around(order, ids[order], order), order, every),
            ("depends on the number of tokens", self._around(few, ids[few], few), few, few),
            ("lets one far position change what others get (rotary that depends on the length)",
             self._with_far_position(), last, last),
            ("does not count a document's positions from 0", self._around(every, ids, None), every, every),
        ):  # fmt: skip
            if not _is_same(base, after, kept, at):
                raise self.refuse("the model around its layers", why)

    def _with_far_position(self) -> list[Tensor]:
        """Return what `_around` returns of a pack whose last row is far away, or the next of a table's."""
        positions = torch.arange(_ROWS)
        try:
            positions[-1] = 5 * int(getattr(self.text, "max_position_embeddings", None) or 1000)
            return self._around(torch.arange(_ROWS), self.ids, positions)
        except (IndexError, RuntimeError):  # of a table, or of a buffer as long
            positions[-1] = _ROWS
            return self._around(torch.arange(_ROWS), self.ids, positions)


_RUNNING: list[_Proof] = []


def _kinds(config: PretrainedConfig, layers: Sequence[nn.Module]) -> list[int]:
    """Number the kinds of layers: by what the configuration lists of each, their modules, and how these are set."""
    listed = [one for one in config.to_dict().values() if isinstance(one, list | tuple) and len(one) == len(layers)]
    listed = [one for one in listed if list(range(len(one))) != one]  # all layers, by their numbers
    kinds: dict[Any, int] = {}
    found = []
    for at, layer in enumerate(layers):
        modules = tuple((name, type(module).__name__, _settings(module)) for name, module in layer.named_modules())
        found.append(kinds.setdefault((*(str(value[at]) for value in listed), modules), len(kinds)))
    return found


def _settings(module: nn.Module) -> frozenset[tuple[str, str]]:
    plain = {name: one for name, one in vars(module).items() if isinstance(one, int | float | str | None)}
    # Of numbers, whether they are 0: sizes and factors may grow with a layer's index, and change nothing else.
    settings = {name: one if isinstance(one, str) else str(one and True) for name, one in plain.items()}
    return frozenset((name, one) for name, one in settings.items() if "idx" not in name)


def _random_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _rows(given: Any, count: int) -> list[Tensor]:
    """Return copies of the rows [T, ...] of all numbers that belong to tokens; masks [T, T] do not."""
    found = []
    for one in tree_flatten(given)[0]:
        if not isinstance(one, Tensor) or one.shape[-2:] == (count, count) or count not in one.shape:
            continue
        one = torch.view_as_real(one) if one.is_complex() else one
        if one.is_floating_point():
            found.append(one.movedim(one.shape.index(count), 0).flatten(1).clone())
    return found


def _pick(tensor: Tensor, rows: Tensor) -> Tensor:
    if tensor.shape[-2:] == (_ROWS, _ROWS):
        return tensor[..., rows, :][..., rows]
    return tensor.index_select(tensor.shape.index(_ROWS), rows) if _ROWS in tensor.shape else tensor


def _is_same(
    before: Sequence[Tensor], after: Sequence[Tensor], rows: Tensor, at: Tensor, tolerance: float = _TOLERANCE
) -> bool:
    """Compare some rows of one run with some of another, each number with the largest of its column."""
    if [one.shape[1:] for one in before] != [one.shape[1:] for one in after]:
        return False
    for one, other in zip(before, after, strict=True):
        one, other = one[rows].flatten(1), other[at].flatten(1)
        if not one.numel():
            continue
        size = one.abs().amax(0) + 1e-6 * one.abs().max() + 1e-30
        if not float(((one - other).abs() / size).max()) <= tolerance:
            return False
    return True


# ---- attention and masks --------------------------------------------------------------------------------------------


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    proof = _RUNNING[-1]
    if proof.layer < 0:
        raise UnsupportedModelError(f"{proof.name}: {type(module).__name__} attends outside the layers")
    if proof.is_recording and (why := _own_way(module, query, key, attention_mask, given, len(proof.rows))):
        paths = {id(one): path for path, one in proof.whole.layers[proof.layer].named_modules()}
        proof.mixes(proof.layer, paths.get(id(module), proof.open[-1].path), why)

    def some() -> Tensor:
        # Whatever attention gives, all else must be token-wise.
        shape = (1, query.shape[2], query.shape[1], value.shape[-1])
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(proof.held)), dtype=query.dtype)

    return proof.hold(f"attention in {proof.open[-1].path}", (query, key, value), some), None


def _own_way(module: nn.Module, query: Tensor, key: Tensor, mask: Any, given: dict[str, Any], count: int) -> str:
    """Say what the range attention cannot do of a call; "" = it can do all."""
    if query.ndim != 4 or query.shape[0] != 1 or query.shape[2] != count or key.shape[2] != count:
        return f"attends with queries {list(query.shape)} and keys {list(key.shape)}"
    if own := unknown_tensors(given):
        return f"attends with {', '.join(own)}"
    if mask is None:
        return "" if is_causal(module, given) else "lets tokens see later ones"
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (count, count) or mask.numel() != count * count:
        return f"attends with a mask of its own {list(getattr(mask, 'shape', ()))}"
    mask = mask.reshape(count, count)
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((seen | (mask < -1e4)).all()):
        return "attends with a bias in the mask"
    rules = [rule for size in range(count) for rule in (MaskRule(window=size), MaskRule(chunk=size))]
    places = torch.arange(count)
    if any(torch.equal(seen, rule.shows(places[:, None], places)) for rule in rules):
        return ""
    return "lets tokens see later ones" if seen[0].all() else "attends with a mask of another kind"


ALL_ATTENTION_FUNCTIONS.register(_PROBE, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, eager_mask)
