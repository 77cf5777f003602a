"""By a component's name, values are seen in one order of dimensions on every model; by their path, in the model's own.

The oracle is plain torch: `seen` divides and permutes a value at its path, by what its dimensions are there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    FromPatch,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    ProbePatch,
    ReplacePatch,
    ZeroPatch,
    load_patches,
    save_patches,
)
from graphpatch_notebook.components import Component
from graphpatch_notebook.experiments import attribute, mean_values, record_to
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import Session
from tests.fuzz import test_roles as written
from tests.zoo import Call, case_by_name, seed_all
from tests.zoo.values import tensors_of

ORDER = "batch window token position head query key channel neuron expert vocab".split()


def _ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(rows))


HANDWRITTEN: dict[str, dict[str, Any]] = {
    "positions first": {"is_sequence_first": True},
    "heads first": {"layout": "h b t c"},
    "transposed scores": {"are_scores_transposed": True},
    "batch and heads merged": {"layout": "(b h) t c"},
    "batch and heads merged, positions first": {"layout": "(b h) t c", "is_sequence_first": True},
}
HEADS, LENGTH = 3, 5
ZOO = [
    *("gpt2-sdpa", "llama-sdpa", "gptj-eager", "mamba", "mixtral-sdpa"),
    *("torch-encoder-layer-sequence-first", "bert-eager", "swin-eager"),
]


class Subject:
    """A captured model, calls of it at two sizes, and its components whose dimensions are all known."""

    def __init__(self, name: str) -> None:
        if name in HANDWRITTEN:
            seed_all(1)
            first = {name: values[0] for name, values in written.CHOICES.items()}
            model = written.Model(4 * HEADS, HEADS, {**first, **HANDWRITTEN[name]}).eval()
            self.calls = [Call.of(_ids(2, LENGTH)), Call.of(_ids(3, LENGTH + 2))]
        else:
            case = case_by_name(name)
            model = case.build()
            variants = case.variants(model)
            self.calls = [case.example(), *(variants[other] for other in ("other_size",) if other in variants)]
        self.model, self.pg = model, PatchableGraph(model, *self.calls[0].args, **self.calls[0].kwargs)
        known = {name: one for name, one in self.pg.components.items() if self.is_known(one)}
        self.components = list(known.values())
        self.permuted = [one for one in self.components if one.axes != one.path_axes]

    @staticmethod
    def is_known(one: Component) -> bool:
        return {*one.axes} <= {*ORDER} and len({*one.axes}) == len(one.axes)

    def output(self, number: int = 0, patches: Any = None) -> list[Tensor]:
        with torch.no_grad(), self.pg.patch(patches or {}, strict=bool(patches)):
            return tensors_of(self.calls[number].run(self.pg))

    def record(self, names: Any, number: int = 0) -> Any:
        call = self.calls[number]
        with torch.no_grad():
            return self.pg.record(names, *call.args, **call.kwargs)


subject = functools.cache(Subject)
every_model = pytest.mark.parametrize("name", [*HANDWRITTEN, *ZOO])


def seen(value: Tensor, axes: tuple[Any, ...]) -> Tensor:
    """Returns a view of a value with these dimensions, in the one order of all models."""
    names = [*axes]
    if "batch_head" in names:
        dim = names.index("batch_head")
        value, names[dim : dim + 1] = value.unflatten(dim, (-1, HEADS)), ["batch", "head"]
    if not {"query", "key"} <= {*names}:
        names = ["position" if axis in ("query", "key") else axis for axis in names]
    return value.permute(sorted(range(len(names)), key=lambda dim: ORDER.index(names[dim])))


def by_path(one: Component, edit: Callable[[Tensor], None]) -> dict[str, Any]:
    """Returns the patch at the path of a component that edits a copy as `seen` sees it."""

    def op(value: Tensor) -> Tensor:
        edit(seen(value, one.path_axes))
        return value

    return {one.path: CustomPatch(op)}


@every_model
def test_a_value_by_name_is_that_at_the_path_in_one_order(name: str) -> None:
    one = subject(name)
    assert len(one.components) > 8
    for number in range(len(one.calls)):
        recorded = one.record(
            [*(each.name for each in one.components), *(each.path for each in one.components)], number
        )
        for each in one.components:
            value = seen(recorded[each.path], each.path_axes)
            assert torch.equal(recorded[each.name], value), each
            assert number or tuple(value.shape) == each.shape
            own = "query" if "key" in each.axes else "position"
            wanted = ["batch", "head", "query", "key"] if own == "query" else ["batch", "position", "head", "channel"]
            assert [axis for axis in each.axes if axis in wanted] == [axis for axis in wanted if axis in each.axes]
            if each in one.permuted and not number:  # either is found from the other
                for recording in (one.record(each.path), one.record(each.name)):
                    assert torch.equal(recording[each.name], seen(recording[each.path], each.path_axes))


@st.composite
def edits(draw: st.DrawFn, one: Component) -> tuple[dict[str, Any], Callable[[Tensor], None]]:
    """Draws a patch by the name of a component, and what it does to a value in the order of `seen`."""
    index: list[Any] = []
    for size in one.shape:
        first = draw(st.integers(0, size - 1))
        index.append(draw(st.sampled_from([slice(None), slice(None), slice(first, None), slice(0, first + 1), first])))
    at = tuple(index[: draw(st.integers(0, len(index)))])
    part = torch.empty(one.shape)[at]
    numbers = torch.randn(part.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    text = ", ".join(str(each) if isinstance(each, int) else f"{each.start or ''}:{each.stop or ''}" for each in at)
    # A name with a colon may mean several values: a patch by the path of all of the value goes before it.
    whole, bracket = one.name, f"{one.name}[{text}]" if part.shape != one.shape else one.name
    kind = draw(st.sampled_from(["zero", "replace", "add", "custom", "bracket", "bracket add", "whole", "head"]))
    if kind == "head" and "head" in one.axes and one.shape[one.axes.index("head")] > 1:
        start, _, last = one.name.rpartition(".")
        dim = one.axes.index("head")
        head = draw(st.integers(0, one.shape[dim] - 1))
        new = torch.randn([size for d, size in enumerate(one.shape) if d != dim])
        patch = {f"{start}.heads[{head}].{last}": ReplacePatch(value=new)}
        return patch, lambda value: value.select(dim, head).copy_(new)
    if kind == "zero":
        return {whole: ZeroPatch(slice=at)}, lambda value: value[at].zero_()
    if kind == "replace":
        return {whole: ReplacePatch(value=numbers, slice=at)}, lambda value: value[at].copy_(numbers)
    if kind == "add":
        return {whole: AddPatch(value=numbers, slice=at)}, lambda value: value[at].add_(numbers)
    if kind == "bracket":
        return {bracket: ReplacePatch(value=numbers)}, lambda value: value[at].copy_(numbers)
    if kind == "bracket add":
        return {bracket: AddPatch(value=numbers)}, lambda value: value[at].add_(numbers)
    if kind == "custom":  # another tensor, with strides of its own
        return {bracket: CustomPatch(lambda value: (value * 2).contiguous())}, lambda value: value[at].mul_(2)
    everything = torch.randn(one.shape)
    return {whole: ReplacePatch(value=everything)}, lambda value: value.copy_(everything)


@every_model
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_patch_by_name_is_an_edit_in_this_order(name: str, data: st.DataObject) -> None:
    """Of the part that is named, whatever the kind of patch is; also together with another patch at the path."""
    one = subject(name)
    component = data.draw(st.sampled_from(one.permuted or one.components))
    patch, edit = data.draw(edits(component))
    own = {component.path: AddPatch(value=1.0)}
    is_first = data.draw(st.booleans())
    together = {**own, **patch} if is_first else {**patch, **own}

    def both(value: Tensor) -> None:
        value.add_(float(is_first))
        edit(value)
        value.add_(float(not is_first))

    for patches, edited in ((patch, edit), (together, both)):
        for found, expected in zip(one.output(0, patches), one.output(0, by_path(component, edited)), strict=True):
            torch.testing.assert_close(found, expected)


@every_model
def test_positions_by_name_are_those_of_the_axis(name: str) -> None:
    one, count = subject(name), 0
    takes_tokens = name != "torch-encoder-layer-sequence-first"
    for component in one.permuted if takes_tokens else ():
        if "query" not in component.path_axes or "key" in component.path_axes or "window" in component.axes:
            continue
        dim, length = component.axes.index("position"), component.shape[component.axes.index("position")]
        for positions in (0, [1, length - 1]):
            chosen = torch.tensor([positions] if isinstance(positions, int) else positions)
            patch = {component.name: AddPatch(value=2.0, positions=positions)}
            expected = by_path(component, lambda value, dim=dim, chosen=chosen: value.index_add_(  # type: ignore[misc]
                dim, chosen, torch.full([len(chosen) if d == dim else size for d, size in enumerate(value.shape)], 2.0)
            ))  # fmt: skip
            for found, wanted in zip(one.output(0, patch), one.output(0, expected), strict=True):
                torch.testing.assert_close(found, wanted)
            call = one.calls[0]
            with torch.no_grad():
                recorded = one.pg.record(component.name, *call.args, positions=positions, **call.kwargs)
            whole = one.record(component.name)[component.name]
            torch.testing.assert_close(recorded[component.name], whole.index_select(dim, chosen))
            count += 1
    assert count or not takes_tokens or name in ("mamba", "swin-eager")


@pytest.mark.parametrize("name", ["swin-eager"])
def test_windows_of_all_rows_are_not_positions(name: str) -> None:
    components = subject(name).pg.components
    start = "swin.encoder.layers_1.layers[0]"
    assert components[f"{start}.attn.z"].axes == ("window", "position", "head", "channel")
    assert components[f"{start}.attn_out"].axes == ("batch", "position", "channel")


# -- everything that names values ------------------------------------------------------------------------------------

QUERIES, HEAD, KEYS = "layers[1].attn.q", "layers[0].attn.heads[1].z[:, -1]", "layers[0].attn.k[:, 1:3, 2]"


class Small(Subject):
    """GPT-2 with scaled dot product attention, whose queries have the heads before the positions."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        settings = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": 20, "bos_token_id": None}
        self.model = GPT2LMHeadModel(GPT2Config(**settings, eos_token_id=None)).eval()
        self.ids = torch.randint(0, 20, (2, 5))
        self.calls = [Call.of(self.ids, use_cache=False)]
        self.pg = PatchableGraph(self.model, self.ids, use_cache=False)
        queries, keys = torch.randn(2, 5, 4, 4), torch.randn(2, 2, 4)
        self.patches = {QUERIES: AddPatch(value=queries), HEAD: ZeroPatch(), KEYS: ReplacePatch(value=keys)}
        edits: dict[str, Callable[[Tensor], Any]] = {
            QUERIES: lambda value: value.add_(queries),
            HEAD: lambda value: value[:, -1, 1].zero_(),
            KEYS: lambda value: value[:, 1:3, 2].copy_(keys),
        }
        self.own: dict[str, Any] = {}
        for name, edit in edits.items():
            self.own |= by_path(self.pg.components.lookup(name)[0], edit)


@pytest.fixture(scope="module")
def small() -> Small:
    return Small()


def as_fx(small: Small, _: Any) -> Any:
    with small.pg.patch(small.patches):
        return small.pg.to_fx((small.ids,), {"use_cache": False}, allow_doubts=True)(small.ids, use_cache=False)


def edited(small: Small, _: Any) -> Any:
    return small.pg.edit(small.patches)(small.ids, use_cache=False)


def from_a_file(small: Small, folder: Any) -> Any:
    save_patches(folder / "patches", small.patches, small.pg)
    with small.pg.patch(load_patches(folder / "patches", small.pg)):
        return small.pg(small.ids, use_cache=False)


def loaded(small: Small, folder: Any) -> Any:
    small.pg.save(folder / "graph")
    graph = PatchableGraph.load(folder / "graph")
    assert graph.components[QUERIES] == small.pg.components[QUERIES]
    with graph.patch(small.patches):
        return graph(small.ids, use_cache=False)


def in_a_session(small: Small, folder: Any) -> Any:
    """Typed, saved, and loaded."""
    namespace = {"pg": small.pg, "ids": small.ids, "values": small.patches[QUERIES].value}
    namespace["keys"] = small.patches[KEYS].value
    session = Session(small.pg)
    session.extend([
        ChosenPatch(QUERIES, "add", value="values"),
        ChosenPatch(HEAD.partition("[:")[0], "zero", slice=":, -1"),
        ChosenPatch(KEYS.partition("[:")[0], "replace", slice=":, 1:3, 2", value="keys"),
    ])  # fmt: skip
    again = Session(small.pg)
    session_file.loads(again, session_file.dumps(session))
    with small.pg.patch(again.resolve(namespace).patch_map):
        return small.pg(small.ids, use_cache=False)


@pytest.mark.parametrize("run", [as_fx, edited, from_a_file, loaded, in_a_session])
def test_patches_by_name_mean_the_same_everywhere(small: Small, run: Callable[..., Any], tmp_path: Any) -> None:
    with torch.no_grad():
        found = run(small, tmp_path)
    (expected,) = small.output(0, small.own)
    assert not torch.allclose(expected, small.output()[0])
    torch.testing.assert_close(found["logits"], expected)


def test_values_that_patches_read_are_seen_by_the_name_of_each(small: Small) -> None:
    source, path = "layers[0].attn.q", small.pg.components["layers[0].attn.q"].path
    value = small.record(path)[path]
    for names, new in (((source, QUERIES), value.transpose(1, 2)), ((path, small.pg.components[QUERIES].path), value)):
        found = small.output(0, {names[1]: FromPatch(names[0], lambda value: 2 * value)})
        torch.testing.assert_close(found, small.output(0, {names[1]: ReplacePatch(value=2 * new)}))
    rows = small.output(0, {QUERIES: FromPatch(QUERIES, rows=[1, 1])})
    torch.testing.assert_close(rows, small.output(0, {QUERIES: CustomPatch(lambda value: value[[1, 1]])}))
    for key, other in ((QUERIES, small.pg.components[QUERIES].path), (small.pg.components[QUERIES].path, QUERIES)):
        with pytest.raises(PatchMapError, match=r"attn"):
            small.output(0, {key: FromPatch(other, rows=[1, 1])})


def test_gradients_reach_what_a_probe_by_name_keeps(small: Small) -> None:
    found = []
    for name in (QUERIES, small.pg.components[QUERIES].path):
        probe = ProbePatch()
        with small.pg.patch({name: probe}):
            logits = small.pg(small.ids, use_cache=False).logits
        found.append(torch.autograd.grad(logits[:, -1, 3].sum(), probe.activation)[0])
    torch.testing.assert_close(found[0], found[1].transpose(1, 2))
    assert found[0].any()


def test_experiments_by_name(small: Small, tmp_path: Any) -> None:
    names = [QUERIES, "layers[1].attn.heads[2].z"]
    examples = [{"input_ids": small.ids, "use_cache": False}]
    recorded = small.record(names)
    store = record_to(small.pg, tmp_path / "store", names, examples)
    for name in names:
        assert np.array_equal(np.asarray(store[name]).reshape(recorded[name].shape), recorded[name])
        means = mean_values(small.pg, name, examples)[name]
        torch.testing.assert_close(means.reshape(recorded[name].shape[2:]), recorded[name].mean((0, 1)))
    assert torch.equal(small.pg.run_until(QUERIES, small.ids, use_cache=False), recorded[QUERIES])

    def zeroed(head: int, position: int) -> dict[str, Any]:
        return {"layers[0].attn.z": ZeroPatch(slice=(slice(None), position, head))}

    def metric(output: Any) -> Tensor:
        return output.logits[:, -1, 3].sum()

    axes = {"head": range(4), "position": [1, 4]}
    with torch.no_grad():
        swept = small.pg.sweep(axes, zeroed, small.ids, use_cache=False, metric=metric, progress=False)
        for head, position in itertools.product(range(4), [1, 4]):
            edit = lambda value: value[:, position, head].zero_()  # noqa: B023, E731
            (expected,) = small.output(0, by_path(small.pg.components["layers[0].attn.z"], edit))
            found = swept.sel(head=head, position=position).item()
            assert found == pytest.approx(expected[:, -1, 3].sum().item(), 1e-4)


# -- what cannot be seen so ------------------------------------------------------------------------------------------


def test_a_value_of_another_shape_is_refused_with_both_orders(small: Small) -> None:
    both = r"\(batch, position, head, channel\).*\(batch, head, query, channel\)"
    for value in (torch.ones(2, 4, 5, 4), torch.ones(3, 3)):
        with pytest.raises((PatchMapError, PatchValueError), match=both):
            small.output(0, {QUERIES: AddPatch(value=value)})
    with pytest.raises(PatchValueError, match=QUERIES.replace("[", r"\[")):
        small.output(0, {QUERIES: CustomPatch(lambda value: value.flatten(2), any_shape=True)})
    longer = {QUERIES: CustomPatch(lambda value: value.half(), any_shape=True)}
    with pytest.raises(RuntimeError, match="dtype|Half"):  # of the model, which is given what the patch returned
        small.output(0, longer)


def test_heads_in_one_dimension_with_the_batch() -> None:
    one, head = subject("batch and heads merged"), "layers[1].attn.heads[1].pattern"
    (component,) = one.pg.components.lookup(head)
    assert component.path_axes == ("batch_head", "query", "key")

    def edit(value: Tensor) -> None:
        value[0, 1, 1] += 2.0
        value[1, 1, 3] += 2.0

    found = one.output(0, {head: AddPatch(value=2.0, positions=[[1], [3]])})
    torch.testing.assert_close(found, one.output(0, by_path(component, edit)))
    assert one.record(head, 1)[head].shape == (3, LENGTH + 2, LENGTH + 2)
    clean = one.calls[0].args[0]
    corrupted = clean.flip(1)
    scores = attribute(one.pg, lambda output: output.square().mean(), clean, corrupted, paths=head)
    there, here = (one.pg.record(head, inputs)[head].detach() for inputs in (clean, corrupted))
    step = torch.zeros_like(here, requires_grad=True)
    with one.pg.patch({head: AddPatch(value=step)}):
        (gradient,) = torch.autograd.grad(one.pg(corrupted).square().mean(), step)
    assert scores.item() == pytest.approx(((there - here) * gradient).sum().item(), 1e-4)
