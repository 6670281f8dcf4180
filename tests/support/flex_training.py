"""Runs whose layout follows the lengths of their documents, as one rank of a `GlooPool`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist_training import trained_to
from evenload.runtime.stages.live_stages import Switch
from evenload.types.run import LayoutDecision
from switch_cases import whole_state

BATCH = 8
SHORT, LONG = 12, 230
"""Letters of a document; a token each."""


def write_phases(directory: Path, phases: Sequence[str]) -> Path:
    """A corpus whose batches of `BATCH` documents are short ("s") or hold two long ones ("l"), in this order."""
    directory.mkdir()
    for step, phase in enumerate(phases):
        for at in range(BATCH):
            letters = LONG if phase == "l" and at < 2 else SHORT + at
            (directory / f"{step:03}-{at}.txt").write_text("".join(chr(97 + (i * 7 + at) % 26) for i in range(letters)))
    return directory


class FlexRun(NamedTuple):
    """Of a run, on rank 0: by step its loss and what was decided; every switch; all tensors at the end, whole."""

    losses: list[float]
    decisions: list[LayoutDecision | None]
    switches: list[Switch]
    state: dict[str, np.ndarray]
    num_known: int


def flex_run(config_file: str, overrides: list[str], memory_cap_bytes: int, stop_after: int) -> FlexRun | None:
    """As `trained_to`."""
    trainer, reports = trained_to(stop_after, config_file, overrides, memory_cap_bytes)
    state = whole_state(trainer.state)
    if trainer.mesh.rank != 0:
        return None
    return FlexRun(
        losses=[float(report.row["loss"]) for report in reports],
        decisions=[report.decision for report in reports],
        switches=[report.switch for report in reports if report.switch is not None],
        state=state,
        num_known=len(trainer._layouts_known),
    )
