"""Convolution, ReLU and 2 x 2 maximum as one operation with weights of its own for every lane."""
