"""Memory: the worst of the surveyed steps, as predicted, against what a process may hold."""

from evenload.check.survey import Survey
from evenload.check.verdict import Verdict


def check_memory(survey: Survey, memory_cap_bytes: int, strategy: str) -> Verdict:
    """Judge the fullest process of the fullest step."""
    limit = f"{memory_cap_bytes / 2**30:.2f} GiB"
    if not survey.peaks:
        if survey.memory_error:
            return Verdict(name="memory", outcome="fail", found=f"limit {limit} a process", why=survey.memory_error)
        return Verdict(name="memory", outcome="skipped", found="", why="no step could be read; see ledger")
    peak, step, longest = max(survey.peaks)
    found = (
        f"fullest of {len(survey.peaks)} steps of {strategy}: {peak / 2**30:.2f} GiB predicted in step {step} (longest "
        f"document {longest:,} tokens), limit {limit} a process"
    )
    if survey.memory_error:
        return Verdict(name="memory", outcome="fail", found=found, why=survey.memory_error)
    return Verdict(name="memory", outcome="pass", found=found)
