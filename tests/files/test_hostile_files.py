"""Files that nobody should load: each is a clear error of ours, and nothing in it runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graphpatch_notebook import GraphError, PatchableGraph
from tests.files.files import Mlp, rewritten, x


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("valid") / "graph.safetensors"
    PatchableGraph(Mlp(), x(), mask=torch.ones(3)).save(file)
    return file


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.crater),)


def crater_of(file: Path) -> Path:
    return file.with_name("crater")


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Bomb(crater_of(file))))


def saved_by_torch(file: Path) -> None:
    torch.save(Bomb(crater_of(file)), file)


def header(size: int, text: bytes = b"{}") -> Callable[[Path], None]:
    return lambda file: file.write_bytes(struct.pack("<Q", size) + text) and None


@pytest.mark.parametrize(
    "made",
    [
        pickled,
        saved_by_torch,
        header(2**63),
        header(10**8, b"{" * 1000),
        header(2, b"[]"),
        header(0, b""),
        lambda file: file.write_bytes(b"") and None,
        lambda file: PatchableGraph(Mlp(), x()).save(file) or (file.write_bytes(file.read_bytes()[:-1]) and None),
        lambda file: file.write_bytes(random.Random(0).randbytes(1000)) and None,
        lambda file: save_file({"a": torch.ones(2)}, file),
    ],
)
def test_other_files(made: Callable[[Path], None], tmp_path: Path) -> None:
    made(tmp_path / "bad.safetensors")
    with pytest.raises(GraphError, match="bad.safetensors"):
        PatchableGraph.load(tmp_path / "bad.safetensors")
    assert not crater_of(tmp_path / "bad.safetensors").exists()


def set_at(*keys: Any, value: Any) -> Callable[[Any], None]:
    """Returns a change that puts `value` at a place in the document."""

    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def without(*keys: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


STEP = ("frames", 0, "graph", 4)
GET_ATTR = ("frames", 1, "graph", 1)
CALL = ("frames", 0, "graph", 3)


def function(name: str, **keys: Any) -> Callable[[Any], None]:
    return set_at(*STEP, "target", value={"name": name, **keys})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


DAMAGED: dict[str, Callable[[Any], Any]] = {
    "no json": lambda document: "no json",
    "deep": lambda document: "[" * 100_000,
    "constant": lambda document: '{"schema": NaN}',
    "list": lambda document: [],
    "no frames": without("frames"),
    "empty frames": set_at("frames", value=[]),
    "extra": set_at("extra", value=1),
    "type": set_at("frames", 0, "module", value=True),
    "range": set_at("frames", 0, "module", value=10**9),
    "negative": set_at("frames", 0, "records", 0, "spec", "shape", value=[-1]),
    "kind": set_at("frames", 0, "records", 0, "kind", value="evil"),
    "deep spec": set_at("frames", 0, "records", 0, "spec", value=nested(500)),
    "parameter": set_at("frames", 0, "parameters", 0, 0, value="x=__import__('os')"),
    "keyword": set_at("frames", 0, "parameters", 0, 0, value="class"),
    "parameter kind": set_at("frames", 0, "parameters", 0, 1, value=9),
    "placeholder": set_at("frames", 0, "graph", 0, "target", value="y"),
    "class": set_at(*CALL, "target", value="__class__"),
    "globals": set_at(*CALL, "target", value="up.forward.__globals__"),
    "quotes": set_at(*CALL, "target", value='up")(1) or getattr(self, "up'),
    "later step": set_at(*STEP, "args", value=[{"step": 400}]),
    "pickle": set_at(*STEP, "args", value=[{"pickle": "gASV"}]),
    "deep argument": set_at(*STEP, "args", value=[nested(600)]),
    "name of argument": set_at(*STEP, "kwargs", value={"a=1);print(": 1}),
    "record": set_at(*STEP, "record", value=10**6),
    "path": set_at(*GET_ATTR, "target", value="../../etc/passwd"),
    "registry": set_at(*GET_ATTR, "target", value="_parameters"),
    "dict": set_at(*GET_ATTR, "target", value="__dict__.weight"),
    "cycle": set_at("frames", 0, "records", 3, "call", value=[0, 0, 1]),
    "no frame": set_at("frames", 0, "records", 3, "call", value=[77, 0, 1]),
    "tensor": set_at("modules", 0, "parameters", value={"weight": 10**6}),
    "child": set_at("modules", 0, "children", value={"me": 0}),
    "forward": set_at("modules", 0, "names", value={"forward": ["tensor", 0]}),
    "modules": set_at("modules", 0, "names", value={"_modules": ["tensor", 0]}),
    "storage": set_at("tensors", 0, "storage", value="/etc/passwd"),
    "shape": set_at("tensors", 0, "shape", value=[10**12]),
    "line": set_at("lines", 0, 1, value="one"),
    "load": function("torch.load"),
    "eval": function("builtins.eval"),
    "file": function("torch.from_file"),
    "apply": function("torch.Tensor.apply_"),
    "operator": function("torch.ops:aten.from_file"),
    "unchecked": function("torch.ops:aten._unsafe_index.Tensor"),
    "operator class": function("torch.ops:aten.__class__"),
    "no operator": function("torch.ops:aten.nothing_like_this"),
    "loader": function("os:__loader__"),
    "getattr": function("builtins.getattr"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_documents(valid: Path, name: str) -> None:
    with pytest.raises(GraphError, match="changed.safetensors|may|names|attribute|registered|array"):
        PatchableGraph.load(rewritten(valid, DAMAGED[name]))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("torch.ops:mylib.op", {}), ("os:system", {}), ("builtins:eval", {}), ("mylib:Function.apply", {}),
        ("subprocess:Popen", {"keys": []}), ("transformers.commands.train:A", {"keys": []}),
    ],
)  # fmt: skip
def test_names_that_are_not_allowed(valid: Path, name: str, keys: Any) -> None:
    shown = name.removeprefix("torch.ops:").replace(":", ".")
    with pytest.raises(GraphError, match=rf"allow=\['{shown}'\]"):
        PatchableGraph.load(rewritten(valid, function(name, **keys)))


def test_other_versions(valid: Path) -> None:
    with pytest.raises(GraphError, match="changed.safetensors"):
        PatchableGraph.load(rewritten(valid, set_at("schema", value=1)))


ATTRIBUTES = ["__class__", "__globals__", "register_hook", "_backward_hooks", "grad_fn", "numpy"]
METHODS = ["apply_", "register_hook", "numpy", "__reduce_ex__", "share_memory_", "format_map"]


@pytest.mark.parametrize(
    ("name", "is_method"), [*((name, False) for name in ATTRIBUTES), *((name, True) for name in METHODS)]
)
def test_attributes_that_graphs_may_not_read_or_call(valid: Path, name: str, is_method: bool) -> None:
    def change(document: Any) -> None:
        step = document["frames"][0]["graph"][4]
        read = {"target": {"name": "builtins.getattr"}, "args": [{"step": 0}, name]}
        step |= {"op": "call_method", "target": name} if is_method else read

    with pytest.raises(GraphError, match=f"'{name}'"):
        PatchableGraph.load(rewritten(valid, change))


def test_allowing_a_name_is_the_only_way_to_other_code(valid: Path) -> None:
    file = rewritten(valid, function("posixpath:basename"))
    with pytest.raises(GraphError, match=r"allow=\['posixpath.basename'\]"):
        PatchableGraph.load(file, allow=["posix", "os"])
    for names in (["posixpath.basename"], ["posixpath"]):
        assert "basename" in PatchableGraph.load(file, allow=names).graph._code
    with pytest.raises(TypeError, match="posixpath"):
        PatchableGraph.load(file, allow="posixpath")


def test_generated_code_holds_no_text_of_the_file(valid: Path) -> None:
    text = "'''\"\"\"); import os #"
    loaded = PatchableGraph.load(rewritten(valid, set_at("frames", 0, "graph", 4, "args", value=[{"step": 3}, text])))
    assert json.dumps(text)[3:-1].replace('\\"', '"') in loaded.graph._code.replace("\\'", "'").replace("\\", "")
