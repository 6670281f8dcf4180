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
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evenload.errors import UnsupportedModelError
from evenload.runtime.model.around import LayerCall, LayersRan, WholeModel, configs_of, find_layers
from evenload.types.base import Frozen

_PROBE = "evenload_probe"
# Primes that are no size of a narrowed model, so that a dimension of this size has a document's rows.
_ROWS, _FEWER_ROWS = 29, 13
_TOLERANCE = 1e-11


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
    """Holds what the probe has found of a model that can be trained.

    Args:
        kinds: of every layer, an index into `mixers`.
        mixers: of every kind of layer; () = its documents may be cut.
    """

    kinds: tuple[int, ...]
    mixers: tuple[tuple[Mixer, ...], ...]

    def mixers_of(self, layer: int) -> tuple[Mixer, ...]:
        return self.mixers[self.kinds[layer]]

    @property
    def whole_documents(self) -> tuple[str, ...]:
        """Classes of the modules for which documents must not be cut; () = there are none."""
        return tuple(sorted({mixer.module for kind in self.mixers for mixer in kind}))


class _Stored(Frozen):
    """What a file of the cache holds: one of the two."""

    findings: Findings | None = None
    refusal: str = ""


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
    if file.is_file():
        stored = msgspec.json.decode(file.read_bytes(), type=_Stored)
    else:
        try:
            stored = _Stored(findings=_prove(config))
        except UnsupportedModelError as error:
            stored = _Stored(refusal=str(error))
        folder.mkdir(parents=True, exist_ok=True)
        partial_file = file.with_suffix(f".{os.getpid()}.partial")
        partial_file.write_bytes(msgspec.json.encode(stored))
        partial_file.replace(file)
    if stored.findings is None:
        raise UnsupportedModelError(stored.refusal)
    return stored.findings


def _digest(config: PretrainedConfig) -> str:
    values = {
        key: value for key, value in config.to_dict().items() if key not in ("_name_or_path", "transformers_version")
    }
    versions = [transformers.__version__, torch.__version__, Path(__file__).read_text()]
    return hashlib.sha256(json.dumps([values, versions], sort_keys=True, default=str).encode()).hexdigest()[:24]


# ---- the narrowed copy ----------------------------------------------------------------------------------------------

_WIDTHS: dict[int, str] = {
    97: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim emb_dim attention_hidden_size lru_width "
    "embedding_dim",
    80: "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim dff dim_ff "
    "intermediate_size_mlp dense_intermediate_size d_inner feed_forward_size shared_intermediate_size "
    "expert_ffn_hidden_size",
    24: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_experts_intermediate_size q_lora_rank",
    4: "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_decoder_attention_heads "
    "attention_heads num_heads swa_num_attention_heads linear_num_heads linear_num_value_heads mamba_dt_rank "
    "time_step_rank index_block_size compress_rates adapter_rank d_rel",
    2: "num_key_value_heads num_kv_heads kv_n_heads num_query_groups swa_num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_k moe_topk top_k_experts moe_top_k n_group linear_num_key_heads n_groups n_mamba_heads "
    "index_n_heads index_topk_blocks o_groups zero_expert_num indexer_n_heads hc_count heads_per_ngram "
    "indexer_compress_ratio split_ngram_parts make_ngram_vocab_size_divisible_by",
    16: "head_dim swa_head_dim global_head_dim dim_head kv_channels attention_head_dim kv_lora_rank linear_head_dim "
    "mamba_d_head mamba_head_dim mamba_headdim mamba_chunk_size chunk_size index_head_dim router_hidden_size head_size "
    "attention_head_size indexer_head_dim ple_embed_dim",
    6: "num_experts n_routed_experts num_local_experts moe_num_experts index_topk",
    9: "sliding_window sliding_window_size window_size attention_window_size local_attention",
    8: "attention_chunk_size qk_rope_head_dim hidden_size_per_layer_input laurel_rank rotary_dim linear_key_head_dim "
    "linear_value_head_dim mamba_d_state mamba_n_heads mamba_num_heads ssm_state_size state_size rel_extent floor_scale "
    "log_scaling_n_floor indexer_budget hc_lowrank",
    12: "qk_nope_head_dim o_lora_rank",
    14: "v_head_dim",
    20: "qk_head_dim",
    1: "topk_group n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups mamba_ngroups "
    "index_local_blocks encoder_layers num_encoder_layers indexer_kv_heads",
    128: "mamba_d_ssm",
    50: "ngram_vocab_size_base",
}  # fmt: skip
_NARROW = {name: size for size, names in _WIDTHS.items() for name in names.split()}
"""Sizes by key. Layers keep their number, and every key that decides what a layer does keeps its value."""
_ALL_HEADS = {"num_key_value_heads": "num_attention_heads", "num_kv_heads": "num_attention_heads"}


def narrowed(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of few heads, channels, experts and words."""
    text = config.get_text_config(decoder=True)
    chosen = text if type(text) in AutoModelForCausalLM._model_mapping else config
    return type(chosen).from_dict(_narrow(chosen.to_dict()))


def _narrow(values: dict[str, Any]) -> dict[str, Any]:
    rope = json.dumps(values.get("rope_parameters") or values.get("rope_scaling") or {})
    # Lists of factors have as many entries as a head has frequencies.
    kept = {"head_dim", "rotary_dim"} if "[" in rope else set[str]()
    found = {
        key: _narrow_value(value, _NARROW[key]) for key, value in values.items() if key in _NARROW and key not in kept
    }
    heads, own_heads = values.get("num_attention_heads"), found.get("num_attention_heads")
    for key, value in values.items():
        if key in ("num_key_value_heads", "num_kv_heads") and heads and value == heads:
            found[key] = own_heads
        elif key.endswith("_token_id") and value is not None:
            found[key] = 1
        elif isinstance(value, dict) and key.endswith("_config"):
            found[key] = _narrow(value)
    if kept and heads and not values.get("head_dim"):
        found["hidden_size"] = own_heads * (values["hidden_size"] // heads)
    if "qk_rope_head_dim" in values and "head_dim" in values:
        found["head_dim"] = found["qk_rope_head_dim"]
    return {key: value for key, value in values.items() if key != "quantization_config"} | found | {"use_cache": False}


def _narrow_value(value: Any, size: int) -> Any:
    if isinstance(value, list | tuple):
        return [_narrow_value(one, size) for one in value]
    if isinstance(value, dict):
        return {key: _narrow_value(one, size) for key, one in value.items()}
    return min(value, size) if isinstance(value, int) and not isinstance(value, bool) else value


def build_narrow(config: PretrainedConfig) -> PreTrainedModel:
    """Make a small model in float64 in training mode, whose weights are of a size at which every part counts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").double()
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if "correction_bias" in name or "expert_bias" in name:
                weight.copy_(noise * 0.05)
            elif not isinstance(weight, nn.Parameter) or name.rpartition(".")[2] in _TIME_SCALES:
                continue
            elif weight.ndim >= 2:
                weight.copy_(noise * (1.0 if "embed" in name or "wte" in name else 1.2 / weight.shape[-1] ** 0.5))
            else:
                weight.add_(noise * 0.1)
    return model.train()


_TIME_SCALES = {"A_log", "dt_bias", "D", "A", "time_decay", "time_first", "lambda_param", "recurrent_param"}
"""Weights of state spaces whose own initial values keep states finite."""


class Float64Casts(TorchFunctionMode):
    """Makes casts to float32, by whatever function, casts to float64, except of what is narrower already."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_cast = func is Tensor.float or any(value is torch.float32 for value in (*args, *kwargs.values()))
        if is_cast and getattr(next(iter(args), None), "dtype", None) not in _NARROW_TYPES:
            func = Tensor.double if func is Tensor.float else func
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


_NARROW_TYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---- the proof ------------------------------------------------------------------------------------------------------


def _prove(config: PretrainedConfig) -> Findings:
    name = type(config).__name__.removesuffix("Config")
    where = "a narrowed copy of it cannot be made"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), Float64Casts():
            model = build_narrow(narrowed(config))
            where = "a narrowed copy of it does not run"
            return _Proof(model).findings()
    except UnsupportedModelError:
        raise
    except Exception as error:  # of the model's own code
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedModelError(
            f"{name}: {where}, so nothing proves that replay trains it right ({why})"
        ) from error


class _Trace(NamedTuple):
    """What a module got and gave in a call: rows [T, ...] of tokens. `given` includes what it hands to attention."""

    path: str
    got: list[Tensor]
    given: list[Tensor]
    drew: list[bool]


class _Proof:
    """Runs a narrowed model as the proof asks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = type(model).__name__
        self.whole = WholeModel(model, find_layers(model))
        for config in configs_of(model):
            config._attn_implementation_internal = config._experts_implementation_internal = _PROBE  # type: ignore
            config._experts_implementation_internal = "eager"  # type: ignore[attr-defined]
        self.kinds = _kinds(model.config.get_text_config(decoder=True), list(self.whole.layers.values()))
        self.first = {kind: layer for layer, kind in reversed(list(enumerate(self.kinds)))}
        self.mixers: dict[int, dict[str, Mixer]] = {layer: {} for layer in self.first.values()}
        self.ids = torch.randint(2, _NARROW["vocab_size"], (_ROWS,), generator=torch.Generator().manual_seed(11))
        self.rows, self.layer = torch.arange(_ROWS), -1
        self.is_recording = False
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.held: dict[tuple[int, str, int], Any] = {}
        self.calls: dict[str, int] = {}  # in the running layer
        self.open: list[_Trace] = []
        self.traces: list[_Trace] = []
        for layer in self.mixers:
            for path, module in self.whole.layers[layer].named_modules():
                module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
                module.register_forward_hook(self._leave)

    def findings(self) -> Findings:
        with _running(self):
            self._record()
            for layer in self.mixers:
                self._prove_layer(layer)
            self._record()
            self._prove_around()
        mixers = tuple(tuple(self.mixers[self.first[kind]].values()) for kind in range(len(self.first)))
        return Findings(kinds=tuple(self.kinds), mixers=mixers)

    def refuse(self, what: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.name}: {what} {why}, so that what a token gets would depend on its pack; replay cannot train it"
        )

    # -- passes

    def _run(self, on_layer: Callable[[int, LayerCall], Tensor], ids: Tensor, positions: Tensor) -> Tensor | None:
        return self.whole.run(positions, on_layer, token_ids=ids, like=torch.empty(0, dtype=torch.float64))

    def _record(self) -> None:
        """Run the document, until no more mixers are found; hold what layers, attention and mixers give."""

        def on_layer(layer: int, call: LayerCall) -> Tensor:
            if layer in self.mixers:
                self.inputs[layer] = call.hidden.clone()
                self.outputs[layer] = self._run_layer(layer, call).clone()
            else:
                self.outputs[layer] = call.hidden
            return self.outputs[layer]

        found = -1
        while found != (found := sum(map(len, self.mixers.values()))):
            self.is_recording, self.rows = True, torch.arange(_ROWS)
            self.held.clear()
            self._run(on_layer, self.ids, self.rows)
            self.is_recording = False

    def _run_layer(self, layer: int, call: LayerCall) -> Tensor:
        self.layer, module = layer, self.whole.layers[layer]
        self.calls.clear()
        self.traces, self.open = [], []
        output = module(*call.args, **call.kwargs)
        self.layer, self.whole.returns_tuple = -1, not isinstance(output, Tensor)
        hidden = output if isinstance(output, Tensor) else output[0]
        if call.hidden.shape[:2] != (1, len(self.rows)) or hidden.shape != call.hidden.shape:
            raise UnsupportedModelError(
                f"{self.name}: layer {layer} takes hidden states {list(call.hidden.shape)} and gives "
                f"{list(hidden.shape)}; replay knows [1, tokens, channels] only"
            )
        return hidden

    def _trace(self, layer: int, rows: Tensor, hidden: Tensor | None = None) -> list[_Trace]:
        """Run some of the document's rows through a layer, and through those before it whose values it may read."""

        def on_layer(at: int, call: LayerCall) -> Tensor:
            if at not in self.mixers:
                return call.hidden
            output = self._run_layer(at, call.on(self.inputs[at][:, rows] if at < layer or hidden is None else hidden))
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
            trace.drew[0] = trace.drew[0] != _random_state()
            self.traces.append(trace)

    def hold(self, name: str, given: Any, run: Callable[[], Any]) -> Any:
        """Return what is held of a call for these rows; in the recorded pass, run it. `given` must be token-wise."""
        number = self.calls[name] = self.calls.get(name, -1) + 1
        key, count = (self.layer, name, number), len(self.rows)
        if self.is_recording:
            self.held[key] = tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, run())
        else:
            for trace in self.open:
                trace.given.extend(_rows(given, count))
        return tree_map(lambda one: _pick(one, self.rows) if isinstance(one, Tensor) else one, self.held[key])

    def mixes(self, layer: int, path: str, why: str) -> None:
        """Hold a module from the next recorded pass on."""
        if path in self.mixers[layer]:
            return
        module = self.whole.layers[layer].get_submodule(path)
        self.mixers[layer][path] = Mixer(path=path, module=type(module).__name__, why=why)
        forward = module.forward

        def held(*args: Any, **kwargs: Any) -> Any:
            return self.hold(f"module {path}", (args, kwargs), lambda: forward(*args, **kwargs))

        module.forward = held

    # -- checks

    def _prove_layer(self, layer: int) -> None:
        """Find what mixes rows in a layer; hold it, and prove the rest."""
        while guilty := self._guilty(layer):
            inner = {path: why for path, why in guilty.items() if path} or guilty
            if set(inner) <= set(self.mixers[layer]):
                inner = {"": guilty[""]}
            for path, why in inner.items():
                if not any(path.startswith(f"{other}.") for other in inner):
                    self.mixes(layer, path, why)
            self._record()

    def _guilty(self, layer: int) -> dict[str, str]:
        """Return modules that mix rows, by name; {} where the layer as a whole does not."""
        everything = torch.arange(_ROWS)
        base = self._trace(layer, everything)
        again = self._trace(layer, everything)
        self._prove_repeatable(layer, base, again)
        guilty: dict[str, str] = {}
        for why, rows, hidden in self._changes(layer):
            changed = self._trace(layer, rows, hidden)
            kept = everything
            if hidden is not None:
                kept = everything[(hidden == self.inputs[layer]).flatten(2).all(-1)[0]]
            for one, other in zip(*_aligned(base, changed), strict=True):
                before, after = (rows[kept], kept) if hidden is not None else (rows, torch.arange(len(rows)))
                same_input = bool(one.got) and _is_same(one.got, other.got, before, after)
                if same_input and not _is_same(one.given, other.given, before, after):
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

    def _prove_repeatable(self, layer: int, base: Sequence[_Trace], again: Sequence[_Trace]) -> None:
        # Modules are listed as they end, so that the innermost is named.
        for one, other in zip(*_aligned(base, again), strict=True):
            what = self._named(layer, one.path)
            if one.drew[0]:
                raise self.refuse(what, "draws random numbers (dropout or noise: set it to 0 in config.json)")
            pairs = zip(one.got + one.given, other.got + other.given, strict=True)
            if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
                raise self.refuse(what, "gives other values when it runs again")

    def _named(self, layer: int, path: str) -> str:
        module = self.whole.layers[layer].get_submodule(path)
        return f"{self.whole.path}.{layer}{'.' * bool(path)}{path} ({type(module).__name__})"

    def _around(self, rows: Tensor, ids: Tensor, positions: Tensor | None = None, changed: int = -1) -> list[Tensor]:
        """Return what reaches the first layer of every kind, and the logits; `changed`: a row behind the last layer."""
        arrived: list[Tensor] = []

        def on_layer(layer: int, call: LayerCall) -> Tensor:
            if layer in self.mixers:
                arrived.extend(_rows((call.args, call.kwargs), len(rows)))
            output = self.outputs[layer][:, rows]
            if changed >= 0 and layer == len(self.outputs) - 1:
                output[0, changed] = 1.5
            return output

        logits = self._run(on_layer, ids, rows if positions is None else positions)
        assert logits is not None
        return [*arrived, logits]

    def _default_positions(self, ids: Tensor) -> list[Tensor]:
        """Return what `_around` returns where the model counts positions itself."""
        plain, self.whole.model.forward = (
            self.whole.model.forward,
            partial(_without_positions, self.whole.model.forward),
        )
        try:
            return self._around(torch.arange(_ROWS), ids)
        finally:
            self.whole.model.forward = plain

    def _prove_around(self) -> None:
        everything, row, ids = torch.arange(_ROWS), _ROWS // 2, self.ids
        others = everything[everything != row]
        random = _random_state()
        base = self._around(everything, ids)
        if random != _random_state():
            raise self.refuse(
                "the model before its layers", "draws random numbers (dropout: set it to 0 in config.json)"
            )
        token = torch.where(everything == row, (ids + 1) % _NARROW["vocab_size"], ids)
        order = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(3))
        far = everything.clone()
        far[-1] = self._far()
        few, last = everything[:_FEWER_ROWS], everything[:-1]
        for why, after, kept, at in (
            ("lets a token change what others get", self._around(everything, token), others, others),
            ("lets a row change logits of others", self._around(everything, ids, changed=row), others, others),
            ("depends on a token's place, not on its position", self._around(order, ids[order]), order, everything),
            ("depends on the number of tokens", self._around(few, ids[few]), few, few),
            ("lets one far position change what others get (rotary that depends on the length)",
             self._around(everything, ids, far), last, last),
            ("does not count a document's positions from 0", self._default_positions(ids), everything, everything),
        ):  # fmt: skip
            if not _is_same(base, after, kept, at):
                raise self.refuse("the model around its layers", why)

    def _far(self) -> int:
        """Return a position that no document of the proof has, beyond those trained so far where there is no table."""
        tables = [
            one for name, one in self.whole.model.named_modules() if isinstance(one, nn.Embedding) and "pos" in name
        ]
        text = self.whole.model.config.get_text_config(decoder=True)
        return _ROWS if tables else 5 * int(getattr(text, "max_position_embeddings", None) or 1000)


def _without_positions(forward: Callable[..., Any], **given: Any) -> Any:
    return forward(**{key: value for key, value in given.items() if key != "position_ids"})


_RUNNING: list[_Proof] = []


@contextmanager
def _running(proof: _Proof) -> Iterator[None]:
    _RUNNING.append(proof)
    try:
        yield
    finally:
        _RUNNING.pop()


def _kinds(config: PretrainedConfig, layers: Sequence[nn.Module]) -> list[int]:
    """Number the kinds of layers: by what the configuration lists of each, their modules, and how these are set."""
    listed = [
        value for value in config.to_dict().values() if isinstance(value, list | tuple) and len(value) == len(layers)
    ]
    kinds: dict[Any, int] = {}
    found = []
    for at, layer in enumerate(layers):
        modules = tuple((name, type(module).__name__, _settings(module)) for name, module in layer.named_modules())
        found.append(kinds.setdefault((*(str(value[at]) for value in listed), modules), len(kinds)))
    return found


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str | None)}
    return tuple(
        sorted((name, str(value)) for name, value in plain.items() if "idx" not in name and "layer" not in name)
    )


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


def _aligned(base: Sequence[_Trace], other: Sequence[_Trace]) -> tuple[list[_Trace], list[_Trace]]:
    """Return the calls of modules that both runs made alike often; experts are called as tokens choose them."""
    counts = [
        {path: [one for one in traces if one.path == path] for path in {t.path for t in traces}}
        for traces in (base, other)
    ]
    both = [
        path for path in dict.fromkeys(one.path for one in base) if len(counts[0][path]) == len(counts[1].get(path, ()))
    ]
    return [one for path in both for one in counts[0][path]], [one for path in both for one in counts[1][path]]


def _is_same(before: Sequence[Tensor], after: Sequence[Tensor], rows: Tensor, at: Tensor) -> bool:
    """Compare some rows of one run with some of another, each number with the largest of its column."""
    if len(before) != len(after):
        return False
    for one, other in zip(before, after, strict=True):
        one, other = one.flatten(1)[rows], other.flatten(1)[at]
        if one.shape != other.shape:
            return False
        size = one.abs().amax(0) + 1e-6 * one.abs().max() + 1e-30
        if one.numel() and not float(((one - other).abs() / size).max()) <= _TOLERANCE:
            return False
    return True


# ---- attention and masks --------------------------------------------------------------------------------------------

_KNOWN = {"s_aux", "position_ids", "cache_position", "position_embeddings"}


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    proof = _RUNNING[-1]
    name, count = type(module).__name__, len(proof.rows)
    if proof.layer < 0:
        raise UnsupportedModelError(f"{proof.name}: {name} attends outside the layers, which replay does not know")
    if given.get("dropout"):
        raise proof.refuse(name, f"drops out {given['dropout']} of attention (set it to 0 in config.json)")
    if proof.is_recording and (why := _own_way(module, query, key, attention_mask, given, count)):
        paths = {id(one): path for path, one in proof.whole.layers[proof.layer].named_modules()}
        proof.mixes(proof.layer, paths.get(id(module), proof.open[-1].path), why)

    def some() -> Tensor:
        # Whatever attention gives, all else must be token-wise.
        shape = (1, query.shape[2], query.shape[1], value.shape[-1])
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(proof.held)), dtype=query.dtype)

    return proof.hold("attention", (query, key, value), some), None


def _own_way(module: nn.Module, query: Tensor, key: Tensor, mask: Any, given: dict[str, Any], count: int) -> str:
    """Say what the range attention cannot do of a call; "" = it can do all."""
    if query.ndim != 4 or query.shape[0] != 1 or query.shape[2] != count or key.shape[2] != count:
        return f"attends with queries {list(query.shape)} and keys {list(key.shape)}"
    if own := [name for name, one in given.items() if isinstance(one, Tensor) and name not in _KNOWN]:
        return f"attends with {', '.join(own)}"
    if mask is None:
        is_causal = given.get("is_causal", getattr(module, "is_causal", True))
        return "" if is_causal else "lets tokens see later ones"
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (count, count) or mask.numel() != count * count:
        return f"attends with a mask of its own {list(getattr(mask, 'shape', ()))}"
    mask = mask.reshape(count, count)
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((seen | (mask < -1e4)).all()):
        return "attends with a bias in the mask"
    q, k = torch.arange(count)[:, None], torch.arange(count)[None]
    causal = k <= q
    sizes = range(1, count + 1)
    if any(
        torch.equal(seen, causal & (k > q - size)) or torch.equal(seen, causal & (k // size == q // size))
        for size in sizes
    ):
        return ""
    return "lets tokens see later ones" if seen[0].all() else "attends with a mask of another kind"


ALL_ATTENTION_FUNCTIONS.register(_PROBE, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, eager_mask)
