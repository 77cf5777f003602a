"""Awkward ways for a module to be called: shared, repeated, recursive, replaced, hooked, hidden, or not at all."""

# The awkward spelling is the point: ruff must not tidy it up.

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from .case import Call, Case, floats, simple_case, tokens
from .submodules import Submodules


class SharedSubmodule(nn.Module):
    """One linear layer under two names, and a third time inside of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.child = nn.Sequential(nn.Tanh(), self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.second(torch.relu(self.first(x))))


class TiedWeights(Submodules, emb=partial(nn.Embedding, 99, 8), mix=(8, 8)):
    """The embedding's weight is read as an attribute of the child and used as the output projection."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.emb(ids)), self.emb.weight)


class TupleOutputModule(Submodules, linear=(2, 3)):
    """A child called twice, its results returned as a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.linear(x), self.linear(x + 1))


class CalledBySteps(Submodules, cell=(6, 6), head=(6, 2)):
    """A child called as often as an integer argument says, possibly never."""

    def forward(self, x: Tensor, steps: int = 3) -> Tensor:
        for _ in range(steps):
            x = x + torch.tanh(self.cell(x))
        return self.head(x)


class Recursion(Submodules, linear=(6, 6)):
    """A module that calls itself."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return x
        return self(torch.relu(self.linear(x)) + 1, depth - 1) * 0.5


class _Talker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.parents: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.parents[0].scale(self.linear(x))


class CallsParent(Submodules, talker=_Talker, norm=partial(nn.LayerNorm, 6)):
    """A child that calls a method of its parent, which calls another child."""

    def __init__(self) -> None:
        super().__init__()
        self.talker.parents.append(self)

    def scale(self, x: Tensor) -> Tensor:
        return self.norm(x) * 3

    def forward(self, x: Tensor) -> Tensor:
        return self.talker(x) + x


class PlainContainers(nn.Module):
    """Modules in a plain list and a plain dict, which torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [nn.Linear(6, 6), nn.Tanh()]
        self.named = {"out": nn.Linear(6, 3)}
        self.known = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.listed:
            x = layer(x)
        return self.named["out"](self.known(x))


class _Encoder(Submodules, inner=(6, 4), outer=(4, 6)):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def decode(self, z: Tensor) -> Tensor:
        return self.outer(z) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class ChildForward(Submodules, linear=(6, 6), encoder=_Encoder):
    """Children called through `child.forward(x)`, past their hooks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder.forward(self.linear.forward(x)) + self.linear(x)


class ChildMethod(Submodules, encoder=_Encoder):
    """Methods of a child other than forward, which call grandchildren."""

    def forward(self, x: Tensor, reconstruct: bool = True) -> Tensor:
        z = self.encoder.encode(x)
        return self.encoder.decode(z) if reconstruct else z


class _Base(Submodules, linear=(6, 6)):
    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return torch.relu(out)


class SuperForward(_Base):
    """Calls the forward of its base class, which works on the same names."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + 1
        return self.linear(out) * super().forward(out)


def _doubling(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        doubled = args[0] * 2
        return forward(self, doubled, *args[1:], **kwargs) + 1

    return wrapper


class DecoratedForward(Submodules, linear=(6, 6)):
    """A decorator that computes before and after the forward that it wraps."""

    @_doubling
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(x) * scale


def _replacement(self: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, self.weight, self.bias).clamp(min=-0.5)


class ReplacedForward(nn.Module):
    """Children whose forward is replaced on the instance: by a method, and by a partial as accelerate does."""

    def __init__(self) -> None:
        super().__init__()
        self.method = nn.Linear(6, 6)
        self.method.forward = types.MethodType(_replacement, self.method)
        self.partial = nn.Linear(6, 6)
        original = self.partial.forward
        self.partial.forward = functools.update_wrapper(
            functools.partial(lambda module, x: module.weight.sum() + type(module).forward(module, x), self.partial),
            original,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.partial(self.method(x))


class AliasedForward(nn.Module):
    """The class's forward is another method under that name, and the instance picks yet another in __init__."""

    def __init__(self, is_fast: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.child = _AliasedChild()
        if is_fast:
            self.forward = self.run_fast

    def run_slow(self, x: Tensor) -> Tensor:
        return self.child(self.linear(x))

    def run_fast(self, x: Tensor) -> Tensor:
        return self.child(torch.relu(self.linear(x)))

    forward = run_slow


class _AliasedChild(Submodules, bias=lambda: nn.Parameter(torch.zeros(6))):
    def shift(this, x: Tensor) -> Tensor:
        return x + this.bias

    forward = shift


class _Calling(Submodules, linear=(6, 6)):
    def __call__(self, x: Tensor, factor: float) -> Tensor:
        return super().__call__(x * factor) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OverriddenCall(Submodules, child=_Calling):
    """A child whose class overrides __call__ and computes around forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, 2.0) - x


class UserHooks(Submodules, first=(6, 6), second=lambda: _Scaled()):
    """The user's own hooks: one changes an input, one changes keyword arguments, two change outputs in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.first.register_forward_hook(lambda module, args, output: output + args[0])
        self.first.register_forward_hook(lambda module, args, output: torch.tanh(output))
        self.second.register_forward_pre_hook(_change_keywords, with_kwargs=True)
        self.second.register_forward_hook(_observe, with_kwargs=True, always_call=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), scale=x.new_tensor(2.0))


class _Scaled(Submodules, linear=(6, 6)):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


def _change_keywords(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return args, {"scale": kwargs["scale"] + 1}


def _observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
    output.mean()


class BackwardHooks(Submodules, before=(6, 6), linear=(6, 6)):
    """Full backward hooks, for which torch wraps inputs and outputs of the child in autograd functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(_double_gradient)
        self.linear.register_full_backward_pre_hook(lambda module, gradient: None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(self.before(x)))


def _double_gradient(module: nn.Module, grad_input: tuple[Tensor | None, ...], grad_output: Any) -> Any:
    return tuple(gradient if gradient is None else gradient * 2 for gradient in grad_input)


class UnusedChildren(Submodules, always=(6, 6), sometimes=[(6, 6), nn.ReLU], never=(6, 6)):
    """Children that the example does not call, one that no call reaches, and one called only for a flag."""

    def forward(self, x: Tensor, use_more: bool = False) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if use_more else x


class _Callback:
    """A callable that is no module but holds one."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2


class ModuleAsArgument(Submodules, linear=(6, 6), applier=lambda: _Applier()):
    """A module handed on as an argument, to a function, to a child and inside of a callable object."""

    def __init__(self) -> None:
        super().__init__()
        self.callback = _Callback(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        x = self.applier(self.linear, x)
        return self.callback(functools.reduce(lambda value, layer: layer(value), [self.linear, torch.tanh], x))


class _Applier(nn.Module):
    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) + layer(x + 1)


class GeneratorMethod(Submodules, linear=(6, 6)):
    """Operations in a generator that runs while the caller loops over it."""

    def states(self, x: Tensor, count: int) -> Iterator[Tensor]:
        for _ in range(count):
            x = torch.tanh(self.linear(x))
            yield x

    def forward(self, x: Tensor, count: int = 2) -> Tensor:
        total = torch.zeros_like(x)
        for state in self.states(x, count):
            total = total * 0.5 + state
        return total


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class DelegatingWrapper(Submodules, wrapped=lambda: _Wrapped(_Encoder())):
    """A wrapper that passes on attributes that it lacks to the module inside, as PEFT does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped(x) + self.wrapped.encode(x) @ self.wrapped.outer.weight.T


class Parametrized(nn.Module):
    """Parametrized weights: torch swaps the child's class and computes the weight in a property."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.orthogonal(torch.relu(self.normed(x)))


class Pruned(nn.Module):
    """A pre-hook that computes the child's weight and sets it as a plain attribute at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        with torch.no_grad():  # The weight would be no leaf, and the module could not be deep-copied.
            prune.l1_unstructured(self.linear, "weight", 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class LazyChild(Submodules, lazy=partial(nn.LazyLinear, 5)):
    """A layer without shape until its first run, which also changes its class."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.lazy(x))


class WorkerThread(Submodules, there=(6, 6), here=(6, 6)):
    """Calls a child in a worker thread, where no mode or context variable of the caller is active."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            is_grad_enabled = torch.is_grad_enabled()
            future = pool.submit(self._run_there, x, is_grad_enabled)
            return self.here(x) + future.result()

    def _run_there(self, x: Tensor, is_grad_enabled: bool) -> Tensor:
        with torch.set_grad_enabled(is_grad_enabled):
            return self.there(x) * 2


class Checkpointed(nn.Module):
    """Runs a child and a function under activation checkpointing, which runs them again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.before = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.GELU())
        self.after = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return checkpoint(self._finish, x, 2.0, use_reentrant=self.use_reentrant)

    def _finish(self, x: Tensor, factor: float) -> Tensor:
        return self.after(torch.sin(x)) * factor


class FunctionalTransforms(Submodules, linear=(6, 6), energy=(6, 1)):
    """vmap, grad and functional_call over children: inside, tensors are wrapped."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mapped = torch.vmap(lambda row: torch.tanh(self.linear(row)) * 2)(x)
        slope = torch.func.grad(lambda value: self.energy(torch.sin(value)).sum())(x)
        doubled = {name: parameter * 2 for name, parameter in self.linear.named_parameters()}
        return mapped, slope, torch.func.functional_call(self.linear, doubled, (x,))


class InnerAutograd(Submodules, energy=[(6, 8), nn.Softplus, (8, 1)]):
    """Takes a gradient inside of its forward and keeps the graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return -force


class FxChild(nn.Module):
    """A child whose forward is generated code without a source file."""

    def __init__(self) -> None:
        super().__init__()
        self.traced = torch.fx.symbolic_trace(_Encoder())

    def forward(self, x: Tensor) -> Tensor:
        return self.traced(x) + 1


def _script(function_or_module: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Deprecated, and still in the models that people have.
        return torch.jit.script(function_or_module)


@_script
def _scripted_gate(x: Tensor, limit: float) -> Tensor:
    gate = torch.sigmoid(x) * 2
    return torch.where(x > limit, x * gate, gate)


class ScriptedFunction(Submodules, linear=(6, 6)):
    """A function compiled by torch.jit.script: what happens inside cannot be seen."""

    def forward(self, x: Tensor, limit: float = 0.1) -> Tensor:
        return _scripted_gate(self.linear(x), limit) + 1


class ScriptedChild(nn.Module):
    """Children that are TorchScript modules, scripted, frozen and traced: their forward is not Python."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = _script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.frozen = torch.jit.freeze(_script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval()))
            self.traced = torch.jit.trace(nn.Linear(6, 6), torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.traced(self.frozen(self.scripted(x))) * 2


_ROWS = (3, 6)
_OTHER: dict[str, Callable[[], Call]] = {"other_size": lambda: Call.of(floats(5, 6))}


def _rows(**kwargs: Any) -> Callable[[], Call]:
    return lambda: Call.of(floats(*_ROWS), **kwargs)


AWKWARD_CALLS: list[Case] = [
    simple_case("awkward-shared-submodule", SharedSubmodule, _rows(), _OTHER),
    simple_case(
        "awkward-tied-weights",
        TiedWeights,
        lambda: Call.of(tokens(3, 7)),
        {"other_size": lambda: Call.of(tokens(5, 2))},
    ),
    simple_case(
        "awkward-called-twice",
        TupleOutputModule,
        lambda: Call.of(torch.ones(3, 2)),
        {"other_size": lambda: Call.of(floats(5, 4, 2))},
    ),
    simple_case(
        "awkward-called-by-steps",
        CalledBySteps,
        _rows(),
        {
            "more": _rows(steps=5),
            "once": _rows(steps=1),
            "never": _rows(steps=0),
            "other_size": lambda: Call.of(floats(5, 6), 2),
        },
    ),
    simple_case(
        "awkward-recursion",
        Recursion,
        _rows(),
        {"deeper": _rows(depth=4), "none": _rows(depth=0), "one": _rows(depth=1)},
        # At depth 0 the input itself comes back.
        without_grad=frozenset({"none"}),
    ),
    simple_case("awkward-calls-parent", CallsParent, _rows(), _OTHER),
    simple_case("awkward-plain-containers", PlainContainers, _rows(), _OTHER),
    simple_case("awkward-child-forward", ChildForward, _rows(), _OTHER),
    simple_case("awkward-child-method", ChildMethod, _rows(), {**_OTHER, "encode_only": _rows(reconstruct=False)}),
    simple_case("awkward-super-forward", SuperForward, _rows(), _OTHER),
    simple_case("awkward-decorated-forward", DecoratedForward, _rows(), {**_OTHER, "scaled": _rows(scale=3.0)}),
    simple_case("awkward-replaced-forward", ReplacedForward, _rows(), _OTHER),
    simple_case("awkward-aliased-forward", AliasedForward, _rows(), _OTHER),
    simple_case("awkward-overridden-call", OverriddenCall, _rows(), _OTHER),
    simple_case("awkward-user-hooks", UserHooks, _rows(), _OTHER),
    simple_case("awkward-backward-hooks", BackwardHooks, _rows(), _OTHER),
    simple_case("awkward-unused-children", UnusedChildren, _rows(), {**_OTHER, "used": _rows(use_more=True)}),
    simple_case("awkward-module-as-argument", ModuleAsArgument, _rows(), _OTHER),
    simple_case("awkward-generator-method", GeneratorMethod, _rows(), {**_OTHER, "more": _rows(count=4)}),
    simple_case("awkward-delegating-wrapper", DelegatingWrapper, _rows(), _OTHER),
    simple_case("awkward-parametrized", Parametrized, _rows(), _OTHER),
    simple_case("awkward-pruned", Pruned, _rows(), _OTHER, mutates_state=True),
    simple_case("awkward-lazy-child", LazyChild, _rows(), _OTHER, mutates_state=True),
    simple_case("awkward-worker-thread", WorkerThread, _rows(), _OTHER),
    simple_case("awkward-checkpoint", lambda: Checkpointed(False), _rows(), _OTHER, notes=Checkpointed.__doc__),
    simple_case(
        "awkward-checkpoint-reentrant", lambda: Checkpointed(True), _rows(), _OTHER, notes=Checkpointed.__doc__
    ),
    simple_case("awkward-functional-transforms", FunctionalTransforms, _rows(), _OTHER),
    simple_case("awkward-inner-autograd", InnerAutograd, _rows(), _OTHER),
    simple_case("awkward-fx-child", FxChild, _rows(), _OTHER),
    simple_case("awkward-scripted-function", ScriptedFunction, _rows(), {**_OTHER, "limit": _rows(limit=-0.5)}),
    simple_case("awkward-scripted-child", ScriptedChild, _rows(), _OTHER),
]
