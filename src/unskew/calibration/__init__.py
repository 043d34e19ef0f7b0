"""Calibrators: a better classifier from feature statistics."""
