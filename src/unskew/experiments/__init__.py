"""Experiments: a run as a value, what its names stand for, its folder, its records, and running it."""
