"""Each parameter on its own: gradient and slots only."""
