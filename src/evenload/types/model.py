"""`ModelSpec`: the numbers about a decoder that decide work, memory and communication."""

from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.scaled_units import scaled

_POSITIVE = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size",
    "bytes_per_element",
)  # fmt: skip


class ModelSpec(Frozen):
    """Shape of a transformer, enough to cost it without instantiating it.

    Args:
        name: shown to users; does not influence any number.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads (GQA when smaller than `num_heads`).
        head_dim: width of one head; `num_heads * head_dim` may differ from `hidden_size`.
        ffn_hidden_size: inner width of the feed-forward block (of one expert for MoE).
        vocab_size: rows of the embedding.
        tied_embeddings: the head shares the embedding's weights.
        gated_ffn: three matrices (SwiGLU) instead of two.
        num_experts: 0 for dense.
        experts_per_token: experts that process one token (MoE).
        sliding_windows: per layer the attention window in tokens, 0 = full; empty = all full.
        post_norm: norms stand behind attention and feed-forward block too (or instead), so backward reads the output
            of the block's last matrix product, which otherwise nobody needs.
        biases: every matrix of a layer and every norm has one; of other models biases are not counted.
        position_rows: of a table of learned positions, which no document may be longer than (GPT-2); 0 = positions are
            computed (rotary), or their table is not counted.
        adapter_parameters_per_layer: 0 = all weights are trained; else only so many a layer (LoRA), and all others
            have no gradient and no optimizer state.
        causal: False for bidirectional encoders, which cannot be sliced.
        bytes_per_element: of weights and activations in compute precision (bf16: 2).
        attention_workspace: attention runs in a GPU's kernels, whose workspace in backward counts as memory.
        ordered_attention: these add in one order (`train.deterministic`), for which they hold more.
        averaged_weights: a moving average of trained weights is kept with the optimizer's state (`train.ema_decay`).
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool = False
    gated_ffn: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    sliding_windows: tuple[int, ...] = ()
    post_norm: bool = False
    biases: bool = False
    position_rows: int = 0
    adapter_parameters_per_layer: int = 0
    causal: bool = True
    bytes_per_element: int = 2
    attention_workspace: bool = False
    ordered_attention: bool = False
    averaged_weights: bool = False

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            if getattr(self, field) < 1:
                raise ConfigError(f"model {self.name}: {field} is {getattr(self, field)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.num_heads} query heads do not divide into "
                f"{self.num_kv_heads} key/value heads"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"model {self.name}: {len(self.sliding_windows)} sliding windows for {self.num_layers} layers"
            )
        for field in ("adapter_parameters_per_layer", "position_rows"):
            if getattr(self, field) < 0:
                raise ConfigError(f"model {self.name}: {field} is {getattr(self, field)}, must be 0 or more")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"model {self.name}: experts_per_token {self.experts_per_token} is outside 1..{self.num_experts}"
            )

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of every layer in tokens, 0 = full. Length `num_layers`."""
        return self.sliding_windows or (0,) * self.num_layers

    @property
    def linear_parameters_per_layer(self) -> int:
        """Weights of one layer's matrices that one token meets (active experts only)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        ffn = (3 if self.gated_ffn else 2) * self.hidden_size * self.ffn_hidden_size
        return attention + ffn * max(1, self.experts_per_token)

    @property
    def stored_parameters_per_layer(self) -> int:
        """Weights of one layer held in memory: matrices (of all experts), router, norms, and biases if counted."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        ffn = (3 if self.gated_ffn else 2) * self.hidden_size * self.ffn_hidden_size
        router = self.hidden_size * self.num_experts
        return attention + ffn * max(1, self.num_experts) + router + 2 * self.hidden_size + self.biases_per_layer

    @property
    def biases_per_layer(self) -> int:
        """Of the matrices and the two norms of one layer; 0 where they are not counted."""
        if not self.biases:
            return 0
        inner = (2 if self.gated_ffn else 1) * self.ffn_hidden_size
        return self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + inner + 4 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding (and of the head, which has the same shape)."""
        return self.vocab_size * self.hidden_size

    @property
    def position_parameters(self) -> int:
        """Of the table of learned positions, which stands beside the embedding; 0 = there is none."""
        return self.position_rows * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        """Of one norm."""
        return (2 if self.biases else 1) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, of all experts; a tied head counts once. Without adapters, and without biases
        where they are not counted."""
        return self.num_layers * self.stored_parameters_per_layer + self._outer_parameters

    @property
    def num_active_parameters(self) -> int:
        """Of those the ones that one token meets: all of a dense model; of experts the chosen ones."""
        router_and_norms = self.hidden_size * (self.num_experts + 2) + self.biases_per_layer
        return self.num_layers * (self.linear_parameters_per_layer + router_and_norms) + self._outer_parameters

    def describe_size(self) -> str:
        """Parameters for people, and how many of them one token meets where that is fewer."""
        total, active = (
            scaled(count, 1000.0, ("", "K", "M", "B", "T"), separator="")
            for count in (self.num_parameters, self.num_active_parameters)
        )
        return f"{total} parameters" + (f", {active} active" if self.num_experts else "")

    @property
    def _outer_parameters(self) -> int:
        """Embedding with positions, head and final norm."""
        embeddings = (1 if self.tied_embeddings else 2) * self.embedding_parameters
        return embeddings + self.position_parameters + self.norm_parameters
