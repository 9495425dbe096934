"""Trees of tensors, and copies of a model without its data.

[tensors] The tensors inside of what a model takes and returns.

[bare] A copy of a model without its data: tensors of the meta device in place of its own.

`copy.deepcopy` refuses a tensor that was computed, as old `weight_norm` keeps one; locks, modules and generators; and takes a
function along as it is, with the original model in its closure. Here such tensors are replaced as all others are, functions get
closures of their own, and what cannot be copied is shared.
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


# --- tensors
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


# --- bare
MOST_VALUES = 1000
"""Numbers of a tensor on the host, neither parameter nor buffer, that keeps its values: a model may count by them."""
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
    """Copies what it is called with, each object once. `memo`: copies that are made already, by the id of their original."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._originals: list[Any] = []  # or the id of one that is gone could be another's

    def __call__(self, value: Any) -> Any:
        if (
            type(value) in _PLAIN
        ):  # the most usual first: a model of 50 layers has ten thousand of them
            return value
        found = self.memo.get(id(value), _OWN)
        if found is not _OWN:
            return found
        return value if isinstance(value, _ALIKE) else self._copied(value)

    def _kept(self, value: Any, new: Any) -> Any:
        self.memo[id(value)] = new
        self._originals.append(value)
        return new

    def _copied(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, torch.Tensor):
            return self._kept(value, bare(value))
        if kind is dict:
            new = self._kept(value, {})
            new.update((self(key), self(part)) for key, part in value.items())
            return new
        if kind is OrderedDict:
            new = self._kept(value, OrderedDict())
            for key, part in value.items():
                new[key] = self(part)
            return new
        if isinstance(value, nn.Module) and _is_plain(kind):
            new = self._kept(value, object.__new__(kind))
            new.__dict__.update((key, self(part)) for key, part in value.__getstate__().items())
            return new
        if kind is list:
            new = self._kept(value, [])
            new.extend(map(self, value))
            return new
        if kind in (tuple, set, frozenset):
            return self._kept(value, kind(map(self, value)))
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType:
            return self._kept(value, MethodType(value.__func__, self(value.__self__)))
        if kind is functools.partial:
            return self._kept(
                value, kind(self(value.func), *map(self, value.args), **self(value.keywords))
            )
        if isinstance(value, io.IOBase):
            raise TypeError(f"a model with an open file ({kind.__name__}) is not copied")
        try:
            if hasattr(value, "__deepcopy__"):
                return self._kept(value, value.__deepcopy__(self.memo))
            return self._rebuilt(value, value.__reduce_ex__(4))
        except (TypeError, RuntimeError, AttributeError):
            if isinstance(value, nn.Module):
                raise
            return self._kept(value, value)

    def _function(self, function: FunctionType) -> Any:
        """The function, with copies of the modules, tensors and functions that its closure holds; other things it shares."""
        cells = function.__closure__ or ()
        if not any(
            isinstance(_content(cell), nn.Module | torch.Tensor | FunctionType | MethodType)
            for cell in cells
        ):
            return self._kept(function, function)
        own = tuple(CellType() for _ in cells)
        new = self._kept(
            function,
            FunctionType(
                function.__code__,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                own,
            ),
        )
        new.__kwdefaults__ = function.__kwdefaults__
        new.__dict__.update(function.__dict__)
        for cell, of in zip(own, cells, strict=True):
            content = _content(of)
            if content is not _OWN:
                takes = isinstance(content, nn.Module | torch.Tensor | FunctionType | MethodType)
                cell.cell_contents = self(content) if takes else content
        return new

    def _rebuilt(self, value: Any, reduced: Any) -> Any:
        """By what pickle would do, in this process."""
        if isinstance(reduced, str):
            return value
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        new = self._kept(value, make(*map(self, args)))
        if state is not None:
            state = self(state)
            if hasattr(new, "__setstate__"):
                new.__setstate__(state)
            else:
                plain, slots = (
                    state if isinstance(state, tuple) and len(state) == 2 else (state, None)
                )
                new.__dict__.update(plain or {})
                for name, part in (slots or {}).items():
                    setattr(new, name, part)
        for part in items or ():
            new.append(self(part))
        for key, part in pairs or ():
            new[self(key)] = self(part)
        return new


@functools.cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether a module of this class is what its attributes are: it is not pickled in a way of its own."""
    names = (
        "__new__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__deepcopy__",
    )
    return all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in names)


def meta_memo(
    model: nn.Module, known: Mapping[int, Any], dtype: torch.dtype | None = None
) -> dict[int, Any]:
    """Meta tensors for the parameters and buffers of a model that are not known, by the ids of their originals. `dtype`: of what
    holds floating-point numbers, its own by default."""
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
    """A copy of an optimizer without states, or of several of one kind as one, for the copies of its parameters."""
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
    """Copies of the model, without weights, and of its optimizer. Tied weights stay tied, which `Module.to("meta")` would undo.

    `dtype`: of what holds floating-point numbers, the model's own by default.
    """
    copier = Copier(meta_memo(model, {}, dtype))
    copied: nn.Module = copier(model)
    return copied, None if optimizer is None else meta_optimizer([optimizer], copier.memo)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that was not assigned yet
        return _OWN


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor like it; a parameter where it is one. A small constant of the host keeps its values."""
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
    """A meta tensor of its sizes; a sparse one has as many values."""
    if tensor.layout is not torch.strided:
        return sparse(tuple(tensor.shape), tensor._nnz(), dtype or tensor.dtype)
    return torch.empty_like(tensor, dtype=dtype, device="meta")


def sparse(sizes: tuple[int, ...], values: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix of the meta device with so many values that are not zero."""
    indices = torch.empty(len(sizes), values, dtype=torch.int64, device="meta")
    numbers = torch.empty(values, dtype=dtype, device="meta")
    made = torch.sparse_coo_tensor(indices, numbers, sizes, device="meta", check_invariants=False)
    return made._coalesced_(True)
