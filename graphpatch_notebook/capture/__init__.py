"""Capture: one eager run of a model on example inputs becomes a tree of frames with named nodes.

`record` runs the model under a `recorder`, which sees torch functions through a function mode, and module calls through
swapped forwards (`observers`). `frame_recorder` records one module call, as the classes in `records`: which calls
become nodes, and their names; sizes stay symbolic. `call_sites` identifies an operation by its place in the user's
code, and reads which variable gets its result. `inputs` binds arguments to the parameters of `forward`; `held_values`
finds the values that modules hold; `packed_weights` reads quantized ones. `custom_graphs` records custom graphs,
`decompositions` opens functions. The doubts in `records` say what may differ on other inputs.

Other packages import what is listed below, and these modules as they are: `records`, the classes that a capture
consists of; `inputs`, `held_values` and `frame_recorder`, which are about calls, modules and torch functions;
`observers`, which patched runs and graphs use too; and `custom_graphs`, which `graphs` makes in the same way.
"""

from __future__ import annotations

import operator
import warnings
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.call_sites import INVOKE, is_own
from graphpatch_notebook.capture.decompositions import chosen_decompositions, decomposition_of
from graphpatch_notebook.capture.frame_recorder import (
    PART_FUNCTIONS,
    SIZED_BY_VALUES,
    Size,
    is_call_sized_by_values,
    is_sized_by_values,
    name_nodes,
    part_count_by_values,
    plain,
)
from graphpatch_notebook.capture.held_values import (
    PLAIN_VALUES,
    WRITTEN,
    all_modules,
    mutable_containers,
    reachable_modules,
)
from graphpatch_notebook.capture.meta_device import (
    META,
    OnMeta,
    WithoutWeights,
    built_without_weights,
    has_values,
    parameter_without_values,
    result_of_size,
)
from graphpatch_notebook.capture.observers import Swaps, apply_observer, observer, visible_apply
from graphpatch_notebook.capture.packed_weights import Packing, held_by, packing_of
from graphpatch_notebook.capture.recorder import FrameCount, OpPlace, Recorder, frame_count
from graphpatch_notebook.capture.records import Doubt, Frame, Reason, listed_doubts
from graphpatch_notebook.errors import CaptureError, GraphPatchWarning
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import eager_code, is_any_compiled, version_of
from graphpatch_notebook.values import rebuilt

__all__ = [
    "INVOKE",
    "META",
    "PART_FUNCTIONS",
    "SIZED_BY_VALUES",
    "Doubt",
    "Frame",
    "FrameCount",
    "OnMeta",
    "OpPlace",
    "Packing",
    "Reason",
    "Recorder",
    "built_without_weights",
    "call_sites",
    "capture",
    "chosen_decompositions",
    "decomposition_of",
    "frame_count",
    "has_values",
    "held_by",
    "is_call_sized_by_values",
    "is_own",
    "is_sized_by_values",
    "listed_doubts",
    "name_nodes",
    "packing_of",
    "parameter_without_values",
    "part_count_by_values",
    "record",
    "result_of_size",
]


def capture(module: Module, options: ExtractionOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Runs `module` once, eagerly, on example inputs and returns the record of that run: its root frame.

    The module is restored afterwards, except for what its own run changes. No code is generated, no tensor is kept.

    Raises:
        CaptureError: An option has an invalid value; nothing ran.
        CaptureError: The module never ran its `forward`, or this torch is too old for a compiled module.
    """
    __tracebackhide__ = True
    options.check()
    recorder = Recorder(module, options)
    tensors = (tensor for one in all_modules(module) for tensor in (*one._parameters.values(), *one._buffers.values()))
    held = [tensor for tensor in tensors if tensor is not None]
    before = [*map(version_of, held)]
    with WithoutWeights() if parameter_without_values(module) else nullcontext() as without_weights:
        root = record(recorder, args, kwargs)
    pairs = zip(held, before, strict=True)
    WRITTEN.update({id(tensor): tensor for tensor, version in pairs if version_of(tensor) != version})
    if without_weights is not None and without_weights.guessed:
        message = (
            f"the model reads values that depend on its weights, which are on the meta device "
            f"({', '.join(without_weights.guessed)}): it was captured as if they were 0, with masks that select all"
        )
        warnings.warn(GraphPatchWarning(message, "compilation"), stacklevel=4)
    root.capture.options = options
    root.capture.has_escaped_sizes = recorder.escapes.found
    _report_failures(recorder)
    _report_unopened(recorder)
    _check_unused(root, options)
    return root


def record(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Runs the module of `recorder` and returns the record of the run, under the conditions of `capture`."""
    __tracebackhide__ = True
    module = recorder.root_module
    modules = reachable_modules(module)
    has_compiled = is_any_compiled(modules)
    if has_compiled and not eager_code.is_possible:
        raise CaptureError(eager_code.reason)
    swaps = Swaps()
    observed, applied = observer.set(recorder), apply_observer.set(recorder)
    try:
        swaps.hold(modules)
        with visible_apply, eager_code if has_compiled else nullcontext(), recorder:
            module(*args, **kwargs)
    finally:
        observer.reset(observed)
        apply_observer.reset(applied)
        swaps.let_go()
        if recorder.has_kept_values():
            _replace_sizes(module, recorder)
    if recorder.root_frame is None:
        raise CaptureError(f"{type(module).__name__} did not run its forward; give example inputs that reach it")
    return recorder.root_frame


def _report_failures(recorder: Recorder) -> None:
    for frame, failure in recorder.failures:
        if recorder.options.error_on_compilation_failure:
            raise failure
        if recorder.options.warn_on_compilation_failure:
            became = "became an OpaqueGraphModule" if frame.opaque_reason else "was captured without its custom graph"
            message = f"{format_path(frame.path) or 'the model'!r} {became}: {type(failure).__name__}: {failure}"
            warnings.warn(GraphPatchWarning(message, "compilation"), stacklevel=4)


def _report_unopened(recorder: Recorder) -> None:
    if recorder.decompositions and not recorder.has_opened and not recorder.unopened:
        names = " nor ".join(decomposition.name for decomposition in recorder.decompositions.values())
        message = f"the model does not call {names} on these inputs, or not observably: nothing was decomposed"
        warnings.warn(GraphPatchWarning(message, "decomposition"), stacklevel=4)
    for (name, refusal), frame in recorder.unopened.items():
        where = repr(format_path(frame.path)) if frame.path else "the model"
        message = f"{name} in {where} cannot be decomposed: {refusal}; it stays one node"
        warnings.warn(GraphPatchWarning(message, "decomposition"), stacklevel=4)


def _check_unused(root: Frame, options: ExtractionOptions) -> None:
    allowed = options.allow_unused_submodules
    if allowed or (allowed is None and not options.error_on_compilation_failure):
        return
    used = {id(frame.module) for frame in root.walk()}
    names = {id(module): name for name, module in root.module.named_modules()}
    # A container, or a module whose parts are called one by one, is not called itself.
    unused = [
        names.get(id(module), type(module).__name__)
        for module in reachable_modules(root.module)
        if not any(id(inside) in used for inside in module.modules())
    ]
    if unused:
        raise CaptureError(
            f"the example inputs do not reach these submodules: {', '.join(sorted(unused))}; give inputs that do, or "
            "set allow_unused_submodules=True"
        )


def _replace_sizes(root: Module, recorder: Recorder) -> None:
    """Puts plain integers in place of sizes that the model kept for itself, and its own tensors in place of aliases."""
    for module in reachable_modules(root):
        for _, container in mutable_containers(module):
            if isinstance(container, list):
                container[:] = [_plain(value, recorder) for value in container]
            elif isinstance(container, dict):
                if any(type(key) is Size for key in container):
                    items = [(_plain(key, recorder), value) for key, value in container.items()]
                    container.clear()
                    container.update(items)
                for key, value in list(container.items()):
                    if type(value) not in PLAIN_VALUES and (plain := _plain(value, recorder)) is not value:
                        container[key] = plain


def _plain(value: Any, recorder: Recorder) -> Any:
    if type(value) is Size:
        return plain(value)
    if isinstance(value, Tensor):
        return recorder.original(value)
    if isinstance(value, tuple):
        items = [_plain(item, recorder) for item in value]
        return rebuilt(type(value), (), items) if any(map(operator.is_not, items, value)) else value
    return value
