"""The order of operations and native calls."""

import graphlib
from collections.abc import Iterable
from typing import Any

from ..jaxprs.graph import Value, needed


def in_order(nodes: Iterable[Any], results: Iterable[Value]) -> list[Any]:
    """Operations and groups after those on which they depend, without unused ones.

    Raises:
        graphlib.CycleError: if there is no such order.
    """
    nodes = list(nodes)
    maker = {v: node for node in nodes for v in node.outs}
    graph = {node: [maker[v] for v in node.ins if v in maker] for node in nodes}
    return needed(list(graphlib.TopologicalSorter(graph).static_order()), results)
