"""What the passes of all ranks say together: medians by name, links, rates and curves."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from evenload.calibrate.assemble import RankMeasurement
from evenload.calibrate.disturbance import spread_of_repeats
from evenload.calibrate.kernel_timings import attention_flops, matmul_token_flops
from evenload.calibrate.link_timings import GRID_BYTES, TRANSFER_KINDS, link_from
from evenload.calibrate.partial_file import Pass
from evenload.calibrate.pass_work import EMBEDDED_ROWS, PassWork, transfer_name
from evenload.calibrate.rounds import GRID, Sample
from evenload.cost.flops import BACKWARD_ATTENTION_RATIO
from evenload.cost.measured_on import Disturbance
from evenload.cost.profile_record import KernelRate, TransferCurve
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec
from evenload.types.token_range import Range

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True, eq=False, kw_only=True)
class PassResults:
    """Args:
    passes: seconds by pass, rank and name (`pass_work`); every pass of a rank has the same names.
    layers: that a pack went through.
    """

    passes: Sequence[Sequence[Pass]]
    layers: int

    @property
    def num_ranks(self) -> int:
        return len(self.passes[0])

    def repeats(self, rank: int, name: str) -> list[float]:
        return [one[rank][name] for one in self.passes]

    def median(self, rank: int, name: str) -> float:
        return statistics.median(self.repeats(rank, name))

    def names(self, rank: int, start: str = "") -> list[str]:
        return [name for name in self.passes[0][rank] if name.startswith(start)]

    def all_repeats(self) -> list[list[float]]:
        """Of everything on every rank."""
        return [self.repeats(rank, name) for rank in range(self.num_ranks) for name in self.names(rank)]

    def measurement(
        self, rank: int, work: PassWork, windows: tuple[int, ...], waited_share: float, peak_flops_per_s: float
    ) -> RankMeasurement:
        """What coefficients are made of, of the rank that did the `work`."""
        packs = self.names(rank, "pack:")
        spread = spread_of_repeats([self.repeats(rank, name) for name in packs])
        return RankMeasurement(
            disturbance=Disturbance(waited_share=waited_share, spread=spread),
            packs=tuple(
                Sample(
                    direction,
                    ranges,
                    self.median(rank, f"pack:{index}:{number}") / self.layers,
                    self._queue_s(rank, f"queue:{index}:{number}") / self.layers,
                    windows,
                )
                for index in work.rounds
                for number, (direction, ranges) in enumerate(_order(index))
            ),
            head=tuple((int(name.partition(":")[2]), self.median(rank, name)) for name in self.names(rank, "head:")),
            peak_flops_per_s=peak_flops_per_s,
            optimizer_s=self.median(rank, "optimizer") / work.num_parameters,
            copy_s_per_byte=self.median(rank, "copy") / work.copied_bytes,
            weight_s=self.median(rank, "weights") / self.layers,
            links={
                transfer.kind: link_from(
                    GRID_BYTES, [self.median(rank, transfer_name(transfer, size)) for size in GRID_BYTES]
                )
                for transfer in work.transfers  # the largest group of a kind comes last
            },
        )

    def _queue_s(self, rank: int, name: str) -> float:
        """0 where the device is its own host."""
        return self.median(rank, name) if name in self.passes[0][rank] else 0.0

    def embedding_s_per_token(self) -> float | None:
        """Of a forward or a backward; None where no rank timed it."""
        found = [self.median(rank, "embedding") for rank in range(self.num_ranks) if self.names(rank, "embedding")]
        # What was timed is both.
        return statistics.median(found) / EMBEDDED_ROWS / 2 if found else None

    def rates(self, model: ModelSpec, tp: int) -> tuple[KernelRate, ...]:
        """FLOP/s that matrix products and attention reach by themselves, on rank 0."""
        rates = []
        for name in self.names(0, "matmul:"):
            tokens = int(name.partition(":")[2])
            flops_per_s = tokens * matmul_token_flops(model, tp) / self.median(0, name)
            rates.append(KernelRate(kernel="matmul", rows=tokens, prefix=0, flops_per_s=flops_per_s))
        for kernel, ratio in (("attention forward", 1.0), ("attention backward", BACKWARD_ATTENTION_RATIO)):
            for name in self.names(0, kernel):
                rows, prefix = (int(part) for part in name.split(":")[1:])
                flops_per_s = ratio * attention_flops(model, tp, rows, prefix) / self.median(0, name)
                rates.append(KernelRate(kernel=kernel, rows=rows, prefix=prefix, flops_per_s=flops_per_s))
        return tuple(rates)

    def curves(self) -> tuple[TransferCurve, ...]:
        """Of every kind of transfer and size of group, medians over ranks."""
        members: dict[tuple[str, int], list[int]] = {}
        for rank in range(self.num_ranks):
            for name in self.names(rank):
                kind, *sizes = name.split(":")
                if kind in TRANSFER_KINDS and sizes[1] == str(GRID_BYTES[0]):
                    members.setdefault((kind, int(sizes[0])), []).append(rank)
        largest = max((size for kind, size in members if kind == "context"), default=0)
        curves = []
        for (kind, size), ranks in members.items():
            names = [f"{kind}:{size}:{num_bytes}" for num_bytes in GRID_BYTES]
            seconds = [statistics.median(self.median(rank, name) for rank in ranks) for name in names]
            link = link_from(GRID_BYTES, seconds)
            curve = TransferCurve(
                kind=kind,  # type: ignore[arg-type]
                ranks=size,
                num_bytes=GRID_BYTES,
                seconds=tuple(seconds),
                latency_s=link.latency_s,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                hidden_share=self._hidden_share(ranks) if (kind, size) == ("context", largest) else None,
            )
            curves.append(curve)
        return tuple(curves)

    def _hidden_share(self, ranks: Sequence[int]) -> float:
        """(attention + transfer - both at once) / attention, median over passes and ranks."""
        shares = []
        for rank in ranks:
            columns = (self.repeats(rank, f"beside:{name}") for name in ("attention", "transfer", "both"))
            shares += [
                (alone_s + moved_s - both_s) / alone_s for alone_s, moved_s, both_s in zip(*columns, strict=True)
            ]
        return statistics.median(shares)


def _order(index: int) -> list[tuple[Direction, tuple[Range, ...]]]:
    """Packs of a round as `time_round` gives them."""
    packs = GRID[index]
    return [("forward", ranges) for ranges in packs] + [("backward", ranges) for ranges in packs[::-1]]
