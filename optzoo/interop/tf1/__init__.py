"""Checkpoints of TensorFlow 1: read, plan, check, build."""

from .save import tf1_variables as tf1_variables
