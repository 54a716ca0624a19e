"""Optimizers that precondition the gradient: Shampoo and GGT."""
