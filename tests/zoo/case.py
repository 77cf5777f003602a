"""What a model of the zoo is: how to build it, what to feed it, and which laws hold for it only in part."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Call:
        return cls(args, kwargs)

    def run(self, module: Callable[..., Any]) -> Any:
        return module(*self.args, **self.kwargs)


def _no_variants(_: nn.Module) -> dict[str, Call]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model of the zoo.

    Attributes:
        name: Unique, usable as a pytest id.
        build: A new model with the same weights at each call, in eval mode unless `training`.
        example: The inputs that a capture gets. Fresh tensors and caches with the same values at each call, so
            that a model that works in place spoils nothing.
        variants: Calls that the example does not cover (sizes, masks, caches, flags, branches), by name. Takes the
            model, because a filled cache comes from a run of it; the model must be unpatched then.
        tolerance: Non-zero only where torch's fast paths switch themselves off under a function mode.
        training: The model is in train mode and draws random numbers: call `seed_all` before each run.
        grad: Whether `scalar_loss` of the output can be backpropagated.
        without_grad: The names of calls (`"example"` or a variant) to which `grad` does not apply.
        mutates_state: A run changes buffers, attributes or globals on which later runs may depend: compare runs of
            separate copies (`build()` twice, or `copy.deepcopy` of a model that has not run yet).
        notes: What is awkward about the model.
    """

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[], Call]
    variants: Callable[[nn.Module], dict[str, Call]] = _no_variants
    tolerance: float = 0.0
    training: bool = False
    grad: bool = True
    without_grad: frozenset[str] = frozenset()
    mutates_state: bool = False
    notes: str = ""

    def __repr__(self) -> str:
        return f"Case({self.name})"

    def has_grad(self, call_name: str) -> bool:
        return self.grad and call_name not in self.without_grad

    def calls(self, model: nn.Module) -> dict[str, Call]:
        """The example (under that name) and the variants."""
        return {"example": self.example(), **self.variants(model)}


def seed_all(seed: int = 0) -> None:
    """Seeds the generators from which the zoo's models draw: torch's for the CPU and Python's.

    `torch.manual_seed` also writes down, three times, by which calls it was reached, for devices that may be started
    later: this took a fifth of the time of the law tests.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)


def seeded(build: Callable[[], nn.Module], *, seed: int = 1, training: bool = False) -> nn.Module:
    """Builds a model with reproducible weights and leaves torch's random state as it was.

    Every floating-point parameter gets noise on top of its initial value: biases of zero, norms of one and weights
    near zero would hide wrong numbers. Frozen ones do not: they are tables, such as the sines and cosines of rotations.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                is_lazy = nn.parameter.is_lazy(parameter)
                if not is_lazy and parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train(training)


def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal values that depend on shape, seed and dtype only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tokens(*shape: int, seed: int = 0, low: int = 3, high: int = 99) -> torch.Tensor:
    """Random token ids; those below `low` are special tokens in most vocabularies."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def simple_case(
    name: str,
    build: Callable[[], nn.Module],
    example: Callable[[], Call],
    variants: Mapping[str, Callable[[], Call]] | None = None,
    **flags: Any,
) -> Case:
    """A case whose variants do not need the model and whose notes are the docstring of the model's class."""
    makers = dict(variants or {})
    training = bool(flags.get("training", False))
    notes = (build.__doc__ or "").strip().split("\n")[0] if isinstance(build, type) else ""
    return Case(
        name=name,
        build=lambda: seeded(build, training=training),
        example=example,
        variants=lambda _: {variant: make() for variant, make in makers.items()},
        **{"notes": notes, **flags},
    )
