"""Paged attention for Flax NNX."""
