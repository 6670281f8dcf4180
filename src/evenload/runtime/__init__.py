"""Executes plans: stages, channels, data parallelism, optimizer, checkpoints."""
