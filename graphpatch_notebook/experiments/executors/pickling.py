"""What is sent to other processes: as bytes, never with a model."""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.function_values import referred
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.patchable_graph import PatchableGraph

RECIPE = """\
    def build():
        model = AutoModelForCausalLM.from_pretrained("gpt2").eval()
        return PatchableGraph(model, **tokenizer("The", return_tensors="pt"))

    pg.sweep(..., executor=executor, recipe=build)  # or recipe="FILE", which pg.save("FILE") wrote"""


def packed(parts: Iterable[tuple[str, Any]]) -> bytes:
    """Returns the parts, each with its name in messages, as bytes that `unpacked` makes equal ones of.

    Functions go along by their code where another process could not import them: lambdas, functions of notebooks.

    Raises:
        ExperimentError: A part holds a model, or something else that cannot be sent; the message names the part.
    """
    stream = io.BytesIO()
    packer = _packer_class()(stream)
    for holder, value in parts:
        packer.holder, packer.held = holder, value
        try:
            packer.dump(value)
        except ExperimentError:
            raise
        except Exception as error:  # whatever the `__reduce__` of a user's class raises
            raise ExperimentError(
                f"{holder} cannot be sent to another process: {type(error).__name__}: {error}"
            ) from error
    return stream.getvalue()


def unpacked(data: bytes) -> list[Any]:
    """Returns the parts that `packed` was given."""
    stream = io.BytesIO(data)
    unpickler = pickle.Unpickler(stream)  # one for all: parts refer to what others hold, too
    parts = []
    while stream.tell() < len(data):
        parts.append(unpickler.load())
    return parts


@functools.cache
def _packer_class() -> Any:
    cloudpickle = extra("cloudpickle", "executor=")

    class Packer(cloudpickle.Pickler):  # type: ignore[misc, name-defined]  # not known here
        """Pickles, but no models; of a view of a tensor only what is seen of it."""

        holder = ""
        held: Any = None

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, PatchableGraph) or (isinstance(value, Module) and has_weights(value)):
                raise ExperimentError(_refusal(self.holder, self.held, value))
            if type(value) is Tensor and _is_part(value):
                return (_same, (value.detach().clone().requires_grad_(value.requires_grad),))
            return super().reducer_override(value)

    return Packer


def has_weights(module: Module) -> bool:
    """Whether there is anything in a module that would have to be sent: `torch.nn.CrossEntropyLoss()` has nothing."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _is_part(tensor: Tensor) -> bool:
    # torch pickles the whole storage: of one row of an embedding, the embedding.
    try:
        return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    except (NotImplementedError, RuntimeError):  # tensors without a storage
        return False


def _same(value: Any) -> Any:
    return value


def _refusal(holder: str, held: Any, module: Module) -> str:
    name = _variable(held, module)
    by = f", by its variable {name!r}" if name is not None else ""
    return (
        f"{holder} holds the model ({type(module).__name__}){by}: its weights would go through the scheduler. Take "
        f"what you need out of it before, and say with recipe= how to build it where it runs:\n{RECIPE}"
    )


def _variable(held: Any, module: Module) -> str | None:
    """Returns the name of the variable by which a function reaches a module, if it is one of its own."""
    while isinstance(held, functools.partial):
        held = held.func
    function = getattr(held, "__func__", held)
    if not isinstance(function, types.FunctionType):
        return None
    return next((name for name, value in referred(function) if value is module), None)
