"""The weights of components: which rows and columns of which matrix of the model belong to a head or a neuron.

The operations between a linear map and the heads only rearrange values. They are run again on numbers: the number of
each output of the linear map ends where the head is that it belongs to. So it makes no difference how a model stores
its weights: fused or separate, transposed or not, interleaved, with fewer heads for keys and values.
"""

from __future__ import annotations

import functools
import math
import string
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.held_values import is_offloaded
from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, refs_in
from graphpatch_notebook.components.chain import Trails
from graphpatch_notebook.components.components import Component, Components, find
from graphpatch_notebook.components.ends import table_of
from graphpatch_notebook.components.flow import Axes, Flow, UnknownValueError, Value
from graphpatch_notebook.components.operations import ADDITIONS, NORMS, SAME_VALUES, SCALINGS, VIEWS
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.patching.sharding import is_distributed
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, spec_at, take

WeightSide: TypeAlias = Literal["outputs", "inputs", "all"]
WeightIndex: TypeAlias = "int | slice"

_FARTHEST = 60
_STEPS = SAME_VALUES | VIEWS | NORMS | SCALINGS | ADDITIONS | {"tanh"}
"""What may lie between a linear map and a component that it makes, besides norms as modules."""
_ORDER = frozenset("batch position query key token".split())
_lock = threading.RLock()


class NoWeightError(Exception):
    """The weight of a component is not known, for this reason (caught inside the package)."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of the model, and the entries along one side that belong to each head.

    Attributes:
        value: The tensor that the model holds.
        inputs, outputs: The dimensions of the tensor that are inputs, and outputs.
        side: The side that is divided into heads or neurons.
        numbers: The numbers of the entries, of shape `(heads, size)` or `(size,)`; `None` for all.
    """

    flow: Flow
    value: Value
    inputs: tuple[int, ...] = (0,)
    outputs: tuple[int, ...] = (1,)
    side: WeightSide = "all"
    numbers: Tensor | None = None

    @property
    def heads(self) -> int | None:
        """The number of heads; `None` if it is not divided into heads."""
        return len(self.numbers) if self.numbers is not None and self.numbers.ndim == 2 else None

    def is_same(self, other: _Matrix) -> bool:
        """Whether these are the same entries of the same matrix."""
        if self.value != other.value or self.numbers is None or other.numbers is None:
            return False
        return torch.equal(self.numbers, other.numbers)

    def whole(self) -> Tensor:
        """Returns the matrix with a row for each input, as a view if the model has it as one tensor."""
        return _flat(self._by_sides(), len(self.inputs))

    def _by_sides(self) -> Tensor:
        return held_tensor(self.flow, self.value).permute(*self.inputs, *self.outputs)

    def of(self, head: int | None) -> Tensor:
        """Returns the part of a head, or all of a matrix that is not divided into heads."""
        numbers = self.numbers if head is None or self.numbers is None else self.numbers[head]
        if numbers is None:
            return self.whole()
        tensor, rows, dim = self._by_sides(), len(self.inputs), 1 if self.side == "outputs" else 0
        first, dims = (rows, len(self.outputs)) if dim else (0, rows)
        for _ in range(dims - 1):  # with one index of a dimension, it is a view however the others are stored
            size = math.prod(tensor.shape[first + 1 : first + dims])
            index_of_all = set((numbers // size).tolist())
            if len(index_of_all) > 1:
                break
            tensor, numbers, dims = tensor.select(first, *index_of_all), numbers % size, dims - 1
            rows -= not dim
        matrix = _flat(tensor, rows)
        steps = set((numbers[1:] - numbers[:-1]).tolist())
        if len(numbers) == 1 or (len(steps) == 1 and min(steps) > 0):
            step = next(iter(steps), 1)
            index = slice(int(numbers[0]), int(numbers[-1]) + 1, step)
            return matrix[:, index] if dim else matrix[index]
        return matrix.index_select(dim, numbers.to(matrix.device))


def _flat(tensor: Tensor, rows: int) -> Tensor:
    """Returns a tensor as a matrix with its first `rows` dimensions in rows: a view if it can be one."""
    return tensor.reshape(math.prod(tensor.shape[:rows]), math.prod(tensor.shape[rows:]))


@dataclass(frozen=True, slots=True)
class _LinearMap:
    """A linear map, with letters for the dimensions of its tensors, as those of an einsum.

    Attributes:
        result, given: What it returns, and what it reads.
        letters: The letters of these, and of the weight.
    """

    flow: Flow
    result: Value
    given: Value
    weight: Value
    letters: Mapping[Value, str]

    @classmethod
    def of(cls, flow: Flow, linear: Value) -> _LinearMap:
        """Reads the letters from the operation.

        Raises:
            NoWeightError: It is not a product with one tensor of the model.
        """
        weights, moving = flow.weights(linear.node), flow.moving(linear.node)
        pair = [read for read in flow.reads(linear.node) if read in weights + moving]
        letters = _product_letters(linear.node, *pair) if len(weights) == len(moving) == 1 and len(pair) == 2 else None
        if letters is None or any(len(set(each)) < len(each) for each in letters):
            raise NoWeightError(f"{flow.path(linear)} ({linear.op}) does not multiply with one matrix")
        return cls(flow, linear, moving[0], weights[0], dict(zip((*pair, linear), letters, strict=True)))

    @property
    def inputs(self) -> str:
        """The letters of the weight that are summed over, in its order."""
        return "".join(letter for letter in self.letters[self.weight] if letter not in self.letters[self.result])

    @property
    def apart(self) -> str:
        """The letters along which each part of what it reads is multiplied with another part of the weight."""
        both = set(self.letters[self.given]) & set(self.letters[self.result])
        return "".join(letter for letter in self.letters[self.weight] if letter in both)

    @property
    def outputs(self) -> str:
        """The letters of the weight that only its result has, in its order."""
        return "".join(letter for letter in self.letters[self.weight] if letter not in self.inputs + self.apart)

    @property
    def is_by_columns(self) -> bool:
        """Whether inputs and outputs are the last dimensions of what it reads and returns, each as a whole."""
        ends = self.letters[self.given][-1:], self.letters[self.result][-1:]
        return ends == (self.inputs, self.outputs) and not self.apart

    def numbers(self, value: Value, letters: str) -> Tensor:
        """Returns the number of each entry of a value along some letters, in its shape."""
        sizes = dict(zip(self.letters[value], value.shape, strict=True))
        order = [letter for letter in self.letters[value] if letter in letters]
        counted = torch.arange(math.prod(sizes[letter] for letter in letters)).view([sizes[each] for each in letters])
        arranged = counted.permute([letters.index(letter) for letter in order])
        shape = [sizes[letter] if letter in letters else 1 for letter in self.letters[value]]
        return arranged.reshape(shape).expand(value.shape).contiguous()

    def matrix(self, inputs: str, side: WeightSide = "all", numbers: Tensor | None = None) -> _Matrix:
        """Returns the weight as a matrix."""
        own = self.letters[self.weight]
        unread = [letter for letter in own if letter not in "".join(self.letters[v] for v in (self.given, self.result))]
        if unread or set(inputs + self.outputs) != set(own):
            raise NoWeightError(f"{self.flow.path(self.result)} does not multiply all that it reads with one matrix")
        rows, columns = (tuple(map(own.index, letters)) for letters in (inputs, self.outputs))
        return _Matrix(self.flow, self.weight, rows, columns, side, numbers)


def _einsum_letters(node: Node) -> tuple[list[str], str]:
    """Returns the letters of the factors and of the result of an einsum; empty if the result is not written out."""
    equation = next((given for given in node.args if isinstance(given, str)), "").replace(" ", "")
    before, _, result = equation.partition("->")
    factors = before.split(",")
    specs = [spec_at(ref.node.spec, ref.dig) for ref in refs_in(node.args)]
    ranks = [len(spec.shape) for spec in specs if isinstance(spec, TensorSpec)]
    if not result or len(ranks) != len(factors):
        return [], ""
    # An ellipsis is as many letters as are left; of fewer, the last ones, as dimensions are broadcast.
    left = [rank - len(letters.replace("...", "")) for rank, letters in zip(ranks, factors, strict=True)]
    free = "".join([letter for letter in string.ascii_letters if letter not in equation][: max(left)])
    factors = [letters.replace("...", free[len(free) - count :]) for letters, count in zip(factors, left, strict=True)]
    return factors, result.replace("...", free)


def _product_letters(node: Node, one: Value, other: Value) -> tuple[str, str, str] | None:
    """Returns letters for the dimensions of two tensors and of their product, as those of an einsum."""
    if node.op == "einsum":
        factors, result = _einsum_letters(node)
        return (factors[0], factors[1], result) if len(factors) == 2 else None
    if node.op not in ("linear", "addmm", "matmul", "mm", "bmm"):
        return None
    first, second = "RI"[-len(one.shape) :], "OI" if node.op == "linear" else "IO"[: len(other.shape)]
    leading = [tuple(value.shape[:-2]) for value in (one, other)]
    count = max(map(len, leading))
    sizes = list(zip(*((1,) * (count - len(each)) + each for each in leading), strict=True))
    names = string.ascii_lowercase[:count]
    # A dimension of one element that is broadcast to a dimension of the other tensor is not the same dimension.
    repeated = [
        "".join(name if pair[which] == max(pair) else name.upper() for name, pair in zip(names, sizes, strict=True))
        for which in range(2)
    ]
    own, others = (letters[count - len(each) :] for letters, each in zip(repeated, leading, strict=True))
    return own + first, others + second, names + "R" * ("R" in first) + "O" * ("O" in second)


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear map of the model whose outputs, or inputs, belong to the heads of a component.

    Attributes:
        linear: What it returns.
        heads: The numbers of the outputs (of inputs, for `attn.z`) that belong to each head, of shape `(heads, size)`;
            of shape `(1, heads * size)` if the heads depend on each other.
        are_separate: Whether each head depends on its own outputs only, and not on others through a norm over all.
        weight: Returns its matrix, with a row for each input: a view of the model's parameter. It raises a
            `GraphError` if this is not held as a tensor of floating-point numbers.
    """

    linear: Value
    heads: Tensor
    are_separate: bool
    weight: Callable[[], Tensor]


def projection(root: Frame, name: str) -> Projection:
    """Returns the linear map that makes the component `attn.q`, `attn.k` or `attn.v`, or that reads `attn.z`.

    Raises:
        NoWeightError: The component is not made, or not read, by one linear map.
    """
    finder, is_read = _finder(root), name.endswith(".z")
    component, axes = finder.component(name), ("head", "channel")
    linear, matrix = finder.inputs(component, axes) if is_read else finder.outputs(component, axes)
    heads = matrix.numbers
    if heads is None or heads.ndim != 2:
        raise NoWeightError(f"{name} is not divided into heads")
    if not linear.is_by_columns:
        raise NoWeightError(
            f"{finder.flow.path(linear.result)} has heads as a dimension of its own, and not as parts of the last one"
        )
    are_separate = is_read or not finder.has_norm_over_heads(component, heads.shape[1])
    return Projection(linear.result, heads if are_separate else heads.reshape(1, -1), are_separate, matrix.whole)


class ComponentWeights:
    """The weights of one kind of component, by layer and head.

    ``W[layer, head]`` is a matrix with a row for each input: ``x @ W[layer, head]``. It is a view of the model's
    parameter where its entries have equal distances in it, else a copy. ``W[layer]`` stacks the heads, and slices stack
    layers or heads; these are copies.

    Attributes:
        name: The name, such as `W_Q`.
        missing: Why there is no weight for some layers, by layer.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> pg = PatchableGraph(model, torch.randn(1, 5, 8))
        >>> pg.weights.W_in[1].shape
        torch.Size([8, 16])
    """

    def __init__(self, name: str, layers: dict[int, _Matrix], missing: dict[int, str]) -> None:
        self.name = name
        self.missing = missing
        self._layers = layers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `W[:]`: layers, heads if there are any, inputs, outputs."""
        return tuple(self[:].shape)

    def __len__(self) -> int:
        return len(self._layers) + len(self.missing)

    def __repr__(self) -> str:
        return f"<{self.name} of {len(self._layers)} of {len(self)} layers>"

    def __getitem__(self, key: WeightIndex | tuple[WeightIndex, ...]) -> Tensor:
        layer, *rest = key if isinstance(key, tuple) else (key,)
        if isinstance(layer, slice):
            found = [self.__getitem__((number, *rest)) for number in range(len(self))[layer]]
            if not found:
                raise IndexError(f"{self.name} has {len(self)} layers, and {layer} takes none of them")
            return torch.stack(found)
        matrix = self._matrix(layer)
        if matrix.heads is None:
            if rest:
                raise IndexError(f"{self.name}[{layer}] is not divided into heads; drop the head")
            return matrix.of(None)
        if len(rest) > 1:
            raise IndexError(f"{self.name} is indexed by layer and head; index the matrix for its rows and columns")
        head = rest[0] if rest else slice(None)
        if isinstance(head, slice):
            return torch.stack([matrix.of(number) for number in range(matrix.heads)[head]])
        if not -matrix.heads <= head < matrix.heads:
            raise IndexError(f"{self.name}[{layer}] has {matrix.heads} heads; {head} is out of range")
        return matrix.of(head % matrix.heads)

    def heads(self, layer: int) -> int:
        """Returns the number of heads of a layer: of key and value heads for `W_K` and `W_V`."""
        return self._matrix(layer).heads or 0

    def _matrix(self, layer: int) -> _Matrix:
        if not -len(self) <= layer < len(self):
            raise IndexError(f"{self.name} has {len(self)} layers; {layer} is out of range")
        layer %= len(self)
        if layer in self.missing:
            raise GraphError(f"{self.name}[{layer}] was not found: {self.missing[layer]}")
        return self._layers[layer]


class Weights:
    """The weights of a model's components, read from the model at each access: `pg.weights`.

    - `W_Q`, `W_K`, `W_V` (channels of the stream x channels of the head) and `W_O` (the reverse), by layer and head.
      Under grouped-query attention, `W_K` and `W_V` have as many heads as there are of keys and values.
    - `W_in` and `W_out` of the MLP by layer (channels x neurons, and the reverse), and `W_gate` if it is gated.
    - `W_E` (tokens x channels), `W_pos` (positions x channels, if the model has such a table) and `W_U`
      (channels x tokens) of the model.

    They are the model's own numbers: norms are not folded in, and biases not included. Of a module that accelerate
    offloads they are copies, which each access loads. If a model has several stacks of
    layers, ``pg.weights["decoder"]`` has those of one.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        ...     def forward(self, x):
        ...         return x + self.mlp(x)
        >>> pg = PatchableGraph(torch.nn.Sequential(Block(), Block()), torch.ones(1, 3, 4))
        >>> pg.weights.W_in.shape, pg.weights.W_out[1].shape
        ((2, 4, 8), torch.Size([8, 4]))
    """

    def __init__(self, root: Frame, stack: str = "") -> None:
        self._root = root
        self._stack = stack

    def __getitem__(self, stack: str) -> Weights:
        return Weights(self._root, stack)

    def __dir__(self) -> list[str]:
        return [*_BY_LAYER, *_OF_MODEL]

    def __repr__(self) -> str:
        return f"<weights: {', '.join(dir(self))}>"

    @property
    def unembedding(self) -> str:
        """The path of the result of the multiplication with `W_U`.

        Raises:
            GraphError: It was not found.
        """
        finder = _finder(self._root)
        try:
            return finder.flow.path(finder.unembedding())
        except NoWeightError as problem:
            raise GraphError(f"W_U was not found: {problem}") from None

    @property
    def changes_logits(self) -> bool:
        """Whether the model computes something between the multiplication with `W_U` and its logits."""
        return _finder(self._root).changes_logits()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in dir(self):
            close = nearest(name, dir(self), 1)
            raise AttributeError(f"there are no weights {name!r}; nearest: {close[0]!r}")
        components, stack = find(self._root), self._stack
        if stack not in components.layers:
            stacks = ", ".join(repr(each) for each in components.layers) or "none"
            raise GraphError(f"unknown stack of layers {stack!r}; the stacks are {stacks}: pg.weights[stack]")
        finder, prefix = _finder(self._root), f"{stack}." if stack else ""
        if name not in _OF_MODEL:
            return finder.by_layer(prefix, name, components.layers[stack])
        try:
            return finder.of_model(prefix, name).whole()
        except NoWeightError as problem:
            raise GraphError(f"{name} was not found: {problem}") from None


_OF_MODEL = ("W_E", "W_pos", "W_U")
_BY_LAYER = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out")


def _finder(root: Frame) -> _WeightFinder:
    with _lock:
        findings = root.capture.findings
        if _finder not in findings:
            findings[_finder] = _WeightFinder(find(root))
        return findings[_finder]  # type: ignore[no-any-return]


class _WeightFinder:
    """Finds the weights of components; keeps what it found."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._trails: Trails = components.evidence.trails
        self.flow = self._trails.flow
        self._known: dict[str, ComponentWeights] = {}

    def by_layer(self, prefix: str, name: str, count: int) -> ComponentWeights:
        known = self._known.get(prefix + name)
        if known is None:
            layers, missing = dict[int, _Matrix](), dict[int, str]()
            for layer in range(count):
                found = self._of_layer(f"{prefix}layers[{layer}].", name)
                if isinstance(found, str):
                    missing[layer] = found
                else:
                    layers[layer] = found
            known = self._known[prefix + name] = ComponentWeights(name, layers, missing)
        return known

    def _of_layer(self, start: str, name: str) -> _Matrix | str:
        try:
            if name in ("W_Q", "W_K", "W_V"):
                return self.outputs(self.component(f"{start}attn.{name[-1].lower()}"), ("head", "channel"))[1]
            if name == "W_O":
                return self.inputs(self.component(f"{start}attn.z"), ("head", "channel"))[1]
            post = self.component(f"{start}mlp.post")
            if name == "W_out":
                return self.inputs(post, ("neuron",))[1]
            gate = self.outputs(self.component(f"{start}mlp.pre"), ("neuron",))[1]
            up = self._up(post)
            other = None if up is None else self._outputs_of(up, ("neuron",), post)[1]
            # An activation may be a product with its own input (`x * sigmoid(x)`).
            is_gated = other is not None and not other.is_same(gate)
            if name == "W_gate" and not is_gated:
                raise NoWeightError("the MLP is not gated")
            return other if other is not None and is_gated and name == "W_in" else gate
        except NoWeightError as problem:
            return str(problem)

    def of_model(self, prefix: str, name: str) -> _Matrix:
        """Returns the embedding or the unembedding."""
        if name == "W_E":
            value = self._value(self.component(f"{prefix}@embed"))
            if (table := table_of(self.flow, value)) is None:
                raise NoWeightError(f"the embedding is made by {value.op or value.node.kind}, not by a table")
            return _Matrix(self.flow, table)
        if name == "W_pos":
            return _Matrix(self.flow, self._table_before(self._value(self.component(f"{prefix}@pos_embed"))))
        linear = _LinearMap.of(self.flow, self.unembedding())
        return linear.matrix(linear.inputs)

    def _table_before(self, value: Value) -> Value:
        """Returns the table of the model whose rows a value has, selected and repeated."""
        start, table = value, table_of(self.flow, value)
        while table is None and value.op in VIEWS | SAME_VALUES and self.flow.is_held(value):
            value = self.flow.reads(value.node)[0]
            table = table_of(self.flow, value)
        table = value if table is None else table
        if table.node.kind not in HELD_KINDS or len(table.shape) != 2:
            raise NoWeightError(f"{self.flow.path(start)} does not have rows of one table")
        return table

    def unembedding(self) -> Value:
        """Returns the result of the last linear map before the logits."""
        return self._before(self._value(self.component("@logits")))

    def changes_logits(self) -> bool:
        """Whether more is done with the result of that linear map than to rearrange it or to change its dtype."""
        value: Value | None = self._value(self.component("@logits"))
        while value is not None and value.op in SAME_VALUES | VIEWS:
            value = self._trails.source(value, _STEPS)
        return value != self.unembedding()

    # -- values --------------------------------------------------------------------------------------------------------

    def component(self, name: str) -> Component:
        if name not in self._components:
            reason = self._components.why_missing(name)
            raise NoWeightError(f"there is no {name}" + (f" ({reason})" if reason else ""))
        return self._components[name]

    def _value(self, component: Component) -> Value:
        return self._components.evidence.values[component.name]

    def _before(self, value: Value) -> Value:
        """Returns the linear map behind a value, through norms and operations that only rearrange."""
        linear = self._trails.linear_map(value, _STEPS)
        if not self.flow.is_linear_map(linear):
            raise NoWeightError(f"{self.flow.path(linear)} is not made by one linear map")
        return linear

    def has_norm_over_heads(self, component: Component, size: int) -> bool:
        """Whether a norm over more than a head's `size` channels lies between a component and its linear map."""
        value: Value | None = self._value(component)
        while value is not None and not self.flow.is_linear_map(value):
            if (value in self._trails.norms or value.op in NORMS) and value.shape[-1] != size:
                return True
            value = self._trails.source(value, _STEPS)
        return False

    def _up(self, post: Component) -> Value | None:
        """Returns the factor that the gate of an MLP is multiplied with; `None` if it is not gated."""
        value: Value | None = self._value(post)
        while value is not None and value.op not in SCALINGS:
            value = self._trails.source(value, _STEPS)
        sides = self.flow.moving(value.node) if value is not None else []
        linear = [side for side in sides if self.flow.is_linear_map(self._trails.linear_map(side, _STEPS))]
        return linear[0] if len(sides) == 2 and len(linear) == 1 else None

    # -- matrices ------------------------------------------------------------------------------------------------------

    def outputs(self, component: Component, axes: tuple[str, ...]) -> tuple[_LinearMap, _Matrix]:
        """Returns the linear map whose outputs form a component, and its matrix with the numbers of the outputs."""
        return self._outputs_of(self._value(component), axes, component)

    def _outputs_of(self, value: Value, axes: tuple[str, ...], like: Component) -> tuple[_LinearMap, _Matrix]:
        linear = _LinearMap.of(self.flow, self._before(value))
        result = linear.result
        numbers = linear.numbers(result, linear.outputs)
        found = _by_axes(self._arrived(result, numbers, value), like.axes, axes)
        if len(found.unique()) < found.numel():  # heads with the same weights: repeated, or made of different inputs
            entries = self._arrived(result, torch.arange(result.size).view(result.shape), value)
            others = tuple(slice(None) if axis in axes else 0 for axis in like.axes)
            if len(entries[others].unique()) > len(found.unique()):
                raise NoWeightError(f"{self.flow.path(result)} multiplies a part of the stream for each head")
        return linear, linear.matrix(linear.inputs, "outputs", found)

    def _arrived(self, start: Value, numbers: Tensor, value: Value) -> Tensor:
        """Returns the numbers of the entries of one value where operations that only rearrange take them."""
        return _Rearranged(self.flow, self._trails, start, numbers).value(value)

    def inputs(self, component: Component, axes: tuple[str, ...]) -> tuple[_LinearMap, _Matrix]:
        """Returns the linear map whose inputs form a component, and its matrix with the numbers of the inputs."""
        value = self._value(component)
        linear = _LinearMap.of(self.flow, self._after(value))
        numbered = torch.arange(value.size).view(value.shape)
        arrived = self._arrived(value, numbered, linear.given)
        if arrived.numel() != value.size:
            raise NoWeightError(f"{self.flow.path(linear.result)} reads other values than {component.name}")
        inputs = self._summed(linear)
        numbers = torch.empty(value.size, dtype=torch.long)
        numbers[arrived.reshape(-1)] = linear.numbers(linear.given, inputs).reshape(-1)
        return linear, linear.matrix(inputs, "inputs", _by_axes(numbers.view(value.shape), component.axes, axes))

    def _summed(self, linear: _LinearMap) -> str:
        """Returns the letters of the inputs of a linear map, and of what the model sums over right after it."""
        inputs = linear.inputs
        for user in self.flow.users.get(linear.result.node, []) if linear.apart else []:
            dims = user.kwargs.get("dim", user.args[1] if len(user.args) > 1 else None)
            if user.op == "sum" and dims is not None:
                of_result = linear.letters[linear.result]
                inputs += "".join(of_result[dim] for dim in ([dims] if isinstance(dims, int) else dims))
        return "".join(letter for letter in linear.letters[linear.weight] if letter in inputs)

    def _after(self, value: Value) -> Value:
        """Returns the linear map that reads a value."""
        for _ in range(_FARTHEST):
            users = self.flow.users.get(value.node, [])
            if (linear := next(filter(self.flow.is_linear_map, map(Value, users)), None)) is not None:
                return linear
            steps = [user for user in users if user.op in SAME_VALUES | VIEWS]
            if len(steps) != 1:
                break
            value = Value(steps[0])
        raise NoWeightError(f"{self.flow.path(value)} is not read by one linear map")


class _Rearranged:
    """Runs recorded operations that only rearrange, on numbers in place of one value."""

    def __init__(self, flow: Flow, trails: Trails, start: Value, numbers: Tensor) -> None:
        self._flow = flow
        self._trails = trails
        self._known: dict[Value, Any] = {start: numbers}

    def value(self, value: Value) -> Tensor:
        """Returns the numbers at the place of the value."""
        try:
            result = self._at(value)
        except UnknownValueError as unknown:
            raise NoWeightError(str(unknown)) from None
        if not isinstance(result, Tensor) or result.shape != value.shape:
            raise NoWeightError(f"the operations before {self._flow.path(value)} do more than rearrange")
        return result

    def _at(self, value: Value) -> Any:
        if value not in self._known:
            whole = Value(value.node)
            result = self._made(value) if value == whole else self._at(whole)
            for key in value.keys:
                result = take(result, key)
            self._known[value] = result
        return self._known[value]

    def _made(self, value: Value) -> Any:
        flow, node = self._flow, value.node
        if (norm := self._trails.norms.get(value)) is not None:
            return self._at(norm.given.value)
        if value.op in VIEWS:
            return flow.rerun(node, self._argument)
        moving = [read for read in flow.moving(node) if read.size == value.size] if node.kind == "op" else []
        if value.op in SAME_VALUES | SCALINGS | ADDITIONS | NORMS and len(moving) == 1:
            return self._at(moving[0]).reshape(value.shape)
        raise NoWeightError(f"{flow.path(value)} ({value.op or node.kind}) does more than rearrange")

    def _argument(self, value: Value) -> Any:
        if not isinstance(value.spec, TensorSpec):
            return tuple(_plain(value.spec))
        # In the run, a tensor may have been laid out so that any view of it was one.
        found = self._at(value)
        return found.contiguous() if isinstance(found, Tensor) else found


def _plain(spec: Any) -> Iterator[Any]:
    """Yields the numbers in a recorded size."""
    if not isinstance(spec, ContainerSpec) or not all(isinstance(child, ScalarSpec) for _, _, child in spec.children):
        raise NoWeightError(f"an argument is {spec}")
    yield from (child.value for _, _, child in spec.children if isinstance(child, ScalarSpec))


def _by_axes(numbers: Tensor, axes: Axes, wanted: tuple[str, ...]) -> Tensor:
    """Returns numbers along the wanted axes; they must be the same along all others."""
    if not set(axes) <= _ORDER | set(wanted):
        raise NoWeightError(f"its dimensions are {', '.join(map(str, axes))}")
    order = sorted(range(len(axes)), key=lambda dim: wanted.index(axes[dim]) if axes[dim] in wanted else -1)
    arranged = numbers.permute(order)
    found = arranged[(0,) * (len(axes) - sum(axis in wanted for axis in axes))]
    if not torch.equal(arranged, found.expand(arranged.shape)):
        raise NoWeightError("its entries are not the same ones in all rows and positions")
    return found if found.ndim == len(wanted) else found[None]


def _loaded(frame: Frame, attributes: Sequence[str]) -> Any:
    """Returns a tensor of a module; if accelerate keeps its weights elsewhere, a copy that its hook loads."""
    module = functools.reduce(getattr, attributes[:-1], frame.module)
    held: Any = getattr(module, attributes[-1])
    if not isinstance(held, Tensor) or not held.is_meta:
        return held
    modules = (module, *(each.module for each in frame.frames_above()))
    hooked = next(filter(is_offloaded, modules), None)
    if hooked is None:
        return held
    hook: Any = hooked.__dict__["_hf_hook"]
    hook.pre_forward(hooked)
    try:
        return getattr(module, attributes[-1])
    finally:
        hook.post_forward(hooked, None)


def held_tensor(flow: Flow, value: Value, through: Collection[str] = VIEWS | SAME_VALUES) -> Tensor:
    """Returns a tensor of the model, or the result of operations on such tensors with names in `through`.

    Raises:
        GraphError: It is computed in another way, or does not hold floating-point numbers.
    """
    node = value.node
    if node.kind in HELD_KINDS:
        held = _loaded(flow.frame_of[node], str(node.target).split("."))
        if is_distributed(held):
            held = held.full_tensor()
        if not isinstance(held, Tensor) or not held.is_floating_point():
            raise GraphError(f"{flow.path(value)} is not a tensor of floating-point numbers (it may be quantized)")
        return held

    if flow.reads(node) and value.op in through and not node.is_in_place:
        result: Tensor = flow.rerun(node, lambda read: held_tensor(flow, read, through))
        return result
    raise GraphError(f"{flow.path(value)} is computed from weights, and not one of them")
