"""Ledger: every token that is read is trained, dropped for a reason, put off, or still waiting."""

from evenload.check.survey import Survey
from evenload.check.verdict import Verdict


def check_ledger(survey: Survey) -> Verdict:
    """Judge the account of the surveyed batches."""
    extent = "a whole epoch" if survey.whole_epoch else "the first batches"
    # Without what stayed at zero.
    told = (" ".join(line.split()) for line in survey.ledger_lines)
    lines = "; ".join(line for line in told if " 0 documents 0 tokens" not in line)
    found = f"{extent}, {survey.steps} steps of {survey.documents:,} documents, {survey.tokens:,} tokens: {lines}"
    if survey.ledger_error:
        return Verdict(name="ledger", outcome="fail", found=found, why=survey.ledger_error)
    if not survey.steps:
        return Verdict(name="ledger", outcome="skipped", found=found, why="no step could be planned; see memory")
    return Verdict(name="ledger", outcome="pass", found=found)
