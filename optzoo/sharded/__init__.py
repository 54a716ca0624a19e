"""Tables sharded by rows over the devices of a mesh: lookups, training steps, checkpoints."""
