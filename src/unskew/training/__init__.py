"""Federated training: the local step, rounds, engines, personal models, costs."""
