"""First-order optimizers: each parameter is updated from its gradient and slots alone."""
