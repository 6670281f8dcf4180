"""`starts.jsonl`: with which ranks and from which step a run went on each time these changed, one JSON object a line.

Written by rank 0 before it trains, where ranks may be lost (`train.on_lost_rank = "shrink"`). A step that was trained
before the loss and is not in the checkpoint is trained again, with the same documents: it has a row in `metrics.jsonl`
for each time, of which the last one counts, and the account of documents, which lies in the checkpoint, has it once.
After a step that all kept in memory nothing finished is trained again: the row of a later one, which not all had
finished when a rank was lost, is cut off.
"""

import os
from pathlib import Path

import msgspec

from evenload.errors import DataError
from evenload.report.run_files import read_metrics
from evenload.types.base import Frozen
from evenload.types.counted import counted

STARTS_FILE = "starts.jsonl"


class StartRecord(Frozen):
    """One line.

    Args:
        ranks: that train, and the layout in which they do, as `ParallelLayout.describe` says it.
        steps_done: that are in the checkpoint, or in memory, from which they go on; 0 = from the beginning.
        steps_repeated: trained before and not in it: steps `steps_done` to `steps_done + steps_repeated - 1`.
    """

    ranks: int
    layout: str
    steps_done: int
    steps_repeated: int

    def line(self, before: "StartRecord | None", why: str) -> str:
        """What happened, for people, such as "ranks were lost: 4 ranks in layout dp=2 pp=2 before, 2 in layout pp=2
        now; training goes on from step 12; steps 12 to 14 are trained again"."""
        was = f"{counted(before.ranks, 'rank')} in layout {before.layout} before, " if before is not None else ""
        first, last = self.steps_done, self.steps_done + self.steps_repeated - 1
        again = (
            "no step is trained again"
            if last < first
            else f"step {first} is trained again"
            if last == first
            else f"steps {first} to {last} are trained again"
        )
        since = f"goes on from step {self.steps_done}" if self.steps_done else "begins anew, as there is no checkpoint"
        return f"{why}: {was}{self.ranks} in layout {self.layout} now; training {since}; {again}"


def start_record(directory: Path, *, ranks: int, layout: str, steps_done: int, is_kept: bool = False) -> StartRecord:
    """Of a start in a run's directory; what is trained again follows from its metrics, and is none after a step that
    all kept in memory."""
    metrics = directory / "metrics.jsonl"
    if is_kept:
        return StartRecord(ranks=ranks, layout=layout, steps_done=steps_done, steps_repeated=0)
    trained = [int(row["step"] or 0) for row in read_metrics(metrics)] if metrics.is_file() else []
    # The last line, not the largest: what an earlier start repeated has not been trained further since.
    repeated = max(0, trained[-1] + 1 - steps_done) if trained else 0
    return StartRecord(ranks=ranks, layout=layout, steps_done=steps_done, steps_repeated=repeated)


def append_start(directory: Path, record: StartRecord) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / STARTS_FILE, "ab") as file:
        # A torn line, of a process that was killed while it wrote, stays one line.
        file.write((b"\n" if _ends_torn(directory / STARTS_FILE) else b"") + msgspec.json.encode(record) + b"\n")


def read_starts(directory: Path) -> list[StartRecord]:
    """In order; none where there is no file. `DataError` where a line but the last of a killed start is none."""
    path = directory / STARTS_FILE
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.endswith(b"}"):
            continue  # torn, or the end
        try:
            found.append(msgspec.json.decode(line, type=StartRecord))
        except msgspec.MsgspecError as error:
            raise DataError(f"{path}, line {number} is no start ({error}); remove the line or the file") from error
    return found


def _ends_torn(path: Path) -> bool:
    if not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
