"""`Profile`: what stands beside the coefficients of a cost file that `evenload profile` measured.

How, when and on what it was measured, how far the fit is off on packs that it had not seen, and the curves behind
coefficients that are one number each. Planning reads none of it; people, reports and the intervals of predictions do.
"""

import hashlib
from typing import Any, Literal

import msgspec

from evenload.errors import ConfigError
from evenload.types.base import Frozen


class FitError(Frozen):
    """Seconds predicted / measured - 1 of packs that were left out of the fit (k-fold), as absolute values.

    Args:
        packs: that were timed; folds: into which they were dealt.
        median, p90: of all of them; 0.05 = 5 %.
    """

    packs: int
    folds: int
    median: float
    p90: float

    def __post_init__(self) -> None:
        if not (0 <= self.median <= self.p90):
            raise ConfigError(
                f"profile: errors of a fit are median {self.median} and p90 {self.p90}; 0 <= median <= p90"
            )


class TimedPack(Frozen):
    """One pack of the grid on one layer.

    Args:
        slices: (start, stop, how many documents have this slice).
        measured_s: median over passes and ranks.
        left_out_s: what the fit says that had not seen this pack.
    """

    direction: Literal["forward", "backward"]
    slices: tuple[tuple[int, int, int], ...]
    measured_s: float
    left_out_s: float


class KernelRate(Frozen):
    """What a kernel reaches at one size.

    Args:
        rows: tokens, or queries; prefix: keys before the first query, for attention.
    """

    kernel: Literal["matmul", "attention forward", "attention backward"]
    rows: int
    prefix: int
    flops_per_s: float


class TransferCurve(Frozen):
    """Seconds of one kind of transfer over sizes, and what is read from them (Skrull, Table 5 and Eq. 16).

    Args:
        ranks: of the group.
        num_bytes: that one link carries, ascending; seconds: of each, median.
        latency_s, bandwidth_bytes_per_s: seconds = latency + bytes / bandwidth. Below `threshold_bytes` the latency
            is more than half of it.
        hidden_share: of local attention's seconds, those behind which the transfer hid when both ran at once; None
            where they were not tried together. Negative: attention was slowed down by more than what was hidden.
    """

    kind: Literal["pipeline", "reduction", "gather", "context", "tensor", "host"]
    ranks: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    hidden_share: float | None = None

    @property
    def threshold_bytes(self) -> float:
        """Below this the constant part is the larger one."""
        return self.latency_s * self.bandwidth_bytes_per_s


class Profile(Frozen):
    """How coefficients were measured.

    Args:
        date: of the end, ISO 8601 in UTC.
        versions: of what computes, by name.
        dtype, attention: of the layers that were timed, and their attention backend.
        layers: that were timed on every rank; seconds in the cost file are of one.
        passes: over the whole grid, interleaved; measured seconds are medians over them.
        seconds: that measuring took, all calls together.
        outliers, timings: repeats that lay far from the median of their pack (more than 5 deviations), of so many.
        waited_share, spread: how much the machine was disturbed, see `cost.measured_on.Disturbance`.
        forward, backward: the fit's error on packs that it had not seen.
        packs: the grid with its residuals.
        activation_bytes: that one token leaves on one layer, by policy, counted; the cost model says the same.
        held_bytes: that the device's allocator reserved, or by which the process grew (CPU; 0 where the system does not
            say), at the peak of the longest round; counted_bytes: that its tensors needed.
        has_overlap: it measured `CostCoefficients.overlap`; else a run measures it.
        digest: of the coefficients as they were measured, to notice a later change by hand.
    """

    date: str
    versions: dict[str, str]
    dtype: str
    attention: str
    layers: int
    passes: int
    seconds: float
    outliers: int
    timings: int
    waited_share: float
    spread: float
    forward: FitError
    backward: FitError
    packs: tuple[TimedPack, ...]
    kernels: tuple[KernelRate, ...]
    transfers: tuple[TransferCurve, ...]
    activation_bytes: dict[str, int]
    held_bytes: int
    counted_bytes: int
    has_overlap: bool = False
    digest: str = ""


def digest_of(coefficients: msgspec.Struct) -> str:
    """Of all fields that differ from their defaults, but the digest itself; a field that a later version adds with a
    default changes nothing. Nor does what a run adds of its own: the way in which keys and values travel and what it
    overlaps, which it chooses, and what copies take between its processes, which it measures."""
    tree = _said(coefficients)
    for of_run in (
        "context_exchange",
        "overlap_reduction",
        "overlap_gather",
        "copies",
    ):
        tree.pop(of_run, None)
    if "profile" in tree:
        tree["profile"].pop("digest", None)
        if not tree["profile"].get("has_overlap"):
            tree.pop("overlap", None)
    return hashlib.sha256(msgspec.json.encode(tree, order="deterministic")).hexdigest()[:16]


def _said(value: Any) -> Any:
    if not isinstance(value, msgspec.Struct):
        return [_said(one) for one in value] if isinstance(value, tuple) else value
    fields = msgspec.structs.fields(value)
    return {f.name: _said(own) for f in fields if (own := getattr(value, f.name)) != f.default}
