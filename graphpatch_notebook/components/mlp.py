"""What is inside an MLP: its neurons before and after the activation, and the choice among experts."""

from __future__ import annotations

from collections.abc import Container

import torch

from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.components.attention import Part, Parts
from graphpatch_notebook.components.chain import Trails
from graphpatch_notebook.components.flow import Flow, Value, walk
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    NORMS,
    SAME_VALUES,
    SCALINGS,
    VIEWS,
)
from graphpatch_notebook.components.stacks import Layer, container_of
from graphpatch_notebook.components.writes import Write

_OUTPUT_STEPS = SAME_VALUES | SCALINGS | VIEWS | ADDITIONS | NORMS


def mlp_of(trails: Trails, write: Write, layer: Layer) -> Parts:
    """Returns the parts of an MLP: `.pre` (what the nonlinearity reads, of the gate if it is gated), `.post`, experts.

    Names that begin with a dot follow that of the MLP, others (`router`, `experts[0].out`) that of the layer.
    """
    parts, flow = Parts(), trails.flow
    router, choice = _router(trails, write)
    if router is not None and choice is not None:
        experts = _experts(trails, write, layer, choice, router)
        parts.found["router"] = Part(router, write.axes(router, "expert"))
        for number, frame in experts.items():
            parts.found[f"experts[{number}].out"] = Part(flow.outputs(frame)[0].value, ("token", "channel"))
        why = "each expert has its own neurons, and each token other experts"
        parts.missing = dict.fromkeys((".pre", ".post"), why)
        if not experts:
            parts.missing["experts[*].out"] = "the experts are not modules that are called one by one"
        absent = [number for number in range(router.shape[-1]) if experts and number not in experts]
        parts.missing |= {f"experts[{n}].out": "no token of the example inputs was sent to it" for n in absent}
        return parts
    down = trails.linear_map(write.value, _OUTPUT_STEPS, is_whole=True)
    post = next(iter(flow.moving(down.node)), None) if flow.is_linear_map(down) else None
    pre = None if post is None else _pre(trails, post, write)
    for name, value in ((".pre", pre), (".post", post)):
        if value is not None:
            whole = _unflattened(trails, value, len(write.value.shape))
            parts.found[name] = Part(whole, write.axes(whole, "neuron"))
        elif post is None:
            parts.missing[name] = "what is added to the stream does not come from one linear map"
        else:
            parts.missing[name] = "no linear map leads to one nonlinearity"
    return parts


def _unflattened(trails: Trails, value: Value, rank: int) -> Value:
    """Returns a value before it was flattened for a linear map, or after its shape was restored behind one."""
    if len(value.shape) == rank:
        return value
    after = [Value(user) for user in trails.flow.users.get(value.node, ()) if user.op in VIEWS]
    others = [*(trails.flow.reads(value.node)[:1] if value.op in VIEWS else ()), *(after if len(after) == 1 else ())]
    return next((each for each in others if each.size == value.size and len(each.shape) == rank), value)


def _pre(trails: Trails, post: Value, write: Write) -> Value | None:
    """Returns what the nonlinearity takes: the last value that is linear in a linear map, and that `post` is not in.

    All that leads from those before to `post` leads through it. Of a gated MLP, `post` is linear in the other factor.
    """
    order, found = trails.flow.order, list[Value]()
    own = [Value(node) for node in sorted(write.inside, key=order.__getitem__) if order[node] <= order[post.node]]
    alike = [value for value in own if value.size == post.size and write.is_bent(value, post)]
    for linear in _maps_behind(trails, post, write.inside):
        parts = list[Value]()
        for value in alike:
            if value == linear or write.is_bent(linear, value) is False:
                at = next((n for n, part in enumerate(parts) if write.is_bent(part, value) is not None), None)
                if at is None:
                    parts.append(value)
                elif parts[at] not in _behind(trails.flow, post, write.inside, value):
                    parts[at] = value
        found += parts
    return found[0] if len(found) == 1 else None


def _behind(flow: Flow, end: Value, inside: Container[Node], without: Value | None = None) -> set[Value]:
    """Returns linear maps that a value is computed from, and all between, besides what leads through another value."""

    def before(value: Value) -> list[Value]:
        is_end = value == without or value.node not in inside or flow.is_linear_map(value)
        return [] if is_end else flow.moving(value.node)

    return {*walk([end], before)}


def _maps_behind(trails: Trails, end: Value, inside: Container[Node]) -> list[Value]:
    flow = trails.flow
    found = filter(flow.is_linear_map, _behind(flow, end, inside))
    return sorted(found, key=lambda value: -flow.order[value.node])


def _router(trails: Trails, write: Write) -> tuple[Value | None, Node | None]:
    flow = trails.flow
    for choice in flow.choices(write.inside):
        found = _maps_behind(trails, flow.reads(choice)[0], write.inside) if flow.reads(choice) else []
        if found:
            return found[0], choice
    return None, None


def _experts(trails: Trails, write: Write, layer: Layer, choice: Node, router: Value) -> dict[int, Frame]:
    """Returns the experts that ran and are modules in a list or a dict, by their number there."""
    flow = trails.flow
    found: dict[int, Frame] = {}
    for member in layer.frame.walk():
        is_after = member.call is not None and flow.start(member) > flow.order[choice]
        number = _number(member, router.shape[-1]) if is_after else None
        if number is not None and any(place.value.node in write.inside for place in flow.outputs(member)):
            found.setdefault(number, member)
    return dict(sorted(found.items()))


def _number(member: Frame, experts: int) -> int | None:
    """Returns the number of a module among the experts in the list or dict that it is in, be they called or not."""
    assert member.call is not None
    container = container_of(member)
    if not isinstance(container, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return None
    alike = [key for key, module in container.named_children() if type(module) is type(member.module)]
    return alike.index(str(member.call.target).rpartition(".")[2]) if len(alike) == experts else None
