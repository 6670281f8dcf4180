"""Everything that one pass of a profile times on one rank, made once; repeats of all of it are interleaved.

Each pass gives seconds by name: `pack:<round>:<number>` in the order of `time_round`, on a GPU also
`queue:<round>:<number>` of its host, `weights`,
`head:<rows>`, `attention forward:<queries>:<prefix>`, `reduction:<ranks>:<bytes>` and so on. Ranks that meet time it
together; a rank without a part in it gives no such name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evenload.calibrate import kernel_timings as kernels
from evenload.calibrate.link_timings import GRID_BYTES, TransferWork, transfers_of
from evenload.calibrate.pack_clock import pack_clock
from evenload.calibrate.partial_file import Pass
from evenload.calibrate.repeats import median_seconds, timed
from evenload.calibrate.rounds import GRID, round_flops, time_round
from evenload.calibrate.weight_timings import time_weights
from evenload.cost.activation import local_kv_heads
from evenload.runtime.comm.cp_groups import ContextGroup
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.model import ModelSpec

BESIDE_BYTES = 1 << 22
"""Of a transfer that runs beside attention, a hop."""
BESIDE_ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
EMBEDDED_ROWS = 2048


@dataclass(frozen=True, eq=False)
class _Beside:
    """A gather of the largest group that may share documents, attention of local documents, and both at once."""

    attention: kernels.AttentionWork
    start: Callable[[], Callable[[], object]]


class PassWork:
    """One rank's share of a pass.

    Args:
        stage, last: whose layers are timed; whose head is, if it has one.
        model: of the layers that are timed.
        rounds: indices into `GRID`.
    """

    def __init__(
        self, stage: PipelineStage, last: PipelineStage, model: ModelSpec, mesh: Mesh, rounds: Sequence[int]
    ) -> None:
        self._stage, self._model, self._mesh, self.rounds = stage, model, mesh, rounds
        device, dtype, tp = stage.device, stage.dtype, mesh.layout.tp
        self._clock = pack_clock(stage, mesh)
        self._kernels: dict[str, Callable[[], object]] = {}
        # Kernels by themselves, and the head, are no larger than what the layers are timed with.
        most_flops = max(round_flops(GRID[index], model) for index in rounds)
        if last.model.is_last:
            heads = kernels.head_work(last, model.vocab_size, kernels.head_rows(model, tp, most_flops))
            self._kernels |= {f"head:{rows}": work for rows, work in heads.items()}
        if stage.model.is_first and tp == 1:
            self._kernels["embedding"] = kernels.embedding_work(stage, model.vocab_size, EMBEDDED_ROWS)
        products = kernels.matmul_work(model, tp, device, dtype, most_flops)
        self._kernels |= {f"matmul:{tokens}": work for tokens, work in products.items()}
        attention = {
            size: self._attention(*size)
            for size in kernels.ATTENTION_GRID
            if size == kernels.ATTENTION_GRID[0] or kernels.attention_flops(model, tp, *size) <= most_flops
        }
        for (rows, prefix), work in attention.items():
            self._kernels[f"attention forward:{rows}:{prefix}"] = work.forward
            self._kernels[f"attention backward:{rows}:{prefix}"] = work.backward
        self._kernels["optimizer"], self.num_parameters = kernels.optimizer_work(mesh.data_size, device)
        self._kernels["copy"], self.copied_bytes = kernels.copy_work(model, tp, device, dtype)
        self.transfers = list(transfers_of(mesh, all_groups=True))
        self._calls = [(work, size, work.call(size)) for work in self.transfers for size in GRID_BYTES]
        self._largest = max(mesh.context.values(), key=lambda group: group.size) if mesh.context else None
        self._beside: _Beside | None = None

    def choose_beside_rows(self) -> int:
        """Queries of local attention that take at most as long as a gather; 0 where nothing is ever gathered.
        Collective over the group."""
        if self._largest is None:
            return 0
        gather = _gather(self._largest, self._stage)
        gather_s = median_seconds(_at_once(gather), self._stage.device)
        attention = self._attention(BESIDE_ROWS[0], 0)
        unit_s = median_seconds(attention.forward, self._stage.device)
        # Attention of so many rows takes so many times as long, squared.
        fitting = [rows for rows in BESIDE_ROWS if unit_s * (rows / BESIDE_ROWS[0]) ** 2 <= gather_s]
        return max(fitting, default=BESIDE_ROWS[0])

    def set_beside_rows(self, rows: int) -> None:
        if rows and self._largest is not None:
            self._beside = _Beside(self._attention(rows, 0), _gather(self._largest, self._stage))

    def run(self) -> Pass:
        """Time everything once. Collective over all ranks."""
        seconds: Pass = {}
        device, control = self._stage.device, self._mesh.control
        for index in self.rounds:
            dist.barrier(group=control)
            for number, sample in enumerate(time_round(self._stage, GRID[index], self._clock)):
                seconds[f"pack:{index}:{number}"] = sample.seconds
                if sample.host_s:
                    seconds[f"queue:{index}:{number}"] = sample.host_s
        seconds["weights"] = time_weights(self._stage, self._clock)
        for name, work in self._kernels.items():
            seconds[name] = timed(work, device)
        dist.barrier(group=control)
        for work, size, call in self._calls:
            if size == GRID_BYTES[0]:
                call()  # ranks that come late do so here
            seconds[transfer_name(work, size)] = timed(call, device) / work.hops
        dist.barrier(group=control)
        if (beside := self._beside) is not None:
            seconds["beside:attention"] = timed(beside.attention.forward, device)
            seconds["beside:transfer"] = timed(_at_once(beside.start), device)

            def both() -> None:
                finish = beside.start()
                beside.attention.forward()
                finish()

            seconds["beside:both"] = timed(both, device)
        return seconds

    def _attention(self, rows: int, prefix: int) -> kernels.AttentionWork:
        stage, model, tp = self._stage, self._model, self._mesh.layout.tp
        heads, groups = model.num_heads // tp, local_kv_heads(model, tp)
        return kernels.AttentionWork(
            stage.backend, rows, prefix, heads, groups, model.head_dim, stage.device, stage.dtype
        )


def transfer_name(work: TransferWork, num_bytes: int) -> str:
    return f"{work.kind}:{work.ranks}:{num_bytes}"


def _at_once(start: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """Starts a transfer and waits for it."""

    def work() -> None:
        finish = start()
        finish()

    return work


def _gather(group: ContextGroup, stage: PipelineStage) -> Callable[[], Callable[[], object]]:
    """Starts a gather and gives what waits for it."""
    rows = torch.zeros(BESIDE_BYTES // 4, device=stage.device)
    return lambda: group.all_gather(rows, "calibration").wait
