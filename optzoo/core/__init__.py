"""The engine; it knows no optimizer."""
