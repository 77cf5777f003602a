"""Files of every kind that were damaged at random: they are read, or an error of ours names them."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from graphpatch_notebook import AddPatch, GraphPatchError, PatchableGraph, ZeroPatch, load_patches, save_patches
from graphpatch_notebook.experiments import ActivationStore, load_result, record_to, save_result
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import Session
from tests.files.files import Mlp, x


def graph() -> PatchableGraph:
    torch.manual_seed(0)
    return PatchableGraph(Mlp().eval(), x(), mask=torch.ones(3))


def sweep(folder: Path) -> Any:
    cells: Callable[[int], Any] = lambda i: {"hidden": AddPatch(value=float(i))}  # noqa: E731
    options: Any = {"metric": lambda out: {"sum": out.sum(), "first": out[0, 0]}, "progress": False}
    return graph().sweep({"i": range(4)}, cells, x(), checkpoint=folder / "sweep", **options)


def write_session(file: Path) -> None:
    session = Session(pg := graph())
    session.edit(lambda _: [ChosenPatch("hidden", "zero", slice="0"), ChosenPatch("x", "add", value="1.5")])
    session_file.save(session, file)
    del pg


def read_session(file: Path) -> None:
    session = Session(pg := graph())
    session_file.load(session, file, is_trusted=True)
    del pg


def read_store(folder: Path) -> None:
    store = ActivationStore(folder / "store")
    for values in store.values():
        assert len(values[:]) == len(values.where(example=range(2)))
    record(folder)


def record(folder: Path) -> None:
    torch.manual_seed(0)
    pg = PatchableGraph(nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2)), torch.ones(2, 4, dtype=torch.long))
    record_to(pg, folder / "store", "sub_1.output", torch.arange(8).reshape(2, 4), batch_size=1)


# What writes files into a folder, and what reads them.
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "graph": (lambda f: graph().save(f / "a.safetensors"), lambda f: PatchableGraph.load(f / "a.safetensors")),
    "graph of a model": (
        lambda f: graph().save(f / "a.safetensors"),
        lambda f: PatchableGraph.load(f / "a.safetensors", model=graph()._module),
    ),
    "patches": (
        lambda f: save_patches(f / "a.safetensors", {"x": AddPatch(value=x()), "hidden": [ZeroPatch(slice=0)]}),
        lambda f: load_patches(f / "a.safetensors", graph()),
    ),
    "session": (lambda f: write_session(f / "a.json"), lambda f: read_session(f / "a.json")),
    "checkpoint": (sweep, sweep),
    "result": (lambda f: save_result(sweep(f), f / "a.nc"), lambda f: load_result(f / "a.nc")),
    "store": (record, read_store),
}


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


def damage(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    place, kind = chance.randrange(len(data)), chance.randrange(6)
    if kind < 3 and file.suffix != ".nc":
        _damage_document(file, chance)
    elif kind % 3 == 0:
        file.write_bytes(data[:place])
    elif kind % 3 == 1:
        data[place] = chance.randrange(256)
        file.write_bytes(data)
    else:
        file.write_bytes(data[:place] + data[place + chance.randrange(1, 30) :])


def _damage_document(file: Path, chance: random.Random) -> None:
    values = [None, True, 0, -1, 7, 2**63, 0.5, "", "x", "10", [], {}, [None], [[]], {"a": None}, {"step": 0}]
    places, value = [chance.randrange(10**6) for _ in range(chance.randint(1, 9))], chance.choice(values)
    if file.suffix == ".json":
        document = json.loads(file.read_text())
        mutated(document, places, value, chance.randrange(3))
        file.write_text(json.dumps(document))
        return
    with safe_open(file, "pt") as opened:
        metadata, names = dict(opened.metadata()), list(opened.keys())
        tensors = {name: opened.get_tensor(name) for name in names}
    name = chance.choice([*metadata, *tensors])
    if name in tensors:
        tensors[name] = chance.choice([tensors[name][:1].clone(), tensors[name].double(), torch.zeros(0)])
    elif metadata[name][0] in "[{" and chance.randrange(9):
        document = json.loads(metadata[name])
        mutated(document, places, value, chance.randrange(3))
        metadata[name] = json.dumps(document)
    else:
        metadata[name] = str(value)
    save_file(tensors, file, metadata=metadata)


@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # h5netcdf closes what it did not open
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_named(kind: str, tmp_path: Path) -> None:
    write, use = KINDS[kind]
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole")
    refusals = {}
    count = {"graph": 120, "result": 12}.get(kind, 30)
    for seed in range(count):
        chance, folder = random.Random(seed), tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        file = chance.choice(sorted(file for file in folder.rglob("*") if file.is_file()))
        damage(file, chance)
        try:
            use(folder)
        except GraphPatchError as error:
            refusals[file, seed] = str(error)
        shutil.rmtree(folder)
    assert 0 < len(refusals) < count
    assert not [text for (file, _), text in refusals.items() if file.name not in text and file.parent.name not in text]
