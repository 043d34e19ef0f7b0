"""Lanes: many clients of many runs trained by one batched step."""
