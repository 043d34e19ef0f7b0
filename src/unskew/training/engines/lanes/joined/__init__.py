"""Convolutions of all lanes in one launch."""
