"""The oracle for patches on ops: the source of the model with `__edit__(...)` around the expression that the op is.

The bytecode tells which expression a call site is (`code.co_positions`, Python 3.11). That expression is wrapped in the
syntax tree, the function compiled again, and its new code put into the living function object for the length of one run
of the reference. `__edit__` changes the value that comes by while the right module runs, and hands on all others.
"""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import random
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphpatch_notebook.capture.modules import reachable_modules
from graphpatch_notebook.capture.records import ElementNode, Frame, Node
from graphpatch_notebook.values import TensorSpec
from tests.frozen_imports import FUNCTIONS
from tests.laws.captures import Capture, run
from tests.laws.edits import Change, Edit, edited, random_change

Span = tuple[int, int, int, int]
Code = types.CodeType


@dataclass(frozen=True)
class Place:
    """The expression of an op.

    Attributes:
        reference: The model in which it is to be edited.
        functions: The functions to give new code; several closures may share one.
        span: Where the expression is in their file.
        evaluation: Which evaluation of it, in one run of a module, makes the op.
    """

    reference: nn.Module
    functions: tuple[types.FunctionType, ...]
    span: Span
    evaluation: int

    @property
    def code(self) -> Code:
        return self.functions[0].__code__


def source_edits(capture: Capture, count: int) -> Iterator[Edit]:
    """Edits of ops by editing the source, where an op is the value of one expression."""
    rng = capture.random("source")
    for frame, node, place in islice(editable_ops(capture, rng), count):
        assert isinstance(node.spec, TensorSpec)
        change = random_change(node.spec.shape, node.spec.dtype, rng)
        path = ".".join((*frame.path, node.name))
        yield Edit(path, change, partial(source_edited, place, capture.counterpart(frame.module), node))


def editable_ops(capture: Capture, rng: random.Random) -> Iterator[tuple[Frame, Node, Place]]:
    """Yields the ops that this oracle can edit, in random order."""
    _closures.clear()
    frames = [frame for frame in capture.frames_called_once() if not _multiplies_groups(frame)]
    by_span: dict[Any, list[Node]] = {}
    for frame in frames:
        for node in frame.nodes:
            if node.kind == "op" and node.is_live and node.site is not None and node.whole is node:
                by_span.setdefault((id(frame), _span_of(node)), []).append(node)
    nodes = [(frame, node) for frame in frames for node in frame.nodes if node.kind == "op" and node.site is not None]
    for frame, node in rng.sample(nodes, len(nodes)):
        same = by_span.get((id(frame), _span_of(node)), [])
        whole = node.whole
        if whole not in same or not isinstance(node.spec, TensorSpec) or node.is_view_filled_later:
            continue
        place = place_of(capture.reference, node, same.index(whole))
        if place is not None and _evaluations(capture, frame, place) == len(same):
            yield frame, node, place


def _evaluations(capture: Capture, frame: Frame, place: Place) -> int:
    """How often a frame comes to an expression: `sum(xs)` is one that makes many ops."""
    seen = 0

    def count(value: Any) -> Any:
        nonlocal seen
        seen += value is not None  # an operator that writes in place and returns nothing has no value to edit
        return value

    with _code_edited(place), _calling(count, place.reference, capture.counterpart(frame.module)):
        run(capture.reference, capture.case.example())
    run(capture.pg, capture.case.example())  # model and reference stay equal where runs change them
    return seen


def _multiplies_groups(frame: Frame) -> bool:
    """Edited group tables make the grouped products of experts read beyond their memory: eager gives random numbers."""
    return "Experts" in type(frame.module).__name__ and "offsets" in frame.names


def _span_of(node: Node) -> tuple[str, Span | None]:
    """Where the expression of an op is: several instructions may have one (the condition of a `while`)."""
    assert node.site is not None
    code, offset = node.site.leaf
    start, end, column, end_column = _positions(code)[offset // 2]
    known = start is not None and end is not None and column is not None and end_column is not None
    return code.co_filename, (start, column, end, end_column) if known else None  # type: ignore[return-value]


@functools.lru_cache(maxsize=4096)
def _positions(code: Code) -> list[Any]:
    return list(code.co_positions())


def place_of(reference: nn.Module, node: Node, evaluation: int) -> Place | None:
    """Returns where the expression of an op is in the source, if it is there."""
    assert node.site is not None
    _, span = _span_of(node)
    functions = _functions_around(node.site.leaf[0], node.site.steps)
    if span is None or not functions:
        return None
    definition = _definition(functions[0].__code__)
    if definition is None or span not in _value_spans(definition):
        return None
    return Place(reference, tuple(functions), span, evaluation)


# -- the source of a function ------------------------------------------------------------------------------------------


def _is_value(part: ast.AST) -> bool:
    return isinstance(part, ast.expr) and isinstance(getattr(part, "ctx", ast.Load()), ast.Load)


def _span(part: Any) -> Span:
    return part.lineno, part.col_offset, part.end_lineno, part.end_col_offset


@functools.cache
def _value_spans(definition: ast.AST) -> set[Span]:
    return {_span(part) for part in ast.walk(definition) if _is_value(part)}


@functools.cache
def _parsed(file: str) -> ast.Module | None:
    return ast.parse(Path(file).read_text("utf-8")) if Path(file).is_file() else None


@functools.cache
def _definition(code: Code) -> ast.AST | None:
    """The statement at the top of the file that a function is defined in: itself, or its class."""
    tree = _parsed(code.co_filename)
    if tree is None:
        return None
    return next(
        (s for s in tree.body if s.lineno - 20 <= code.co_firstlineno <= (s.end_lineno or 0) and _holds(s, code)), None
    )


def _holds(statement: ast.AST, code: Code) -> bool:
    functions = (part for part in ast.walk(statement) if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return any(part.name == code.co_name and _first_line(part) == code.co_firstlineno for part in functions)


def _first_line(part: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([part.lineno, *(decorator.lineno for decorator in part.decorator_list)])


def _functions_around(code: Code, steps: tuple[tuple[Code, int], ...]) -> list[types.FunctionType]:
    """The living functions that have this code, or that define what has it: a comprehension, a closure."""
    for outer, _ in reversed(steps):
        if (outer is code or _is_inside(code, outer)) and (functions := _functions_of(outer)):
            return functions
    return []


def _is_inside(code: Code, outer: Code) -> bool:
    return any(part is code for part in _codes(outer))


_top_level: dict[int, list[types.FunctionType]] = {}
_closures: dict[int, list[types.FunctionType]] = {}


def _functions_of(code: Code) -> list[types.FunctionType]:
    """The living functions that have this code: closures are new with each model, others with each file."""
    is_closure = "<locals>" in code.co_qualname
    known = _closures if is_closure else _top_level
    if not known or (not is_closure and id(code) not in known):
        functions = [*FUNCTIONS, *(found for found in gc.get_objects() if type(found) is types.FunctionType)]
        known.clear()
        for function in functions:
            if ("<locals>" in function.__code__.co_qualname) == is_closure:
                known.setdefault(id(function.__code__), []).append(function)
    return known.setdefault(id(code), [])


# -- editing it --------------------------------------------------------------------------------------------------------


def _around(definition: ast.AST, span: Span) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yields where in a definition the expression at a place is: what holds it, the field, the index in the field."""
    for part in ast.walk(definition):
        for field, value in ast.iter_fields(part):
            for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(item, ast.AST) and _is_value(item) and _span(item) == span:
                    yield part, field, index, item


def _put(part: ast.AST, field: str, index: int | None, item: ast.AST) -> None:
    if index is None:
        setattr(part, field, item)
    else:
        getattr(part, field)[index] = item


@functools.lru_cache(maxsize=64)
def _edited_code(code: Code, file: str, span: Span) -> Code:
    """The code of a function with `__edit__(...)` around the expression at a place."""
    definition = _definition(code)
    assert isinstance(definition, ast.stmt)
    places = list(_around(definition, span))
    for *place, item in places:
        name = ast.copy_location(ast.Name("__edit__", ast.Load()), item)
        _put(*place, ast.copy_location(ast.Call(name, [item], []), item))
    try:
        compiled = compile(ast.Module([definition], []), file, "exec", dont_inherit=True)
    finally:
        for place in places:
            _put(*place)
    return next(
        part for part in _codes(compiled) if part.co_name == code.co_name and part.co_firstlineno == code.co_firstlineno
    )


def _codes(code: Code) -> Iterator[Code]:
    yield code
    for part in code.co_consts:
        if isinstance(part, Code):
            yield from _codes(part)


@contextmanager
def source_edited(place: Place, module: nn.Module, node: Node, change: Change) -> Iterator[None]:
    """By other code in the function, with an effect on one evaluation while `module` runs."""
    evaluation = -1

    def edit(value: Any) -> Any:
        nonlocal evaluation
        evaluation += 1
        if evaluation != place.evaluation:
            return value
        if isinstance(node, ElementNode):
            return edited(value, (f"sub_{node.position}",), change.edit)
        if not node.is_in_place:
            return change.edit(value)
        value.copy_(change.edit(value))
        return value

    with _code_edited(place), _calling(edit, place.reference, module):
        yield


@contextmanager
def _code_edited(place: Place) -> Iterator[None]:
    before = place.code
    after = _edited_code(before, before.co_filename, place.span)
    for function in place.functions:
        function.__code__ = after
    try:
        yield
    finally:
        for function in place.functions:
            function.__code__ = before


@contextmanager
def _calling(edit: Callable[[Any], Any], reference: nn.Module, module: nn.Module) -> Iterator[None]:
    """Makes `__edit__` call `edit` while the forward of `module`, and none of its submodules, runs in this thread."""
    running = _Running()
    builtins.__edit__ = lambda value: edit(value) if running.modules[-1:] == [module] else value  # type: ignore[attr-defined]
    try:
        with running.noted(reference):
            yield
    finally:
        del builtins.__edit__  # type: ignore[attr-defined]


class _Running(threading.local):
    """The modules whose forwards run at this moment in this thread, innermost last."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    @contextmanager
    def noted(self, root: nn.Module) -> Iterator[None]:
        modules = [module for module in reachable_modules(root) if not isinstance(module, torch.jit.ScriptModule)]
        before = [module.__dict__.get("forward") for module in modules]
        for module in modules:
            module.__dict__["forward"] = self._noting(module, module.forward)
        try:
            yield
        finally:
            for module, forward in zip(modules, before, strict=True):
                del module.__dict__["forward"]
                if forward is not None:
                    module.__dict__["forward"] = forward

    def _noting(self, module: nn.Module, forward: Any) -> Any:
        @functools.wraps(forward)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.modules.append(module)
            try:
                return forward(*args, **kwargs)
            finally:
                self.modules.pop()

        return noting
