"""Pickles tasks for other processes, and rejects models."""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import variables_of
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.patchable_graph import PatchableGraph

RECIPE = """\
    def build():
        model = AutoModelForCausalLM.from_pretrained("gpt2").eval()
        return PatchableGraph(model, **tokenizer("The", return_tensors="pt"))

    pg.sweep(..., executor=executor, recipe=build)  # or recipe="FILE", which pg.save("FILE") wrote"""


_REPAIR = f"Take what you need out of it before, and say with recipe= how to build it where it runs:\n{RECIPE}"


def packed(parts: Iterable[tuple[str, Any]], repair: str = _REPAIR) -> bytes:
    """Pickles the parts, each given with its name for messages, to bytes for `unpacked`.

    Functions that another process could not import (lambdas, functions of notebooks) are pickled by their code.

    Args:
        parts: The parts, which are read one by one.
        repair: What to do instead if a part holds a model.

    Raises:
        ExperimentError: A part holds a model, or cannot be pickled; the message names the part.
    """
    stream = io.BytesIO()
    packer = _packer_class()(stream)
    packer.repair = repair
    for holder, value in parts:
        packer.holder, packer.held = holder, value
        try:
            packer.dump(value)
        except ExperimentError:
            raise
        except Exception as error:  # raised by the `__reduce__` of a user's class, for example
            raise ExperimentError(
                f"{holder} cannot be sent to another process: {type(error).__name__}: {error}"
            ) from error
    return stream.getvalue()


def unpacked(data: bytes) -> list[Any]:
    """Returns the parts from the bytes that `packed` returned."""
    stream = io.BytesIO(data)
    unpickler = pickle.Unpickler(stream)  # one for all, since parts share objects
    parts = []
    while stream.tell() < len(data):
        parts.append(unpickler.load())
    return parts


def sendable(error: BaseException) -> BaseException:
    """Returns an error that can be pickled and unpickled: the same, or an `ExperimentError` with its text."""
    try:
        unpacked(packed([("the error", error)]))  # errors with own parameters may be pickled, but not unpickled
    except Exception:
        return ExperimentError(f"{type(error).__name__}: {error}")
    return error


@functools.cache
def _packer_class() -> Any:
    cloudpickle = extra("cloudpickle", "executor=")

    class Packer(cloudpickle.Pickler):  # type: ignore[misc, name-defined]  # its type is unknown
        """Pickles values except for models; of a view of a tensor, only the elements of the view."""

        holder = repair = ""
        held: Any = None

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, PatchableGraph) or (isinstance(value, Module) and has_weights(value)):
                raise ExperimentError(_refusal(self.holder, self.held, value) + self.repair)
            if type(value) is Tensor and _is_part(value):
                return (_same, (value.detach().clone().requires_grad_(value.requires_grad),))
            return super().reducer_override(value)

    return Packer


def has_weights(module: Module) -> bool:
    """Whether a module has parameters or buffers; `torch.nn.CrossEntropyLoss()` has none."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _is_part(tensor: Tensor) -> bool:
    # torch pickles the whole storage of a view, such as the embedding for one of its rows.
    try:
        return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    except (NotImplementedError, RuntimeError):  # tensors without a storage
        return False


def _same(value: Any) -> Any:
    return value


def _refusal(holder: str, held: Any, module: Module) -> str:
    name = _variable(held, module)
    by = f", by its variable {name!r}" if name is not None else ""
    return f"{holder} holds the model ({type(module).__name__}){by}: its weights would be sent to other processes. "


def _variable(held: Any, module: Module) -> str | None:
    """Returns the name of the variable of a function that holds the module, if there is one."""
    while isinstance(held, functools.partial):
        held = held.func
    function = getattr(held, "__func__", held)
    if not isinstance(function, types.FunctionType):
        return None
    return next((outer.name for outer in variables_of(function) if outer.value() is module), None)
