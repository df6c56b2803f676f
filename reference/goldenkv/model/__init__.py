"""Weights, the forward pass over tiles, and checkpoints."""
