"""`ExtractionOptions`: how a model is captured."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from torch.fx import Graph
from torch.nn import Module

from graphpatch_notebook.errors import CaptureError, ExperimentError, cut
from graphpatch_notebook.values import ContainerSpec


@dataclass(kw_only=True)
class ExtractionOptions:
    """How `PatchableGraph` captures a model. Every field may be left alone.

    Attributes:
        skip_compilation: Capture no graphs at all: every module becomes an `OpaqueGraphModule`, whose inputs,
            output, parameters, buffers and tensor attributes can be patched.
        classes_to_skip_compiling: The same for modules of exactly these classes only.
        error_on_compilation_failure: Raise the original exception of a module that cannot be captured.
        warn_on_compilation_failure: Give a `GraphPatchWarning` with that exception instead, and continue with an
            `OpaqueGraphModule`. Without either option this fallback is silent, but can be seen: in the tree, and as
            `OpaqueGraphModule.reason`.
        allow_unused_submodules: Whether submodules that the example inputs do not reach are fine (they become
            `UnusedModule`). `None` means: allowed, unless `error_on_compilation_failure` is set.
        custom_extraction_functions: For modules of these classes (or of subclasses of them), a function from the
            module to an `fx.Graph` that replaces the module. Its placeholders carry the names of `forward`'s
            parameters, in any order, its output is wrapped in a one-element tuple, and the names of its nodes are
            kept: a graph for which this is not so is a `CaptureError`. Where the function raises, the module is
            captured as any other (or opaque, if the options say to skip it), as the two options above say of failures.
        postprocessing_function: Called with each `CompiledGraphModule` and the module that it was captured from, inner
            ones first. May edit `graph_module.graph` in place (and give the graph module tensors and modules of its own
            for that): the edited graph then runs in place of the module, in every call of the `PatchableGraph`.
        copy_transformers_generation_config: Give the `PatchableGraph` of a transformers model a `generation_config` of
            its own, a copy of the model's, which its `generate` uses. Otherwise, it uses the model's own.
        decompose: Which composite functions to record as their steps, in graphs too: a list of their names. `None`:
            none, but attention has its scores and its pattern as values. A list, even an empty one, turns that off.
            See below.
        layers: The modules that are the layers of the model, in order, by their paths (`["encoder.0", "encoder.1"]`); a
            list of paths for a layer of several modules. `None`: they are found, see `PatchableGraph.components`.

    Attention patterns: a call of `scaled_dot_product_attention`, or of `multi_head_attention_forward` (which
    `torch.nn.MultiheadAttention` calls), both of `torch.nn.functional`, is one node, in graphs as well. Two values
    inside are nodes, too: `scores` (scaled and masked), and `pattern`,
    what the softmax (and dropout) made of them; what the pattern and the values are multiplied to, *z*, is the value of
    a call of the first itself. The call takes its steps one by one only in runs in which a patch stands on one of these
    two, be it a probe; all other calls run fused, also where their result is patched. Capture computes neither: it
    needs no memory for the square of the sequence. The result of the steps equals that of the fused kernel within
    rounding: 1e-5 in float32 (absolute and relative), 1e-12 in float64, 4e-3 in float16, 3e-2 in bfloat16 for inputs
    around one; dropout draws other numbers. The steps hold the whole pattern in memory, (batch, heads, queries, keys),
    as eager attention does. In half precision, scores are float32.

    Functions in a list are opened during the capture, and their graphs hold all their steps. Such graphs never run in
    place of their module, unless they are edited: they equal it within rounding only. These can be opened:
    `"scaled_dot_product_attention"`; and
    `"multi_head_attention_forward"`, with the steps of torch's own code under the variables of that code: with
    `need_weights=True` the pattern is what `softmax` made, the second of the `attn_output_weights`; otherwise it calls
    `scaled_dot_product_attention` in turn, so list both.

    Example:
        >>> ExtractionOptions(skip_compilation=True).skip_compilation
        True
    """

    skip_compilation: bool = False
    classes_to_skip_compiling: set[type[Module]] = field(default_factory=set)
    error_on_compilation_failure: bool = False
    warn_on_compilation_failure: bool = False
    allow_unused_submodules: bool | None = None
    custom_extraction_functions: dict[type[Module], Callable[[Module], Graph]] = field(default_factory=dict)
    postprocessing_function: Callable[[Any, Module], None] | None = None
    copy_transformers_generation_config: bool = True
    decompose: Collection[str] | None = None
    layers: Sequence[str | Sequence[str]] | None = None

    def check(self) -> None:
        """Raises a `CaptureError` for a value of the wrong type, which would go unnoticed later."""
        for option in fields(self):
            value = getattr(self, option.name)
            is_right, takes = _CHECKS.get(option.name, _CHECK_OF_FLAGS)
            if not is_right(value) and (option.name in _CHECKS or option.type == "bool"):
                raise CaptureError(f"{option.name} takes {takes}, not {cut(repr(value))}")

    def extraction_function(self, module: Module) -> Callable[[Module], Graph] | None:
        """Returns the custom extraction function for `module`: that of the nearest class in its method order."""
        functions = self.custom_extraction_functions
        return next((functions[cls] for cls in type(module).__mro__ if cls in functions), None)


def _are_module_classes(values: Any) -> bool:
    return isinstance(values, Collection) and all(isinstance(one, type) and issubclass(one, Module) for one in values)


_FLAG = "True or False"
_CHECK_OF_FLAGS: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), _FLAG)
# Whether an option has a valid value, and what it takes: those that are not flags.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "allow_unused_submodules": (lambda value: value is None or type(value) is bool, _FLAG),
    "custom_extraction_functions": (
        lambda value: isinstance(value, Mapping) and _are_module_classes(value) and all(map(callable, value.values())),
        "a dict {torch.nn.Linear: function}, of functions from a module to a torch.fx.Graph",
    ),
    "classes_to_skip_compiling": (_are_module_classes, "a set of classes of modules {torch.nn.Linear}"),
    "postprocessing_function": (
        lambda value: value is None or callable(value),
        "a function of the graph module and the module",
    ),
}


def options_among(
    args: tuple[Any, ...], kwargs: dict[str, Any], is_input: Callable[[str], bool] = lambda _: True
) -> tuple[ExtractionOptions, tuple[Any, ...], dict[str, Any]]:
    """Returns the options that are given with example inputs (else the default ones), and the inputs without them.

    Args:
        args: What was given, positional.
        kwargs: What was given by keyword.
        is_input: Whether a module of the model has an input of this name. Others cannot have the name of an option, or
            nearly so.

    Raises:
        TypeError: There are options, or fields of them, where the model would get them.
    """
    given, inputs = "extraction_options", dict(kwargs)
    found = [args[0]] if args and isinstance(args[0], ExtractionOptions) else []
    args = args[len(found) :]
    if isinstance(inputs.get(given), ExtractionOptions):
        found.append(inputs.pop(given))
    names = [given, *(option.name for option in fields(ExtractionOptions))]
    meant = {n: near[0] for n in inputs if (near := get_close_matches(n, names, 1, 0.7)) and not is_input(n)}
    rest = (*args, *inputs.values())
    if meant or len(found) > 1 or any(isinstance(v, ExtractionOptions) or v is ExtractionOptions for v in rest):
        written = ", ".join(f"{name}=..." for name in meant.values() if name != given) or "..."
        raise TypeError(
            f"options are given once, and first: PatchableGraph(model, ExtractionOptions({written}), *inputs); "
            f"{', '.join(meant) or 'what was given in another place'} would go to the model"
        )
    return (found[0] if found else ExtractionOptions()), args, inputs


# -- misspelled options among inputs -----------------------------------------------------------------------------------

_FIELDS_OF_PATCHES = {"slice", "steps", "positions", "position_dim", "any_shape", "allow_empty"}
# Inputs that transformers models may take in `**kwargs`, and whose names are similar to those of options.
_OF_MODELS = {"position_ids", "head_mask", "cache_position"}
_GONE = {
    "backward": "run the cells in a loop, with metric(pg(...)).backward()",
    "heads": "name the heads, layers[*].attn.heads[*].z",
    "seed": "shuffle the reference, ids[torch.randperm(len(ids))]",
}
"""Options of version 0.1 that are gone, and what to write instead."""


def check_input_names(
    root: Any, names: Iterable[str], function: Callable[..., Any], like: Callable[..., Any] | None = None
) -> None:
    """Checks that no keyword input is a misspelled option, which a model with `**kwargs` would accept silently.

    `function` was called; `like` is a function whose options are meant, if it has none.

    Raises:
        ExperimentError: A name is similar to that of an option, or it is that of a field of patches, and no module of
            the model has a parameter of that name.
    """
    if not names:
        return
    options, known = _option_names(like or function), _input_names(root)
    for name in sorted({*names} - known):
        if name in _GONE:
            raise ExperimentError(f"{function.__name__} has no {name}= any more: {_GONE[name]}")
        if name in _FIELDS_OF_PATCHES and name not in options:
            raise ExperimentError(
                f"{function.__name__} has no {name}=; patches have: pg.patch({{path: ZeroPatch({name}=...)}})"
            )
        begun = [one for one in options if (len(name) > 2 and one.startswith(name)) or name.startswith(f"{one}_")]
        close = [] if name in _OF_MODELS else begun or get_close_matches(name, options, n=1, cutoff=0.7)
        if close:
            repair = f"did you mean {close[0]}=?" if like is None else f"{like.__name__} has {close[0]}="
            raise ExperimentError(
                f"{name!r} is neither an option of {function.__name__} nor a parameter of the model's forward; {repair}"
            )


def _input_names(root: Any) -> set[str]:
    known = {parameter.name for frame in root.walk() for parameter in frame.parameters}
    kwargs = [node.spec for node in root.inputs() if isinstance(node.spec, ContainerSpec)]  # of the example inputs
    return known.union(str(name) for spec in kwargs for name, *_ in spec.children)


@functools.lru_cache(maxsize=256)
def _option_names(function: Callable[..., Any]) -> Sequence[str]:
    """Returns the names of the keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
