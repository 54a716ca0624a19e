"""Rows whose updates are deferred until they are read: optzoo.caught_up."""
