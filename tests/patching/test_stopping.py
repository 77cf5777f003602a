"""Runs that end early: `StopPatch`, `pg.run_until`, `pg.record` and patterns, against hooks of plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphpatch_notebook import (
    AddPatch,
    ExperimentError,
    GraphPatchError,
    GraphPatchWarning,
    PatchableGraph,
    PatchMapError,
    PatchNotFiredError,
    PatchValueError,
    ProbePatch,
    StopPatch,
    UnknownPathError,
    ZeroPatch,
)
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import TensorSpec, leaves, take
from tests import tiny_models
from tests.hooks import registered
from tests.laws.captures import Capture, capture_of, leaves_its_state_alone, run, some_cases
from tests.zoo import Case
from tests.zoo.submodules import Submodules
from tests.zoo.values import bit_equal, same_state, snapshot


class HandStop(BaseException):
    """Ends a forward of plain torch."""


def tensor_outputs(capture: Capture) -> list[tuple[str, Frame, tuple[Any, ...]]]:
    """Returns tensors that modules return which are called once: path, frame and keys."""
    found = []
    for frame in capture.frames_called_once():
        node = frame.output_node
        for dig, spec in leaves(node.spec):
            if isinstance(spec, TensorSpec) and not isinstance(frame.module, torch.jit.ScriptModule):
                target = capture.pg.nodes[format_path((*frame.path, node.name), dig)]
                found.append((target.path, frame, dig))
                break
    return found


def has_modules(case: Case) -> bool:
    """Modules that the thread of the caller runs, past no hook, and that nothing but they themselves calls."""
    others = ("awkward-worker-thread", "awkward-side-effects", "awkward-child-forward")
    return leaves_its_state_alone(case) and case.name not in others


@contextlib.contextmanager
def called(model: nn.Module, names: dict[int, str]) -> Iterator[list[str]]:
    """Gives the names of the modules that are called in the block."""
    seen: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda m, _: seen.append(names[id(m)]))
        for module in model.modules()
        if id(module) in names and not isinstance(module, torch.jit.ScriptModule)
    ]
    with registered(handles):
        yield seen


def with_hooks(capture: Capture, chosen: list[tuple[str, Frame, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Runs the reference with hooks that keep outputs, until all are there; returns these and what was called."""
    kept: dict[str, Any] = {}
    handles = []
    for path, frame, dig in chosen:

        def keep(
            module: nn.Module, args: Any, output: Any, path: str = path, frame: Frame = frame, dig: Any = dig
        ) -> None:
            spec = frame.output_node.spec
            for text in dig:
                key, spec = spec.child(text)  # type: ignore[union-attr, misc]
                output = take(output, key)
            kept[path] = output.clone()  # the model may write into it later
            if len(kept) == len(chosen):
                raise HandStop

        handles.append(capture.counterpart(frame.module).register_forward_hook(keep))
    with registered(handles):
        names = {id(module): name for name, module in capture.reference.named_modules()}
        with called(capture.reference, names) as seen, contextlib.suppress(HandStop):
            run(capture.reference, capture.case.example())
    return kept, seen


@some_cases(has_modules, every=4)
def test_recording_is_what_hooks_keep_and_calls_what_they_call(case: Case) -> None:
    capture = capture_of(case)
    outputs = tensor_outputs(capture)
    if not outputs:
        return
    chosen = capture.random("record").sample(outputs, min(5, len(outputs)))
    run(capture.model, case.example())  # the first run of a scripted module leaves its forward in it
    before = snapshot(capture.model)
    names = {id(module): name for name, module in capture.model.named_modules()}
    with torch.no_grad():
        expected, expected_calls = with_hooks(capture, chosen)
        with called(capture.model, names) as calls:
            found = run(lambda *a, **k: capture.pg.record([p for p, _, _ in chosen], *a, **k), case.example())
        assert calls == expected_calls
        assert found.keys() == expected.keys()
        for path in expected:
            assert capture.difference(expected[path], found[path]) is None, path
        path = chosen[0][0]
        expected, expected_calls = with_hooks(capture, chosen[:1])
        with called(capture.model, names) as calls:
            found = run(lambda *a, **k: capture.pg.run_until(path, *a, **k), case.example())
        assert calls == expected_calls
        assert capture.difference(expected[path], found) is None
    assert same_state(capture.model, before) is None
    assert bit_equal(run(capture.reference, case.example()), run(capture.pg, case.example())) is None


TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.fixture(scope="module")
def gpt2() -> PatchableGraph:
    return PatchableGraph(tiny_models.gpt2(layers=3, width=8, vocabulary=20, n_positions=32), TOKENS)


def test_a_patch_on_a_pattern_is_on_each_path_that_has_none_of_its_own(gpt2: PatchableGraph) -> None:
    paths = gpt2.nodes.matching("transformer.h_*.mlp.output")
    add = AddPatch(value=1.0)
    with gpt2.patch({"transformer.h_*.mlp.output": ZeroPatch(), paths[1]: add}):
        found = gpt2(TOKENS).logits
    with gpt2.patch({paths[0]: ZeroPatch(), paths[1]: add, paths[2]: ZeroPatch()}):
        assert torch.equal(gpt2(TOKENS).logits, found)


def test_patterns_that_are_refused(gpt2: PatchableGraph) -> None:
    with pytest.raises(UnknownPathError, match=r"'h_\*\.output'.*'transformer\.h_0\.output'"):
        gpt2.patch({"h_*.output": ZeroPatch()}).__enter__()
    with pytest.raises(UnknownPathError, match="nowhere"):
        gpt2.record("nowhere_*", TOKENS)
    with pytest.raises(UnknownPathError):
        gpt2.record([], TOKENS)
    with pytest.raises(PatchValueError, match="'transformer.h_0.output'"):
        gpt2.record("transformer.h_0.output", TOKENS, positions=[0, 9])
    with pytest.raises(PatchValueError, match="transformer.h_0.output"):
        gpt2.record("transformer.h_0.output", TOKENS, positions=[3, 3])
    for call, answer in (
        (gpt2.record, "an option of record .* did you mean positions="),
        (gpt2.run_until, "an option of run_until .* record has positions="),
    ):
        with pytest.raises(ExperimentError, match=f"'position' is neither {answer}"):
            call("transformer.h_0.output", TOKENS, position=1)
    with pytest.raises(PatchMapError, match=r"means 3 values, which one ProbePatch .* pg\.record\("):
        gpt2.patch({"transformer.h_*.output": [ZeroPatch(), ProbePatch()]}).__enter__()
    with pytest.raises(UnknownPathError, match=r"2 problems"):
        gpt2.patch({"nowhere_*": ZeroPatch(), "nothing": ZeroPatch()}).__enter__()


@pytest.mark.parametrize(
    "positions",
    [[3, 0], [2, 2], -1, [-1, 0], range(3, 0, -2), [[3, 1], [0, 2]], torch.tensor([[1, 1], [-1, 0]])],
    ids=str,
)
def test_positions_are_recorded_in_the_order_given(gpt2: PatchableGraph, positions: Any) -> None:
    with torch.no_grad():
        whole = gpt2.record("transformer.h_1.output", TOKENS)["transformer.h_1.output"]
        found = gpt2.record("transformer.h_1.output", TOKENS, positions=positions)["transformer.h_1.output"]
    index = torch.as_tensor(list(positions) if isinstance(positions, range) else positions)
    expected = whole[torch.arange(2)[:, None], index] if index.dim() == 2 else whole[:, index.reshape(-1)]
    assert torch.equal(found, expected)


def test_what_a_recording_holds(gpt2: PatchableGraph) -> None:
    recording = gpt2.record(["transformer.h_*.output", "transformer.h_0.output", "lm_head.output"], TOKENS)
    assert list(recording) == [*gpt2.nodes.matching("transformer.h_*.output"), "lm_head.output"]
    layer = recording[gpt2.graph.transformer.h_2.output]
    layer.sum().backward()
    assert gpt2.transformer.h[0].mlp.c_fc.weight.grad is not None
    gpt2.zero_grad()
    some = gpt2.record("transformer.h_*.output", TOKENS, positions=[1, 3], dtype=torch.float64)
    assert torch.equal(some["transformer.h_2.output"], layer[:, [1, 3]].double())
    elsewhere = gpt2.record("transformer.h_2.output", TOKENS, device="meta")["transformer.h_2.output"]
    assert (elsewhere.device.type, elsewhere.shape) == ("meta", layer.shape)
    with pytest.raises(UnknownPathError, match="was not recorded; nearest: "):
        some["transformer.h_3.output"]


class Branching(Submodules, first=(2, 2), second=(2, 2)):
    def forward(self, x: Tensor, detour: bool = True) -> Tensor:
        first = self.first(x)
        bent = self.second(first) if detour else first
        return bent * 2


X = torch.ones(1, 2)


def test_recorded_values_have_all_of_their_names(gpt2: PatchableGraph) -> None:
    recording = gpt2.record("**", TOKENS)
    for component in gpt2.components.values():
        assert recording[component.name].data_ptr() == recording[component.path].data_ptr()
        assert (recording[component.name] is recording[component.path]) == (component.layout is None)
    z = recording["layers[1].attn.z"]
    assert recording["layers[1].attn.heads[-1].z[:, 2]"].shape == (2, 4)
    for name in ("layers[1].attn.heads[0].z", "layers[-2].attn.heads[-2].z"):
        head = recording[name]
        assert torch.equal(head, z.select(gpt2.components["layers[1].attn.z"].axes.index("head"), 0))
    path = gpt2.components["layers[1].attn.z"].path
    last = gpt2.record(path, TOKENS, positions=-1)
    assert torch.equal(last["layers[1].attn.z"], last[path].transpose(1, 2))
    named = gpt2.record("layers[*].resid_post", TOKENS)
    assert named[gpt2.components["layers[0].resid_post"].path] is named["layers[0].resid_post"]
    with pytest.raises(UnknownPathError, match=r"means 3 values .* one at a time"):
        recording["layers[*].resid_post"]
    with pytest.raises(UnknownPathError, match="was not recorded"):
        gpt2.record("layers[1].attn.z", TOKENS, positions=1)["layers[1].attn.heads[0].z"]
    with pytest.raises(UnknownPathError, match="was not recorded"):
        named["layers[0].mlp_out"]


def test_a_value_that_never_comes_is_reported_and_missing() -> None:
    pg = PatchableGraph(Branching(), X)
    with pytest.warns(GraphPatchWarning, match=r"'second\.output': 'second' was not called"):
        recording = pg.record("*.output", X, detour=False)
    assert list(recording) == ["first.output"]
    with pytest.raises(PatchNotFiredError, match=r"'second\.output'"):
        pg.run_until("second.output", X, detour=False)


def test_a_stop_comes_after_all_other_patches_on_the_node(gpt2: PatchableGraph) -> None:
    path = "transformer.h_1.output"
    plain = gpt2.run_until(path, TOKENS)
    with gpt2.patch({path: [StopPatch(), AddPatch(value=1.0)]}), gpt2.patch({path: AddPatch(value=2.0)}):
        assert torch.equal(gpt2(TOKENS), plain + 1.0 + 2.0)
    behind = {path: StopPatch(), "transformer.h_2.output": ZeroPatch()}
    with gpt2.patch(behind), pytest.warns(GraphPatchWarning, match=r"h_2\.output': the run was stopped before it"):
        gpt2(TOKENS)


class Checkpointed(Submodules, inner=(2, 2), outer=(2, 2)):
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(lambda y: self.inner(y).relu(), x, use_reentrant=False))


def test_a_stop_inside_of_what_backward_recomputes_is_refused() -> None:
    pg, x = PatchableGraph(Checkpointed(), torch.ones(1, 2)), torch.ones(1, 2)
    with pytest.raises(GraphPatchError):
        pg.run_until("inner.output", x)
    with torch.no_grad():
        assert torch.equal(pg.run_until("inner.output", x), pg._module.inner(x))


class Handling(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except BaseException:
            return torch.zeros_like(x)


def test_a_model_that_handles_the_end_as_an_error_is_an_error() -> None:
    pg, x = PatchableGraph(Handling(), torch.ones(1, 2)), torch.ones(1, 2)
    with pytest.raises(GraphPatchError, match="'inner.output'"):
        pg.run_until("inner.output", x)
    assert torch.equal(pg.record("inner.output", x)["inner.output"], pg._module.inner(x))
