"""What depends on values of tensors: sizes of tensors, and how often loops run: `for expert in hit.nonzero(): ...`."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.functions import SIZE_READS
from graphpatch_notebook.capture.records import CallNode, Frame, Node, Site, SourceLine, line_at, map_leaves, refs_in
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, leaves

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SIZES = frozenset(name.strip("_") for name in SIZE_READS)


def data_loop_of(frame: Frame, node: Node) -> SourceLine | None:
    """Returns the head of the loop over data that names `node`, or names a call on the way to its frame."""
    loops = data_loops(frame.root)
    around = [node, *(above.call for above in frame.frames_above() if above.call is not None)]
    return next((loops[id(each)] for each in around if id(each) in loops), None)


def data_loops(root: Frame) -> dict[int, SourceLine]:
    """Returns the head of the loop over data, by the id of each node (of any frame) that such a loop names."""
    findings = root.capture.findings
    if data_loops not in findings:
        findings[data_loops] = {id(node): line for each in root.walk() for node, line in _marked(each)}
    return findings[data_loops]  # type: ignore[no-any-return]


def _marked(frame: Frame) -> Iterator[tuple[Node, SourceLine]]:
    reads = [
        *(read.site for read in frame.value_reads),
        *(node.site for node in frame.nodes if node.site is not None and (_reads_count(node) or _returns_read(node))),
    ]
    loops = [loop for read in reads for loop in _loops_over(read)]
    for node in frame.nodes if loops else ():
        # A module that is called once has its own name, whenever that is.
        if node.site is not None and (not isinstance(node, CallNode) or node.call_count > 1):
            for file, first, last, head in loops:
                lines = [line_at(code, offset) for code, offset in node.site.steps if code.co_filename == file]
                if any(first <= line <= last for line in lines):
                    yield node, head
                    break


def _reads_count(node: Node) -> bool:
    return part_count_by_values(node) is not None or (node.op in _SIZES and comes_of_values(node))


def _returns_read(node: Node) -> bool:
    """Whether a module returns plain numbers, and read values into Python to get them."""
    return (
        isinstance(node, CallNode)
        and any(isinstance(spec, ScalarSpec) and spec.value is not None for _, spec in leaves(node.spec))
        and any(frame.value_reads for frame in node.frame.walk())
    )


def _loops_over(read: Site) -> Iterator[tuple[str, int, int, SourceLine]]:
    """Yields the loops that a value read into Python at `read` decides on: file, first and last line, head."""
    for code, offset in read.steps:
        line = line_at(code, offset)
        for first, last, head in _loops_of(code.co_filename, line, code.co_name == "<lambda>"):
            yield code.co_filename, first, last, SourceLine(code.co_filename, head, code.co_name)


@functools.lru_cache(maxsize=256)
def _loops_of(file: str, line: int, is_in_lambda: bool) -> tuple[tuple[int, int, int], ...]:
    """Returns the lines whose turns depend on the value read at `line`: the first, the last, and the head of the loop.

    These are loops that go over it or end by it, and in other loops the parts that run only in some turns.
    """
    function = _function_at(file, line, is_in_lambda)
    if function is None:
        return ()
    names = _names_from(function, line)
    found = []
    for loop in ast.walk(function):
        if isinstance(loop, (ast.For, ast.AsyncFor, ast.While)):
            head = loop.test if isinstance(loop, ast.While) else loop.iter
            if _is_decided(head, line, names) or _breaks(loop, line, names):
                found.append((loop.body[0].lineno, _last_line(loop.body[-1]), loop.lineno))
            else:
                for condition in _conditions(loop, line, names):
                    skips = any(isinstance(inner, ast.Continue) for inner in ast.walk(condition))
                    last = _last_line(loop.body[-1] if skips else condition)
                    only_skips = isinstance(condition.body[0], ast.Continue)
                    first = _last_line(condition) + 1 if only_skips else condition.body[0].lineno
                    found.append((first, last, loop.lineno))
        else:
            if isinstance(loop, _COMPREHENSIONS):
                parts = [part for generator in loop.generators for part in (generator.iter, *generator.ifs)]
            elif isinstance(loop, ast.Call) and isinstance(loop.func, ast.Name) and loop.func.id in ("map", "filter"):
                parts = loop.args[1:]
            else:
                continue
            if any(_is_decided(part, line, names) for part in parts):
                found.append((loop.lineno, _last_line(loop), loop.lineno))
    return tuple(found)


def _function_at(file: str, line: int, is_in_lambda: bool) -> ast.AST | None:
    """Returns the innermost function around a line of a file: a lambda only if the line is in one."""
    kinds = ast.Lambda if is_in_lambda else (ast.FunctionDef, ast.AsyncFunctionDef)
    around = [each for each in ast.walk(_tree(file)) if isinstance(each, kinds) and _holds(each, line)]
    return max(around, key=lambda function: function.lineno, default=None)


@functools.lru_cache(maxsize=32)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # the source is missing, or does not match the code
        return ast.Module(body=[], type_ignores=[])


def _names_from(function: ast.AST, line: int) -> set[str]:
    """Returns the variables and attributes that hold the value read at `line`, or a value computed from it."""
    found: set[str] = set()
    statements = [each for each in ast.walk(function) if isinstance(each, ast.stmt)]
    for each in sorted(statements, key=lambda statement: statement.lineno):
        source, targets = _assigned(each)
        if source is not None and _is_decided(source, line, found):
            found.update(name for target in targets for name in _names_in(target))
    return found


def _assigned(statement: ast.stmt) -> tuple[ast.expr | None, list[ast.expr]]:
    """Returns what a statement puts somewhere, and where: also `rows.append(row)`."""
    if isinstance(statement, ast.Assign):
        return statement.value, statement.targets
    if isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        return statement.value, [statement.target]
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return statement.iter, [statement.target]
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return call, [call.func.value]
    return None, []


def _names_in(target: ast.expr) -> Iterator[str]:
    """Yields the variables and attributes (`self.rows`) that are changed where something is put into `target`."""
    if isinstance(target, (ast.Name, ast.Attribute)):
        yield ast.unparse(target)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for each in target.elts:
            yield from _names_in(each)
    elif isinstance(target, (ast.Subscript, ast.Starred)):
        yield from _names_in(target.value)
    elif isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):  # `rows.setdefault(0, [])`
        yield from _names_in(target.func.value)


def _is_decided(expression: ast.AST, line: int, names: set[str]) -> bool:
    if isinstance(expression, (ast.expr, ast.stmt)) and _holds(expression, line):
        return True
    read = (each for each in ast.walk(expression) if isinstance(each, (ast.Name, ast.Attribute))) if names else ()
    return any(ast.unparse(each) in names for each in read)


def _conditions(loop: ast.For | ast.AsyncFor | ast.While, line: int, names: set[str]) -> list[ast.If]:
    """Returns the conditions in a loop that depend on what was read."""
    return [each for each in ast.walk(loop) if isinstance(each, ast.If) and _is_decided(each.test, line, names)]


def _breaks(loop: ast.For | ast.AsyncFor | ast.While, line: int, names: set[str]) -> bool:
    """Whether a loop is left where a condition on what was read holds."""
    conditions = _conditions(loop, line, names)
    return any(isinstance(inner, (ast.Break, ast.Return)) for each in conditions for inner in ast.walk(each))


def _holds(part: ast.expr | ast.stmt, line: int) -> bool:
    return part.lineno <= line <= _last_line(part)


def _last_line(part: ast.expr | ast.stmt) -> int:
    return part.end_lineno or part.lineno


# -- sizes -------------------------------------------------------------------------------------------------------------


PART_FUNCTIONS = frozenset({"unbind", "split", "chunk", "tensor_split"})
"""Functions that give the parts of a tensor; a loop over a tensor is one over what `unbind` gives."""

SIZED_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2", "bincount"}
)
TRUTHS = (torch.bool, torch.uint8)
"""The dtypes of masks: as an index, such a tensor selects the entries where it is true."""


def part_count_by_values(node: Node) -> int | None:
    """Returns how many parts a tensor was split into at `node`, if that depends on values of tensors."""
    if node.op not in PART_FUNCTIONS or node.kind != "op" or not isinstance(node.spec, ContainerSpec):
        return None
    return len(node.spec.children) if comes_of_values(node) else None


def comes_of_values(node: Node) -> bool:
    """Whether the tensor that `node` is made from, as its first argument, has a shape that depends on values."""
    while (ref := next(refs_in(node.args), None)) is not None and ref.node is not node:
        node = ref.node
        if is_sized_by_values(node):
            return True
    return False


def is_sized_by_values(node: Node) -> bool:
    """Whether the size of the result of the function called at `node` depends on the values of its arguments."""
    if node.op in SIZED_BY_VALUES or (node.op == "where" and len(node.args) == 1):
        return True
    if node.op != "getitem":
        return False
    indices = (found.node.spec for found in list(refs_in(node.args))[1:])
    return any(isinstance(index, TensorSpec) and index.dtype in TRUTHS for index in indices)


def is_call_sized_by_values(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the values of `args` decide how many entries the result of a function has, going by its (raw) name."""
    if name == "__getitem__":
        found: list[Any] = []
        map_leaves(args[1], found.append)
        return any(isinstance(each, Tensor) and each.dtype in TRUTHS for each in found)
    if name == "where":
        return len(args) == 1
    return name in SIZED_BY_VALUES or (name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor))
