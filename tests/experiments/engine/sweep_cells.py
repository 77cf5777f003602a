"""Which cells the laws of sweeps are tried on: of each kind of node a few, patched in each way that there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphpatch_notebook import AddPatch, CustomPatch, Patch, ReplacePatch, ZeroPatch
from graphpatch_notebook.inspection.resolution import NodeMeta
from tests.laws.captures import Capture

PatchMap = dict[str, Any]

UNREPEATABLE = ("tokens_per_expert", "perm", "float", "histc_input", "offsets")
"""Nodes that decide which memory is filled: patched, they show what was there before, as views filled later do."""


def cells_of(capture: Capture, purpose: str, *, same_sizes: bool = True, nodes: int = 1) -> list[PatchMap]:
    """Returns patch maps, the same in each run of the tests, with patches of their own at each call.

    Args:
        capture: The model.
        purpose: Other words, other cells.
        same_sizes: Whether values have the sizes that they had at capture: then tensors as large as these are written.
        nodes: How many nodes of each kind.
    """
    rng = capture.random(purpose)
    metas = chosen_nodes(capture, rng, nodes)
    maps: list[PatchMap] = [{}]
    for meta in metas:
        maps += [{meta.path: patch} for patch in patches_for(meta, rng, same_sizes)]
    for _ in range(2 if metas else 0):
        some = rng.sample(metas, min(3, len(metas)))
        maps.append({meta.path: patches_for(meta, rng, same_sizes) for meta in some})
    return maps


def chosen_nodes(capture: Capture, rng: random.Random, count: int) -> list[NodeMeta]:
    """Returns nodes of each kind: with entries, as an empty cache has none, and not of sizes."""
    every = (meta for meta in capture.pg.nodes.values() if not meta.is_size and not _is_unrepeatable(meta))
    nodes = [meta for meta in every if meta.shape is None or meta.shape.numel()]
    kinds: list[Callable[[NodeMeta], bool]] = [
        lambda meta: meta.kind == "output" and meta.frame_path != "" and _is_float(meta),
        lambda meta: meta.kind == "op" and meta.frame_path != "" and _is_float(meta),
        lambda meta: meta.kind == "op" and _is_float(meta),
        lambda meta: meta.kind == "input" and meta.frame_path != "" and _is_float(meta),
        lambda meta: meta.kind in ("parameter", "buffer", "attribute") and meta.shape is not None,
        lambda meta: "|" in meta.path and meta.shape is not None,
        lambda meta: meta.is_mutated_later and meta.shape is not None,
        lambda meta: not _is_float(meta),
        lambda meta: meta.frame_path == "" and meta.kind != "op",
    ]
    found: dict[str, NodeMeta] = {}
    for is_kind in kinds:
        matching = [meta for meta in nodes if is_kind(meta) and meta.path not in found]
        found |= {meta.path: meta for meta in rng.sample(matching, min(count, len(matching)))}
    return list(found.values())


def _is_unrepeatable(meta: NodeMeta) -> bool:
    return meta.name in UNREPEATABLE or meta.is_view_filled_later


def _is_float(meta: NodeMeta) -> bool:
    return meta.shape is not None and meta.dtype is not None and meta.dtype.is_floating_point


def patches_for(meta: NodeMeta, rng: random.Random, same_sizes: bool) -> list[Patch[Any]]:
    """Returns two patches that such a value can take."""
    if meta.shape is None:
        return [AddPatch(value=1), CustomPatch(custom_op=_unchanged)]
    if not _is_float(meta):
        return [ZeroPatch(), CustomPatch(custom_op=_reversed)]
    makers = list(_makers(meta, rng, same_sizes))
    return [make() for make in rng.sample(makers, 2)]


def _makers(meta: NodeMeta, rng: random.Random, same_sizes: bool) -> Iterator[Callable[[], Patch[Any]]]:
    shape, dtype = meta.shape, meta.dtype
    assert shape is not None
    yield ZeroPatch
    yield lambda: AddPatch(value=0.75)
    yield lambda: CustomPatch(custom_op=_halved)
    yield lambda: CustomPatch(custom_op=_reversed, any_shape=True)
    if len(shape) > 0:
        yield lambda: ZeroPatch(slice=(0, ...))
        yield lambda: AddPatch(value=-0.5, slice=(..., -1))
        yield lambda: ReplacePatch(value=0.25, slice=(..., slice(0, 1)))
    if len(shape) > 1:
        yield lambda: ZeroPatch(slice=(slice(None), -1))
        yield lambda: ReplacePatch(value=1.5, slice=(slice(None), 0))
        yield lambda: CustomPatch(custom_op=_halved, slice=(slice(None), -1))
        yield lambda: CustomPatch(custom_op=_centred)
    if same_sizes:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        value = torch.randn(shape, generator=generator).to(dtype)
        yield lambda: AddPatch(value=value)
        yield lambda: ReplacePatch(value=value)
        if len(shape) > 1:
            yield lambda: ReplacePatch(value=value[:, -1], slice=(slice(None), -1))
            yield lambda: AddPatch(value=value[:1], slice=(slice(None), ...))


def _unchanged(value: Any) -> Any:
    return value


def _halved(value: Any) -> Any:
    return value * 0.5


def _reversed(value: Any) -> Any:
    """Sequences of a batch trade places."""
    return value.flip(0) if value.dim() else value


def _centred(value: Any) -> Any:
    """What one sequence of the batch gets depends on the others."""
    return value - value.mean(0, keepdim=True)
