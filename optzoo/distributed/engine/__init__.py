"""The engine of the distributed methods: collectives, local steps, launching."""
