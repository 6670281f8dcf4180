"""Memory: the worst of the surveyed steps, as predicted, against what a process may hold."""

from evenload.check.survey import Survey
from evenload.check.verdict import Verdict
from evenload.types.scaled_units import format_bytes


def check_memory(survey: Survey, memory_cap_bytes: int, strategy: str) -> Verdict:
    """Judge the fullest process of the fullest step."""
    limit = format_bytes(memory_cap_bytes)
    if not survey.peaks:
        if survey.memory_error:
            return Verdict(name="memory", outcome="fail", found=f"limit {limit} a process", why=survey.memory_error)
        return Verdict(name="memory", outcome="skipped", found="", why="no step could be read; see ledger")
    peak, step, longest = max(survey.peaks)
    found = (
        f"fullest of {len(survey.peaks)} steps of {strategy}: {format_bytes(peak)} predicted in step {step} (longest "
        f"document {longest:,} tokens), limit {limit} a process"
    )
    if survey.memory_error:
        return Verdict(name="memory", outcome="fail", found=found, why=survey.memory_error)
    return Verdict(name="memory", outcome="pass", found=found)
