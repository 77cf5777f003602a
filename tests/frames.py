"""Frames made by hand: for the tests of what only reads them (paths, nodes, trees)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphpatch_notebook.capture.records import CallNode, Frame, Kind, Node, OpNode, Site
from graphpatch_notebook.values import ScalarSpec, TensorSpec, ValueSpec, describe

FLOAT = torch.float32
CPU = torch.device("cpu")


def tensor(*shape: int) -> TensorSpec:
    return TensorSpec(torch.Size(shape), FLOAT, CPU)


def spec_of(value: Any) -> ValueSpec:
    """Returns a spec as it is, and the spec of any other value (containers hold real tensors)."""
    return value if isinstance(value, (TensorSpec, ScalarSpec)) else describe(value)


class FrameBuilder:
    """Adds nodes to a frame in order, under the names that they are given: numbering is capture's business."""

    def __init__(self, module: nn.Module | None = None, parent: Frame | None = None, attribute_path: str = "") -> None:
        self.frame = Frame(module or nn.Identity(), attribute_path, parent)
        if parent is not None:
            self.frame.capture = parent.capture

    def add(self, kind: Kind, name: str, spec: Any = None, **fields: Any) -> Node:
        common = {"op": name, "target": name, "spec": spec_of(spec), "name": name, "base_name": name} | fields
        kinds = {"op": OpNode, "call": CallNode}
        node = kinds[kind](**common) if kind in kinds else Node(kind=kind, **common)
        self.frame.nodes.append(node)
        self.frame.names.setdefault(name, node)
        return node

    def input(self, name: str, spec: Any = None) -> Node:
        return self.add("input", name, spec)

    def parameter(self, name: str, spec: Any) -> Node:
        return self.add("parameter", name, spec)

    def op(self, name: str, spec: Any = None, **fields: Any) -> Node:
        return self.add("op", name, tensor(1) if spec is None else spec, **fields)

    def output(self, spec: Any, name: str = "output") -> Node:
        return self.add("output", name, spec)

    def call(
        self, name: str, target: str | None = None, module: nn.Module | None = None, **fields: Any
    ) -> FrameBuilder:
        """Adds the call of a submodule, and returns the builder of its frame."""
        target = target or name
        child = FrameBuilder(module, self.frame, target)
        child.frame.call = self.add("call", name, target=target, frame=child.frame, **fields)
        return child


def here() -> Site:
    """Returns the call site of the caller."""
    import sys

    frame = sys._getframe(1)
    return Site(((frame.f_code, frame.f_lasti),))


class TupleOutputModule(nn.Module):
    """The module of the documentation, which has a `_shape` of its own."""

    _shape = (2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(*TupleOutputModule._shape)

    def forward(self, x):
        return (self.linear(x), self.linear(x + 1))


# As the documentation prints it.
DOCUMENTED_TREE = """\
<root>: TupleOutputModule
├─x: Tensor(3, 2)
├─linear_0: Linear
│ ├─input: Tensor(3, 2)
│ ├─weight: Tensor(3, 2)
│ ├─bias: Tensor(3)
│ ├─linear: Tensor(3, 3)
│ └─output: Tensor(3, 3)
├─add: Tensor(3, 2)
├─linear_1: Linear
│ ├─input: Tensor(3, 2)
│ ├─weight: Tensor(3, 2)
│ ├─bias: Tensor(3)
│ ├─linear: Tensor(3, 3)
│ └─output: Tensor(3, 3)
└─output: tuple(2)
  ├─sub_0: Tensor(3, 3)
  └─sub_1: Tensor(3, 3)"""


def tuple_frame() -> Frame:
    """The frame of a `TupleOutputModule` on `torch.ones(3, 2)`."""
    module = TupleOutputModule()
    root = FrameBuilder(module)
    root.input("x", tensor(3, 2))
    for number, name in enumerate(("linear_0", "linear_1")):
        if number:
            root.op("add", tensor(3, 2), site=here())
        linear = root.call(name, "linear", module.linear, call_index=number, call_count=2, site=here())
        linear.input("input", tensor(3, 2))
        linear.parameter("weight", tensor(3, 2))
        linear.parameter("bias", tensor(3))
        linear.op("linear", tensor(3, 3), site=here())
        linear.output(tensor(3, 3))
    root.output((torch.empty(3, 3), torch.empty(3, 3)))
    return root.frame


def layered_frame(layers: int, ops: int = 20) -> Frame:
    """A model of equal layers `h_0`, `h_1`, ... with an `attn` and an `mlp` each."""
    root = FrameBuilder()
    root.input("input_ids", tensor(1, 8))
    root.input("attention_mask", None)
    transformer = root.call("transformer")
    transformer.input("input_ids", tensor(1, 8))
    for number in range(layers):
        layer = transformer.call(f"h_{number}", f"h.{number}")
        layer.input("hidden_states", tensor(1, 8, 4))
        for name in ("attn", "mlp"):
            part = layer.call(name)
            part.input("hidden_states", tensor(1, 8, 4))
            part.op("size", 8, is_size=True, is_live=False)
            for op in range(ops):
                part.op(f"mul_{op}" if op else "mul", tensor(1, 8, 4))
            part.output((torch.empty(1, 8, 4), None) if name == "attn" else torch.empty(1, 8, 4))
        layer.output(tensor(1, 8, 4))
    transformer.output(tensor(1, 8, 4))
    root.output({"logits": torch.empty(1, 8, 16), "loss": None})
    return root.frame
