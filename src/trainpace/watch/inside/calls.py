"""The calls that make the loss in the captured step: modules and loss functions, with the sizes of what they got, in order.

What a call got from an earlier one is noted as such, so that all of them can be made again on the meta device.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MOST_CALLS = 200
"""Calls of a step that are noted: a recurrent cell is called once for every letter of a line."""
MOST_NODES = 20_000
"""Nodes of a loss's graph that are looked at to find which outputs it was made of."""


class Shape(NamedTuple):
    """A tensor that the script made. `values`: of a sparse one, how many it has. `learns`: whether its gradient is computed."""

    sizes: tuple[int, ...]
    dtype: Any
    values: int | None = None
    learns: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers, such as indices."""
        return (
            not (self.dtype.is_floating_point or self.dtype.is_complex)
            and str(self.dtype) != "torch.bool"
        )

    def made(self, n: int, of: int) -> Any:
        """Such a tensor of the meta device for `n` samples where the call had `of`."""
        import torch

        if self.values is not None:
            from trainpace.workload import sparse

            return sparse(self.sizes, self.values, self.dtype)
        return torch.empty(_scaled(self.sizes, n, of), dtype=self.dtype, device="meta")


class FromOutput(NamedTuple):
    """A tensor that came from an earlier call: which call, and its position among that one's tensors."""

    call: int
    position: int
    sizes: tuple[int, ...]


class Fixed(NamedTuple):
    """An object with tensors, such as a graph, without their data: it is what it was in the script's own batch."""

    value: Any
    samples: int


class Derived(NamedTuple):
    """A tensor that the script computed of outputs, at these places; the computation itself is not followed."""

    places: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    dtype: Any


class Outputs:
    """The tensors that calls returned, found by where their numbers lie and by the nodes of autograd's graph that made them."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self._at: dict[int, list[tuple[int, int]]] = {}
        self._made: dict[tuple[Any, int], tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self.calls)

    def begin(self) -> None:
        """A call begins, which has returned nothing yet."""
        self.calls.append([])

    def put(self, tensors: list[Any]) -> None:
        """What the last call returned."""
        self.calls[-1] = tensors
        for position, tensor in enumerate(tensors):
            place = len(self.calls) - 1, position
            self._at.setdefault(tensor.data_ptr(), []).append(place)
            if tensor.grad_fn is not None:
                self._made[tensor.grad_fn, tensor.output_nr] = place

    def place_of(self, value: Any) -> tuple[int, int] | None:
        """(call, position) of the last output that this is, perhaps in another shape. One that was detached is another."""
        for call, position in reversed(self._at.get(value.data_ptr(), ())):
            tensor = self.calls[call][position]
            if tensor.numel() == value.numel() and tensor.requires_grad == value.requires_grad:
                return call, position
        return None

    def reached(self, roots: Iterable[Any]) -> list[tuple[int, int]]:
        """The places of the outputs that tensors were made of, the last calls' alone where these were made of others."""
        found: dict[tuple[int, int], None] = {}
        left = [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
        seen = set(left)
        while left and len(seen) < MOST_NODES:
            node = left.pop()
            if node in self._made:
                found[self._made[node]] = None
                continue
            for following in node[0].next_functions:
                if following[0] is not None and following not in seen:
                    seen.add(following)
                    left.append(following)
        return sorted(found)


class Call(NamedTuple):
    """`module`: the number of a model with parameters, or what has none and makes a loss. `arguments`: with placeholders for
    tensors; `nesting`: how they are nested."""

    module: Any
    arguments: list[Any]
    nesting: Any

    @property
    def shapes(self) -> list[Shape]:
        return [value for value in self.arguments if isinstance(value, Shape)]

    @property
    def fixed(self) -> list[Fixed]:
        return [value for value in self.arguments if isinstance(value, Fixed)]

    @property
    def follows(self) -> bool:
        """Whether it got something from an earlier call."""
        return any(isinstance(value, FromOutput | Derived) for value in self.arguments)

    def made(self, n: int, of: int) -> list[Any]:
        """Its arguments for `n` samples where it had `of`; what comes from earlier calls stays open."""
        made = [
            value.made(n, of) if isinstance(value, Shape) else value for value in self.arguments
        ]
        if self.fixed:
            from trainpace.workload import Copier

            # each step gets its own, which a model may write into
            made = [
                Copier({})(value.value) if isinstance(value, Fixed) else value for value in made
            ]
        return made

    def holds_still(self, of: int) -> bool:
        """Whether something that it got says that its batch is a graph, whose edges do not grow with its nodes: an object, a
        sparse matrix, or pairs of nodes."""
        pairs = [
            len(s.sizes) == 2 and s.sizes[0] == 2 and of != 2 and s.is_whole for s in self.shapes
        ]
        return (
            any(pairs)
            or any(v.samples > 0 for v in self.fixed)
            or any(s.values for s in self.shapes)
        )

    def run(
        self, module: Any, arguments: list[Any], outputs: Sequence[Sequence[Any]], n: int, of: int
    ) -> Any:
        from torch.utils._pytree import tree_unflatten

        given = list(arguments)
        for i, value in enumerate(self.arguments):
            if isinstance(value, FromOutput):
                given[i] = outputs[value.call][value.position].reshape(_scaled(value.sizes, n, of))
            elif isinstance(value, Derived):
                given[i] = _derived(value, outputs, _scaled(value.sizes, n, of))
            elif isinstance(value, Shape) and value.learns:
                given[i] = given[i].detach().requires_grad_()
        args, kwargs = tree_unflatten(given, self.nesting)
        return module(*args, **kwargs)


def _derived(value: Derived, outputs: Sequence[Sequence[Any]], sizes: tuple[int, ...]) -> Any:
    """A tensor of its sizes through which gradients flow to all that it was made of."""
    import torch

    means = [outputs[call][position].mean() for call, position in value.places]
    return torch.empty(sizes, dtype=value.dtype, device="meta") + sum(means[1:], means[0])


def _scaled(sizes: tuple[int, ...], n: int, of: int) -> tuple[int, ...]:
    """With as many samples; what has no such dimension first stays as it is."""
    if not sizes or n == of or sizes[0] % of or (of == 1 and sizes[0] > 1):
        return sizes
    return (n * (sizes[0] // of), *sizes[1:])


def described(module: Any, args: Any, kwargs: Any, outputs: Outputs) -> Call:
    from torch.utils._pytree import tree_flatten

    values, nesting = tree_flatten((args, kwargs))
    return Call(module, [_placeholder(value, outputs) for value in values], nesting)


def _placeholder(value: Any, outputs: Outputs) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            count = value._nnz()
            return Shape(tuple(value.shape), value.dtype, count)
        found = outputs.place_of(value)
        if found is not None:
            return FromOutput(*found, tuple(value.shape))
        if value.grad_fn is not None and (places := outputs.reached([value])):
            return Derived(tuple(places), tuple(value.shape), value.dtype)
        learns = value.requires_grad and value.is_floating_point()
        return Shape(tuple(value.shape), value.dtype, learns=learns)
    if value is None or isinstance(value, bool | int | float | str | torch.device | torch.dtype):
        return value
    from trainpace.workload import Copier, tensors_in

    sizes = [t.shape[0] for t in (*tensors_in(value), *tensors_of(value)) if t.dim()]
    return Fixed(Copier({})(value), sizes[0] if sizes else 0)


def tensors_of(value: Any) -> list[Any]:
    """The tensors of an output, those among them that an object holds, such as a distribution of actions."""
    import torch
    from torch.utils._pytree import tree_leaves

    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, torch.nn.Module):
            found += [part for part in vars(leaf).values() if isinstance(part, torch.Tensor)]
    return [tensor for tensor in found if tensor.layout is torch.strided]
