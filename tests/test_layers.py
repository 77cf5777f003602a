"""Imports go down the layers, notebook packages stay in `notebook/`, and private names of torch in one file."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphpatch_notebook

ROOT = Path(graphpatch_notebook.__file__).parent
FILES = sorted(file for file in ROOT.rglob("*.py") if "_alias" not in file.parts)

# From the lowest to the highest: a file imports what is in its own layer, and in layers before it.
LAYERS = [
    "_version",
    "errors",
    "torch_compat",
    "lazy_names",
    "texts",
    "paths",
    "values",
    "patches",
    "options",
    "capture",
    "patching/model_state",
    "components",
    "inspection",
    "distributed/processes",
    "distributed/sharding",
    "graphs",
    "files",  # knows records and graphs only: `PatchableGraph.save` and `load` call it
    "patching",
    "patchable_graph",
    "distributed/executors",
    "distributed/remote",
    "experiments/metrics",
    "experiments/engine",
    "experiments/results",
    "experiments/methods",
    "experiments/attribution",
    "experiments/circuits",
    "experiments/datasets",
    "experiments/interventions",
    "experiments/grids",
    "experiments/plotting",
    "experiments",
    "notebook/messages",
    "notebook/display",
    "notebook/search",
    "notebook/session",
    "notebook/export",
    "notebook/run_report",
    "notebook/runs",
    "notebook/views",
    "notebook/magics",
    "notebook/completion",
    "notebook/extension",
    "notebook",
    "distributed",
    "__init__",
]
SPLIT = ("distributed", "experiments", "notebook")  # packages whose folders are layers of their own
# Functions of a lower layer that import a higher one when they are called, and their file: `pg.browse()`, `pg.sweep()`,
# `show_heatmap()`.
DOORS = {
    ("patching", "distributed"): "patching/model_state.py",
    ("patchable_graph", "distributed"): "patchable_graph.py",
    ("patchable_graph", "notebook"): "patchable_graph.py",
    ("patchable_graph", "experiments"): "patchable_graph.py",
    ("experiments", "notebook"): "experiments/plotting.py",
}
NOTEBOOK_PACKAGES = {"IPython", "anywidget", "ipywidgets", "traitlets"}
FILE_FOR_PRIVATE_TORCH_NAMES = "torch_compat.py"


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf8"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def layer_of(file: Path) -> str:
    parts = [part.removesuffix(".py") for part in file.relative_to(ROOT).parts if part != "__init__.py"]
    return layer_of_name(parts)


def layer_of_name(parts: list[str]) -> str:
    """Returns the layer of a module, from its name without that of the package."""
    if not parts:
        return "__init__"
    return "/".join(parts[: 2 if parts[0] in SPLIT or "/".join(parts[:2]) in LAYERS else 1])


def module_name(file: Path) -> str:
    parts = [ROOT.name, *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute(node: ast.ImportFrom, file: Path) -> str:
    """Returns the full name of the module that a `from` import reads."""
    if not node.level:
        return node.module or ""
    package = [ROOT.name, *file.relative_to(ROOT).parts[:-1]]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def imported_names(nodes: Iterator[ast.AST] | list[ast.stmt], file: Path) -> set[str]:
    """Returns the full names that import statements ask for: modules, and what is taken from them."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{absolute(node, file)}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def names_in(file: Path) -> frozenset[str]:
    """Returns the full names that the import statements anywhere in a file ask for."""
    return frozenset(imported_names(ast.walk(parse(file)), file))


def torch_names(tree: ast.Module) -> set[str]:
    """Returns the full names of everything that a file reads from torch, through whatever it imported it as."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names = set(bound.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(dotted_name(node, bound))
    return {name for name in names if name.split(".")[0] == "torch"}


def dotted_name(node: ast.expr, bound: dict[str, str]) -> str:
    """Returns the full name that a chain of attributes spells, or nothing when it does not begin at an import."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    if isinstance(node, ast.Attribute):
        start = dotted_name(node.value, bound)
        return f"{start}.{node.attr}" if start else ""
    return ""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def test_files_are_in_layers() -> None:
    assert {layer_of(file) for file in FILES} <= set(LAYERS), "give the new module its place in LAYERS"


def test_imports_go_down() -> None:
    assert {name_of(file): above for file in FILES if (above := imported_from_above(file))} == {}


def imported_from_above(file: Path) -> set[str]:
    """Returns the layers above that of a file that it imports, but for its doors."""
    own = layer_of(file)
    inside = set()
    for name in names_in(file):
        package, *parts = name.split(".")
        if package == ROOT.name:
            layer = layer_of_name(parts)
            inside.add(layer if layer in LAYERS else parts[0])  # what is taken from the `__init__` of a package
    above = {layer for layer in inside - {own} if LAYERS.index(layer) > LAYERS.index(own)}
    doors = {way for way, opened in DOORS.items() if opened == name_of(file)}
    return {layer for layer in above if (own.split("/")[0], layer.split("/")[0]) not in doors}


def test_two_seams_lead_to_other_processes() -> None:
    """How a value is made whole, and where a run happens; workers load a module of this room first."""
    room = f"{ROOT.name}.distributed"
    outside = [file for file in FILES if file.parent != ROOT / "distributed"]
    importing = {name_of(file) for file in outside if room in str(names_in(file))}
    assert importing == {"patching/model_state.py", "patchable_graph.py", "experiments/engine/__init__.py"}
    for file in set(FILES) - set(outside):
        assert not any(f"{ROOT.name}.experiments" in name for name in imported_names(parse(file).body, file))


@pytest.mark.parametrize(("own", "layer"), sorted(DOORS))
def test_doors_are_opened_by_functions(own: str, layer: str) -> None:
    file = ROOT / DOORS[own, layer]
    door = f"{ROOT.name}.{layer}."
    tree = parse(file)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    in_functions = {name for function in functions for name in imported_names(ast.walk(function), file)}
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {name for block in guarded for name in imported_names(block.body, file)}
    assert {name for name in names_in(file) if name.startswith(door)} <= in_functions | for_types
    assert any(name.startswith(door) for name in in_functions)
    assert not any(name.startswith(door) for name in imported_names(tree.body, file))


def test_widgets_have_one_base() -> None:
    with_widgets = {
        name_of(file) for file in FILES for name in names_in(file) if name.split(".")[0] in ("anywidget", "ipywidgets")
    }
    assert with_widgets == {"notebook/display/displayed_widget.py"}


def test_notebook_packages_stay_in_notebook() -> None:
    found = {}
    for file in FILES:
        packages = {name.split(".")[0] for name in names_in(file)}
        if layer_of(file).split("/")[0] != "notebook" and packages & NOTEBOOK_PACKAGES:
            found[name_of(file)] = packages & NOTEBOOK_PACKAGES
    assert found == {}


def test_private_torch_names_stay_in_one_file() -> None:
    with_private = {name_of(file) for file in FILES if any(map(is_private, torch_names(parse(file))))}
    assert with_private == {FILE_FOR_PRIVATE_TORCH_NAMES}


def test_no_code_reads_the_texts_of_errors() -> None:
    """What code needs to know about an error is its class, or an attribute: its text is for people."""
    found = {name_of(file): texts for file in FILES if (texts := matched_errors(parse(file)))}
    assert found == {}


def matched_errors(tree: ast.Module) -> list[str]:
    """Returns where the text of an error, a problem or a reason is compared with, searched for, or cut at some text."""
    texts = re.compile(
        r"str\((error|exception|problem|failure|reason|why|doubt|change)\)|\b(why|reason|problem|problems)\b"
    )
    found = []
    for node in ast.walk(tree):
        looked_at: list[ast.expr] = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            looked_at = [node.comparators[0]] if isinstance(node.comparators[0], ast.Call) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith"):
                looked_at = [node.func.value]
            elif ast.unparse(node.func.value) == "re":
                looked_at = node.args[1:]
        found += [ast.unparse(node) for each in looked_at if texts.fullmatch(ast.unparse(each))]
    return found


def test_reading_the_texts_of_errors_is_recognised() -> None:
    source = """
def one(error, reason): return "abc" in str(error) or str(error).startswith("abc") or reason.endswith("abc")
def two(why): return re.sub("; use .*", "", why)
def three(error, reasons): return "abc" in reasons or str(error) or error.path.startswith("abc")
"""
    assert len(matched_errors(ast.parse(source))) == 4


FILES_FOR_RECORDED_SIZES = ("components/dimensions.py",)


def single_sizes(tree: ast.Module) -> list[str]:
    """Returns where single sizes of what was recorded of a value (`spec.shape`) are looked at, one by one."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.Lambda)):
            continue
        shapes = {"spec.shape"}
        nodes = list(ast.walk(function))
        for node in nodes:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).removesuffix(")").endswith("spec.shape"):
                shapes |= {ast.unparse(target) for target in node.targets}
        for node in nodes:
            looked_at = []
            if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
                looked_at = [node.value]
            elif isinstance(node, (ast.For, ast.comprehension)):
                call = node.iter
                looked_at = [call, *call.args] if isinstance(call, ast.Call) else [call]
            texts = [ast.unparse(each) for each in looked_at]
            found += [text for text in texts if text in shapes or text.endswith(".spec.shape")]
    return found


def test_which_dimension_is_which_is_decided_in_one_place() -> None:
    """Nobody else compares the sizes of a captured value with others to find out what its dimensions are."""
    files = [file for file in FILES if "spec.shape" in file.read_text("utf8")]
    found = {name_of(file): sizes for file in files if (sizes := single_sizes(parse(file)))}
    assert found.keys() == set(FILES_FOR_RECORDED_SIZES), found


def test_no_import_cycles() -> None:
    modules = {module_name(file) for file in FILES}
    imports: dict[str, set[str]] = {}
    for file in FILES:
        wanted = imported_names(parse(file).body, file)
        # `from a.b import c` reads the module a.b.c where there is one, else a.b.
        imports[module_name(file)] = {name if name in modules else name.rpartition(".")[0] for name in wanted} & modules
    for name in modules - {ROOT.name}:
        imports[name] -= {ROOT.name}  # each module is imported while its package is
    tuple(graphlib.TopologicalSorter(imports).static_order())


# Packages of which others import only what their `__init__` offers, and the modules that they import as well: the
# `__init__` of `capture` says why. Nothing is added to these sets.
CLOSED = ("capture", "patching")
REACHED_INTO: dict[str, set[str]] = {
    "capture": {"custom_graphs", "frame_recorder", "inputs", "modules", "records"},
    "patching": {"model_state"},
}


def test_packages_are_imported_through_what_they_offer() -> None:
    found: dict[str, set[str]] = {package: set() for package in CLOSED}
    for file in FILES:
        folders = {folder.relative_to(ROOT).as_posix() for folder in file.parents if folder.is_relative_to(ROOT)}
        for name in names_in(file):
            for package in set(CLOSED) - folders:
                full = f"{ROOT.name}.{package.replace('/', '.')}"
                inside = name.removeprefix(f"{full}.")
                if name.startswith(f"{full}.") and inside not in offered(package):
                    found[package].add(inside.partition(".")[0])
    assert found == REACHED_INTO


@functools.cache
def offered(package: str) -> set[str]:
    """Returns the names in `__all__` of a package."""
    for node in parse(ROOT / package / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


# Private names of others that may be read: what `torch.nn.Module` keeps where it offers no public way to it, and of
# `sys`, `inspect`, IPython and the random generators; documented ones of `NodePath`, whose other names are children.
READABLE = set(
    "_parameters _buffers _modules _non_persistent_buffers_set _is_view _getframe _current_frames _apply "
    "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _ParameterKind _repr_pretty_ "
    "_repr_mimebundle_ _inst _rand _code _shape".split()
)
# What reads the private attributes of objects of other files, and why. Nothing is added to it.
READ_PRIVATE = {
    "notebook/magics/cells.py": {"_since"},  # of a `RecordPatch`: a cell checks only the new values
}


def test_private_attributes_are_read_where_they_are_defined() -> None:
    found = {
        name_of(file): names
        for file in FILES
        if name_of(file) != FILE_FOR_PRIVATE_TORCH_NAMES
        if (names := private_attributes_of_others(parse(file)) - READABLE)
    }
    assert found == READ_PRIVATE


def private_attributes_of_others(tree: ast.Module) -> set[str]:
    """Returns the private attributes that a file reads of other objects than `self`, and defines nowhere itself."""
    own, read = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            body = [*node.body]
            own |= {item.name for item in body if isinstance(item, ast.FunctionDef)}
            own |= {ast.unparse(item.target) for item in body if isinstance(item, ast.AnnAssign)}
            own |= {ast.unparse(target) for item in body if isinstance(item, ast.Assign) for target in item.targets}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            is_self = ast.unparse(node.value) in ("self", "cls", "super()")
            if is_self and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif not is_self:
                read.add(node.attr)
    return read - own
