"""Errors and warnings, with the lines that warnings name; blocks that end well, also by a KeyboardInterrupt.

If a click started the run, rather than a line of the user's code, warnings are collected, to be shown with its results.
Collection is local to a context; `warnings.catch_warnings` would affect all threads.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

_MARK = "graphpatch: "
_LONGEST_WORD = 300
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


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

    def __init__(self, *args: object) -> None:
        # A path or number of thousands of letters would hide what the message says about it.
        super().__init__(
            *(
                _LONG_WORD.sub(lambda word: cut(word[0], _LONGEST_WORD), arg) if isinstance(arg, str) else arg
                for arg in args
            )
        )


class CaptureError(GraphPatchError, RuntimeError, ValueError):
    """A module could not be captured as a graph, or an extraction option has an invalid value; then nothing ran."""


class PatchMapError(GraphPatchError, ValueError):
    """A patch map was refused on entry; nothing ran, and nothing was changed."""


class UnknownPathError(PatchMapError, KeyError):
    """A patch map names a path that does not exist, or does not lead to a single value that can be patched."""

    # `KeyError` prints the repr of its argument, which would show the line breaks as `\n`.
    __str__ = Exception.__str__


class UnknownChildError(UnknownPathError, AttributeError):
    """A graph, a node or a container does not have this child."""


class PatchValueError(GraphPatchError, ValueError):
    """A patch met a value that it cannot be applied to, or of another kind or shape than when it was captured."""


class PatchNotFiredError(GraphPatchError, RuntimeError):
    """A patch of a strict context never fired during a call.

    Attributes:
        paths: The paths of such patches.
    """

    paths: tuple[str, ...] = ()


class GraphError(GraphPatchError, RuntimeError, ValueError):
    """A graph cannot be built, or cannot run in place of its module.

    Of a loaded graph, nothing ran for a call that it does not cover. All processes of a sharded model raise it if they
    make different calls.
    """


class SerializationError(GraphError):
    """A graph or patches cannot be saved, or a file cannot be loaded. Nothing in the file ran."""


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


class GraphPatchWarning(UserWarning):
    r"""Every warning of this package. Its text begins with its kind, by which it can be filtered.

    Attributes:
        kind: What it is about:

            - `aliased view`: The patched node is a view that the model fills in later; the patch cuts it off.
            - `checkpoint`: A patched forward is recomputed in backward, which did not run inside the context.
            - `compilation`: A module was not captured as a graph and fell back to an `OpaqueGraphModule`.
            - `component`: A component is used although its value may not be what its name says.
            - `decomposition`: A function in `ExtractionOptions.decompose` is not called, or cannot be decomposed there.
            - `edited graph`: An edited graph is valid for the branches and flags of the example only.
            - `experiment`: Some cells of a sweep failed, or had to be run in a slower way than requested.
            - `listener`: A listener to the changes of a session raised an error.
            - `missing process`: A call of a model waits for a process that does not make it.
            - `not fired`: A patch never fired during a call, or no call was made in its context.
            - `repeated call`: A module or an op ran more often than when it was captured, and all of that was patched.
            - `shared gradient`: The gradient of a probed input includes those of other uses of the same tensor.
            - `state`: A run that should leave no trace changed something in the model that cannot be put back.
            - `unresolved patch`: Patches in a file of a session name values that this graph does not have.
            - `unstored frame`: Some frames, or hooks, could not be stored: a loaded graph needs the model for these.

    Example:
        >>> import warnings
        >>> from graphpatch_notebook import GraphPatchWarning
        >>> warnings.filterwarnings("ignore", r"\[not fired\]", GraphPatchWarning)
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message, kind)
        self.kind = kind

    def __str__(self) -> str:
        return f"[{self.kind}] {self.args[0]}"


KINDS = {
    "AliasedPatchWarning": "aliased view",
    "CheckpointWarning": "checkpoint",
    "CompilationWarning": "compilation",
    "DecompositionWarning": "decomposition",
    "EditedGraphWarning": "edited graph",
    "ExperimentWarning": "experiment",
    "ListenerWarning": "listener",
    "PatchNotFiredWarning": "not fired",
    "RepeatedCallWarning": "repeated call",
    "UnresolvedPatchWarning": "unresolved patch",
    "UnstoredFrameWarning": "unstored frame",
}
# Names of 0.1.0, and what to write instead. Version 0.3.0 forgets them.
REMOVED = {name: f"GraphPatchWarning, whose `kind` is {kind!r}" for name, kind in KINDS.items()} | {
    "LiveFallbackWarning": "nothing: graph modules run the model's own code",
    "OptionError": "CaptureError",
    "PatchShapeError": "PatchValueError",
    "StoredFormError": "SerializationError",
    "UnstoredFrameError": "SerializationError",
    "UnverifiedGraphWarning": "pg.verify(...), which compares on request",
    "SweepInterrupted": "KeyboardInterrupt, whose `result` it has",
    "ridge_probes": "record_to(...), then probes(store, labels, 'ridge')",
    "plot_scores": "top_scores(scores).plot.barh()",
    "save_figure": "axes.figure.savefig(file)",
}


def removed(name: str) -> ImportError | None:
    """Returns an error that says what to write instead of a name of the version before; `None` for other names."""
    now = REMOVED.get(name)
    return None if now is None else ImportError(f"{name!r} was removed in version 0.2.0; use {now}")


_T = TypeVar("_T")

# What the content of a file cannot cause: a mistake in code, a missing package, a warning that the user made an error.
_NOT_OF_FILES = (AssertionError, ImportError, NameError, Warning)
_PARTS_MISSING = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR)


@contextmanager
def afterwards(*steps: Callable[[], object]) -> Iterator[None]:
    """Runs steps, in order, when the block ends or raises."""
    with ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)
        yield


@contextmanager
def holding(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Gives a context variable another value for the length of the block."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)


@contextmanager
def reading(name: str, kind: type[Exception], hint: str = "") -> Iterator[None]:
    """Raises an error of this kind, which names the file, for all that a damaged file makes the block raise.

    What the operating system refuses (too many open files, no permission) is not damage, and is raised as it is.
    """
    try:
        yield
    except Exception as error:
        is_refused = isinstance(error, OSError) and error.errno not in (None, *_PARTS_MISSING)
        if is_refused or isinstance(error, _NOT_OF_FILES):
            raise
        raise kind(f"{name} is damaged, or does not fit: {error}{hint}") from error


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Gives a name to write to, and then replaces `file` atomically; its mode stays.

    Links stay, and lead to it. What was loaded from the old file, or reads it now, is not disturbed.

    Raises:
        OSError: It cannot be written; what was there stays. The error names `file`, and is of the class of its number
            (`PermissionError`, ...).
    """
    target = Path(os.path.realpath(file))
    written = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        written.touch()  # raises the usual errors where nothing can be written
        yield written
        with written.open("rb+") as stream:
            os.fsync(stream.fileno())
        if target.exists() and not target.is_file():
            shutil.copyfile(written, target)  # a device stays what it is, and a folder is an error
            return
        if target.exists():
            shutil.copymode(target, written)
        written.replace(target)
    except Exception as error:
        from safetensors import SafetensorError

        if not isinstance(error, (OSError, SafetensorError)):
            raise
        number = getattr(error, "errno", None)
        if number is None:
            raise OSError(f"{str(file)!r} cannot be written, perhaps for lack of space") from error
        raise OSError(number, os.strerror(number), str(file)) from error
    finally:
        written.unlink(missing_ok=True)


_INSIDE = (
    os.path.dirname(__file__),
    os.path.dirname(torch.__file__),
    os.path.dirname(contextlib.__file__) + os.sep + "contextlib",
    "<graphpatch",
)

_collected: ContextVar[dict[str, str] | None] = ContextVar("graphpatch_collected_warnings", default=None)


@contextlib.contextmanager
def collected_warnings() -> Iterator[dict[str, str]]:
    """Collects the warnings that this package gives in the block, in its thread or task: their kinds by message."""
    messages: dict[str, str] = {}
    with holding(_collected, messages):
        yield messages


def _is_collected(message: str, kind: str) -> bool:
    messages = _collected.get()
    if messages is not None:
        messages[message] = kind
    return messages is not None


def level_of_caller() -> int:
    """Returns the `stacklevel` at which a warning, given by the caller of this, names a line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def warn_each_time(message: str, kind: str) -> None:
    """Gives a warning that names a line of the user's code, even if that line gave the same warning before.

    By default Python shows a warning once for each line of code, so running a cell again would show nothing.
    """
    if _is_collected(message, kind):
        return
    frame = sys._getframe(level_of_caller() - 1)
    warnings.warn_explicit(
        GraphPatchWarning(message, kind), None, frame.f_code.co_filename, frame.f_lineno, registry={}
    )


def warn(message: str, kind: str, stacklevel: int) -> None:
    """Gives a warning, once for each line of code; `stacklevel` counts from the caller of this function."""
    if not _is_collected(message, kind):
        warnings.warn(GraphPatchWarning(message, kind), stacklevel=stacklevel + 1)


def extra(name: str, purpose: str, instead: str = "") -> Any:
    """Imports and returns a module of the optional dependencies `experiments`.

    The message of the `ExperimentError`, if it is not installed, names the feature that needs it, and an alternative.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name, purpose, instead) from error


def check_extra(name: str, purpose: str) -> None:
    """Raises the `ExperimentError` of `extra` if a module is not installed, without importing it."""
    if name not in sys.modules and find_spec(name) is None:
        raise _missing(name, purpose)


def _missing(name: str, purpose: str, instead: str = "") -> ExperimentError:
    return ExperimentError(
        f"{purpose} needs {name.partition('.')[0]}: pip install 'graphpatch-notebook[experiments]'{instead}"
    )
