"""What all other folders build on: numerics, checks, paths, gradients, row-sparse gradients."""
