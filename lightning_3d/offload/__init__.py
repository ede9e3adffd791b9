"""Weights, optimizer states and activations in host memory or on a disk, while nothing uses them."""
