"""Checkpoints of TensorFlow 1."""
