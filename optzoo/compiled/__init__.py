"""What compilers report of a step, for devices that need not be there."""
