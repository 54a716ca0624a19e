"""How slots are stored: as they are, two in one array, in 8 bits, or rounded at random."""
