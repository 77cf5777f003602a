"""`find` against a plain reading of the grammar over `pg.nodes`, one node and one term at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphpatch_notebook import NodeMeta, PatchableGraph
from graphpatch_notebook.notebook.search import find
from tests.notebook.hostile import hostile_graph

graph = cache(hostile_graph)
PATCHED = ["blocks_1.linear", 'output|"a.b"', "output | no path"]


@dataclass(frozen=True)
class Written:
    """A term as somebody writes it, and what it means."""

    text: str
    means: Callable[[NodeMeta], bool]
    asks_for_sizes: bool = False


def size_term(size: int) -> Written:
    return Written(f"shape:{size}", lambda meta: meta.shape is not None and size in meta.shape)


def shape_term(sizes: list[int | None]) -> Written:
    texts = ["*" if size is None else str(size) for size in sizes]

    def means(meta: NodeMeta) -> bool:
        shape = meta.shape
        if shape is None or len(shape) != len(sizes):
            return False
        return all(a in (None, b) for a, b in zip(sizes, shape, strict=True))

    return Written(f"shape:[{', '.join(texts)}]", means)


def is_opaque(meta: NodeMeta) -> bool:
    return meta.frame_path == "skipped"


IS: dict[str, Callable[[NodeMeta], bool]] = {
    "patched": lambda meta: meta.path in PATCHED,
    "opaque": is_opaque,
    "size": lambda meta: meta.is_size,
    "tensor": lambda meta: meta.shape is not None,
    "number": lambda meta: meta.shape is None,
    **{kind: lambda meta, kind=kind: meta.kind == kind for kind in ("input", "parameter", "buffer", "op", "output")},
}

texts = st.sampled_from(["b", "LINEAR", "rel", "blocks_1", ".", "ß", "名", "output|", "zzz", "s_1.w", "ö"]).map(
    lambda text: Written(
        text, lambda meta: text.lower() in meta.path.lower() or (meta.kind == "op" and text.lower() in meta.op.lower())
    )
)
globs = st.sampled_from(["blocks_*.linear", "B*S_1", "*e*", "output*a.b", "*", "blocks_1*relu", "s*zzz"]).map(
    lambda glob: Written(
        glob,
        lambda meta: (
            re.search(
                ".*".join(map(re.escape, glob.lower().split("*"))),
                f"{meta.path}\n{meta.op if meta.kind == 'op' else ''}".lower(),
                re.DOTALL,
            )
            is not None
        ),
    )
)
ops = st.sampled_from(["linear", "RELU", "re*", "*", "add", "nothing", "*a*d*", "batch_norm"]).map(
    lambda name: Written(
        f"op:{name}",
        lambda meta: meta.kind == "op" and re.fullmatch(name.lower().replace("*", ".*"), meta.op.lower()) is not None,
    )
)
shapes = st.builds(shape_term, st.lists(st.sampled_from([2, 3, 4, None]), max_size=3)) | st.sampled_from(
    [2, 3, 4, 9]
).map(size_term)
states = st.sampled_from(sorted(IS)).map(lambda word: Written(f"is:{word}", IS[word], word == "size"))
terms = texts | ops | shapes | states | globs
queries = st.lists(st.tuples(terms, st.booleans()), max_size=4)


@settings(max_examples=300, deadline=None)
@given(queries, st.sampled_from([" ", "  ", "\t"]))
def test_find_is_the_plain_reading_of_the_grammar(query: list[tuple[Written, bool]], space: str) -> None:
    pg = graph()
    text = space.join(("-" if is_excluded else "") + term.text for term, is_excluded in query)
    shows_sizes = any(term.asks_for_sizes and not is_excluded for term, is_excluded in query)
    expected = [
        path
        for path, meta in pg.nodes.items()
        if (shows_sizes or not meta.is_size) and all(term.means(meta) is not out for term, out in query)
    ]
    found = find(pg, text, PATCHED)
    assert found.paths == expected
    assert [meta.path for meta in found] == expected
    assert list(found) == [pg.nodes[path] for path in expected]


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("-\"'/[](),*:. abopshei\\1") | st.characters(), max_size=12))
def test_any_text_is_a_query_or_a_clear_error(text: str) -> None:
    problem: str | None = None
    try:
        found = find(graph(), text)
    except ValueError as error:
        problem = str(error)
    if problem is None:
        assert set(found.paths) <= set(graph().nodes)
    else:
        assert len(problem) > 10
        assert "\n" not in problem


@pytest.mark.parametrize(
    ("query", "repair"),
    [
        ("opp:mul", r"\*opp:mul"),
        ("dtype:f32", "op, shape, is"),
        ("is:patchd", "is:patched"),
        ("shape:4x", "shape:64"),
        ("shape:[1,b]", r"shape:\[1,\*,64\]"),
        ("op:", "op:mul"),
        ("attn - mul", "-term"),
    ],
)
def test_an_invalid_query_is_an_error_with_a_correction(query: str, repair: str) -> None:
    with pytest.raises(ValueError, match=repair):
        find(graph(), query)


@pytest.mark.parametrize(
    "text",
    ["resid_pre", "layers_0*resid_pre", "layers_1*mlp_out", "*attn.q*", "mlp.post*", "-layers_*.z", "zz*q"],
)
def test_texts_and_patterns_are_found_in_path_function_and_names_of_components_in_this_order(text: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    pg = PatchableGraph(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(1, 5, 8))
    names: dict[str, list[str]] = {}
    for name, component in pg.components.items():
        names.setdefault(component.path, []).append(name)
    pattern = re.compile(".*".join(map(re.escape, text.removeprefix("-").split("*"))), re.DOTALL)
    expected = [
        path
        for path, meta in pg.nodes.items()
        if not meta.is_size
        and (
            pattern.search("\n".join([path, meta.op if meta.kind == "op" else "", *names.get(path, [])]).lower())
            is None
        )
        is text.startswith("-")
    ]
    assert find(pg, text).paths == expected
    assert bool(expected) is not text.startswith("zz")
