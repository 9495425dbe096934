"""The tensors inside of what a model takes and returns."""

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, and in graphs of torch_geometric; of a sparse one its values and indices."""
    if isinstance(tree, torch.Tensor):
        if tree.layout is torch.sparse_coo:
            yield from (tree._values(), tree._indices())
        else:
            yield tree
    elif isinstance(tree, list | tuple | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)
    elif _is_graph(tree):
        yield from tensors_in(tree.to_dict())


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Nested lists, tuples, dicts and graphs of torch_geometric with `function` applied to every tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [map_tensors(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return copy.copy(tree).apply(function) if _is_graph(tree) else tree


def _is_graph(value: Any) -> bool:
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and isinstance(value, module.BaseData)
