"""Storage of slots: plain, two in one array, 8-bit, or stochastically rounded."""
