"""Replicas of a model: placement, mapped steps, collectives, and the states of their methods."""

from .distributed.engine.collectives import broadcast as broadcast
from .distributed.engine.collectives import per_replica as per_replica
from .distributed.engine.launch import map_over_replicas as map_over_replicas
from .distributed.engine.launch import replica_specs as replica_specs
from .distributed.engine.launch import replicate as replicate
from .distributed.engine.launch import resize_replicas as resize_replicas
from .distributed.engine.launch import scan_local_steps as scan_local_steps
from .state.types import LocalSGDState as LocalSGDState
from .state.types import ReplicaState as ReplicaState
from .state.types import SharedParamsState as SharedParamsState
