"""What the compilers make of each optimizer, wrapper and method: recorded, and compared."""
