"""Small models, round cost coefficients and hand-written packs for tests of costs and planners."""

from collections.abc import Iterable
from typing import Any

import msgspec
from hypothesis import strategies as st

from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.cost.memory import trained_parameters_per_rank
from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import SliceColumns
from evenload.types.document import Document
from evenload.types.layer_kind import AttentionKind, LayerKind, Product, StateKind
from evenload.types.model import ModelSpec, alike_model

FORWARD = PassCoefficients(linear_s_per_token=1.0, attention_s_per_pair=0.1, slice_s=0.01, pack_s=5.0)
BACKWARD = PassCoefficients(linear_s_per_token=2.0, attention_s_per_pair=0.25, slice_s=0.02, pack_s=7.0)


def sample_coefficients(**changes: Any) -> CostCoefficients:
    """Numbers that are easy to multiply by hand."""
    fields: dict[str, Any] = {
        "source": "calibrated",
        "device": "cpu",
        "peak_flops_per_s": 1e12,
        "forward": FORWARD,
        "backward": BACKWARD,
        "embedding_s_per_token": 0.5,
        "head_s_per_token": 3.0,
        "head_pack_s": 11.0,
        "optimizer_s_per_parameter": 1e-3,
        "p2p_bandwidth_bytes_per_s": 100.0,
        "p2p_latency_s": 0.5,
        "reduce_bandwidth_bytes_per_s": 1000.0,
        "reduce_latency_s": 0.25,
    }
    return CostCoefficients(**{**fields, **changes})


def sample_model(**changes: Any) -> ModelSpec:
    """A layer has 192 attention, 384 feed-forward and 16 norm weights; the embedding has 256."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "num_layers": 3,
        "hidden_size": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "ffn_hidden_size": 16,
        "vocab_size": 32,
    }
    return alike_model(**{**fields, **changes})


def reduction_seconds(costs: PackCosts) -> float:
    """Price the reduce-scatter of fp32 gradients and the all-gather of weights on the fullest rank; nothing hides."""
    element, trained = costs.model.bytes_per_element, trained_parameters_per_rank(costs.model, costs.layout).tolist()
    return max(
        sum(costs.coefficients.ring_seconds(size * held, copies) for size in (max(element, 4), element))
        for copies, held in zip(costs.layout.data_sizes, trained, strict=True)
    )


@st.composite
def cut_documents(draw) -> tuple[list[int], SliceColumns, SliceColumns]:
    """Random documents, cut independently in both directions, a slice a pack."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    packs = []
    for reverse in (False, True):
        rows = []
        for doc, length in enumerate(lengths):
            inner = sorted(draw(st.sets(st.integers(1, length - 1), max_size=4))) if length > 1 else []
            pieces = [(doc, a, b) for a, b in zip([0, *inner], [*inner, length], strict=True)]
            rows += [[piece] for piece in (pieces[::-1] if reverse else pieces)]
        packs.append(SliceColumns.from_ranges(rows))
    return lengths, packs[0], packs[1]


def documents(lengths: Iterable[int], first_id: int = 0) -> tuple[Document, ...]:
    """Documents that count up from an id; every token but the first is a label."""
    return tuple(
        Document(doc_id=i, num_tokens=int(n), num_label_tokens=int(n) - 1) for i, n in enumerate(lengths, first_id)
    )


def recurrent_model(**changes: Any) -> ModelSpec:
    """Four layers of three kinds: a convolution before a scan, attention, and a scan beside attention. A document's
    state at a cut has 3·10 elements of a convolution and 2·4·4 of a scan, in bf16 30·2 + 32·4 = 188 bytes."""
    dense = sample_model(num_layers=4)
    convolution = StateKind(function="causal_conv1d_fn", inputs=10, outputs=10, state=30, is_wide=False)
    scan = StateKind(function="mamba2_chunk_scan", inputs=18, outputs=8, state=32)
    products = (
        Product(name="in_proj", inputs=8, outputs=18),
        Product(name="out_proj", inputs=8, outputs=8, is_read=False),
    )
    recurrent = LayerKind(products=products, parameters=300, states=(convolution, scan), blocks=1)
    both = msgspec.structs.replace(dense.kinds[0], states=(scan,))
    return msgspec.structs.replace(dense, kinds=(recurrent, dense.kinds[0], both), layers=(0, 1, 2, 0), **changes)


def mixed_model(**changes: Any) -> ModelSpec:
    """Three layers of three kinds: dense with a window, experts with wider keys than values in chunks, and a mixer
    without attention (`mixer=""` leaves documents free to be cut)."""
    mixer = changes.pop("mixer", "Mixer")
    dense, experts = sample_model(sliding_windows=(16,) * 3), sample_model(num_experts=4, experts_per_token=2)
    attention = AttentionKind(heads=2, kv_heads=2, head_dim=6, value_dim=4, chunk=24, sinks=True)
    wide = msgspec.structs.replace(experts.kinds[0], attention=attention)
    own = LayerKind(products=(Product(name="in_proj", inputs=8, outputs=40),), parameters=340, mixer=mixer)
    return msgspec.structs.replace(dense, kinds=(dense.kinds[0], wide, own), layers=(0, 1, 2), **changes)
