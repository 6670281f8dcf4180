"""From where ranks that are left after a loss go on: the last step that all kept, else the last checkpoint."""

import os
from pathlib import Path
from typing import NamedTuple

from evenload.cli.launch_survivors import SURVIVOR_FOLDER
from evenload.runtime.checkpoint.kept_steps import KeptSteps, last_kept
from evenload.runtime.comm.membership import Membership


class Standing(NamedTuple):
    """Steps that are done where members begin, kept in memory by all before them or else saved."""

    steps_done: int
    is_kept: bool


def kept_steps(members: Membership) -> KeptSteps | None:
    """What this rank keeps while these train; None where the launcher has made no place for it."""
    folder = os.environ.get(SURVIVOR_FOLDER)
    if not folder:
        return None
    return KeptSteps(Path(folder), members.round, members.start_rank, len(members.ranks))


def standing(members: Membership, saved_steps: int) -> Standing:
    """Where these begin; to be asked when the members before them have ended or left.

    Args:
        saved_steps: in the last checkpoint.
    """
    folder = os.environ.get(SURVIVOR_FOLDER)
    kept = None if not folder else last_kept(Path(folder), members.round)
    return Standing(saved_steps, is_kept=False) if kept is None else Standing(kept.steps_done, is_kept=True)
