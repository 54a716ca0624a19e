"""The base of all other folders: numerics, checks, paths, gradients, row-sparse gradients."""
