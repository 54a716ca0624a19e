"""Proximal optimizers: they read the parameters and apply the learning rate themselves."""
