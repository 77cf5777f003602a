"""The weights of components: which rows and columns of which matrix of the model belong to a head or a neuron.

The operations between a linear map and the heads only rearrange values. They are run again on numbers: the number of
each output of the linear map ends where the head is that it belongs to. So it makes no difference how a model stores
its weights: fused or separate, transposed or not, interleaved, with fewer heads for keys and values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture import is_packed
from graphpatch_notebook.capture.modules import changed_model, exchange, held_now, is_offloaded
from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, once_a_capture
from graphpatch_notebook.components.components import Component, Components, find, table_of
from graphpatch_notebook.components.flow import Flow, Trails, UnknownValueError, Value, walk
from graphpatch_notebook.components.operations import ADDITIONS, NORMS, SAME_VALUES, SCALINGS, VIEWS
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.patching.model_state import is_distributed
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.values import ContainerSpec, take

WeightIndex: TypeAlias = "int | slice"

_FARTHEST = 60
_SMALL = 3
_STEPS = SAME_VALUES | VIEWS | NORMS | SCALINGS | ADDITIONS | {"tanh"}
"""What may lie between a linear map and a component that it makes, besides norms as modules."""
_UNCHANGED = (SAME_VALUES - frozenset("where clamp clip masked_fill nan_to_num".split())) | frozenset(
    "view reshape flatten unflatten squeeze unsqueeze getitem expand".split()
)
"""Keep the channels as they are, if they are the last dimension before and after."""
_ORDER = frozenset("batch position query key token window".split())


def index_of(numbers: Tensor) -> slice | Tensor:
    """Returns numbers as a slice, if they are consecutive."""
    first, last = int(numbers[0]), int(numbers[-1])
    is_range = last - first + 1 == len(numbers) and bool((numbers.diff() == 1).all())
    return slice(first, last + 1) if is_range else numbers


class NoWeightError(Exception):
    """The weight of a component is not known, for this reason (caught inside the package)."""


class _LinearMap:
    """A linear map with one tensor of the model, and which of that tensor's dimensions are inputs, and outputs.

    Which these are is found by running it on small tensors, so that it makes no difference how it is written.

    Attributes:
        result, given, weight: What it returns, what it reads, and the tensor of the model.
        inputs, outputs: The dimension of what it reads, or returns, for each dimension of the weight that is one.
    """

    def __init__(self, flow: Flow, linear: Value) -> None:
        weights, moving = flow.weights(linear.node), flow.moving(linear.node)
        if len(weights) != 1 or len(moving) != 1:
            raise NoWeightError(f"{flow.path(linear)} ({linear.op}) does not multiply with one matrix")
        self.flow, self.result, self.given, self.weight = flow, linear, moving[0], weights[0]
        self.inputs, self.outputs = dict[int, int](), dict[int, int]()
        try:
            for dim, size in enumerate(self.weight.shape):
                if size > 1:
                    self._find(dim, size)
        except Exception as error:
            raise NoWeightError(f"{flow.path(linear)} ({linear.op}) does not run on small tensors") from error
        if self.inputs.keys() & self.outputs.keys():
            raise NoWeightError(f"{flow.path(linear)} multiplies each part of what it reads with another matrix")
        if len(self.inputs) + len(self.outputs) < sum(size > 1 for size in self.weight.shape):
            raise NoWeightError(f"{flow.path(linear)} does not multiply all that it reads with one matrix")

    def _find(self, dim: int, size: int) -> None:
        """Finds which dimension of what it reads or returns depends on one of the weight, index by index."""
        changes = self._small_run(at=dim) != self._small_run()
        for e, other in enumerate(self.result.shape):
            if other == size and not changes.select(e, 0).any():
                self.outputs[dim] = e
        for j, other in enumerate(self.given.shape):
            if other == size and torch.equal(self._small_run(at=dim, given=j), self._small_run(given=j)):
                self.inputs[dim] = j

    def _small_run(self, at: int | None = None, given: int | None = None) -> Tensor:
        """Returns what it makes of ones: with a weight changed behind the first index of a dimension.

        With `given`, it reads ones at the first index of this dimension only, and zeros elsewhere.
        """
        reads = self.flow.reads(self.result.node)
        small = {read: torch.ones([min(size, _SMALL) for size in read.shape]) for read in reads}
        if at is not None:
            small[self.weight].narrow(at, 1, small[self.weight].shape[at] - 1).fill_(2.0)
        if given is not None:
            small[self.given].narrow(given, 1, small[self.given].shape[given] - 1).zero_()
        result: Tensor = self.flow.rerun(self.result.node, small.__getitem__)
        return result

    def numbers(self, value: Value, dims: Mapping[int, int]) -> Tensor:
        """Returns the number of the input or output that each entry of a value belongs to, in its shape."""
        found = torch.zeros([1] * len(value.shape), dtype=torch.long)
        for _, dim in sorted(dims.items()):
            along = torch.arange(value.shape[dim]).view([-1 if d == dim else 1 for d in range(len(value.shape))])
            found = found * value.shape[dim] + along
        return found.expand(value.shape).contiguous()

    def matrix(self) -> Tensor:
        """Returns the weight with a row for each input, as a view if the model has it as one tensor."""
        columns = sorted(self.outputs)
        rows = [dim for dim in range(len(self.weight.shape)) if dim not in columns]
        tensor = held_tensor(self.flow, self.weight).permute(*rows, *columns)
        return tensor.flatten(len(rows)).flatten(0, len(rows) - 1)


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of the model whose outputs, or inputs, belong to the heads or neurons of a component.

    Attributes:
        map: The linear map.
        side: Whether its outputs or its inputs are divided.
        heads: The numbers of the outputs (of inputs, for `attn.z`) that belong to each head, of shape `(heads, size)`;
            of shape `(size,)` for neurons, and of shape `(1, heads * size)` if the heads depend on each other.
        made: The component, or the value laid out like it.
        are_separate: Whether each head depends on its own outputs only, and not on others through a norm over all.
    """

    map: _LinearMap
    side: Literal["outputs", "inputs"]
    heads: Tensor
    made: Value
    are_separate: bool = True

    @property
    def linear(self) -> Value:
        """What the linear map returns."""
        return self.map.result

    @functools.cached_property
    def indices(self) -> list[slice | Tensor]:
        """The numbers of each head, as `index_of` gives them."""
        return list(map(index_of, self.heads))

    @property
    def channels(self) -> int:
        """How many outputs (inputs) there are: they are one or several of the last dimensions of the value."""
        own = self.map.outputs if self.side == "outputs" else self.map.inputs
        return math.prod(self.map.weight.shape[dim] for dim in own)

    def weight(self) -> Tensor:
        """Returns the whole matrix, with a row for each input: a view of the model's parameter.

        Raises:
            GraphError: It is not held as a tensor of floating-point numbers.
        """
        return self.map.matrix()

    @property
    def count(self) -> int | None:
        """The number of heads; `None` for neurons."""
        return len(self.heads) if self.heads.ndim == 2 else None

    def of(self, head: int | None) -> Tensor:
        """Returns the part of a head, or that of all neurons."""
        numbers = self.heads if head is None else self.heads[head]
        matrix, dim = self.weight(), 1 if self.side == "outputs" else 0
        steps = set((numbers[1:] - numbers[:-1]).tolist())
        if len(numbers) == 1 or (len(steps) == 1 and min(steps) > 0):
            index = slice(int(numbers[0]), int(numbers[-1]) + 1, next(iter(steps), 1))
            return matrix[:, index] if dim else matrix[index]
        return matrix.index_select(dim, numbers.to(matrix.device))


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """What is added to the outputs of a linear map, by itself or after it, wherever these have got to.

    Attributes:
        map: The linear map.
        terms: Operations that add to the outputs, each with the number of the output that each entry belongs to.
        size: The number of outputs.
        numbers: The numbers of the outputs of each head, of shape `(heads, size)`, or of all of them, `(size,)`.
    """

    map: _LinearMap
    terms: Sequence[tuple[Value, Tensor]]
    size: int
    numbers: Tensor

    @property
    def count(self) -> int | None:
        """The number of heads; `None` for vectors that are not divided into heads."""
        return len(self.numbers) if self.numbers.ndim == 2 else None

    def of(self, head: int | None) -> Tensor:
        """Returns the part of a head, or the whole vector."""
        total = sum(map(self._added, self.terms))
        assert isinstance(total, Tensor)
        return total[(self.numbers if head is None else self.numbers[head]).to(total.device)]

    def _added(self, term: tuple[Value, Tensor]) -> Tensor:
        """Returns what an operation adds to each output: what it returns if the rest of what it reads is zero."""
        (value, numbers), flow = term, self.map.flow
        added = [each for each in flow.reads(value.node) if flow.is_held(each) and each != self.map.weight]
        held = {each: held_tensor(flow, each) for each in added}
        like = next(iter(held.values()), torch.empty(0))  # the model may have been converted since the capture

        def read(each: Value) -> Tensor:
            return held[each] if each in held else like.new_zeros(each.shape)

        made: Tensor = flow.rerun(value.node, read)
        entries, numbers = made.expand(value.shape).reshape(-1), numbers.reshape(-1).to(made.device)
        found = entries.new_zeros(self.size).index_copy(0, numbers, entries)
        if not (found.is_meta or torch.equal(found[numbers], entries)):
            raise GraphError(f"{flow.path(value)} does not add the same in all rows and positions")
        return found


def projection(root: Frame, name: str) -> Projection:
    """Returns the linear map that makes the component `attn.q`, `attn.k` or `attn.v`, or that reads `attn.z`.

    Raises:
        NoWeightError: The component is not made, or not read, by one linear map.
    """
    finder, is_read = _finder(root), name.endswith(".z")
    component = finder.component(name)
    found = finder.inputs(component) if is_read else finder.outputs(component)
    for value, dims in ((found.map.given, found.map.inputs), (found.map.result, found.map.outputs)):
        rank = len(value.shape)
        if [*dims.values()] != [*range(rank - len(dims), rank)]:
            raise NoWeightError(
                f"{finder.flow.path(found.linear)} has its channels in another order than as the last dimensions"
            )
    if is_read or not finder.has_norm_over_heads(component, found.heads.shape[1]):
        return found
    return replace(found, heads=found.heads.reshape(1, -1), are_separate=False)


def tensors_written(root: Frame, name: str) -> dict[str, tuple[Tensor, int]]:
    """Returns the tensors of the model that a component is a linear function of, by path.

    The component is what a part of a layer adds to the stream, or its start: the sum of a linear map, an embedding and
    biases, say. Each tensor comes with its dimension of the component's channels: what is projected there is projected
    in the component.

    Raises:
        NoWeightError: It is computed in another way, such as by experts, or through a norm.
        GraphError: A tensor is not held as floating-point numbers.
    """
    finder = _finder(root)
    found = finder.written(finder.component(name))
    return {finder.flow.path(value): (held_tensor(finder.flow, value), dim) for value, dim in found.items()}


class ComponentWeights:
    """The weights of one kind of component, by layer and head.

    ``W[layer, head]`` is a matrix with a row for each input: ``x @ W[layer, head]``. It is a view of the model's
    parameter where its entries have equal distances in it, else a copy. ``W[layer]`` stacks the heads, and slices stack
    layers or heads; these are copies. Biases, `b[layer, head]`, are vectors, and copies.

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

    def __init__(self, name: str, layers: Sequence[Projection | Bias | NoWeightError]) -> None:
        self.name = name
        self.missing = {number: str(each) for number, each in enumerate(layers) if isinstance(each, NoWeightError)}
        self._layers = layers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `W[:]`: layers, heads if there are any, inputs, outputs."""
        return tuple(self[:].shape)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"<{self.name} of {len(self) - len(self.missing)} of {len(self)} layers>"

    def __getitem__(self, key: WeightIndex | tuple[WeightIndex, ...]) -> Tensor:
        layer, *rest = key if isinstance(key, tuple) else (key,)
        if isinstance(layer, slice):
            return torch.stack([self.__getitem__((number, *rest)) for number in range(len(self))[layer]])
        found = self._layer(layer)
        if len(rest) > (found.count is not None):
            raise IndexError(f"{self.name}[{layer}] is indexed by layer{' and head' * (found.count is not None)}")
        if found.count is None:
            return found.of(None)
        heads, head = range(found.count), rest[0] if rest else slice(None)
        if isinstance(head, slice):
            return torch.stack([found.of(number) for number in heads[head]])
        if not -len(heads) <= head < len(heads):
            raise IndexError(f"{self.name}[{layer}] has {len(heads)} heads; {head} is out of range")
        return found.of(heads[head])

    def heads(self, layer: int) -> int:
        """Returns the number of heads of a layer: of key and value heads for `W_K` and `W_V`."""
        return self._layer(layer).count or 0

    def _layer(self, number: int) -> Projection | Bias:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.name} has {len(self)} layers; {number} is out of range")
        found = self._layers[number]
        if isinstance(found, NoWeightError):
            raise GraphError(f"{self.name}[{number % len(self)}] was not found: {found}")
        return found


@dataclass(frozen=True, repr=False)
class FactoredMatrix:
    """The product of two matrices of low rank, `left @ right`, which is not computed, such as `W_OV[layer, head]`.

    Attributes:
        left: Of shape (rows, rank).
        right: Of shape (rank, columns).

    Example:
        >>> matrix = FactoredMatrix(torch.eye(3)[:, :1], torch.tensor([[1.0, 2.0, 2.0]]))
        >>> matrix
        <FactoredMatrix of shape (3, 3), rank 1>
        >>> tuple(matrix.product.shape), float(matrix.norm()), matrix.singular_values.shape
        ((3, 3), 3.0, torch.Size([1]))

    Source:
        Elhage et al., A mathematical framework for transformer circuits (2021).
    """

    left: Tensor
    right: Tensor

    def __repr__(self) -> str:
        return f"<FactoredMatrix of shape ({len(self.left)}, {self.right.shape[1]}), rank {len(self.right)}>"

    @property
    def product(self) -> Tensor:
        """The matrix, of shape (rows, columns)."""
        return self.left @ self.right

    @property
    def singular_values(self) -> Tensor:
        """The singular values that may differ from zero, of shape (rank,), the largest first."""
        _, left = torch.linalg.qr(self.left)
        _, right = torch.linalg.qr(self.right.mT)
        found: Tensor = torch.linalg.svdvals(left @ right.mT)
        return found

    def norm(self) -> Tensor:
        """Returns the Frobenius norm."""
        return ((self.left.mT @ self.left) * (self.right @ self.right.mT).mT).sum().sqrt()

    def __matmul__(self, other: FactoredMatrix) -> FactoredMatrix:
        return FactoredMatrix(self.left, self.right @ other.left @ other.right)


@dataclass(frozen=True)
class _HeadCircuits:
    """`W_OV` or `W_QK`: a `FactoredMatrix` for each layer and head of queries."""

    weights: Weights
    components: Components
    prefix: str
    name: str

    def __getitem__(self, key: tuple[int, int]) -> FactoredMatrix:
        layer, head = key
        weights, count = self.weights, self.weights.W_O.heads(layer)
        part, head = ("v" if self.name == "W_OV" else "k"), range(count)[head]
        layer = range(len(weights.W_O))[layer]
        read = self.components[f"{self.prefix}layers[{layer}].attn.{part}"].head_of(head, count)
        if part == "v":
            return FactoredMatrix(weights.W_V[layer, read], weights.W_O[layer, head])
        return FactoredMatrix(weights.W_Q[layer, head], weights.W_K[layer, read].mT)


class Weights:
    """The weights of a model's components, read from the model at each access: `pg.weights`.

    - `W_Q`, `W_K`, `W_V` (channels of the stream x channels of the head) and `W_O` (the reverse), by layer and head.
      Under grouped-query attention, `W_K` and `W_V` have as many heads as there are of keys and values.
    - `W_in` and `W_out` of the MLP by layer (channels x neurons, and the reverse), and `W_gate` if it is gated.
    - `b_Q`, `b_K`, `b_V` by layer and head, and `b_O`, `b_in`, `b_gate`, `b_out` by layer: what is added to the
      products with these. Where a model has no bias, `GraphError` is raised, as where it has no such matrix.
    - `W_OV` and `W_QK` of a layer and head of queries, ``pg.weights.W_OV[1, 3]``: the product `W_V @ W_O`, and `W_Q`
      with the transposed `W_K`, as a `FactoredMatrix`.
    - `W_E` (tokens x channels), `W_pos` (positions x channels, if the model has such a table) and `W_U`
      (channels x tokens) of the model, and `b_U`, the bias of the logits.

    They are the model's own numbers: norms are not folded in. Of a module that accelerate
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
        >>> pg.weights.W_in.shape, pg.weights.W_out[1].shape, pg.weights.b_in[1].shape
        ((2, 4, 8), torch.Size([8, 4]), torch.Size([8]))
    """

    def __init__(self, root: Frame, stack: str = "") -> None:
        self._root = root
        self._stack = stack

    def __getitem__(self, stack: str) -> Weights:
        return Weights(self._root, stack)

    def __dir__(self) -> list[str]:
        return [*_BY_LAYER, *_BIASES, *_BY_HEAD, *_OF_MODEL]

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
        """Whether the model does more with the product with `W_U` than to scale it or to add to it."""
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
        if name in _BY_HEAD:
            return _HeadCircuits(self, components, prefix, name)
        if name not in _OF_MODEL:
            return finder.by_layer(prefix, name, components.layers[stack])
        try:
            return finder.of_model(prefix, name)
        except NoWeightError as problem:
            raise GraphError(f"{name} was not found: {problem}") from None


_OF_MODEL = ("W_E", "W_pos", "W_U", "b_U")
_BY_HEAD = ("W_OV", "W_QK")
_BY_LAYER = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_gate", "W_out")
_BIASES = tuple(f"b{name[1:]}" for name in _BY_LAYER)


@once_a_capture
def _finder(root: Frame) -> _WeightFinder:
    return _WeightFinder(find(root))


class _WeightFinder:
    """Finds the weights of components; keeps what it found."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._trails: Trails = components.evidence.trails
        self.flow = self._trails.flow
        self._known: dict[str, ComponentWeights] = {}

    def by_layer(self, prefix: str, name: str, count: int) -> ComponentWeights:
        if prefix + name not in self._known:
            layers = list[Projection | Bias | NoWeightError]()
            for layer in range(count):
                try:
                    find_one = self._bias if name in _BIASES else self._of_layer
                    layers.append(find_one(f"{prefix}layers[{layer}].", name))
                except NoWeightError as problem:
                    layers.append(problem)
            self._known[prefix + name] = ComponentWeights(name, layers)
        return self._known[prefix + name]

    def _of_layer(self, start: str, name: str) -> Projection:
        if name in ("W_Q", "W_K", "W_V"):
            return self.outputs(self.component(f"{start}attn.{name[-1].lower()}"))
        if name == "W_O":
            return self.inputs(self.component(f"{start}attn.z"))
        post = self.component(f"{start}mlp.post")
        if name == "W_out":
            return self.inputs(post)
        gate = self.outputs(self.component(f"{start}mlp.pre"))
        factor = self._factor(post)
        up = gate if factor is None else self.outputs(post, factor)
        # An activation may be a product with its own input (`x * sigmoid(x)`).
        if name == "W_gate" and up.map.weight == gate.map.weight and torch.equal(up.heads, gate.heads):
            raise NoWeightError("the MLP is not gated")
        return gate if name == "W_gate" else up

    def _bias(self, start: str, name: str) -> Bias:
        found = self._of_layer(start, f"W{name[1:]}")
        if found.side == "outputs":
            return self._added(found.map, found.made, found.heads)
        written = self._value(self.component(f"{start}{'attn_out' if name == 'b_O' else 'mlp_out'}"))
        return self._added(found.map, written)

    def _added(self, linear: _LinearMap, end: Value, numbers: Tensor | None = None) -> Bias:
        """Returns what is added to a linear map on the way to a value; `numbers` are those of its parts."""
        flow, terms = self.flow, list[tuple[Value, Tensor]]()
        outputs = linear.numbers(linear.result, linear.outputs)
        for value in self._trails.sources(end, _STEPS):
            is_own = value == linear.result and len(flow.reads(value.node)) > 2
            if is_own or (value.op in ADDITIONS and value not in self._trails.norms):
                terms.append((value, self._arrived(linear.result, outputs, value)))
        if not terms:
            raise NoWeightError(f"nothing is added to {flow.path(linear.result)}: it has no bias")
        size = int(outputs.max()) + 1
        return Bias(linear, terms, size, torch.arange(size) if numbers is None else numbers)

    def of_model(self, prefix: str, name: str) -> Tensor:
        """Returns the embedding, the unembedding or its bias."""
        if name == "W_U":
            return _LinearMap(self.flow, self.unembedding()).matrix()
        if name == "b_U":
            linear = _LinearMap(self.flow, self.unembedding())
            return self._added(linear, self._value(self.component("@logits"))).of(None)
        value = self._value(self.component(f"{prefix}@{'embed' if name == 'W_E' else 'pos_embed'}"))
        start, table = value, table_of(self.flow, value)
        # Positions may be rows of the table in order: selected, and repeated for each row of the batch.
        while name == "W_pos" and table is None and value.op in VIEWS | SAME_VALUES and self.flow.is_held(value):
            value = self.flow.reads(value.node)[0]
            table = table_of(self.flow, value) or (value if value.node.kind in HELD_KINDS else None)
        if table is None or len(table.shape) != 2:
            raise NoWeightError(f"{self.flow.path(start)} ({start.op}) does not have rows of one table")
        return held_tensor(self.flow, table)

    def written(self, component: Component) -> dict[Value, int]:
        """Returns the tensors that a component is a linear function of, each with its dimension of channels."""
        flow, start, found = self.flow, self._value(component), dict[Value, int]()

        def terms(value: Value) -> list[Value]:
            reads = [read for read in flow.reads(value.node) if read.is_float] if value.op else []
            whole = [read for read in reads if read.shape[-1:] == value.shape[-1:]]
            is_scaled = value.op in SCALINGS and sum(read.size > 1 for read in reads) == 1
            if value.shape[-1:] == start.shape[-1:] and value not in self._trails.norms:
                if (table := table_of(flow, value)) is not None or value.node.kind in HELD_KINDS:
                    found[table or value] = -1
                    return []
                if flow.is_linear_map(value):
                    linear = _LinearMap(flow, value)
                    if [*linear.outputs.values()] == [len(value.shape) - 1]:
                        found[linear.weight] = next(iter(linear.outputs)) - len(linear.weight.shape)
                        return [read for read in reads if read not in (linear.weight, linear.given)]
                elif is_scaled or value.op in _UNCHANGED or (value.op in ADDITIONS and len(whole) > 1):
                    return whole
            raise NoWeightError(f"{flow.path(value)} ({value.op or value.node.kind}) is not linear in weights")

        for _ in walk([start], terms):
            pass
        return found

    def unembedding(self) -> Value:
        """Returns the result of the last linear map before the logits."""
        return self._before(self._value(self.component("@logits")))

    def changes_logits(self) -> bool:
        """Whether more is done with the result of that linear map than to rearrange it, to scale it or to add to it."""
        value = self._value(self.component("@logits"))
        return self._trails.linear_map(value, _STEPS - NORMS - {"tanh"}) != self.unembedding()

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

    def _after(self, value: Value) -> Value:
        """Returns the linear map that reads a value."""
        users = self.flow.users

        def after(node: Node) -> list[Node]:
            return users.get(node, []) if node.op in SAME_VALUES | VIEWS else []

        for node in walk(users.get(value.node, []), after, _FARTHEST):
            if self.flow.is_linear_map(Value(node)):
                return Value(node)
        raise NoWeightError(f"{self.flow.path(value)} is not read by one linear map")

    def has_norm_over_heads(self, component: Component, size: int) -> bool:
        """Whether a norm over more than a head's `size` channels lies between a component and its linear map."""
        return any(
            (value in self._trails.norms or value.op in NORMS) and value.shape[-1] != size
            for value in self._trails.sources(self._value(component), _STEPS)
        )

    def _factor(self, post: Component) -> Value | None:
        """Returns the factor that the gate of an MLP is multiplied with; `None` if it is not gated."""
        values = self._trails.sources(self._value(post), _STEPS)
        sides = next((self.flow.moving(value.node) for value in values if value.op in SCALINGS), [])
        linear = [side for side in sides if self.flow.is_linear_map(self._trails.linear_map(side, _STEPS))]
        return linear[0] if len(sides) == 2 and len(linear) == 1 else None

    # -- heads and neurons ---------------------------------------------------------------------------------------------

    def outputs(self, component: Component, value: Value | None = None) -> Projection:
        """Returns the linear map whose outputs form a component, or a value that is laid out like it."""
        value = self._value(component) if value is None else value
        linear = _LinearMap(self.flow, self._before(value))
        result = linear.result
        entries = self._arrived(result, torch.arange(result.size).view(result.shape), value)
        found = self._by_axes(linear.numbers(result, linear.outputs).flatten()[entries], component)
        # The same numbers several times are heads that are repeated, or that the same weights make of different inputs.
        others = tuple(slice(None) if axis in _parts(component) else 0 for axis in component.axes)
        if len(component.seen(entries)[others].unique()) > len(found.unique()):
            raise NoWeightError(f"{self.flow.path(result)} multiplies a part of the stream for each head")
        return Projection(linear, "outputs", found, value)

    def inputs(self, component: Component) -> Projection:
        """Returns the linear map whose inputs form a component."""
        value = self._value(component)
        linear = _LinearMap(self.flow, self._after(value))
        arrived = self._arrived(value, torch.arange(value.size).view(value.shape), linear.given)
        if arrived.numel() != value.size:
            raise NoWeightError(f"{self.flow.path(linear.result)} reads other values than {component.name}")
        numbers = torch.empty(value.size, dtype=torch.long)
        numbers[arrived.reshape(-1)] = linear.numbers(linear.given, linear.inputs).reshape(-1)
        return Projection(linear, "inputs", self._by_axes(numbers.view(value.shape), component), value)

    def _by_axes(self, numbers: Tensor, component: Component) -> Tensor:
        """Returns numbers by head and channel, or by neuron; they must be the same along all other dimensions."""
        wanted = _parts(component)
        numbers, axes = component.seen(numbers), component.axes
        if not set(axes) <= {*_ORDER, *wanted, None}:  # of unknown ones it is seen below that nothing depends on them
            raise NoWeightError(f"its dimensions are {', '.join(map(str, axes))}")
        order = sorted(range(len(axes)), key=lambda dim: wanted.index(axes[dim]) if axes[dim] in wanted else -1)
        arranged = numbers.permute(order)
        found = arranged[(0,) * (len(axes) - sum(axis in wanted for axis in axes))]
        if not torch.equal(arranged, found.expand(arranged.shape)):
            raise NoWeightError("its entries are not the same ones in all rows and positions")
        return found if found.ndim == len(wanted) else found[None]

    def _arrived(self, start: Value, numbers: Tensor, end: Value) -> Tensor:
        """Returns the numbers of the entries of one value where operations that only rearrange take them."""
        flow, known = self.flow, dict[Value, Any]({start: numbers})

        def at(value: Value) -> Any:
            if value not in known:
                whole = Value(value.node)
                known[value] = made(value) if value == whole else functools.reduce(take, value.keys, at(whole))
            return known[value]

        def made(value: Value) -> Any:
            if (norm := self._trails.norms.get(value)) is not None:
                return at(norm.given.value)
            if value.op in VIEWS:
                return flow.rerun(value.node, argument)
            moving = [read for read in flow.moving(value.node) if value.op and read.size == value.size]
            if value.op in SAME_VALUES | SCALINGS | ADDITIONS | NORMS and len(moving) == 1:
                return at(moving[0]).reshape(value.shape)
            raise NoWeightError(f"{flow.path(value)} ({value.op or value.node.kind}) does more than rearrange")

        def argument(read: Value) -> Any:
            if isinstance(read.spec, ContainerSpec):  # sizes
                return tuple(getattr(child, "value", None) for _, _, child in read.spec.children)
            # In the run, a tensor may have been laid out so that any view of it was one.
            return at(read).contiguous()

        try:
            found = at(end)
        except UnknownValueError as unknown:
            raise NoWeightError(str(unknown)) from None
        if not isinstance(found, Tensor) or found.shape != end.shape:
            raise NoWeightError(f"the operations before {flow.path(end)} do more than rearrange")
        return found


def _parts(component: Component) -> tuple[str, ...]:
    """Returns the axes along which the parts of a component have weights of their own."""
    return ("neuron",) if component.name.endswith((".pre", ".post")) else ("head", "channel")


def _loaded(frame: Frame, attributes: Sequence[str]) -> Any:
    """Returns a tensor of a module; if accelerate keeps its weights elsewhere, a copy that its hook loads."""
    for each in frame.frames_above():
        if (change := exchange(each, held_now(each)[0])) is not None:
            raise changed_model(".".join(attributes), each, change)
    module = functools.reduce(getattr, attributes[:-1], frame.module)
    held: Any = getattr(module, attributes[-1])
    modules = (module, *(each.module for each in frame.frames_above()))
    hooked = next(filter(is_offloaded, modules), None) if isinstance(held, Tensor) and held.is_meta else None
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
        if not isinstance(held, Tensor) or not held.is_floating_point() or is_packed(held):
            raise GraphError(f"{flow.path(value)} is not a tensor of floating-point numbers (it may be quantized)")
        return held

    if flow.reads(node) and value.op in through and not node.is_in_place:
        result: Tensor = flow.rerun(node, lambda read: held_tensor(flow, read, through))
        return result
    raise GraphError(f"{flow.path(value)} is computed from weights, and not one of them")
