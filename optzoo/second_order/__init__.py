"""Rules that weigh directions against each other."""
