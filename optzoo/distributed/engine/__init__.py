"""What the distributed methods share: collectives, local steps, launching."""
