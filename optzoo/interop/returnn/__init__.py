"""RETURNN's updater."""

from .engine import OptzooUpdater as OptzooUpdater
from .learning_rate import LearningRateControl as LearningRateControl
from .updater import returnn_updater as returnn_updater
