"""Rules that read the parameter and end in a shrink; they own their learning rate."""
