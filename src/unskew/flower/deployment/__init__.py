"""Flower's processes: an app to start from, certificates and keys, and a deployment on this machine for trying."""
