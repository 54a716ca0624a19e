"""Checkpoints of TensorFlow 1: read, plan, check, build."""
