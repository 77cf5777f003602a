"""What is inside an MLP: its neurons before and after the activation, and the choice among experts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch.nn import Module

from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.components.chain import Layer, Region, Trails, container_of, region
from graphpatch_notebook.components.flow import Flow, Value
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    CHOICES,
    NONLINEARITIES,
    NORMS,
    SAME_VALUES,
    SCALINGS,
    VIEWS,
)
from graphpatch_notebook.components.writes import Write

_OUTPUT_STEPS = SAME_VALUES | SCALINGS | VIEWS | ADDITIONS | NORMS


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The parts of an MLP; each that was not found is `None`, and `missing` has the reason.

    Attributes:
        down: What its last linear map returns.
        post: What its last linear map reads: the neurons.
        pre: What the nonlinearity reads; of the gate, if it is gated.
        router: The scores of the experts.
        choice: The operation that chooses among them.
        experts: The frames of the experts that ran, by their number.
        missing: Why parts were not found.
    """

    down: Value | None
    post: Value | None
    pre: Value | None
    router: Value | None
    choice: Node | None
    experts: dict[int, Frame]
    missing: dict[str, str]


def mlp_of(trails: Trails, write: Write, layer: Layer) -> Mlp:
    """Returns the parts of an MLP that writes to the stream."""
    missing: dict[str, str] = {}
    router, choice = _router(trails, write)
    experts = _experts(trails, write, layer, choice, router) if choice is not None and router is not None else {}
    last = trails.linear_map(write.value, _OUTPUT_STEPS, is_whole=True)
    down = last if router is None and trails.flow.is_linear_map(last) else None
    post = pre = None
    if router is not None:
        missing["mlp.pre"] = missing["mlp.post"] = "each expert has its own neurons, and each token other experts"
        if not experts:
            missing["experts[*].out"] = "the experts are not modules that are called one by one"
        absent = [number for number in range(router.shape[-1]) if experts and number not in experts]
        missing |= {f"experts[{number}].out": "no token of the example inputs was sent to it" for number in absent}
    elif down is None:
        missing["mlp.pre"] = missing["mlp.post"] = "what is added to the stream does not come from one linear map"
    else:
        post = next(iter(trails.flow.moving(down.node)), None)
        pre = _pre(trails, post, write) if post is not None else None
        rank = len(write.value.shape)
        post, pre = _unflattened(trails, post, rank), _unflattened(trails, pre, rank)
        if pre is None:
            missing["mlp.pre"] = "no linear map leads to one nonlinearity"
    return Mlp(down, post, pre, router, choice, experts, missing)


def _unflattened(trails: Trails, value: Value | None, rank: int) -> Value | None:
    """Returns a value before it was flattened for a linear map, or after its shape was restored behind one."""
    if value is None or len(value.shape) == rank:
        return value
    before = trails.flow.reads(value.node) if value.op in VIEWS else []
    after = [Value(user) for user in trails.flow.users.get(value.node, ()) if user.op in VIEWS]
    others: list[Value] = before[:1] + (after if len(after) == 1 else [])
    for other in others:
        if other.size == value.size and len(other.shape) == rank:
            return other
    return value


def _pre(trails: Trails, post: Value, write: Write) -> Value | None:
    """Returns the input of the nonlinearity: the result of a linear map, or its part that is the gate."""
    found = region(trails, post, write.inside)
    if len(found.sources) == 1:
        pre = _before_activation(trails.flow, found)
        if pre is not None and pre.size == post.size:
            return pre
    product: Value | None = post
    while product is not None and product.op not in SCALINGS:
        product = trails.source(product, SAME_VALUES | VIEWS, is_whole=True)
    if product is None:
        return None
    gates = []
    for branch in trails.flow.moving(product.node):
        side = region(trails, branch, write.inside)
        has_nonlinearity = any(op in NONLINEARITIES for ops in side.ops.values() for op in ops)
        if has_nonlinearity and len(side.sources) == 1 and (pre := _before_activation(trails.flow, side)) is not None:
            gates.append(pre)
    return gates[0] if len(gates) == 1 else None


def _before_activation(flow: Flow, found: Region) -> Value | None:
    """Returns the last unchanged value that is the result of the linear map with its bias, or a part of that."""
    pre = None
    for waist in found.waists:
        if pre is not None and not found.is_view(waist) and not _adds_bias(flow, found, waist):
            return pre
        pre = waist
    return None


def _adds_bias(flow: Flow, found: Region, waist: Value) -> bool:
    """Whether a waist is the one before plus a tensor of the model: `x @ W + b` is one map."""
    is_sum = len(found.ops[waist]) == 1 and waist.op in ADDITIONS
    return is_sum and len(flow.moving(waist.node)) == 1 < len(flow.reads(waist.node))


def _router(trails: Trails, write: Write) -> tuple[Value | None, Node | None]:
    flow = trails.flow
    choosing = (node for node in write.inside if node.whole.op in CHOICES)
    for choice in (node.whole for node in sorted(choosing, key=flow.order.__getitem__)):
        if not (reads := flow.reads(choice)):
            continue
        found = [value for value in region(trails, reads[0], write.inside).sources if flow.is_linear_map(value)]
        if found:
            return found[0], choice
    return None, None


def _experts(trails: Trails, write: Write, layer: Layer, choice: Node, router: Value) -> dict[int, Frame]:
    """Returns the experts that ran and are modules in a list or a dict, by their number there."""
    flow = trails.flow
    found: dict[int, Frame] = {}
    waiting = deque([layer.frame])
    while waiting:
        frame = waiting.popleft()
        for call in frame.calls():
            number, member = _number(call.frame, router.shape[-1]), call.frame
            if number is None or flow.start(member) < flow.order[choice]:
                waiting.append(member)
            elif any(place.value.node in write.inside for place in flow.outputs(member)):
                found.setdefault(number, member)
    return dict(sorted(found.items()))


def members_like(member: Frame) -> dict[str, Module]:
    """Returns the modules of one class in the list or dict that a module is in, by their names there.

    Empty if it is called from elsewhere. Those that did not run on the example inputs are among them.
    """
    container = container_of(member)
    if not isinstance(container, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return {}
    members = dict(container.named_children())
    return {key: module for key, module in members.items() if type(module) is type(member.module)}


def _number(member: Frame, experts: int) -> int | None:
    """Returns the number of a module among the experts in the list or dict that it is in."""
    assert member.call is not None
    alike = list(members_like(member))
    return alike.index(str(member.call.target).rpartition(".")[2]) if len(alike) == experts else None
