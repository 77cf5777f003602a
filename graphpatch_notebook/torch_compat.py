"""The private names of torch that this package uses, with their versions and the tests that notice a change."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
import torch._compile
import torch.fx
import torch.fx._pytree
import torch.utils._python_dispatch
import torch.utils._pytree

_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_in_backward() -> bool:
    """Whether this code runs inside a backward pass.

    `torch._C._current_graph_task_id`: torch 2.6 to 2.13. Tested by: tests/laws/test_law_06_gradients.py.
    """
    return torch._C._current_graph_task_id() != -1


def is_overload(func: object) -> bool:
    """Whether `func` is an operator of `torch.ops`, which prints as such.

    `torch._ops.OpOverload`, `OpOverloadPacket`, `HigherOrderOperator`: torch 2.6 to 2.13. Tested by:
    tests/graphs/test_code.py (torch.ops).
    """
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator))


def is_higher_order(func: object) -> bool:
    """Whether `func` is an operator of `torch.ops.higher_order`, which calls functions: `cond`, `scan`.

    `torch._ops.HigherOrderOperator`: torch 2.6 to 2.13. Tested by: tests/integrations/test_exported.py (branches).
    """
    return isinstance(func, torch._ops.HigherOrderOperator)


def codegen_of(graph: torch.fx.Graph) -> torch.fx.graph.CodeGen:
    """Returns the `CodeGen` of `graph`: torch has `set_codegen`, but no public getter.

    `torch.fx.Graph._codegen`: torch 2.6 to 2.13. Tested by: tests/graphs/test_weaving.py.
    """
    return graph._codegen


def forward_pre_hooks(module: torch.nn.Module) -> list[tuple[int, Callable[..., Any], bool]]:
    """Returns the forward pre-hooks of a module in order: id, hook, and whether it takes keyword arguments.

    The hook dictionaries of `torch.nn.Module`: torch 2.6 to 2.13. Tested by: tests/graphs/test_postprocessing.py.
    """
    with_kwargs = module._forward_pre_hooks_with_kwargs
    return [(key, hook, key in with_kwargs) for key, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: torch.nn.Module) -> list[tuple[int, Callable[..., Any], bool]]:
    """Returns the forward hooks of a module, as `forward_pre_hooks` does."""
    with_kwargs = module._forward_hooks_with_kwargs
    return [(key, hook, key in with_kwargs) for key, hook in module._forward_hooks.items()]


def runs_hooks(module: torch.nn.Module) -> bool:
    """Whether `Module.__call__` goes the long way for `module`, past hooks, rather than straight to `forward`.

    The hook dictionaries of `torch.nn.Module`: torch 2.6 to 2.13. Tested by: tests/laws/test_law_06_gradients.py.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _module_globals["_global_forward_hooks"]
        or _module_globals["_global_forward_pre_hooks"]
        or _module_globals["_global_backward_hooks"]
        or _module_globals["_global_backward_pre_hooks"]
    )


def takes_hooks(module: torch.nn.Module) -> bool:
    """Whether forward hooks can be registered on `module`: scripted modules take none."""
    return not isinstance(module, torch.jit.ScriptModule)


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether `module` is under FSDP: its parameters are gathered for a call, and their memory is freed afterwards.

    Asked without importing FSDP. Tested by: tests/distributed/test_sharded_models.py.
    """
    kind: Any = type(module)
    return _is_fully_sharded(kind)


def fully_shards_parts(module: torch.nn.Module) -> bool:
    """Whether `module` is under FSDP, and its parameters were parts of weights before: tensor parallelism within FSDP.

    `_get_fsdp_state`, `_fsdp_param_group`, `is_dtensor`; `_handle`, `_param_extensions` of the older FSDP: torch 2.6 to
    2.13. Tested by: tests/distributed/test_sharded_models.py.
    """
    if not is_fully_sharded(module):
        return False
    state_of = getattr(module, "_get_fsdp_state", None)
    group = None if state_of is None else state_of()._fsdp_param_group
    if group is not None:
        return any(each.is_dtensor for each in group.fsdp_params)
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    return any(each is not None for each in getattr(flat, "_param_extensions", None) or ())


_fully_sharded: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""Each frame of a capture asks; `fully_shard` and parametrizations make new classes, which know their modules."""


def _is_fully_sharded(kind: type) -> bool:
    if kind not in _fully_sharded:
        home: Any = sys.modules.get("torch.distributed.fsdp")
        wrappers = () if home is None else (home.FSDPModule, home.FullyShardedDataParallel)
        _fully_sharded[kind] = issubclass(kind, wrappers)
    return _fully_sharded[kind]


def has_global_hooks() -> bool:
    """Whether there are hooks that run for all modules.

    The same dictionaries. Tested by: tests/experiments/engine/test_sweeps_are_loops.py.
    """
    return bool(_module_globals["_global_forward_hooks"] or _module_globals["_global_forward_pre_hooks"])


_module_globals = torch.nn.Module.__call__.__globals__

without_torch_functions = torch._C.DisableTorchFunction
"""A context manager in which function modes see nothing: for the engine's own looks at tensors.

`torch._C.DisableTorchFunction`: torch 2.6 to 2.13. Tested by: tests/laws/test_law_02_identity.py.
"""


def is_tracing() -> bool:
    """Whether a `torch.jit.trace` is under way.

    `torch._C._get_tracing_state`: torch 2.6 to 2.13. Tested by: tests/graphs/test_laziness.py (torch.jit.trace).
    """
    return torch._C._get_tracing_state() is not None


safe_softmax = torch._safe_softmax
"""The softmax of torch's attention: zeros where all scores are minus infinity.

`torch._safe_softmax`: torch 2.6 to 2.13. Tested by: tests/capture/test_decompositions.py.
"""


def function_mode_depth() -> int:
    """Returns the number of active function modes; inside the handler of a mode, it is not active.

    `torch._C._len_torch_function_stack`: torch 2.6 to 2.13. Tested by: tests/laws/test_law_02_identity.py
    (awkward-custom-operators).
    """
    return torch._C._len_torch_function_stack()


def may_compile() -> bool:
    """Whether `torch.compile` may have compiled anything so far: it imports `torch._dynamo`.

    torch 2.6 to 2.15. Tested by: tests/integrations/test_torch_compile.py.
    """
    return "torch._dynamo" in sys.modules


def has_compiled_frames() -> bool:
    """Whether `torch.compile` has compiled any code in this process.

    `torch._dynamo.utils.counters`: torch 2.6 to 2.13. Tested by: tests/integrations/test_torch_compile.py.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def own_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Returns what calls the forward of a module with its hooks, whatever attribute of the module replaces it.

    `Module._call_impl`: torch 2.6 to 2.13. Tested by: tests/patching/test_contexts.py.
    """
    call: Callable[..., Any] = type(module)._call_impl.__get__(module)
    return call


def called_attribute(module: torch.nn.Module) -> str:
    """Returns the attribute that `Module.__call__` calls, which a module may have of its own: its forward with hooks.

    `Module._call_impl`, and `Module._compiled_call_impl`, which `Module.compile` sets: torch 2.6 to 2.13. Tested by:
    tests/laws/test_law_03_edits.py.
    """
    return "_call_impl" if module.__dict__.get("_compiled_call_impl") is None else "_compiled_call_impl"


def is_any_compiled(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether one of the modules runs code of `torch.compile`: a wrapper made by it, or its `forward` is. For speed.

    `OptimizedModule._orig_mod`, `Module._compiled_call_impl`: torch 2.6 to 2.13; `_torchdynamo_orig_callable` of
    functions: torch 2.6 to 2.13. Tested by: tests/integrations/test_torch_compile.py.
    """
    kinds = set()
    for module in modules:
        kinds.add(type(module))
        state = module.__dict__  # none of the attributes is on a class
        if "_compiled_call_impl" in state and state["_compiled_call_impl"] is not None:
            return True
        if "_orig_mod" in module._modules or ("forward" in state and hasattr(state["forward"], _COMPILED)):
            return True
    return any(hasattr(getattr(kind, "forward", None), _COMPILED) for kind in kinds)


_COMPILED = "_torchdynamo_orig_callable"


class Switch:
    """A context manager for something that is on while any thread is in a block of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._blocks = 0

    def __enter__(self) -> None:
        with self._lock:
            self._blocks += 1
            self._switch_on()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._switch_off()

    def _switch_on(self) -> None:
        """Switches it on, also if it is on already."""

    def _switch_off(self) -> None:
        """Switches it off."""


class EagerCode(Switch):
    """Makes compiled code run eagerly, in all threads.

    `torch.compiler.set_stance` (public). Tested by: tests/integrations/test_torch_compile.py.
    """

    _stance: Any = None

    def _switch_on(self) -> None:
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")

    def _switch_off(self) -> None:
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


eager_code = EagerCode()


def never_compiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns `function` wrapped so that `torch.compile` breaks its graph there and runs it eagerly.

    `torch._compile._disable_dynamo`: torch 2.6 to 2.13. The public `torch.compiler.disable` imports dynamo at once,
    which takes as long as torch itself. Tested by: tests/integrations/test_torch_compile.py, tests/test_packaging.py.
    """
    return torch._compile._disable_dynamo(function)


def tensor_metadata(shape: torch.Size, dtype: torch.dtype) -> Any:
    """Returns what `torch.fx` prints as the type of a value: `meta["tensor_meta"]` of a node.

    `TensorMetadata` of `torch.fx.passes.shape_prop`: torch 2.6 to 2.13. Tested by: tests/graphs/test_code.py.
    """
    return torch.fx.passes.shape_prop.TensorMetadata(shape, dtype, False, (), None, False, {})


def run_while_compiling(function: Callable[_P, _T]) -> Callable[_P, None]:
    """Returns a function that calls `function` when `torch.compile` traces a call of it, without tracing into it.

    `_dynamo_marked_constant`: torch 2.6 to 2.13; it runs with modules as arguments since 2.9. The public
    `torch.compiler.assume_constant_result` imports dynamo. Tested by: tests/integrations/test_torch_compile.py.
    """

    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        function(*args, **kwargs)

    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return run


class VisibleFlexAttention(Switch):
    """Makes function modes see `flex_attention` and `create_block_mask`, if these were imported.

    These are plain Python functions that do not hand themselves over to function modes, and models call what
    `torch.compile` made of them, which fails under a mode. While this is on, their code hands a call over as other
    functions of torch do; where no mode is on, their own code runs, compiled if the caller compiled it.

    `torch.nn.attention.flex_attention` is public; `set_eval_frame` and `skip_code` of `torch._dynamo.eval_frame`: torch
    2.6 to 2.13. Tested by: tests/capture/test_flex_attention.py.
    """

    _original: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {}
    _compilers: ClassVar[ContextVar[tuple[Any, ...]]] = ContextVar("graphpatch_compilers", default=())

    def _switch_on(self) -> None:
        home: Any = sys.modules.get(_FLEX_ATTENTION)
        if home is None or self._original:
            return
        for function in (home.flex_attention, home.create_block_mask):
            own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
            own.__kwdefaults__ = function.__kwdefaults__
            self._original[function] = own
            function.__code__ = _handing_over(function.__code__)

    def _switch_off(self) -> None:
        while self._original:
            function, own = next(iter(self._original.items()))
            function.__code__ = own.__code__
            del self._original[function]

    def is_inside(self) -> bool:
        """Whether a function mode handles a call at present: what happens in it belongs to that one call."""
        return bool(self._compilers.get())

    @classmethod
    def call(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls one of the functions: through the function modes that are on, else its own code."""
        set_compiler = sys.modules["torch._dynamo.eval_frame"].set_eval_frame
        compiler = set_compiler(None)  # it would compile the modes
        function = getattr(sys.modules[_FLEX_ATTENTION], name)
        try:
            if not function_mode_depth():
                own = cls._original.get(function, function)
                set_compiler(compiler or (cls._compilers.get() or [None])[-1])
                return own(*args, **kwargs)
            outer = cls._compilers.get()
            token = cls._compilers.set((*outer, compiler or (outer or [None])[-1]))
            try:
                return torch.overrides.handle_torch_function(function, (), *args, **kwargs)
            finally:
                cls._compilers.reset(token)
        finally:
            set_compiler(compiler)


_FLEX_ATTENTION = "torch.nn.attention.flex_attention"
visible_flex_attention = VisibleFlexAttention()


@functools.cache
def _handing_over(code: CodeType) -> CodeType:
    """Returns code that forwards a call, in place of `code`: it counts as code of torch, and is not compiled."""
    result = _hand_over.__code__.replace(
        co_name=code.co_name,
        co_filename=code.co_filename,
        co_consts=tuple(code.co_name if each == "NAME" else each for each in _hand_over.__code__.co_consts),
    )
    for each in (result, VisibleFlexAttention.call.__func__.__code__):  # type: ignore[attr-defined]
        importlib.import_module("torch._dynamo.eval_frame").skip_code(each)
    return result


def _hand_over(*args: Any, **kwargs: Any) -> Any:
    # An import, as this code runs among the globals of another module.
    from graphpatch_notebook.torch_compat import VisibleFlexAttention

    return VisibleFlexAttention.call("NAME", args, kwargs)


def is_module_call(code: CodeType) -> bool:
    """Whether this is the code of torch that calls a module: its `self` is the module, which is called once there.

    `torch.nn.Module._call_impl`: torch 2.6 to 2.13. Tested by: tests/patching/test_failures.py.
    """
    return code is torch.nn.Module._call_impl.__code__


def structure_of(value: object) -> Any:
    """Returns the pytree structure of `value`.

    `torch.utils._pytree`: torch 2.6 to 2.13. Tested by: tests/integrations/test_exported.py.
    """
    return torch.utils._pytree.tree_structure(value)


def structured(leaves: list[Any], structure: Any) -> Any:
    """Returns the value with the given pytree structure and leaves: reverses `structure_of`."""
    return torch.utils._pytree.tree_unflatten(leaves, structure)


def parts_of(structure: Any) -> list[Any]:
    """Returns the structures of the children of a container.

    `TreeSpec.children`, a list called `children_specs` before: torch 2.6 to 2.13. Tested by:
    tests/integrations/test_exported.py.
    """
    children = getattr(structure, "children", None)
    return list(children() if callable(children) else structure.children_specs)


def version_of(value: Any) -> int | None:
    """Returns the number of writes into a tensor; `None` if torch does not count them.

    `Tensor._version`: torch 2.6 to 2.13. Tested by: tests/patches/test_kinds.py.
    """
    try:
        return value._version  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # no tensor; an inference tensor
        return None


def base_of(value: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that a tensor is a view of, if it is one.

    `Tensor._base`: torch 2.6 to 2.13. Tested by: tests/experiments/attribution/test_rules.py.
    """
    return value._base


def input_guards(program: torch.export.ExportedProgram) -> Callable[..., None] | None:
    """Returns the function in which `program.module()` checks the guards of the exporter on flat inputs, if it exists.

    `torch.export.unflatten` leaves it out.

    `ExportedProgram._guards_code`, `_guards_fn` of its module: seen in torch 2.13; up to 2.8 there were none. Tested
    by: tests/integrations/test_exported.py.
    """
    if not getattr(program, "_guards_code", True):
        return None
    guards: Any = getattr(program.module(), "_guards_fn", None)
    return None if guards is None else inspect.unwrap(guards.forward)  # it is wrapped for compilers


def native_namespaces() -> dict[str, object]:
    """Returns the namespaces that hold torch's own operators: nothing else is in them. By names for them.

    `torch._C._VariableFunctions`, `torch._C._nn`, ...: torch 2.6 to 2.13. Tested by:
    tests/files/test_functions.py.
    """
    names = ("_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")
    found: dict[str, object] = {"torch": torch._C._VariableFunctions}
    return found | {f"torch._C.{name}": getattr(torch._C, name) for name in names if hasattr(torch._C, name)}


set_grad_enabled = torch._C._set_grad_enabled
"""The functions that `torch.no_grad()` and similar contexts call, and that function modes see.

`torch._C._set_grad_enabled`: torch 2.6 to 2.13. Tested by: tests/files/test_functions.py.
"""


assert_that = torch._assert
"""What code that is to be traced calls in place of `assert`.

`torch._assert`: torch 2.6 to 2.13. Tested by: tests/files/test_functions.py.
"""


def overload_path(func: object) -> str | None:
    """Returns the path in `torch.ops` of an operator (`aten.add.Tensor`); `None` for other functions.

    `torch._ops.OpOverload`, `OpOverloadPacket`, whose `str` is that path: torch 2.6 to 2.13. Tested by:
    tests/files/test_functions.py.
    """
    return str(func) if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) else None


def is_awaited(value: object) -> bool:
    """Whether a tensor is the result of a collective, for which its first use waits: it has no memory of its own.

    `torch.distributed._functional_collectives.AsyncCollectiveTensor`: torch 2.6 to 2.13. Tested by:
    tests/distributed/test_sharded_models.py.
    """
    return type(value).__name__ == "AsyncCollectiveTensor"


def default_store() -> Any:
    """Returns the store in which the processes of the default group find each other.

    `torch.distributed.distributed_c10d._get_default_store`: torch 2.6 to 2.13. Tested by:
    tests/distributed/test_sharded_models.py.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def strided_shard(dim: int, factor: int) -> Any:
    """Returns the placement of weights that are packed into one along a dimension and split one by one.

    `_StridedShard`: torch 2.6 to 2.13. Tested by: tests/distributed/test_sharded_models.py.
    """
    placements = importlib.import_module("torch.distributed.tensor.placement_types")
    return placements._StridedShard(dim=dim, split_factor=factor)


def split_factor(placement: object) -> int:
    """Returns the factor of such a placement; 1 for all others."""
    return getattr(placement, "split_factor", 1) if type(placement).__name__ == "_StridedShard" else 1


class ProductsWithoutZeros(torch.utils._python_dispatch.TorchDispatchMode):
    """Leaves rows of zeros of the first matrix out of products: of derivatives of many functions, many rows are zero.

    `torch.utils._python_dispatch.TorchDispatchMode`, which gets plain matrices also under `is_grads_batched`: torch 2.6
    to 2.13. Tested by: tests/experiments/circuits/test_attribution_graph.py (zeros).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.mm.default or not args[0].numel():
            return func(*args, **(kwargs or {}))
        left, right = args
        rows = (left.amax(1).bool() | left.amin(1).bool()).nonzero()[:, 0]  # four times faster than `any`
        if len(rows) == len(left):
            return func(left, right)
        return left.new_zeros(len(left), right.shape[1]).index_copy_(0, rows, left[rows] @ right)
