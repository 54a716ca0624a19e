"""RETURNN's updater."""
