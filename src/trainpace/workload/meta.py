"""Map over trees of tensors, and copy a model to the meta device without its data.

`copy.deepcopy` does not work for all models. It rejects non-leaf tensors (which old `weight_norm`
stores), locks, modules and generators. It also shares functions, so closures keep references to the
original model. `Copier` replaces non-leaf tensors like all others and copies closures. It shares
objects that cannot be copied.
"""

import copy
import functools
import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, and in graphs of torch_geometric.

    For a sparse tensor, its values and indices are yielded.
    """
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
    """Apply `function` to every tensor in nested lists, tuples, dicts and graphs."""
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


MOST_VALUES = 1000
"""Maximum elements of a host tensor that keeps its values. Parameters and buffers never do."""
_PLAIN = frozenset(
    (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        torch.device,
        torch.dtype,
        torch.Size,
    )
)
_ALIKE = (bool, int, float, complex, str, bytes, type, BuiltinFunctionType, ModuleType)
_OWN = object()


class Copier:
    """Copier that copies each object once.

    Args:
        memo: {id of an original: its copy}, for objects that were copied before.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._originals: list[Any] = []  # keeps ids unique

    def __call__(self, value: Any) -> Any:
        if type(value) in _PLAIN:  # tested first: a model of 50 layers has ten thousand of them
            return value
        found = self.memo.get(id(value), _OWN)
        if found is not _OWN:
            return found
        return value if isinstance(value, _ALIKE) else self._copied(value)

    def _store(self, value: Any, new: Any) -> Any:
        self.memo[id(value)] = new
        self._originals.append(value)
        return new

    def _copied(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, torch.Tensor):
            return self._store(value, bare(value))
        if kind in (dict, OrderedDict, list):
            return self._container(value, self._store(value, kind()))
        if kind in (tuple, set, frozenset):
            return self._store(value, kind(map(self, value)))
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType:
            return self._store(value, MethodType(value.__func__, self(value.__self__)))
        if kind is functools.partial:
            args, keywords = map(self, value.args), self(value.keywords)
            return self._store(value, kind(self(value.func), *args, **keywords))
        if isinstance(value, io.IOBase):
            raise TypeError(f"a model with an open file ({kind.__name__}) cannot be copied")
        return self._by_its_protocol(value)

    def _container(self, value: Any, new: Any) -> Any:
        if isinstance(value, list):
            new.extend(map(self, value))
        else:
            new.update((self(key), self(part)) for key, part in value.items())
        return new

    def _by_its_protocol(self, value: Any) -> Any:
        try:
            if hasattr(value, "__deepcopy__"):
                return self._store(value, value.__deepcopy__(self.memo))
            reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str):
                return value
            # the function by which copy.deepcopy rebuilds an object from its pickled parts
            rebuilt: Any = getattr(copy, "_reconstruct")  # noqa: B009
            new = rebuilt(value, self.memo, *reduced, deepcopy=lambda part, _: self(part))
            return self._store(value, new)
        except (TypeError, RuntimeError, AttributeError):
            if isinstance(value, nn.Module):
                raise
            return self._store(value, value)

    def _function(self, function: FunctionType) -> Any:
        """Copy a function, and the modules, tensors and functions in its closure."""
        cells = [_content(cell) for cell in function.__closure__ or ()]
        if not any(isinstance(content, _COPIED_IN_CLOSURES) for content in cells):
            return self._store(function, function)
        closure = tuple(CellType() for _ in cells)
        code, name, defaults = function.__code__, function.__name__, function.__defaults__
        copied = FunctionType(code, function.__globals__, name, defaults, closure)
        new = self._store(function, copied)
        new.__kwdefaults__ = function.__kwdefaults__
        new.__dict__.update(function.__dict__)
        for cell, content in zip(closure, cells, strict=True):
            if isinstance(content, _COPIED_IN_CLOSURES):
                content = self(content)
            if content is not _OWN:
                cell.cell_contents = content
        return new


_COPIED_IN_CLOSURES = nn.Module | torch.Tensor | FunctionType | MethodType


def meta_memo(
    model: nn.Module, known: Mapping[int, Any], dtype: torch.dtype | None = None
) -> dict[int, Any]:
    """Return {id of a parameter or buffer: meta tensor} for a model.

    Args:
        model: The model.
        known: Mapping with the ids of tensors to skip.
        dtype: Dtype of floating-point tensors. None keeps the original dtypes.
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in known:
            cast = tensor.is_floating_point() and not hasattr(tensor, "keeps_dtype")
            empty = torch.empty_like(tensor, dtype=dtype if cast else None, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return memo


def meta_optimizer(
    optimizers: Sequence[torch.optim.Optimizer], memo: Mapping[int, Any]
) -> torch.optim.Optimizer:
    """Copy an optimizer without its states, for copied parameters.

    Several optimizers of one class become one.
    """
    first = optimizers[0]
    fresh = copy.copy(first)
    fresh.state = type(first.state)(first.state.default_factory) if first.state is not None else {}
    fresh.param_groups = [
        {**group, "params": [memo.get(id(p), p) for p in group["params"]]}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return fresh


def on_meta(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype | None = None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copy a model and its optimizer to the meta device.

    Unlike with `Module.to("meta")`, tied weights stay tied.

    Args:
        model: The model.
        optimizer: Its optimizer, or None.
        dtype: Dtype of floating-point tensors. None keeps the model's dtypes.
    """
    copier = Copier(meta_memo(model, {}, dtype))
    copied: nn.Module = copier(model)
    return copied, None if optimizer is None else meta_optimizer([optimizer], copier.memo)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # its name is not assigned yet
        return _OWN


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor or parameter like the given one.

    Small host tensors (`MOST_VALUES`) keep their values, since a model may read them.
    """
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    learns = tensor.is_leaf and tensor.requires_grad
    if (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not learns
        and tensor.numel() <= MOST_VALUES
    ):
        return tensor.detach().clone()
    return without_data(tensor.detach()).requires_grad_(learns)


def without_data(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a meta tensor of the same shape. A sparse tensor keeps its number of values."""
    if tensor.layout is not torch.strided:
        return sparse(tuple(tensor.shape), tensor._nnz(), dtype or tensor.dtype)
    return torch.empty_like(tensor, dtype=dtype, device="meta")


def sparse(sizes: tuple[int, ...], values: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a sparse meta tensor with the given shape and number of values."""
    indices = torch.empty(len(sizes), values, dtype=torch.int64, device="meta")
    numbers = torch.empty(values, dtype=dtype, device="meta")
    made = torch.sparse_coo_tensor(indices, numbers, sizes, device="meta", check_invariants=False)
    return made._coalesced_(True)
