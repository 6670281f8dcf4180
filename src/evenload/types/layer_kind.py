"""Describe what a decoder layer computes of every token: matrix products, attention, experts, or a mixer of its own
(`LayerKind`). Layers that are alike in all of this are of one kind."""

from evenload.errors import ConfigError
from evenload.types.base import Frozen, require_at_least_one


class Product(Frozen, omit_defaults=True):
    """Describe the product of every token with a matrix.

    Args:
        name: of the linear in the layer, its last part ("q_proj").
        inputs, outputs: widths.
        rows: of the input that a token has.
        shares_input: an earlier product of the layer reads the same input.
        is_read: backward reads the output; a sum with the residual stream alone does not.
        in_mixer: it is part of `LayerKind.mixer`, or its rows are no tokens' in order (of latent attention some are
            [1, 1, T, rank]): nothing is kept of it, and backward runs it again.
    """

    name: str
    inputs: int
    outputs: int
    rows: int = 1
    shares_input: bool = False
    is_read: bool = True
    in_mixer: bool = False

    @property
    def parameters(self) -> int:
        """Weights of the matrix."""
        return self.inputs * self.outputs


class AttentionKind(Frozen, omit_defaults=True):
    """Describe attention over ranges of tokens.

    Args:
        heads, kv_heads: of queries; of keys and values, as they enter the scores (GQA when fewer).
        head_dim, value_dim: widths of a query or key, and of a value.
        window: the last tokens that a token sees, itself among them; 0 = all.
        chunk: documents are divided into chunks of so many tokens, and a token sees its own; 0 = no chunks.
        sinks: every head has a score that takes part in the softmax and has no value.
        soft_cap: limit of scores, by a tanh; 0 = none.
        is_kept: keys, values and outputs are; those inside a mixer are made again.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    chunk: int = 0
    sinks: bool = False
    soft_cap: float = 0.0
    is_kept: bool = True

    @property
    def reach(self) -> int:
        """The window, or the chunk as a negative number: what pairs are counted by (`types.columns.causal_pairs`)."""
        return -self.chunk if self.chunk else self.window

    @property
    def pair_width(self) -> int:
        """Products of a (query, key) pair: all heads' scores and weighted values."""
        return self.heads * (self.head_dim + self.value_dim)

    @property
    def key_width(self) -> int:
        """Elements of a token's keys and values."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    def local_kv_heads(self, tp: int) -> int:
        """Return the key/value heads of one device; copies where there are fewer than devices."""
        return max(1, self.kv_heads // tp)

    def local_key_width(self, tp: int) -> int:
        """Return the elements of a token's keys and values on one device."""
        return self.local_kv_heads(tp) * (self.head_dim + self.value_dim)


class ExpertsKind(Frozen, omit_defaults=True):
    """Describe a block of experts behind a router. Every chosen expert computes rows of its own.

    Args:
        count, chosen: experts, and how many of them a token uses.
        width, inner: of their input and output, and between their matrices.
        gated: three matrices (SwiGLU) instead of two.
        router, choices: what routers keep of a token: results of products, and numbers of experts and groups.
        cast_router: results of products with weights cast to fp32, kept where the model is of fp32 itself.
        is_read: backward reads the output.
        shares_input: an earlier product of the layer (a shared expert's) reads the same input.
    """

    count: int
    chosen: int
    width: int
    inner: int
    gated: bool = True
    router: int = 0
    choices: int = 0
    cast_router: int = 0
    is_read: bool = False
    shares_input: bool = False

    @property
    def parameters(self) -> int:
        """Weights of one expert's matrices."""
        return (3 if self.gated else 2) * self.width * self.inner

    @property
    def first_outputs(self) -> int:
        """Elements a token that the chosen experts' first matrices put out."""
        return (2 if self.gated else 1) * self.inner * self.chosen


_CONVOLUTION, _ROW_BY_ROW = "causal_conv1d_fn", "mamba_selective_scan"
_IN_CHUNKS = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"
STATE_CHUNK = 64
"""Rows that a scan computes at once: products of matrices inside a chunk, a recurrence from chunk to chunk."""


class StateKind(Frozen, omit_defaults=True):
    """Describe a function of a layer that carries a state along a document, row by row: a scan, or a convolution, whose
    state is its last inputs. Documents are cut between its rows; the state at a cut is all that goes on.

    Args:
        function: its name in transformers' modules ("causal_conv1d_fn", "mamba2_chunk_scan").
        inputs, outputs: elements a token of what it reads and gives.
        state: elements of the state of a document.
        is_wide: the state is of fp32 where the model is of less.
    """

    function: str
    inputs: int
    outputs: int
    state: int
    is_wide: bool = True

    def __post_init__(self) -> None:
        known = (_CONVOLUTION, *_IN_CHUNKS, _ROW_BY_ROW)
        if self.function not in known:
            raise ConfigError(f"a layer: the work of {self.function} is not known; {', '.join(known)} are")
        require_at_least_one(f"a layer: {self.function}: ", self, "inputs", "outputs", "state")

    @property
    def is_scan(self) -> bool:
        """Whether it is called slice by slice; a convolution takes all slices of a pack at once."""
        return self.function != _CONVOLUTION

    @property
    def products(self) -> int:
        """Multiply-adds of a token forward. A convolution: its kernel's width for every output, which is one more than
        the inputs of a channel that its state holds. A scan: three for every element of its state, which fades, is
        written and is read. One in chunks also multiplies the rows of a chunk with each other: every element that goes
        in or out with half of them, on average, as later rows are not seen."""
        if not self.is_scan:
            return self.state + self.outputs
        in_chunk = STATE_CHUNK // 2 * (self.inputs + self.outputs) if self.function in _IN_CHUNKS else 0
        return 3 * self.state + in_chunk


class LayerKind(Frozen, omit_defaults=True):
    """Describe layers that compute alike.

    Args:
        products: in the order in which they are computed, without those of experts and their router.
        parameters: all weights, also of all experts, the router, norms and biases.
        copied_parameters: those of them that tensor parallelism copies: norms, router, biases behind a sum over ranks.
        attention: None = none over ranges of tokens. experts: None = none.
        states: functions that carry a state along a document, in the order of their calls.
        mixer: class of a module that mixes tokens in a way of its own, so that documents must not be cut; "" = none.
        blocks: whose hidden states tensor parallelism gathers and scatters: attention, feed-forward; not experts.
        biases: matrices have biases behind a sum over tensor-parallel ranks.
        adapter_parameters: the only trained weights (LoRA); 0 = all are trained, or, in a model with adapters, none.
    """

    products: tuple[Product, ...]
    parameters: int
    copied_parameters: int = 0
    attention: AttentionKind | None = None
    experts: ExpertsKind | None = None
    states: tuple[StateKind, ...] = ()
    mixer: str = ""
    blocks: int = 2
    biases: bool = False
    adapter_parameters: int = 0

    def __post_init__(self) -> None:
        for one in self.products:
            require_at_least_one(f"a layer: {one.name} ", one, "inputs", "outputs")
        if attention := self.attention:
            require_at_least_one("a layer: ", attention, "heads", "kv_heads", "head_dim", "value_dim")
        if experts := self.experts:
            require_at_least_one("a layer: experts' ", experts, "count", "width", "inner")
        if attention and attention.heads % attention.kv_heads:
            raise ConfigError(
                f"a layer: {attention.heads} query heads do not divide into {attention.kv_heads} key/value heads"
            )
        if experts and not 1 <= experts.chosen <= experts.count:
            raise ConfigError(f"a layer: a token uses {experts.chosen} experts, which is outside 1..{experts.count}")
        if min(self.adapter_parameters, self.copied_parameters, self.parameters - self.copied_parameters) < 0:
            raise ConfigError(
                f"a layer: {self.parameters} parameters, {self.copied_parameters} of them copied, and "
                f"{self.adapter_parameters} of adapters; give numbers of at least 0, and the copied among all"
            )

    @property
    def active_products(self) -> int:
        """Weights of matrices that one token uses, as often as it uses them: chosen experts, no router."""
        of_experts = self.experts.chosen * self.experts.parameters if self.experts else 0
        return sum(one.rows * one.parameters for one in self.products) + of_experts

    @property
    def active_parameters(self) -> int:
        """All weights but those of experts that a token does not use."""
        idle = (self.experts.count - self.experts.chosen) * self.experts.parameters if self.experts else 0
        return self.parameters - idle

    @property
    def state_products(self) -> int:
        """Multiply-adds of a token in functions that carry a state."""
        return sum(one.products for one in self.states)

    @property
    def mixed_products(self) -> int:
        """Of `active_products`, those of the mixer."""
        return sum(one.rows * one.parameters for one in self.products if one.in_mixer)

    @property
    def inner(self) -> int:
        """Width of the widest input inside the layer; with experts, of one expert's."""
        return self.experts.inner if self.experts else max((one.inputs for one in self.products), default=0)

    def describe(self) -> str:
        """Return what takes its time, in words, without windows."""
        parts = [f"{one.name} {one.rows * one.inputs}x{one.outputs}" for one in self.products]
        if attention := self.attention:
            widths = dict.fromkeys((attention.head_dim, attention.value_dim))
            parts.append(f"{attention.heads}/{attention.kv_heads} heads of {'/'.join(map(str, widths))}")
        if experts := self.experts:
            gated = " gated" if experts.gated else ""
            parts.append(f"{experts.chosen} of {experts.count} experts {experts.width}x{experts.inner}{gated}")
        parts += [f"{one.function} {one.inputs}x{one.outputs} with a state of {one.state}" for one in self.states]
        parts += [f"{self.adapter_parameters} adapter parameters"] if self.adapter_parameters else []
        return ", ".join([*parts, self.mixer] if self.mixer else parts)

    @property
    def unread_products(self) -> int:
        """Of `active_products`, those that a recomputing backward does not repeat, as nothing reads their output: the
        last one before the residual sum, unless a norm follows, and the last of experts; and all of a mixer, which it
        repeats anyway."""
        of_experts = self.experts.chosen * self.experts.width * self.experts.inner if self.experts else 0
        return sum(one.rows * one.parameters for one in self.products if not one.is_read) + of_experts
