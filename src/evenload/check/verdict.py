"""`Verdict`: what one check found, in words and as pass, fail or skipped."""

from typing import Literal

from evenload.types.base import Frozen

Outcome = Literal["pass", "fail", "skipped"]


class Verdict(Frozen):
    """The answer of one check.

    Args:
        name: of the check.
        found: what was measured, the tolerance, and on how much.
        why: the reason of a failure, or why it was skipped; "" where it passed.
    """

    name: str
    outcome: Outcome
    found: str
    why: str = ""


def passed(name: str, found: str) -> Verdict:
    return Verdict(name=name, outcome="pass", found=found)


def failed(name: str, found: str, why: str) -> Verdict:
    return Verdict(name=name, outcome="fail", found=found, why=why)


def skipped(name: str, found: str, why: str) -> Verdict:
    return Verdict(name=name, outcome="skipped", found=found, why=why)


def exit_code(verdicts: list[Verdict]) -> int:
    """0 nothing failed; 3 only memory failed, as where no plan fits; 1 anything else failed."""
    failed = {verdict.name for verdict in verdicts if verdict.outcome == "fail"}
    if not failed:
        return 0
    return 3 if failed == {"memory"} else 1
