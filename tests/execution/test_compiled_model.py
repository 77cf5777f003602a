"""Patched models that `torch.compile` compiles once for all values of their patches."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM, StaticCache

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ProbePatch, RecordPatch, ReplacePatch, ZeroPatch
from graphpatch_notebook.errors import GraphError, PatchMapError, PatchValueError, UnknownPathError
from graphpatch_notebook.patches.kinds import Patch
from tests.experiments.hooked import GPT2_OUTPUT
from tests.hooks import registered
from tests.integrations.test_torch_compile import MASKED_BY_VMAP, gpt2
from tests.zoo import installed
from tests.zoo.transformers_models import with_cache

X = torch.linspace(-1, 1, 6).view(2, 3)


class Mlp(nn.Module):
    """What it computes is written down once more in `by_hand`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        hidden = torch.relu(self.up(x)) * scale
        return self.down(hidden)


class Shifted(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return super().forward(x, scale) + self.shift


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


def by_hand(model: Mlp, x: Tensor, added: Any = 0, replaced: Any = None, bias: Any = None) -> Tensor:
    hidden = torch.relu(model.up(x)) * 2.0
    hidden = torch.cat([hidden[:, :1], hidden[:, 1:2] + added, hidden[:, 2:]], 1)
    out = nn.functional.linear(hidden, model.down.weight, model.down.bias if bias is None else bias)
    if replaced is not None:
        out = out.clone()
        out[0] = replaced
    return out


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model() -> Mlp:
    return Mlp().eval()


@pytest.fixture(scope="module")
def pg(model: Mlp) -> PatchableGraph:
    return PatchableGraph(model, X)


def test_other_values_do_not_compile_again(model: Mlp, pg: PatchableGraph) -> None:
    add, replace = AddPatch(value=torch.ones(2, 1), slice=(slice(None), slice(1, 2))), ReplacePatch(value=0.5, slice=0)
    bias = ReplacePatch(value=torch.zeros(3))
    patches = {"hidden": add, "output": [replace], "down.bias": bias, "up.output": AddPatch(value=0)}
    backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = pg.compile(patches, X, backend=backend)
    with torch.no_grad():
        for number in (0.5, 2, True, -1.25, 0):  # as a user sets them
            add.value, bias.value, replace.value = torch.randn(2, 1), torch.randn(3), number
            assert torch.equal(compiled(X), by_hand(model, X, add.value, number, bias.value))
            assert torch.equal(compiled(X * 3), by_hand(model, X * 3, add.value, number, bias.value))
        assert backend.frame_count == 1
        replace.value, add.value, add.slice = 7.0, torch.zeros(2, 4), None  # what is not a value compiles again
        assert torch.equal(compiled(X), by_hand(model, X, 0, 7.0, bias.value))
        model.up.weight.mul_(2)  # weights are those of the model
        assert torch.equal(compiled(X), by_hand(model, X, 0, 7.0, bias.value))
    replace.value = "7"
    with pytest.raises(PatchMapError, match="ReplacePatch: value must be a tensor or a number, not str"):
        compiled(X)


def test_numbers_at_lists_of_indices(model: Mlp, pg: PatchableGraph) -> None:
    replace = ReplacePatch(value=0.1, slice=(slice(None), [0, 2]))
    compiled = pg.compile({"output": replace}, X, backend="eager")
    for replace.value in (0.1, 3, -1.5):
        expected = by_hand(model, X)
        expected[:, [0, 2]] = replace.value
        assert torch.equal(compiled(X), expected)


@pytest.mark.parametrize(
    ("field", "given", "kind", "message"),
    [
        ("value", torch.ones(5), PatchValueError, r"AddPatch on 'hidden' \(mul\).* must broadcast to"),
        ("value", 1j, PatchValueError, "AddPatch on 'hidden'"),
        ("value", None, PatchMapError, "'hidden': AddPatch: value must be a tensor or a number"),
        ("slice", (0, 9), PatchMapError, r"'hidden': AddPatch: slice \[0, 9\] is out of range"),
        ("slice", torch.zeros(2, 4, dtype=torch.bool), PatchMapError, "selects nothing"),
    ],
)
def test_fields_that_are_not_valid_any_more(
    pg: PatchableGraph, field: str, given: Any, kind: type[Exception], message: str
) -> None:
    """They are refused as by `patch`: a mask without a True had no effect."""
    add = AddPatch(value=1.0)
    compiled = pg.compile({"hidden": add}, X, backend="eager")
    compiled(X)
    setattr(add, field, given)
    with pytest.raises(kind, match=message):
        compiled(X)
    with pytest.raises(kind), pg.patch({"hidden": add}):
        pg(X)


def test_too_many_slices_are_named(model: Mlp, pg: PatchableGraph) -> None:
    add = AddPatch(value=1.0)
    compiled = pg.compile({"hidden": add}, X, backend="eager")

    def call(number: int) -> None:
        add.slice = (number // 4 % 2, number % 4) if number < 8 else slice(None, None, number)
        compiled(X)

    with pytest.raises(GraphError, match="one for each slice of a patch"):
        list(map(call, range(64)))


@pytest.mark.slow
def test_inductor_computes_the_same_within_rounding(model: Mlp, pg: PatchableGraph) -> None:
    add = AddPatch(value=0.0, slice=(slice(None), slice(1, 2)))
    compiled = pg.compile({"hidden": add}, X)
    # Without the ten C++ programs by which it finds out what this processor has: they take longer than all else here.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        compiled(X)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for number in range(100):
        add.value = number / 7
        torch.testing.assert_close(compiled(X), by_hand(model, X, add.value))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_gradients_reach_values_and_weights(model: Mlp, pg: PatchableGraph) -> None:
    value = torch.ones(2, 1, requires_grad=True)
    compiled = pg.compile({"hidden": AddPatch(value=value, slice=(..., slice(1, 2)))}, X, backend="aot_eager")
    wanted = (value, model.up.weight)
    found = torch.autograd.grad(compiled(X).square().sum(), wanted)
    expected = torch.autograd.grad(by_hand(model, X, value).square().sum(), wanted)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_patches_that_are_active_are_part_of_it(model: Mlp, pg: PatchableGraph) -> None:
    steer = AddPatch(value=1.0, slice=(slice(None), slice(1, 2)))
    edited = pg.edit({"output": ReplacePatch(value=0.25, slice=0)})
    with edited.patch({"hidden": steer}):
        compiled = edited.compile({"hidden": steer}, X, backend="eager")
    steer.value = 3.0
    # The patch of the block around it is the same object: it adds twice.
    assert torch.equal(compiled(X), by_hand(model, X, torch.tensor(3.0) + 3.0, 0.25))
    with pg.patch({"hidden": ProbePatch()}), pytest.raises(GraphError, match="'hidden': a ProbePatch may run"):
        pg.compile({"output": ZeroPatch()}, X)


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        count = x.numel()
        return x * count


class OwnAdd(AddPatch):
    def op(self, original_output: Any) -> Any:
        return original_output + 1


@pytest.mark.parametrize(
    ("patches", "kind", "message"),
    [
        ({"hidden": CustomPatch(torch.neg)}, GraphError, "'hidden': a CustomPatch may run other Python code"),
        ({"up.output": [ZeroPatch(), RecordPatch()]}, GraphError, "'up.output': a RecordPatch may run"),
        ({"hidden": OwnAdd(value=1)}, GraphError, "a OwnAdd may run other Python code"),
        ({"hidden": ZeroPatch(steps=0)}, GraphError, "a graph does not count steps"),
        ({"hiden": ZeroPatch()}, UnknownPathError, "hidden"),
        ({"hidden": AddPatch(value="1")}, PatchMapError, "value must be a tensor or a number"),
        ({"hidden": 3}, PatchMapError, "give a patch or a list of patches"),
    ],
)
def test_refused_before_anything_runs(
    pg: PatchableGraph, patches: Mapping[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pg.compile(patches, X)


def test_numbers_of_the_model_are_refused() -> None:
    pg = PatchableGraph(Counting(), X)
    with pytest.raises(GraphError, match="'size_count': the value is int.*, which compiled code holds as a constant"):
        pg.compile({"size_count": ReplacePatch(value=2)}, X)
    with pytest.raises(GraphError, match="to_fx"):  # inputs of another size than the graph is for
        PatchableGraph(Mlp(), X).compile({"hidden": ZeroPatch()}, X[:1])


@pytest.mark.skipif(MASKED_BY_VMAP or installed.TORCH < (2, 6), reason="refused there: see test_torch_compile.py")
def test_another_mode_is_refused() -> None:
    model = Shifted().eval()
    compiled = PatchableGraph(model, X).compile({"hidden": ZeroPatch()}, X, backend="eager")
    assert torch.equal(compiled(X), model.down(torch.zeros(2, 4)) + model.shift)
    model.train()
    with pytest.raises(GraphError, match="compile again"):
        compiled(X)


def test_errors_of_the_graph_are_not_hidden_by_those_of_the_compiler() -> None:
    model = WithDropout().eval()
    compiled = PatchableGraph(model, X).compile({"output": AddPatch(value=1.0)}, X, backend="eager")
    assert torch.equal(compiled(X), X + 1)
    with pytest.raises(GraphError, match="dimension 0 of 'x' is 5"):
        compiled(torch.ones(5, 3))


@contextmanager
def hooked(model: Any, steer: AddPatch, position: int) -> Iterator[None]:
    """Adds to the stream after the first layer at a position, and zeroes the second head of the other layer."""

    def steered(_module: nn.Module, _args: Any, output: Any) -> Any:
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[:, position] += steer.value
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def without_head(_module: nn.Module, args: Any) -> Any:
        heads = args[0].clone()
        heads[..., 8:] = 0
        return (heads,)

    handles = [
        model.transformer.h[0].register_forward_hook(steered),
        model.transformer.h[1].attn.c_proj.register_forward_pre_hook(without_head),
    ]
    with registered(handles):
        yield


def test_language_models() -> None:
    model, ids = gpt2()
    pg = PatchableGraph(model, ids)
    steer = AddPatch(value=torch.zeros(16), slice=(slice(None), 2))
    patches: dict[str, Patch[Any]] = {
        f"transformer.h_0.{GPT2_OUTPUT}": steer,
        "layers[1].attn.heads[1].z": ZeroPatch(),
    }
    backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = pg.compile(patches, ids, allow_doubts=True, backend=backend)

    with torch.no_grad():
        expected = []
        for value in (steer.value, torch.randn(16), torch.randn(16)):
            steer.value = value
            with hooked(model, steer, 2):
                expected.append((value, model(ids).logits))
        for steer.value, logits in expected:
            torch.testing.assert_close(compiled(ids).logits, logits)
    assert backend.frame_count == 1


@pytest.mark.skipif(MASKED_BY_VMAP or installed.TORCH < (2, 6), reason="refused there: see test_torch_compile.py")
@pytest.mark.skipif(installed.TRANSFORMERS < (5, 0), reason="its static caches count tokens in Python")
@torch.no_grad()
def test_generations_with_static_caches_compile_once() -> None:
    model, ids = gpt2()
    pg = PatchableGraph(model, ids)
    steer = AddPatch(value=torch.zeros(16), slice=(slice(None), -1))
    patches: dict[str, Patch[Any]] = {f"transformer.h_0.{GPT2_OUTPUT}": steer, "layers[1].attn.heads[1].z": ZeroPatch()}
    backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = pg.compile(patches, ids, allow_doubts=True, backend=backend)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}

    def check(prompt: Tensor, **cache: Any) -> None:
        steer.value = torch.randn(16)
        with hooked(model, steer, -1):
            expected = model.generate(prompt, **options)
        found = compiled.generate(prompt, **options, **cache)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(found.logits, expected.logits)

    for _ in range(3):  # other values of the patch, and other caches of the same length
        check(ids, cache_implementation="static")
    assert backend.frame_count == 1
    cache = StaticCache(config=model.config, max_cache_len=8)
    for prompt in (ids, ids[:, :3], ids + 1 - 2 * (ids == 31)):  # other prompts
        cache.reset()
        check(prompt, **with_cache(model, cache))
    assert backend.frame_count == 1
    check(ids, **with_cache(model, StaticCache(config=model.config, max_cache_len=12)))
    assert backend.frame_count == 2

    runs: list[int] = []
    with model.register_forward_pre_hook(lambda *_: runs.append(1)):
        with pytest.raises(GraphError, match='cache_implementation="static"'):
            compiled.generate(ids, **options)
        with pg.patch({}):
            in_context = pg.compile(patches, ids, allow_doubts=True, backend="eager")
        runs.clear()
        with pytest.raises(GraphError, match=r"outside of pg.patch\(\)"):
            in_context.generate(ids, **options, cache_implementation="static")
        assert not runs


@pytest.mark.skipif(MASKED_BY_VMAP or installed.TORCH < (2, 6), reason="refused there: see test_torch_compile.py")
@pytest.mark.skipif(installed.TRANSFORMERS < (5, 0), reason="its static caches count tokens in Python")
@torch.no_grad()
def test_sliding_windows_need_a_cache_of_all_positions() -> None:
    """The code in the error is what helps, also beyond the window."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": None}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=3, initializer_range=0.5)).eval()
    ids = torch.arange(5)[None]
    pg = PatchableGraph(model, ids, use_cache=False)
    patches = {"layers[1].resid_post": AddPatch(value=2.0, slice=(slice(None), -1))}
    compiled = pg.compile(patches, ids, use_cache=False, allow_doubts=True, backend="eager")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with pytest.raises(GraphError, match="sliding window") as caught:
        compiled.generate(ids, **options, cache_implementation="static")
    code = textwrap.dedent(str(caught.value).partition("\n")[2]).replace("...", "ids, **options")
    code = code.replace("compiled.generate", "found = compiled.generate")
    names: dict[str, Any] = {"copy": copy, "StaticCache": StaticCache, **locals()}
    exec(code, names)
    with pg.patch(patches):
        assert torch.equal(names["found"], pg.generate(ids, **options))


class Total:
    """A static cache, as far as `CompiledModel.generate` is concerned."""

    is_compileable = True

    def __init__(self) -> None:
        self.values = {"total": torch.zeros(())}
        self.number = 0


class Adding(nn.Module):
    def __init__(self, step: int = 0) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor, cache: Total | None = None) -> Tensor:
        shifted = x + 1 if cache is None or x.shape[0] > 1 else x + cache.values["total"]
        doubled = shifted * 2
        if cache is not None:
            cache.values["total"].add_(doubled.sum())
            cache.number += self.step
        return doubled

    def generate(self, x: Tensor, cache: Total) -> list[Tensor]:
        return [self(x, cache=cache), *(self(x[:1], cache=cache) for _ in range(3))]


def test_steps_are_compiled_only_if_a_graph_does_what_they_do() -> None:
    pg = PatchableGraph(Adding(), X)
    one, other = Total(), Total()
    compiled = pg.compile({"doubled": AddPatch(value=1.0)}, X, backend="aot_eager")
    with pg.patch({"doubled": AddPatch(value=1.0)}):
        expected = pg.generate(X, cache=one)
    assert all(map(torch.equal, compiled.generate(X, cache=other), expected))
    assert torch.equal(one.values["total"], other.values["total"])
    elsewhere = pg.compile({"shifted": ZeroPatch()}, X, backend="eager")
    with pytest.raises(GraphError, match="cannot have these patches: 'shifted' is another value there"):
        elsewhere.generate(X, cache=Total())
    counting = PatchableGraph(Adding(step=1), X).compile({"doubled": ZeroPatch()}, X, backend="eager")
    with pytest.raises(GraphError, match=r"each step changes 'cache\|number', which is not in a tensor"):
        counting.generate(X, cache=Total())


@pytest.mark.skipif(MASKED_BY_VMAP or installed.TORCH < (2, 6), reason="refused there: see test_torch_compile.py")
@pytest.mark.skipif(installed.TRANSFORMERS < (5, 0), reason="its static caches count tokens in Python")
@torch.no_grad()
def test_one_step_with_a_cache_given_by_hand() -> None:
    """The graph reads and writes the cache that it is given, not that of the example."""
    model, ids = gpt2()

    def filled(prompt: Tensor, length: int = 8) -> Any:
        cache = StaticCache(config=model.config, max_cache_len=length)
        model(prompt, **with_cache(model, cache), use_cache=True)
        return cache

    token, example = ids[:, :1], filled(ids[:, :3])
    pg = PatchableGraph(model, token, **with_cache(model, example), use_cache=True)
    zero = ZeroPatch(slice=(..., slice(0, 4)))
    compiled = pg.compile(
        {"transformer.h_0.mlp.output": zero}, token, **with_cache(model, example), use_cache=True, backend="eager"
    )
    caches, before = (filled(ids), filled(ids)), example.layers[0].keys.clone()
    for _ in range(2):
        with model.transformer.h[0].mlp.register_forward_hook(lambda _m, _a, output: zero.op(output.clone())):
            expected = model(token, **with_cache(model, caches[0]), use_cache=True).logits
        torch.testing.assert_close(compiled(token, **with_cache(model, caches[1]), use_cache=True).logits, expected)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close((one.keys, one.cumulative_length), (other.keys, other.cumulative_length))
    assert torch.equal(before, example.layers[0].keys)
    with pytest.raises(GraphError, match=r"layers\.sub_0\.keys' is Tensor\(2, 2, 9, 8\), and was Tensor\(2, 2, 8, 8\)"):
        compiled(token, **with_cache(model, filled(ids, 9)), use_cache=True)
