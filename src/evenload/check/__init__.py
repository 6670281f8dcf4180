"""Proof on the user's own model and data: isolation, invariance, resume, ledger."""
