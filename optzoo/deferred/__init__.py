"""Deferred rows until they are read: optzoo.caught_up."""
