"""Every exception and warning of this package. Errors also inherit from the built-in class that code would catch."""

from __future__ import annotations

import contextlib
from typing import Any

_MARK = "graphpatch: "


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error, which keeps its type, its arguments and its traceback.

    Python 3.11 prints notes with the traceback; before that, IPython, Jupyter and pytest do.
    """
    with contextlib.suppress(AttributeError, TypeError):  # errors that take no attributes
        if hasattr(error, "add_note"):
            error.add_note(_MARK + note)
        else:
            notes = [*getattr(error, "__notes__", ()), _MARK + note]
            setattr(error, "__notes__", notes)  # noqa: B010  # `BaseException` has no such attribute there


def cut(text: str, most: int = 80) -> str:
    """Returns the text for a message, with at most `most` letters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def has_note(error: BaseException) -> bool:
    """Whether this package has added a note to the error already: what is nearest to its cause comes first."""
    return any(str(note).startswith(_MARK) for note in getattr(error, "__notes__", ()))


class GraphPatchError(Exception):
    """Base class of every error that this package raises on purpose."""


class CaptureError(GraphPatchError, RuntimeError):
    """A module could not be captured as a graph."""


class OptionError(GraphPatchError, ValueError):
    """An option has an invalid value; nothing ran."""


class PatchMapError(GraphPatchError, ValueError):
    """A patch map was refused on entry; nothing ran, and nothing was changed."""


class UnknownPathError(PatchMapError, KeyError):
    """A patch map names a path that does not exist, or does not lead to a single value that can be patched."""

    # `KeyError` prints the repr of its argument, which would show the line breaks as `\n`.
    __str__ = Exception.__str__


class UnknownChildError(UnknownPathError, AttributeError):
    """A graph, a node or a container does not have this child."""


class PatchValueError(GraphPatchError, ValueError):
    """A patch met a value that it cannot be applied to."""


class PatchShapeError(GraphPatchError, ValueError):
    """A patched name holds another kind of value than it did when the module was captured."""


class PatchNotFiredError(GraphPatchError, RuntimeError):
    """A patch of a strict context never fired during a call.

    Attributes:
        paths: The paths of such patches.
    """

    paths: tuple[str, ...] = ()


class ShardedCallError(GraphPatchError, RuntimeError):
    """The processes that a model is sharded over call it with different patches, or one of them does not call it."""


class GraphError(GraphPatchError, RuntimeError):
    """A graph cannot be built, or cannot run in place of its module."""


class SessionError(GraphPatchError, ValueError):
    """The chosen patches of a notebook cannot be changed or used in this way; nothing was changed."""


class ChosenPatchError(SessionError):
    """A field of a chosen patch is invalid.

    Attributes:
        field: The name of the field: `path`, `kind`, `slice`, `value`, ...
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class StaleEditError(SessionError):
    """An edit of the chosen patches was based on a version of them that is not the last one any more."""


class SessionFileError(SessionError):
    """A file with chosen patches cannot be read, or would overwrite something else."""


class UntrustedValueError(SessionError):
    """A value of a chosen patch is code from a file that the user has not trusted yet: it was not run."""


class ExportError(SessionError):
    """The chosen patches cannot be written down as Python in this form."""


class ExperimentError(GraphPatchError, ValueError):
    """An experiment cannot be done like this, or its results cannot be kept or loaded."""


class SweepInterrupted(KeyboardInterrupt):
    """A sweep was interrupted.

    Attributes:
        result: The `xarray.DataArray` of the finished cells; NaN in cells that did not run.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result

    def _render_traceback_(self) -> list[str]:
        """Returns the text for notebooks: without a traceback, since the line of the interrupt does not matter."""
        return [f"{type(self).__name__}: {self}"]


class SerializationError(GraphPatchError, ValueError):
    """A graph cannot be saved, or a file cannot be loaded. Nothing in the file ran."""


class UnstoredFrameError(SerializationError, RuntimeError):
    """A loaded graph called a module that has neither a graph in the file nor a model to run instead."""


class StoredFormError(SerializationError):
    """A loaded graph was called with inputs, or in a mode, that it does not cover; nothing ran."""


class GraphPatchWarning(UserWarning):
    """Base class of every warning that this package gives."""


class CompilationWarning(GraphPatchWarning):
    """A module was not captured as a graph and fell back to an `OpaqueGraphModule`."""


class PatchNotFiredWarning(GraphPatchWarning):
    """A patch never fired: in a call of the `PatchableGraph` inside its context, or because no call was made there."""


class RepeatedCallWarning(GraphPatchWarning):
    """A module or an op ran more often in one frame than when it was captured, and all of that was patched."""


class CheckpointWarning(GraphPatchWarning):
    """A patched forward is to be recomputed in backward, but backward did not run inside the patch context."""


class DecompositionWarning(GraphPatchWarning):
    """A function in `ExtractionOptions.decompose` is not called, or is called in a way that cannot be decomposed."""


class AliasedPatchWarning(GraphPatchWarning):
    """The patched node is a view that the model fills in later: the patch cuts it off from its base."""


class SharedGradientWarning(GraphPatchWarning):
    """The gradient of a probed input of a module includes those of other uses of the same tensor."""


class EditedGraphWarning(GraphPatchWarning):
    """An edited graph is valid for the branches and flags of the example only, and a call may have others."""


class StateWarning(GraphPatchWarning):
    """A run that should leave no trace changed something in the model that cannot be put back.

    It wrote into weights, or into large tensors, into which the model did not write while it was captured; later runs
    will be put back. Or it took values from an iterator.
    """


class ComponentWarning(GraphPatchWarning):
    """A component is used although its value may not be what its name says."""


class ExperimentWarning(GraphPatchWarning):
    """Some cells of a sweep failed, or had to be run in a slower way than requested."""


class ListenerWarning(GraphPatchWarning):
    """A listener to the changes of a session raised an error."""


class UnresolvedPatchWarning(GraphPatchWarning):
    """Patches in a file of a session name values that this graph does not have: they were left out."""


class UnstoredFrameWarning(GraphPatchWarning):
    """Some frames could not be stored: a loaded graph needs the model for these."""
