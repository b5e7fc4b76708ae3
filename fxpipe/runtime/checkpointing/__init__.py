"""Checkpointing: a function runs without keeping its activations, and runs again ahead of its
backward."""
