"""Lengths, global batches and planners that benchmarks of planning and of the paper's settings share."""

import runpy
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenload.config.sections import LoraConfig, with_adapters
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.data.lengths import read_length_table
from evenload.explore.batches import BatchRule
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.cluster import ClusterSpec, cluster_from
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]  # Python twins of the core; small runs

TABLES = ("github_dirs", "docs", "stdlib", "books")
"""Real tables of examples/lengths."""
K = 1024
SHARES = {
    "Wikipedia": ((8, 0.0), (K, 0.8788), (4 * K, 0.9934), (8 * K, 0.9992), (32 * K, 0.9999), (78 * K, 1.0)),
    "LMSysChat1M": (
        (8, 0.0), (K, 0.8712), (4 * K, 0.9935), (8 * K, 0.9987), (32 * K, 0.9998), (128 * K, 0.9999), (1643 * K, 1.0),
    ),
    "ChatQA2": ((32, 0.0), (K, 0.2192), (4 * K, 0.3148), (8 * K, 0.4043), (32 * K, 0.9986), (99 * K, 1.0)),
}  # fmt: skip
"""Table 1 of Skrull: (tokens, share of shorter documents); the first entry, the shortest document, is assumed."""


def table_lengths(name: str) -> NDArray[np.int64]:
    """All lengths of a table in examples/lengths; 20,000 drawn ones of `commoncrawl_like`."""
    folder = ROOT / "examples" / "lengths"
    if name == "commoncrawl_like":
        return runpy.run_path(str(folder / f"{name}.py"))["commoncrawl_like_lengths"](20_000, 104).astype(np.int64)
    return read_length_table(str(folder / f"{name}.npy.gz")).lengths


def lognormal_lengths(count: int) -> NDArray[np.int64]:
    """Median 1,200 tokens, sigma 1.4, clipped to 32..32,768, seed 0."""
    generator = np.random.default_rng(0)
    return np.clip(generator.lognormal(np.log(1200), 1.4, count), 32, 32_768).astype(np.int64)


def drawn_lengths(data: str, count: int, seed: int) -> NDArray[np.int64]:
    """int64[count], log-uniform inside every bin of `SHARES`."""
    shares = np.random.default_rng(seed).random(count)
    tokens, edges = np.array(SHARES[data], float).T
    return np.exp(np.interp(shares, edges, np.log(tokens))).astype(np.int64)


def batch_of(name: str, documents: int, context: int, seed: int = 0) -> tuple[Document, ...]:
    """One global batch drawn from a table, truncated to the context."""
    rule = BatchRule(num_documents=documents, context=context, overlong="truncate")
    (batch,) = rule.sample(table_lengths(name), steps=1, seed=seed)
    return batch.documents


def documents_of(lengths: NDArray[np.int64]) -> tuple[Document, ...]:
    """Documents of these lengths; ids by position."""
    return tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths.tolist()))


def tokens_of(documents: tuple[Document, ...]) -> NDArray[np.int64]:
    """int64[n]: lengths of documents."""
    return np.array([document.num_tokens for document in documents], dtype=np.int64)


def planner_for(
    model_name: str,
    cluster: ClusterSpec | str,
    sizes: dict[str, int],
    options: PlanOptions,
    *,
    limited: bool = True,
    lora: LoraConfig | None = None,
) -> StepPlanner:
    """A planner with data-sheet costs, layers split evenly.

    Args:
        sizes: of the layout's axes, `{"dp": 8, "pp": 4}`.
        limited: within the memory of devices and nodes; else all activations fit.
        lora: train adapters alone; None = all weights.
    """
    cluster = cluster_from(cluster) if isinstance(cluster, str) else cluster
    layout = even_layout(model_from(model_name).num_layers, **sizes)
    return planner_in(model_name, cluster, layout, options, limited=limited, lora=lora)


def planner_in(
    model_name: str,
    cluster: ClusterSpec,
    layout: ParallelLayout,
    options: PlanOptions,
    *,
    limited: bool = True,
    lora: LoraConfig | None = None,
) -> StepPlanner:
    """The same in a layout."""
    model = with_adapters(model_from(model_name), lora)
    costs = analytic_coefficients(model, cluster, layout)
    cap, host = (cluster.device.usable_bytes, host_memory(cluster)) if limited else (None, "unlimited")
    return StepPlanner(model, costs, layout, cap, options, host=host)
