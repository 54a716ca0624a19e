"""Rows that rest until they are read: optzoo.caught_up."""
