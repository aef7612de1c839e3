"""Paged attention for Flax NNX: train a decoder, then serve the same module."""
