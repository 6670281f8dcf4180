"""Find the parts of a decoder of transformers, and what its layers compute, from the model itself.

Nothing is known of an architecture but its plans and its module tree. The model is made on the meta device, without
memory, and its own forward runs once on a few tokens; its layers run in it one by one under a `TorchFunctionMode`:

    around the layers   modules with weights that are called before the first layer (`prologue`) and behind the last
    in a layer          products of tokens' rows with weights, choices of the largest, attention, experts, functions
                        that carry a state; whose outputs backward reads, and which are changed in place
    between layers      what a layer reads of another one besides hidden states (Gemma 3n and 4 share keys)
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from evenload.errors import UnsupportedModelError
from evenload.runtime.model.around import LayerCall, WholeModel, find_layers, using
from evenload.runtime.model.mask_rules import MaskRule, mask_rule, unknown_tensors
from evenload.runtime.model.packed_cuts import PLANS, PackedCut, packed_cut
from evenload.runtime.model.state_calls import Spans, StateCall, StateForm, carrying
from evenload.types.layer_kind import AttentionKind, ExpertsKind, Product, StateKind

_SURVEY = "evenload_survey"
SURVEYED_ROWS = 29
"""Tokens of the survey; a prime that is no size of a model."""


@dataclass(frozen=True)
class LayerSites:
    """Names what replay records in a layer, by the names of modules in it.

    Args:
        linears: whose input rows are the tokens, and that run once.
        unused: of these and of experts, whose output no backward reads: a sum alone takes it.
        in_place: whose output the layer changes.
        choosing: modules that choose the largest of some numbers a token, or multiply with a weight of their own.
        experts: blocks of experts.
        calls: of attention, and of functions that carry a state, in order.
        mixers: modules that mix rows in a way of their own, in which nothing is recorded ("" = the layer).
    """

    linears: frozenset[str]
    unused: frozenset[str]
    in_place: frozenset[str]
    choosing: frozenset[str]
    experts: frozenset[str]
    calls: tuple[AttentionKind | StateForm, ...]
    mixers: frozenset[str] = frozenset()

    @property
    def attention(self) -> tuple[AttentionKind, ...]:
        """Its calls, in order."""
        return tuple(call for call in self.calls if isinstance(call, AttentionKind))

    def is_mixed(self, name: str) -> bool:
        """Say whether a module is one of `mixers`, or inside one."""
        return any(not path or name == path or name.startswith(f"{path}.") for path in self.mixers)


@dataclass(frozen=True)
class TensorCut:
    """Says how linears of layers are cut over ranks by transformers' plan, by the last part of their names: by output
    (`columns`) or input (`rows`); paths of blocks of `experts`, of which every rank has some; modules with `packed`
    weights by path; and named `sizes` that must divide by the number of ranks. Or why nothing can be cut."""

    columns: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    packed: Mapping[str, PackedCut] = field(default_factory=dict, hash=False)
    sizes: tuple[tuple[str, int], ...] = ()
    refusal: str = ""


def linear_kind(name: str) -> str:
    """Return the last part of a module's name, which an adapter may be wrapped around."""
    return name.removesuffix(".base_layer").rsplit(".", 1)[-1]


def block_of(linear: str) -> str:
    """Return the block of a linear that is cut by output: its module, whose input every rank needs whole."""
    return linear.removesuffix(".base_layer").rsplit(".", 1)[0]


@dataclass(frozen=True)
class Structure:
    """Names the parts of a decoder, as paths in transformers' whole model.

    Args:
        layers: the list of layers; sites: what each does.
        prologue, epilogue: modules with weights before the first and behind the last layer, in the order of their
            calls, embedding and head among them.
        is_tied: embedding and head share their weights.
        returns_tuple: layers return hidden states in a tuple.
        groups: layers that are replayed in one graph, as one reads what another has made; in order.
        reads_tokens: layers read more of the prologue than hidden states, so that all lie on one stage.
    """

    layers: str
    sites: tuple[LayerSites, ...]
    embedding: str
    head: str
    prologue: tuple[str, ...]
    epilogue: tuple[str, ...]
    is_tied: bool
    returns_tuple: bool
    groups: tuple[tuple[int, ...], ...]
    reads_tokens: bool
    cut: TensorCut

    @property
    def num_layers(self) -> int:
        return len(self.sites)

    def layer_path(self, index: int) -> str:
        """Return the name of a layer in the whole model."""
        return f"{self.layers}.{index}"


def structure_of(model: PreTrainedModel) -> Structure:
    """Survey a model on the meta device, whose configuration is not changed. `UnsupportedModelError`: it has no list of
    layers, or calls them in a way that replay does not know."""
    key = json.dumps([type(model).__name__, model.config.to_dict()], sort_keys=True, default=str)
    if key not in _KNOWN:
        _KNOWN[key] = _survey(model)
    return _KNOWN[key]


_KNOWN: dict[str, Structure] = {}


def _survey(model: PreTrainedModel) -> Structure:
    survey = Survey(model)
    try:
        survey.run()
    except UnsupportedModelError:
        raise
    except Exception as error:  # of the model's own code, on tensors without values
        where = f"layer {survey.layer}" if survey.layer >= 0 else "the model around its layers"
        raise UnsupportedModelError(
            f"{type(model).__name__}: {where} computes with more than shapes before it trains ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}), which replay does not know"
        ) from error
    return survey.structure()


class LayerNotes:
    """Notes what one layer does. Lists are in the order of calls."""

    def __init__(self) -> None:
        self.products: list[tuple[str, bool, Product]] = []  # with their linears, and whether rows are tokens
        self.inputs: set[tuple[int, int]] = set()  # of products: storages and widths
        self.outputs: dict[str, tuple[Tensor, int]] = {}  # of sites, and their versions
        self.used: set[str] = set()
        self.attention: list[tuple[str, AttentionKind]] = []
        self.experts: dict[str, ExpertsKind] = {}
        self.packed: dict[str, PackedCut] = {}  # modules by path
        self.carriers: dict[str, str] = {}  # modules that carry a state by path: their classes
        self.states: list[StateKind] = []
        self.calls: list[AttentionKind | StateForm] = []
        self.stacked: list[Tensor] = []  # weights of all experts, [E, in, out], in code of the model's own
        self.choosing: set[str] = set()
        self.choices: list[tuple[str, int]] = []  # by module: how many sets of the largest a token
        self.chosen = self.router = self.cast_router = 0  # in a set; results of products of routers
        self.mixer = self.mixer_path = ""
        self.divided_biases = 0  # weights of those that tensor parallelism divides
        self.has_row_biases = False

    def is_mixed(self, path: str) -> bool:
        """Say whether a module mixes tokens in a way of its own, or is inside one."""
        return bool(self.mixer) and f"{path}.".startswith(f"{self.mixer_path}." if self.mixer_path else "")

    def sites(self) -> LayerSites:
        calls = Counter(name for name, _, _ in self.products)
        linears = {name for name, is_of_tokens, _ in self.products if is_of_tokens and calls[name] == 1}
        return LayerSites(
            linears=frozenset(linears),
            unused=frozenset((linears | self.experts.keys()) - self.used),
            in_place=frozenset(name for name, (output, version) in self.outputs.items() if output._version != version),
            choosing=frozenset(self.choosing),
            experts=frozenset(self.experts),
            calls=tuple(self.calls),
        )

    def refuse_cut(self, styles: Mapping[str, str]) -> str:
        """Say why transformers' plan, of styles by the last part of linears' names, cannot be followed; "" = it can.
        Between blocks a rank has rows of its own, in blocks all rows and what its columns make of them."""
        kinds = {name: self._style(name, styles) for name, _, _ in self.products}
        blocks = {block_of(name) for name, style in kinds.items() if style == "colwise"}

        def inside(names: Iterable[str]) -> str:
            return ", ".join(sorted(one for one in names if any(f"{one}.".startswith(f"{block}.") for block in blocks)))

        others = sorted(name for name, style in kinds.items() if style not in ("colwise", "rowwise", *_WHOLE))
        uncut = inside(name for name, style in kinds.items() if style in _WHOLE)
        mixing = sorted({name for name, _ in self.attention if not inside([name])})
        whole = inside([*self.choosing, *self.experts])
        carriers = sorted({kind for path, kind in self.carriers.items() if path not in self.packed})
        reasons = {
            **{one.refusal: bool(one.refusal) for one in self.packed.values()},
            f"carries states along documents in {', '.join(carriers)}, of which no cut by heads is known": carriers,
            f"needs {', '.join(others)} whole on one rank, as norms of all heads and fused matrices do (its plan for "
            f"tensor parallelism: {', '.join(sorted({kinds[one] for one in others}))})": others,
            f"attends in {', '.join(mixing)}, whose linears its plan for tensor parallelism does not cut: every rank "
            "would compute all of it": mixing,
            f"multiplies with the whole of {uncut} between linears that are cut": uncut,
            f"chooses in {whole}, between linears that are cut": whole,
            "has attention sinks, which its plan for tensor parallelism does not cut": styles.get("sinks") != "colwise"
            and any(one.sinks for _, one in self.attention),
        }
        return next((why for why, is_so in reasons.items() if is_so), "")

    def _style(self, linear: str, styles: Mapping[str, str]) -> str:
        block, _, name = linear.rpartition(".")
        return self.packed[block].style(name) if block in self.packed else styles.get(name, "")

    def packed_styles(self) -> Iterator[tuple[str, str]]:
        """Yield the last parts of the names of linears with packed weights, or beside them, and their styles."""
        for name, _, _ in self.products:
            if block_of(name) in self.packed:
                yield linear_kind(name), self._style(name, {})

    def cut_sizes(self, columns: Collection[str]) -> Iterator[tuple[str, int]]:
        """Yield named sizes of what is cut."""
        for packed in self.packed.values():
            yield from packed.counts.items()
        for _, one in self.attention:
            yield from (("num_attention_heads", one.heads), ("num_key_value_heads", one.kv_heads))
        known = {name for name, _ in self.attention} | self.packed.keys()
        for name, _, product in self.products:
            if product.name in columns and block_of(name) not in known:
                yield f"outputs of {name}", product.outputs
        for name, experts in self.experts.items():
            yield f"number of {name}", experts.count


_WHOLE = ("", "replicated", "replicated_with_grad_allreduce")
"""Styles of what every rank holds whole; "" = the plan does not name it."""

# Their results hold values of what they were given in sums and views alone, which no backward of theirs reads.
_SUMS = {"add", "__add__", "__radd__", "__iadd__", "add_", "view", "reshape", "squeeze", "unsqueeze", "transpose",
         "contiguous", "flatten", "unflatten", "__get__", "size", "dim", "clone", "permute", "chunk",
         "split", "untyped_storage", "is_floating_point"}  # fmt: skip
# Asked of values: masks hide nothing, positions are of one document, and no expert has tokens.
_QUESTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda values: torch.tensor(data=True),
    "any": lambda values: torch.tensor(data=False),
    "nonzero": lambda values: values.new_empty(0, values.ndim, dtype=torch.int64),
}
_SCALES = {"mul", "__mul__", "__rmul__", "div", "__truediv__"}
_SCORES = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"}


class Survey(TorchFunctionMode):
    """Notes what is called around and in the layers of a model without memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.whole, self.layer = model, WholeModel(model, find_layers(model)), -1
        self.notes: list[LayerNotes] = []
        self.hidden_size = 0
        self.prologue: list[str] = []
        self.epilogue: list[str] = []
        self.links: list[tuple[int, int]] = []
        self.refusals: list[str] = []
        """Why the model cannot be trained; what it computes is told all the same."""
        self.reads_tokens = self.reads_embeddings = self._is_inside = False
        """Layers read more of the prologue than hidden states; its backward reads what the embedding gives."""
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._owners: dict[int, str] = {}  # of weights, by id
        self._inner: dict[int, str] = {}  # modules in the running layer, by id
        self._stack: list[nn.Module] = []
        self._sites: dict[int, frozenset[str]] = {}  # whose values a storage holds
        self._made_in: dict[int, int] = {}  # storages by layer, -1 = before them
        self._alive: list[Tensor] = []  # so that no storage is another's later

    def run(self) -> None:
        """Run the model, whose layers are back in their places afterwards."""
        positions = torch.arange(SURVEYED_ROWS, device="meta")
        like = torch.empty(SURVEYED_ROWS, 1, device="meta", dtype=self.model.dtype)
        enter = nn.modules.module.register_module_forward_pre_hook(self._enter)
        leave = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        _RUNNING.append(self)
        try:
            with self, using(self.whole.configs, _SURVEY), carrying(self._carry), torch.enable_grad():
                self.whole.run(positions, self._run_layer, token_ids=positions, like=like)
        finally:
            _RUNNING.pop()
            enter.remove()
            leave.remove()
            self.whole.restore()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)
        path = self._paths.get(id(module), "")
        if self.layer >= 0 or not path or not module._parameters:
            return
        part = self.epilogue if self.notes else self.prologue
        if self.whole.path.startswith(f"{path}."):
            own = ", ".join(module._parameters)
            raise UnsupportedModelError(f"{type(self.model).__name__} has weights outside any module: {path}.{own}")
        if len(self.notes) not in (0, len(self.whole.layers)):
            raise UnsupportedModelError(f"{type(self.model).__name__} calls {path} between its layers")
        if path not in part:
            part.append(path)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _run_layer(self, index: int, call: LayerCall) -> Tensor:
        if index != len(self.notes):
            raise UnsupportedModelError(f"{type(self.model).__name__} calls layer {index} out of turn")
        layer, hidden = self.whole.layers[index], call.hidden
        if hidden.shape[:2] != (1, SURVEYED_ROWS) or hidden.ndim != 3:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives its layers hidden states {list(hidden.shape)}, not one a token"
            )
        self._made_in[_storage_of(hidden)] = index
        self._sites.clear()
        self.layer, self.hidden_size = index, hidden.shape[-1]
        self.notes.append(LayerNotes())
        self._inner = {id(module): name for name, module in layer.named_modules()}
        self._owners = {
            id(weight): name for name, module in layer.named_modules() for weight in module._parameters.values()
        }
        found = {name: packed_cut(module) for name, module in layer.named_modules()}
        self.notes[-1].packed = {name: cut for name, cut in found.items() if cut is not None}
        output = layer(*call.args, **call.kwargs)
        self.whole.returns_tuple = not isinstance(output, Tensor)
        self.layer = -1
        return output if isinstance(output, Tensor) else output[0]

    def structure(self) -> Structure:
        """Return what was found; `UnsupportedModelError` where it cannot be trained."""
        model, layers = self.model, self.whole.path
        if self.refusals:
            raise UnsupportedModelError(self.refusals[0])
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        paths = {name for name in (self._paths.get(id(embedding)), self._paths.get(id(head))) if name}
        if len(paths) < 2:
            raise UnsupportedModelError(f"{type(model).__name__} has no embedding or no head of its own")
        # A module inside another one with weights of its own is part of that.
        epilogue = tuple(one for one in self.epilogue if not any(one.startswith(f"{two}.") for two in self.epilogue))
        owners: dict[int, str] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            other = owners.setdefault(id(weight), name)
            is_in_one = any(other.startswith(f"{part}.") and name.startswith(f"{part}.") for part in epilogue)
            if other != name and weight is not embedding.weight and not is_in_one:  # type: ignore[union-attr]
                raise UnsupportedModelError(f"{type(model).__name__} shares a weight as {other} and {name}")
        known = {f"{part}." for part in (layers, *self.prologue, *self.epilogue)}
        for name, _ in model.named_parameters():
            if not any(name.startswith(part) for part in known):
                raise UnsupportedModelError(
                    f"{type(model).__name__} does not call the module of {name} for a text, so it cannot be trained"
                )
        return Structure(
            layers=layers,
            sites=tuple(notes.sites() for notes in self.notes),
            embedding=self._paths[id(embedding)],
            head=self._paths[id(head)],
            prologue=tuple(self.prologue),
            epilogue=epilogue,
            is_tied=embedding.weight is head.weight,  # type: ignore[union-attr]
            returns_tuple=self.whole.returns_tuple,
            groups=_groups(len(self.notes), self.links),
            reads_tokens=self.reads_tokens,
            cut=self.tensor_cut(layers),
        )

    def tensor_cut(self, layers: str) -> TensorCut:
        """Return how transformers' plan cuts the layers, which have this path."""
        config: Any = self.model.config.get_text_config(decoder=True)
        plan: dict[str, str] | None = getattr(config, "base_model_tp_plan", None)
        ours, of_packed = PLANS.get(config.model_type), dict(chain(*(notes.packed_styles() for notes in self.notes)))
        # Experts lie whole on their ranks, however the plan cuts their matrices.
        parts = {tuple(name.split(".")): style for name, style in (plan or {}).items()}
        styles = {name[-1]: style for name, style in parts.items() if "experts" not in name}
        styles = {**of_packed, **styles, **(ours or {})}
        columns, rows = (
            frozenset(name for one in (styles, of_packed) for name, style in one.items() if style == wanted)
            for wanted in ("colwise", "rowwise")
        )
        refusals = [notes.refuse_cut(styles) for notes in self.notes]
        reasons = {
            "has no plan for tensor parallelism in transformers": not plan and ours is None,
            f"makes more than an embedding before its layers ({', '.join(self.prologue[1:])})": len(self.prologue) > 1,
            **dict.fromkeys(refusals, True),
            "computes with its embeddings before its layers": self.reads_embeddings,
        }
        if why := next((why for why, is_so in reasons.items() if is_so and why), ""):
            return TensorCut(refusal=why)
        return TensorCut(
            columns,
            rows,
            frozenset(f"{layers}.{index}.{name}" for index, notes in enumerate(self.notes) for name in notes.experts),
            {f"{layers}.{at}.{name}": cut for at, notes in enumerate(self.notes) for name, cut in notes.packed.items()},
            tuple(dict.fromkeys(size for notes in self.notes for size in notes.cut_sizes(columns))),
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "dropout" and _drops(args, kwargs):
            self._refuse_dropout()
        if name in _QUESTIONS and isinstance(args[0], Tensor) and args[0].is_meta:
            return _QUESTIONS[name](args[0])
        output = func(*args, **kwargs)
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        made = [one for one in tree_flatten(output)[0] if isinstance(one, Tensor)]
        self._alive += made
        for one in made:
            self._made_in.setdefault(_storage_of(one), self.layer)
        if self._is_inside:
            return output
        if self.layer >= 0:
            self._note(func, args, kwargs, tensors, output, made)
        elif not self.notes:
            self.reads_embeddings |= bool(self._used(name, args, tensors, made))
            if func is nn.functional.embedding:
                self._sites[_storage_of(output)] = frozenset(("embedding",))
        return output

    def _note(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], output: Any, made: list[Tensor]) -> None:
        notes, name = self.notes[-1], getattr(func, "__name__", "")
        for one in tensors:
            if one.requires_grad and not isinstance(one, nn.Parameter) and name != "__get__":
                origin = self._made_in.get(_storage_of(one), self.layer)
                if origin < 0:
                    self.reads_tokens = True
                elif origin != self.layer:
                    self.links.append((origin, self.layer))
        notes.used |= self._used(name, args, tensors, made)
        if name == "topk":
            path = next(self._inner[id(one)] for one in reversed(self._stack) if id(one) in self._inner)
            notes.choosing.add(path)
            notes.choices.append((path, made[-1].numel() // SURVEYED_ROWS))
            notes.chosen = made[-1].shape[-1]
        elif func is nn.functional.linear or func is torch.addmm:
            self._multiply(notes, args[1 if func is nn.functional.linear else 2], args, output)
        if name == "linear" and not isinstance(args[1], nn.Parameter):
            own = {one.shape for one in self._stack[-1].parameters(recurse=False)}
            notes.cast_router += output.shape[-1] * (args[1].shape in own)
        if name in _SCORES and isinstance(tensors[1], nn.Parameter) and tensors[1].ndim > 2:
            notes.stacked.append(tensors[1])
        if _mixes(name, args, kwargs, tensors, made):
            self._note_mixer(notes)

    def _used(self, name: str, args: Any, tensors: list[Tensor], made: list[Tensor]) -> frozenset[str]:
        """Return the sites whose outputs the backward of a call reads; follow those of others."""
        sites = frozenset().union(*(self._sites.get(_storage_of(one), frozenset()) for one in tensors))
        trained = [isinstance(one, Tensor) and one.requires_grad for one in args]
        scales = name in _SCALES and sum(trained) == 1 and (trained[0] or "mul" in name)
        if name not in _SUMS and not scales and name != "dropout":
            return sites
        for one in made if sites else ():
            self._sites[_storage_of(one)] = self._sites.get(_storage_of(one), frozenset()) | sites
        return frozenset()

    def _refuse_dropout(self) -> None:
        config = self.model.config.to_dict().items()
        keys = [f"{key} is {value}" for key, value in config if "drop" in key and isinstance(value, float) and value]
        self.refusals.append(
            f"{', '.join(keys) or type(self._stack[-1]).__name__}: a dropout mask would differ between forward and "
            "backward; set it to 0 in config.json"
        )

    def _multiply(self, notes: LayerNotes, weight: Tensor, args: Any, output: Tensor) -> None:
        owner, module = self._owners.get(id(weight)), self._stack[-1]
        if owner is None:
            return
        if self._inner.get(id(module)) != owner or not isinstance(module, nn.Linear | Conv1D):
            notes.choosing.add(owner)
        if owner in notes.choosing:
            notes.router += output.shape[-1]
            return
        rows = args[1 if isinstance(module, Conv1D) else 0]
        key, *shape = (_storage_of(rows), rows.shape[-1]), *rows.shape[:-1]
        product = Product(
            name=linear_kind(owner),
            inputs=rows.shape[-1],
            outputs=output.shape[-1],
            rows=max(1, math.prod(shape) // SURVEYED_ROWS),
            shares_input=key in notes.inputs,
        )
        notes.products.append((owner, shape in ([1, SURVEYED_ROWS], [SURVEYED_ROWS]), product))
        notes.inputs.add(key)
        self._alive.append(rows)
        if isinstance(module.bias, nn.Parameter):
            is_of_rows = output.shape[-1] == self.hidden_size
            notes.has_row_biases |= is_of_rows
            notes.divided_biases += 0 if is_of_rows else module.bias.numel()
        self._note_output(owner, output)

    def _note_output(self, site: str, output: Tensor) -> None:
        """Follow what becomes of a site's output."""
        self._sites[_storage_of(output)] = frozenset((site,))
        self.notes[-1].outputs[site] = output, output._version

    def _note_mixer(self, notes: LayerNotes) -> None:
        own = next(one for one in reversed(self._stack) if not type(one).__module__.startswith("torch."))
        if not notes.mixer:
            notes.mixer, notes.mixer_path = type(own).__name__, self._inner.get(id(own), "")

    def _carry(self, call: StateCall) -> Tensor:
        """Note a call that carries a state, without what its function computes."""
        notes, rows = self.notes[-1], [one for one, _ in call.rows]
        notes.carriers[self._inner[id(self._stack[-1])]] = type(self._stack[-1]).__name__
        notes.used |= frozenset().union(*(self._sites.get(_storage_of(one), frozenset()) for one in rows))
        self._is_inside = True
        try:
            output, (end,) = call.over(Spans([SURVEYED_ROWS], [None], [True]))
        finally:
            self._is_inside = False
        assert end is not None, "the state behind the rows is wanted"
        kind = StateKind(
            function=call.function,
            inputs=sum(one.numel() for one in rows) // SURVEYED_ROWS,
            outputs=output.numel() // SURVEYED_ROWS,
            state=end.numel(),
            is_wide=end.element_size() > rows[0].element_size(),
        )
        notes.states.append(kind)
        notes.calls.append(call.form)
        return output

    def note_attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, given: dict[str, Any]
    ) -> None:
        if self.layer < 0:
            raise UnsupportedModelError(f"{type(module).__name__} attends outside the layers")
        notes = self.notes[-1]
        if rule.refusal:
            self.refusals.append(rule.refusal)
        if given.get("dropout"):
            self._refuse_dropout()
        if rule.refusal or unknown_tensors(given):
            self._note_mixer(notes)
        kind = AttentionKind(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            window=rule.window,
            chunk=rule.chunk,
            sinks=given.get("s_aux") is not None,
            soft_cap=float(given.get("softcap") or 0.0),
        )
        notes.attention.append((self._inner[id(module)], kind))
        notes.calls.append(kind)

    def note_experts(self, module: Any, rows: Tensor, chosen: int, output: Tensor) -> None:
        count, name, width = module.down_proj.shape[0], self._inner[id(module)], rows.shape[-1]
        inner = module.down_proj.numel() // (count * width)
        notes, key = self.notes[-1], (_storage_of(rows), width)
        notes.experts[name] = ExpertsKind(
            count=count,
            chosen=chosen,
            width=width,
            inner=inner,
            gated=bool(module.has_gate),
            shares_input=key in notes.inputs,
        )
        notes.inputs.add(key)
        self._note_output(name, output)


_RUNNING: list[Survey] = []


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _mixes(name: str, args: Any, kwargs: Any, tensors: list[Tensor], made: list[Tensor]) -> bool:
    """Say whether a call computes with places of tokens: a convolution, a running sum or a padded block over them,
    scores of tokens by tokens, or their numbers."""
    if name == "arange":
        return SURVEYED_ROWS in args or kwargs.get("end") == SURVEYED_ROWS
    if not tensors:
        return False
    shape = tensors[0].shape
    if name in ("cumsum", "cumprod"):
        return shape[kwargs.get("dim", args[1] if len(args) > 1 else -1)] == SURVEYED_ROWS
    if name == "pad":
        return SURVEYED_ROWS in shape[:-1] and SURVEYED_ROWS not in made[0].shape[:-1]
    if name in _SCORES and len(tensors) == 2 and min(len(shape), tensors[1].ndim) > 1:
        return shape[-1] == SURVEYED_ROWS or (shape[-2] == SURVEYED_ROWS and tensors[1].shape[-1] == SURVEYED_ROWS)
    return name == "conv1d"


def _drops(args: Any, kwargs: Any) -> bool:
    probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    is_training = kwargs.get("training", args[2] if len(args) > 2 else True)
    return bool(is_training and probability)


def _groups(num_layers: int, links: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Join layers from one that makes something to the last that reads it."""
    joined = {layer for maker, reader in links for layer in range(maker + 1, reader + 1)}  # to the one before
    groups: list[tuple[int, ...]] = []
    for layer in range(num_layers):
        groups.append((*groups.pop(), layer) if layer in joined else (layer,))
    return tuple(groups)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    rule = getattr(attention_mask, "rule", MaskRule())
    _RUNNING[-1].note_attention(module, query, key, value, rule, given)
    return query.transpose(1, 2)[..., :1] + key.sum() + value.sum() + value.new_zeros(value.shape[-1]), None


def _mask(**given: Any) -> Tensor:
    mask = torch.zeros(1, 1, SURVEYED_ROWS, SURVEYED_ROWS, device="meta")
    mask.rule = mask_rule(**given)  # type: ignore[attr-defined]
    return mask


def _mix_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    output = hidden_states * top_k_weights.sum(-1, keepdim=True)
    _RUNNING[-1].note_experts(module, hidden_states, top_k_index.shape[-1], output)
    return output


ALL_ATTENTION_FUNCTIONS.register(_SURVEY, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_SURVEY, _mask)
ALL_EXPERTS_FUNCTIONS.register(_SURVEY, _mix_experts)
