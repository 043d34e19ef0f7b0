"""Engines: how the clients of a round are trained on this machine, and which one to take."""
