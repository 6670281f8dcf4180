"""Strategies measured against each other on the user's own machine, model and data, and against their predictions."""
