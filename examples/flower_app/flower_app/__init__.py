"""Flower's FedAvg on skewed digits, then calibration."""
