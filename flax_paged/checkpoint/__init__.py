"""Checkpoints as arrays and names: readers for safetensors and GGUF, our Orbax folder, and strict assignment to a model."""
