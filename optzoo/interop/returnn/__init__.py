"""RETURNN's updater."""

from .backend import OptzooUpdater as OptzooUpdater
