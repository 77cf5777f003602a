"""Capture: one eager run of a model on example inputs becomes a tree of frames with named nodes.

`record` runs the model under a `recorder`, which sees torch functions through a function mode, and module calls through
swapped forwards (`modules`). `frame_recorder` records one module call, as the classes in `records`: which calls
become nodes, and their names; sizes stay symbolic. `call_sites` identifies an operation by its place in the user's
code, and reads which variable gets its result. `inputs` binds arguments to the parameters of `forward`; `modules` also
finds the values that modules hold; `packed_weights` reads quantized ones. `custom_graphs` records custom graphs,
`decompositions` opens functions. The doubts in `records` say what may differ on other inputs.

Other packages import what is listed below, and these modules as they are: `records`, the classes that a capture
consists of; `inputs`, `modules` and `frame_recorder`, which are about calls, modules and torch functions; and
`custom_graphs`, which `graphs` makes in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

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
from graphpatch_notebook.capture.meta_device import (
    META,
    OnMeta,
    WithoutWeights,
    built_without_weights,
    has_values,
    parameter_without_values,
    result_of_size,
)
from graphpatch_notebook.capture.modules import (
    OF_EACH_MODULE,
    WRITTEN,
    Swaps,
    all_modules,
    mutable_containers,
    observer,
    reachable_modules,
    visible_apply,
)
from graphpatch_notebook.capture.packed_weights import Packing, held_by, is_packed, packing_of, passed_as, unpacked
from graphpatch_notebook.capture.recorder import OpPlace, Recorder
from graphpatch_notebook.capture.records import Doubt, Frame, Reason, listed_doubts
from graphpatch_notebook.errors import CaptureError, GraphPatchWarning
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import eager_code, has_compiled_frames, may_compile, version_of

__all__ = [
    "INVOKE",
    "META",
    "PART_FUNCTIONS",
    "SIZED_BY_VALUES",
    "Doubt",
    "Frame",
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
    "has_values",
    "held_by",
    "is_call_sized_by_values",
    "is_own",
    "is_packed",
    "is_sized_by_values",
    "listed_doubts",
    "name_nodes",
    "packing_of",
    "parameter_without_values",
    "part_count_by_values",
    "passed_as",
    "record",
    "result_of_size",
    "unpacked",
]


def capture(module: Module, options: ExtractionOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Runs `module` once, eagerly, on example inputs and returns the record of that run: its root frame.

    The module is restored afterwards, except for what its own run changes. No code is generated, no tensor is kept.

    Raises:
        CaptureError: An option has an invalid value; nothing ran.
        CaptureError: The module never ran its `forward`, or this torch is too old for a compiled module.
    """
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
    _report_failures(recorder)
    _report_unopened(recorder)
    _check_unused(root, options)
    return root


def record(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Runs the module of `recorder` and returns the record of the run, under the conditions of `capture`."""
    module = recorder.root_module
    modules = reachable_modules(module)
    has_dynamo = may_compile()  # then functions may be compiled, too
    swaps = Swaps(lambda module: recorder.unseen.add(id(module)))
    lazy = [each for each in modules if isinstance(each, LazyModuleMixin) and each.has_uninitialized_params()]
    observed = observer.set(recorder)
    try:
        swaps.hold(modules)
        for each in lazy:  # what they do only once is not a part of the model
            each.__dict__["initialize_parameters"] = partial(_unrecorded, recorder, each.initialize_parameters)
        with visible_apply, eager_code if has_dynamo else nullcontext(), recorder:
            module(*args, **kwargs)
    finally:
        observer.reset(observed)
        swaps.release()
        for each in lazy:
            del each.__dict__["initialize_parameters"]
        _replace_sizes(modules)
    if not has_dynamo and has_compiled_frames():
        raise CaptureError(
            f"{type(module).__name__} compiled a part of itself (torch.compile) in this run, and what runs in compiled "
            "code cannot be seen: make the PatchableGraph once more, now that it is compiled"
        )
    if recorder.root_frame is None:
        raise CaptureError(f"{type(module).__name__} did not run its forward; give example inputs that reach it")
    recorder.root_frame.capture.unseen = recorder.unseen
    return recorder.root_frame


def _unrecorded(recorder: Recorder, initialize: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with recorder.mute():
        initialize(*args, **kwargs)


def _replace_sizes(modules: Iterable[Module]) -> None:
    """Puts plain numbers in place of sizes that the model keeps, also in its containers, and as keys of these."""
    seen = set[int]()  # the config, say, is held by all modules
    for _, container in (each for module in modules for each in mutable_containers(module, OF_EACH_MODULE, seen)):
        if isinstance(container, list) and not _MAY_BE_SIZES.isdisjoint(map(type, container)):
            container[:] = map(_plain, container)
        elif isinstance(container, dict):
            if Size in map(type, container):
                items = [(_plain(key), value) for key, value in container.items()]
                container.clear()
                container.update(items)
            if not _MAY_BE_SIZES.isdisjoint(map(type, container.values())):
                for key, value in list(container.items()):
                    if (new := _plain(value)) is not value:
                        container[key] = new


_MAY_BE_SIZES = frozenset({Size, tuple})


def _plain(value: Any) -> Any:
    if type(value) is Size:
        return plain(value)
    if type(value) is tuple and any(type(item) is Size for item in value):
        return tuple(map(_plain, value))
    return value


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
