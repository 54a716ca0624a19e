"""Row-sparse gradients: lookups, train steps, lazy optimizers."""
