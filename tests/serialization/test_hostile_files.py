"""Files that nobody should load: each is a clear error of ours, and nothing in it runs."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from graphpatch_notebook import PatchableGraph, SerializationError
from tests.serialization.files import Mlp, read, rewritten, write, x


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


def zipped(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(crater_of(file))))


def header(size: int, text: bytes = b"{}") -> Callable[[Path], None]:
    return lambda file: file.write_bytes(struct.pack("<Q", size) + text) and None


@pytest.mark.parametrize(
    "made",
    [
        pickled,
        saved_by_torch,
        zipped,
        header(2**63),
        header(10**8, b"{" * 1000),
        header(2, b"[]"),
        header(0, b""),
        lambda file: file.write_bytes(b"") and None,
        lambda file: file.write_bytes(random.Random(0).randbytes(1000)) and None,
        lambda file: save_file({"a": torch.ones(2)}, file),
    ],
)
def test_other_files(made: Callable[[Path], None], tmp_path: Path) -> None:
    made(tmp_path / "bad.safetensors")
    with pytest.raises(SerializationError, match="bad.safetensors"):
        PatchableGraph.load(tmp_path / "bad.safetensors")
    assert not crater_of(tmp_path / "bad.safetensors").exists()


def test_the_bomb_is_one(tmp_path: Path) -> None:
    pickled(tmp_path / "bad")
    pickle.loads((tmp_path / "bad").read_bytes())
    assert crater_of(tmp_path / "bad").exists()


def test_truncated_files(valid: Path, tmp_path: Path) -> None:
    whole = valid.read_bytes()
    for length in (4, 8, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(SerializationError, match="damaged"):
            PatchableGraph.load(tmp_path / "cut.safetensors")


def test_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        PatchableGraph.load(tmp_path / "nothing.safetensors")


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


def function(value: Any) -> Callable[[Any], None]:
    return set_at("frames", 0, "graph", 4, "function", value=value)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: "no json", "not hold valid JSON"),
        (lambda document: "[" * 100_000, "nested too deeply|no valid JSON"),
        (lambda document: '{"schema": 1, "schema": 1}', "given twice"),
        (lambda document: '{"schema": NaN}', "NaN is not a number"),
        (lambda document: '{"schema": ' + "9" * 5000 + "}", "not hold valid JSON"),
        (lambda document: [], "there should be an object, not list"),
        (
            set_at("schema", value=99),
            "of schema 99, and this version reads schema 1: graphpatch-notebook 0.1.0.* or newer",
        ),
        (set_at("schema", value="1"), "there should be a whole number"),
        (set_at("extra", value=1), "the field 'extra' is unknown"),
        (without("frames"), "the field 'frames' is missing"),
        (set_at("frames", value=[]), "a frame is missing"),
        (set_at("frames", 0, "module", value=10**9), "a whole number from 0 to"),
        (set_at("frames", 0, "module", value=True), "a whole number"),
        (set_at("frames", 0, "nodes", 0, "kind", value="evil"), "one of input, parameter"),
        (set_at("frames", 0, "nodes", 0, "spec", value=nested(500)), "nested too deeply|one of tensor"),
        (set_at("frames", 0, "nodes", 0, "spec", 1, value=[-1]), "a whole number from 0"),
        (set_at("frames", 0, "parameters", 0, 0, value="x=__import__('os')"), "the name of a parameter"),
        (set_at("frames", 0, "parameters", 0, 0, value="class"), "the name of a parameter"),
        (set_at("frames", 0, "parameters", 0, 1, value=9), "a whole number from 0 to 4"),
        (set_at("frames", 0, "graph", 0, "name", value="x; import os"), "is not a name"),
        (set_at("frames", 0, "graph", 0, "parameter", value="y"), "the parameters of forward"),
        (set_at("frames", 0, "graph", 3, "path", value="down"), "does not lead to the module that is called"),
        (set_at("frames", 0, "graph", 3, "path", value="__class__"), "does not lead to the module that is called"),
        (set_at("frames", 0, "graph", 3, "path", value="up.forward.__globals__"), "does not lead to the module"),
        (set_at("frames", 0, "graph", 3, "path", value='up")(1) or getattr(self, "up'), "does not lead to the module"),
        (set_at("frames", 0, "graph", 4, "args", value=[{"node": 400}]), "a whole number from 0 to 3"),
        (set_at("frames", 0, "graph", 4, "args", value=[{"node": 4}]), "a whole number from 0 to 3"),
        (set_at("frames", 0, "graph", 4, "args", value=[{"node": -1}]), "a whole number from 0 to 3"),
        (set_at("frames", 0, "graph", 4, "args", value=[{"pickle": "gASV"}]), "'pickle' is not a kind of value"),
        (set_at("frames", 0, "graph", 4, "args", value=[2**80]), "a whole number from"),
        (set_at("frames", 0, "graph", 4, "args", value=[nested(500)]), "nested too deeply"),
        (set_at("frames", 0, "graph", 4, "kwargs", value=[["a=1);print(", 1]]), "is not the name of an argument"),
        (set_at("frames", 0, "graph", 4, "record", value=0), "the record of another node"),
        (set_at("frames", 0, "graph", -1, "args", value=[{"node": 0}]), "wrapped in a tuple"),
        (set_at("frames", 0, "graph", value=[]), "there is no|placeholders"),
        (without("frames", 0, "graph"), "there should be a graph"),
        (set_at("frames", 1, "graph", 1, "path", value="../../etc/passwd"), "leads to no tensor"),
        (set_at("frames", 1, "graph", 1, "path", value="_parameters"), "leads to no tensor"),
        (set_at("frames", 1, "graph", 1, "path", value="__dict__.weight"), "leads to no tensor"),
        (set_at("frames", 0, "nodes", 3, "frame", value=0), "it cannot call the frame 0"),
        (set_at("frames", 0, "nodes", 3, "frame", value=77), "a whole number from 0 to"),
        (without("frames", 2), "a whole number from 0 to"),
        (set_at("modules", 0, "class", value="__import__"), "is not the name of a class"),
        (set_at("modules", 0, "class", value="a.b"), "is not the name of a class"),
        (set_at("modules", 0, "parameters", 0, 0, value="__class__"), "cannot be called '__class__'"),
        (set_at("modules", 0, "parameters", 0, 0, value="../weight"), "cannot be called"),
        (set_at("modules", 0, "parameters", 0, 1, value=10**6), "a whole number from 0"),
        (set_at("modules", 0, "attributes", value=[["forward", 0]]), "cannot be called 'forward'"),
        (set_at("modules", 0, "attributes", value=[["_modules", 0]]), "cannot be called '_modules'"),
        (set_at("modules", 0, "called", value=[["up", 0]]), "is not a name for a module"),
        (set_at("modules", 0, "children", value=[["me", 0]]), "a whole number from 0 to -1"),
        (set_at("tensors", 0, "storage", value="/etc/passwd"), "does not fit its table"),
        (set_at("tensors", 0, "shape", value=[10**12]), "items|beyond|shape"),
        (set_at("options", "kept", "skip_compilation", value="yes"), "there should be a bool"),
        (set_at("form", value=None), "there should be an object"),
        (set_at("form", "dims", 0, 0, value="nowhere"), "one of"),
        (set_at("lines", 0, 1, value="one"), "a whole number"),
        (function("torch.load"), "'torch.load' is not one of the functions that a file may call"),
        (function("builtins.eval"), "not one of the functions"),
        (function("torch.hub.load"), "not one of the functions"),
        (function("torch.from_file"), "not one of the functions"),
        (function("torch.Tensor.apply_"), "not one of the functions"),
        (function({"op": "aten.from_file"}), "is not an operator that a file may call"),
        (function({"op": "aten._unsafe_index.Tensor"}), "is not an operator that a file may call"),
        (function({"op": "aten.__class__"}), "is not an operator that a file may call"),
        (function({"op": "aten.nothing_like_this"}), "is not registered here"),
        (function({"op": "mylib.op.default"}), r"use mylib.op, which is not part of torch: .* allow=\['mylib.op'\]"),
        (function({"function": "os:system"}), r"allow=\['os.system'\]"),
        (function({"function": "builtins:eval"}), r"allow=\['builtins.eval'\]"),
        (function({"function": "os:__loader__"}), "is not the name of a function"),
        (function({"apply": "mylib:Function"}), r"allow=\['mylib.Function'\]"),
        (function({"make": "subprocess:Popen", "keys": []}), r"allow=\['subprocess.Popen'\]"),
        (function({"make": "transformers.commands.train:A", "keys": []}), r"allow=\['transformers.commands.train.A'\]"),
        (function("builtins.getattr"), "reads the attribute"),
    ],
)
def test_documents(valid: Path, change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        PatchableGraph.load(rewritten(valid, change))


@pytest.mark.parametrize("name", ["__class__", "__globals__", "register_hook", "_backward_hooks", "grad_fn", "numpy"])
def test_attributes_that_graphs_may_not_read(valid: Path, name: str) -> None:
    def change(document: Any) -> None:
        document["frames"][0]["graph"][4] |= {"function": "builtins.getattr", "args": [{"node": 0}, name]}

    with pytest.raises(SerializationError, match=f"it reads the attribute '{name}'"):
        PatchableGraph.load(rewritten(valid, change))


@pytest.mark.parametrize("name", ["apply_", "register_hook", "numpy", "__reduce_ex__", "share_memory_", "format_map"])
def test_methods_that_graphs_may_not_call(valid: Path, name: str) -> None:
    def change(document: Any) -> None:
        node = document["frames"][0]["graph"][4]
        del node["function"]
        node |= {"op": "call_method", "method": name}

    with pytest.raises(SerializationError, match=f"it calls the method '{name}'"):
        PatchableGraph.load(rewritten(valid, change))


def test_allowing_a_name_is_the_only_way_to_other_code(valid: Path) -> None:
    file = rewritten(valid, function({"function": "posixpath:basename"}))
    with pytest.raises(SerializationError, match=r"load\(file, allow=\['posixpath.basename'\]\)"):
        PatchableGraph.load(file, allow=["posix", "os"])
    for names in (["posixpath.basename"], ["posixpath"]):
        assert "basename" in PatchableGraph.load(file, allow=names).graph._code
    with pytest.raises(TypeError, match="allow takes a list"):
        PatchableGraph.load(file, allow="posixpath")


def test_tensors_that_no_table_names(valid: Path, tmp_path: Path) -> None:
    document, tensors = read(valid)
    for other in ({**tensors, "more": torch.ones(1)}, dict(list(tensors.items())[1:])):
        with pytest.raises(SerializationError, match="does not fit its table"):
            PatchableGraph.load(write(tmp_path / "other.safetensors", document, other))


# -- any change at all -------------------------------------------------------------------------------------------------

PLACES = st.lists(st.integers(0, 10**6), min_size=1, max_size=12)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from([2**31, 2**63, -(2**70), 1e300, 0.5, "", "x"]),
    st.sampled_from(["__class__", "..", "a/b", "weight", "cpu", "float64", "meta", "torch.save", "\0", "size_0"]),
    st.sampled_from([[], {}, [[]], {"node": 0}, {"tuple": []}, {"dict": [[[], 1]]}, {"slice": [1, 2, 3]}]),
)  # fmt: skip


def mutated(document: Any, places: list[int], value: Any, action: int) -> None:
    """Changes something at a place that the numbers lead to."""
    holder = document
    for place in places:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = keys[place % len(keys)]
        child = holder[key]
        if not isinstance(child, (dict, list)) or not child or place is places[-1]:
            break
        holder = child
    if action == 0:
        holder[key] = value
    elif action == 1:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[-1]))
    else:
        holder[f"{key}_"] = copy.deepcopy(holder[key])


@settings(
    max_examples=300, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(places=PLACES, value=VALUES, action=st.integers(0, 2))
def test_any_change_loads_or_is_refused(valid: Path, places: list[int], value: Any, action: int) -> None:
    document, tensors = read(valid)
    mutated(document, places, value, action)
    try:
        loaded = PatchableGraph.load(write(valid.with_name("mutated.safetensors"), document, tensors))
    except SerializationError:
        return
    assert repr(loaded.graph)
    assert loaded.graph._code
    assert isinstance(loaded._module, nn.Module)


def test_generated_code_holds_no_text_of_the_file(valid: Path) -> None:
    text = "'''\"\"\"); import os #"
    loaded = PatchableGraph.load(rewritten(valid, set_at("frames", 0, "graph", 4, "args", value=[{"node": 3}, text])))
    assert json.dumps(text)[3:-1].replace('\\"', '"') in loaded.graph._code.replace("\\'", "'").replace("\\", "")
