"""Checkpoints as arrays and names: safetensors, GGUF, our Orbax folder, and strict assignment to a model."""
