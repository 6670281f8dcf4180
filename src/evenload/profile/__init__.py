"""Measures the device and fits cost coefficients, so that predictions are in its seconds."""
