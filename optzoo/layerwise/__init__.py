"""Rules that weigh a parameter as a whole against its gradient."""
