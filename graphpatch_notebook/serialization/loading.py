"""`load`: reads a file strictly, into plain modules and records whose graphs are these modules.

With a model, the modules of the file are found in it, and their weights have to be the same.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import plain_values_read
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.errors import SerializationError
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.codecs.names import Allowed
from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.serialization.codecs.tensors import made_tensors
from graphpatch_notebook.serialization.codecs.values import decoded
from graphpatch_notebook.serialization.files import read_document
from graphpatch_notebook.serialization.forms import Guard, decoded_form
from graphpatch_notebook.serialization.frames import FrameReader, decoded_lines
from graphpatch_notebook.serialization.modules import LoadedRoot, ModuleReader
from graphpatch_notebook.values import is_same_plain

SCHEMA = 1
"""The version of the layout of documents. Increased whenever an older reader would misread a newer document."""

METADATA_KEY = "graphpatch_notebook"
"""The key of the document in the metadata of a safetensors file."""

_FIELDS = ("schema", "written_by", "torch", "options", "form", "frames", "modules", "tensors", "lines")


@dataclass(frozen=True)
class Loaded:
    """The contents of a file; `unstored` says why it has no graph of some frames, by path."""

    module: Module
    root: Frame
    options: ExtractionOptions
    unstored: dict[str, str]


def load(file: str | os.PathLike[str] | IO[bytes], model: Module | None, allow: Iterable[str]) -> Loaded:
    """Reads a file. See `PatchableGraph.load`."""
    if model is not None and not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    allowed = Allowed(allow)
    otherwise = "holds tensors, but no graph; pg.save(file) writes files with both"
    name, content, contents = read_document(file, METADATA_KEY, "pg.save(file)", "load", otherwise)
    try:
        fields = _checked_fields(content)
        originals = None if model is None else originals_of(fields, model)
        tensors = made_tensors(fields["tensors"], contents)
        return _assembled(fields, tensors, originals, allowed, name)
    except RecursionError:
        raise SerializationError(f"{name}: it is nested too deeply") from None


def assembled(content: dict[str, Any], tensors: Sequence[Tensor], originals: Mapping[int, Module]) -> Loaded:
    """Returns the result of loading a document in the process that made it, with the modules of the model."""
    fields = _checked_fields(JsonValue(content, "the graph"))
    return _assembled(fields, tensors, originals, Allowed(None), "the graph", is_guarded=False)


def guard_of(module: Module) -> Guard | None:
    """Returns the guard of a loaded graph whose root is `module`; `None` for other modules."""
    return module.__dict__.get("_stored_guard") if isinstance(module, LoadedRoot) else None


# -- the file ----------------------------------------------------------------------------------------------------------


def _checked_fields(content: JsonValue) -> dict[str, JsonValue]:
    content.check_schema(SCHEMA)
    fields = content.fields(*_FIELDS)
    fields["written_by"].text()
    fields["torch"].text()
    if not fields["frames"].items():
        raise fields["frames"].error("a frame is missing")
    return fields


# -- what is in it -----------------------------------------------------------------------------------------------------


def _assembled(
    fields: dict[str, JsonValue],
    tensors: Sequence[Tensor],
    originals: Mapping[int, Module] | None,
    allowed: Allowed,
    file: str,
    *,
    is_guarded: bool = True,
) -> Loaded:
    frames = fields["frames"].items()
    live = {module for module, is_stored in map(_module_of, frames) if not is_stored}
    root = _module_of(frames[0])[0]
    if originals is not None and is_guarded:
        check_weights(fields, originals, tensors, live)
    modules = ModuleReader(fields["modules"], tensors, originals or {}, live, root).modules
    reader = FrameReader(fields["frames"], modules, decoded_lines(fields["lines"]), allowed)
    options = decoded_options(fields["options"])
    first = reader.frames[0]
    if first.opaque_reason is None and is_guarded:
        form = decoded_form(fields["form"], first)
        allowed.check(file)
        watched = {id(frame.module): frame.module for frame in reader.frames if frame.opaque_reason is None}
        assert isinstance(first.module, LoadedRoot)
        model = None if originals is None else originals[root]
        has_edits = any(frame.is_edited for frame in reader.frames)
        stored = {n: module for n, module in (originals or {}).items() if n not in live}
        guard = Guard(form, list(watched.values()), _changed_read(fields, stored))
        first.module.set_guard(guard, model, has_edits=has_edits)
    allowed.check(file)
    unstored = {format_path(f.path): f.opaque_reason for f in reader.frames if f.opaque_reason is not None}
    return Loaded(first.module, first, options, unstored)


def _module_of(item: JsonValue) -> tuple[int, bool]:
    """Returns the number of the module of a frame, and whether the frame is stored."""
    if type(item.value) is not dict or not {"module", "unstored"} <= item.value.keys():
        raise item.error("there should be a frame")
    entries = item.entries()
    return entries["module"].whole(), entries["unstored"].is_null


def decoded_options(item: JsonValue) -> ExtractionOptions:
    """Returns options, without functions and classes, and without options of other versions."""
    fields = item.fields("kept", "dropped")
    for text in fields["dropped"].entries().values():
        text.text()
    known = {option.name: option for option in dataclasses.fields(ExtractionOptions)}
    default = ExtractionOptions()
    values: dict[str, Any] = {}
    for name, entry in fields["kept"].entries().items():
        if name not in known:
            continue
        before = getattr(default, name)
        is_set = type(entry.value) is dict and list(entry.value) == ["set"]
        value = {t.text() for t in entry.entries()["set"].items()} if is_set else decoded(entry)
        if isinstance(before, (set, frozenset)) and is_set:
            value = type(before)(value)
        if before is not None and type(value) is not type(before):
            raise entry.error(f"there should be a {type(before).__name__}")
        if name == "decompose" and not (value is None or isinstance(value, tuple)):
            raise entry.error("there should be a tuple of names")
        values[name] = value
    return ExtractionOptions(**values)


# -- the model that is given -------------------------------------------------------------------------------------------


def check_weights(
    fields: Mapping[str, JsonValue], originals: Mapping[int, Module], tensors: Sequence[Tensor], live: set[int]
) -> None:
    """Checks that a model has the weights and modes of the file."""
    for number, item in enumerate(fields["modules"].items()):
        module = originals.get(number)
        if module is None:
            continue
        entries = item.entries()
        name = type(module).__name__
        if number not in live and entries["training"].flag() is not module.training:
            was = "train" if entries["training"].flag() else "eval"
            raise SerializationError(
                f"{_where(module, fields, originals)} ({name}) was in {was} mode when the graph was saved; call "
                f"model.{was}()"
            )
        for kind, registry in (("parameters", module._parameters), ("buffers", module._buffers)):
            for entry in entries[kind].items():
                tensor, stored = entry.items()[0].text(), entry.items()[1]
                if stored.is_null:
                    continue
                found = registry.get(tensor)
                expected = tensors[stored.whole(0, len(tensors) - 1)]
                if found is None or difference(found.detach(), expected.detach().to(found.device), tensor) is not None:
                    raise SerializationError(
                        f"{tensor!r} of {_where(module, fields, originals)} ({name}) is not what it was when the graph "
                        "was saved; load these weights into the model first: "
                        "model.load_state_dict(safetensors.torch.load_file(file), strict=False)"
                    )


def _changed_read(fields: Mapping[str, JsonValue], stored: Mapping[int, Module]) -> str | None:
    """Returns a plain value that the code of a model reads, and that was another one when the graph was saved."""
    for number, item in enumerate(fields["modules"].items()):
        if number in stored and "read" in (entries := item.entries()):
            now = plain_values_read(stored[number])
            before = {name: decoded(entry) for name, entry in entries["read"].entries().items()}
            found = [name for name in before if name in now and not is_same_plain(now[name], before[name])]
            found += [name for name in now if "." in name and name not in before]  # new in a dict or list
            if found:
                return f"{found[0]!r} ({type(stored[number]).__name__})"
    return None


def _where(module: Module, fields: Mapping[str, JsonValue], originals: Mapping[int, Module]) -> str:
    """Returns the path of a module in the model, for messages."""
    model = originals.get(fields["frames"].items()[0].entries()["module"].whole(0, len(fields["modules"].items()) - 1))
    names = model.named_modules() if model is not None else ()
    path = next((path for path, other in names if other is module), "")
    return repr(path) if path else "the model"


def originals_of(fields: Mapping[str, JsonValue], model: Module) -> dict[int, Module]:
    """Returns the modules of `model` by the numbers that they have in the file."""
    modules = fields["modules"].items()
    frames = fields["frames"].items()
    found: dict[int, Module] = {}

    def pair(item: JsonValue, module: Module, path: str) -> None:
        number = item.whole(0, len(modules) - 1)
        known = found.setdefault(number, module)
        if known is not module:
            raise SerializationError(f"{path!r} of the model is a different module than when the graph was saved")
        entry = modules[number].entries()
        if "class" not in entry or entry["class"].text() != type(module).__name__:
            there = f"of {entry['class'].text()}" if "class" in entry else "another one"
            raise SerializationError(
                f"{repr(path) if path else 'the model'} is of class {type(module).__name__}, and {there} in the file: "
                "give the model whose graph it is"
            )
        for child in entry["children"].items() if "children" in entry else []:
            name, index = child.items(2)
            inner = module._modules.get(name.text())
            if index.is_null:
                continue
            if inner is None:
                raise SerializationError(f"the model has no {f'{path}.{name.text()}'.lstrip('.')!r}, unlike the file")
            if index.whole(0, number - 1) not in found:
                pair(index, inner, f"{path}.{name.text()}".lstrip("."))

    _module_of(frames[0])  # which checks it
    pair(frames[0].entries()["module"], model, "")
    return found
