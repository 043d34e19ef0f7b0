"""Federated methods as values, and their names."""
