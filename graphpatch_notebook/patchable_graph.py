"""`PatchableGraph`: a captured model, in which every value can be inspected and patched."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture import built_without_weights, call_sites, capture
from graphpatch_notebook.capture.inputs import ExampleInputs, parameters_of
from graphpatch_notebook.capture.modules import delegate, original_forward
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components import find
from graphpatch_notebook.errors import GraphError, add_note
from graphpatch_notebook.graphs import CompiledGraphModule, GraphInterpreter, GraphModule, own_graphs
from graphpatch_notebook.graphs.compiled_module import postprocess
from graphpatch_notebook.inspection.resolution import METHODS, NodeMap
from graphpatch_notebook.options import ExtractionOptions, check_input_names, options_among
from graphpatch_notebook.patches.kinds import Patch, ProbePatch, StopPatch
from graphpatch_notebook.patches.slices import PositionSelection
from graphpatch_notebook.patching import (
    GENERATION_CONFIG,
    CapturedModel,
    PatchContext,
    Recording,
    generating_with,
    innermost,
    record,
)
from graphpatch_notebook.patching.model_state import calling, copied, preserved
from graphpatch_notebook.texts import (
    NO_TOKENIZER,
    Text,
    check_tokenizer,
    encoded,
    is_one_text,
    is_text,
    padded,
    token_text,
    with_tokens,
)

if TYPE_CHECKING:
    from xarray import DataArray

    from graphpatch_notebook.components import Components, Weights
    from graphpatch_notebook.experiments.circuits.attribution_graph import AttributionGraph
    from graphpatch_notebook.experiments.circuits.circuit import Circuit
    from graphpatch_notebook.experiments.datasets.feature_pages import FeaturePage
    from graphpatch_notebook.graphs.verification import VerificationReport
    from graphpatch_notebook.inspection.node_path import NodePath
    from graphpatch_notebook.notebook.views.browser import Browser
    from graphpatch_notebook.patching import CompiledModel

_COMPILES_ITSELF = (
    "the model compiles a function while it runs, and torch.compile fails where the run is observed; if it computes "
    "attention, load the model with attn_implementation='sdpa' (or 'eager'), else call "
    "torch.compiler.set_stance('force_eager') before"
)
_Method = TypeVar("_Method", bound=Callable[..., Any])
_OWN = {"_module", "_captured", "_generation_config", "_blocks"}
# What `nn.Module` defines, and the model may override.
_OF_MODEL = (
    "add_module apply bfloat16 buffers children cpu cuda double eval float get_buffer get_extra_state get_parameter "
    "get_submodule half ipu load_state_dict modules mtia named_buffers named_children named_modules named_parameters "
    "parameters register_buffer register_module register_parameter requires_grad_ set_extra_state set_submodule "
    "share_memory state_dict to to_empty train type xpu zero_grad _apply"
).split()


class _LikeItsModel(Module):
    """A module with the parameters, buffers, children and modes of another module, `_module`."""

    _module: Module


delegate(_LikeItsModel, "_module", _OF_MODEL)


def _or_of_the_model(method: _Method) -> _Method:
    """Makes a method on texts that of the model, if no tokenizer was given and the model has one of this name."""

    @functools.wraps(method)
    def wrapper(self: PatchableGraph, given: Any) -> Any:
        if captured(self).tokenizer is not None:
            return method(self, given)
        if not hasattr(self._module, method.__name__):
            raise GraphError(f"{method.__name__} needs a tokenizer: pg.tokenizer = tokenizer")
        return getattr(self._module, method.__name__)(given)

    return cast(_Method, wrapper)


class PatchableGraph(_LikeItsModel):
    """A wrapper that is used like its model, in which every intermediate value has a name and can be patched.

    The model runs once, eagerly, on the example inputs; what it does is recorded as a hierarchy of graphs, one for each
    call of a submodule. The model itself is shared, never copied or changed: without active patches, calling the
    `PatchableGraph` runs the model's own code. Attributes and methods of the model are reachable through it, and its
    methods (`generate`, say) run patched inside a patch context.

    It keeps references to the example inputs (no copies), on which *Run* of the tree browser runs the model.

    Args:
        module: The model.
        extraction_options: An `ExtractionOptions`, as the first positional argument after the model or by keyword. It
            is not passed to the model.
        *example_args: Example inputs, positional.
        tokenizer: For language models: an object with `encode` and `decode`, such as a tokenizer of transformers. Texts
            then are inputs like tokens, here and wherever this object takes inputs: `"The cat"`, a list of texts, which
            are padded, or a chat, a list of messages (dicts with `role` and `content`) for the tokenizer's template.
            Views show the texts of tokens.
        **example_kwargs: Example inputs, by keyword.

    Raises:
        TypeError: The model is not a module, the tokenizer has no `decode`, or options are at a place where the model
            would get them; nothing ran.
        CaptureError: An option has an invalid value; nothing ran.
        CaptureError: The model could not be captured on these inputs.
        Exception: Any error that the model raises on these inputs.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
        >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
        >>> with pg.patch({"output": ZeroPatch()}):
        ...     print(pg(torch.ones(1, 2)).tolist())
        [[0.0, 0.0, 0.0]]
    """

    _captured: CapturedModel
    _blocks: tuple[PatchableGraph, list[CapturedModel]] | None
    """Of a spliced graph, the graph that it replaces in its blocks, and what that was before each of them."""

    def __init__(self, module: Module, *example_args: Any, tokenizer: Any = None, **example_kwargs: Any) -> None:
        given: Any = module
        if not isinstance(given, Module):
            shown = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            load = f"; load it first: AutoModelForCausalLM.from_pretrained({given!r})" if isinstance(given, str) else ""
            raise TypeError(
                f"PatchableGraph needs a torch.nn.Module, not {shown}: PatchableGraph(model, *example_inputs){load}"
            )
        options, example_args, example_kwargs = options_among(
            example_args,
            example_kwargs,
            lambda name: any(p.name == name for one in given.modules() for p in parameters_of(one.forward)),
        )
        super().__init__()
        if tokenizer is not None:
            check_tokenizer(tokenizer)
            names = [parameter.name for parameter in parameters_of(original_forward(module))]
            example_args, example_kwargs = with_tokens(module, names, tokenizer, example_args, example_kwargs)
        examples = ExampleInputs(example_args, example_kwargs)
        try:
            root_frame = capture(module, options, example_args, example_kwargs)
        except Exception as error:
            call_sites.hide_frames(error)
            if not example_args and not example_kwargs:
                add_note(error, "the model ran without inputs; give some: PatchableGraph(model, *example_inputs)")
            elif example_args and is_text(example_args[0]):
                add_note(error, NO_TOKENIZER)
            elif not example_kwargs and isinstance(example_args[0], Mapping):
                add_note(error, "give inputs as you would call the model: PatchableGraph(model, **inputs)")
            elif type(error).__module__.startswith("torch._dynamo"):
                add_note(error, _COMPILES_ITSELF)
            raise
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from graphpatch_notebook.distributed.sharding import with_whole_records

            root_frame = with_whole_records(root_frame)
        self._set_up(CapturedModel(module, root_frame, options, examples=examples))
        self._captured.tokenizer = tokenizer
        if (sharding := self._captured.sharding) is not None:
            run = functools.partial(self._run_on, example_args, example_kwargs)
            sharding.measure(run, self.nodes, example_args, example_kwargs)
            self._captured.renew()
        if options.postprocessing_function is not None:
            postprocess(self._graph_module, options.postprocessing_function)

    @classmethod
    def from_config(
        cls, config: Any, *example_args: Any, model_class: type[Module] | None = None, **example_kwargs: Any
    ) -> PatchableGraph:
        """Returns a `PatchableGraph` of a model of transformers without weights: names, shapes and code, to browse.

        The model takes no memory: its parameters are on the meta device. A session of patches that is written here
        can be loaded where the weights are. To run the model, load weights into it with its `load_state_dict` and
        `assign=True`; until then, calls of the model raise an error.

        Args:
            config: A config of transformers, or the name or the folder of one.
            *example_args: Example inputs, positional. They need no particular values.
            model_class: The class of the model. Default: the class that the config names, else that of a causal
                language model.
            **example_kwargs: Example inputs, by keyword; `extraction_options` as for `PatchableGraph`.

        Raises:
            OSError: The config does not exist, or it cannot be downloaded.
            CaptureError: The model computes with the values of its weights in Python.

        Example:
            >>> import torch
            >>> from transformers import GPT2Config
            >>> config = GPT2Config(n_layer=8, n_embd=12288, n_head=96)
            >>> pg = PatchableGraph.from_config(config, input_ids=torch.arange(5)[None])
            >>> pg.nodes["layers[7].attn.pattern"].shape
            torch.Size([1, 96, 5, 5])
        """
        import transformers

        if isinstance(config, Module):
            raise TypeError(
                f"from_config takes a config, or its name, not a {type(config).__name__}: give model.config, or wrap "
                "the model itself: PatchableGraph(model, *inputs)"
            )
        if not isinstance(config, transformers.PretrainedConfig):
            config = transformers.AutoConfig.from_pretrained(config)
        kind = model_class or getattr(transformers, (config.architectures or [""])[0], None)
        build = functools.partial(kind or transformers.AutoModelForCausalLM.from_config, config)
        model = built_without_weights(build, config.dtype).eval()
        try:
            return cls(model, *example_args, **example_kwargs)
        except Exception as error:
            if model_class is None:
                add_note(error, f"raised by a {type(model).__name__}, which model_class= exchanges for another")
            raise

    @classmethod
    def _of(cls, module: Module, root_frame: Frame, options: ExtractionOptions) -> PatchableGraph:
        """Returns a `PatchableGraph` over existing records, without a run of `module`."""
        return cls._around(CapturedModel(module, root_frame, options))

    @classmethod
    def _around(cls, captured: CapturedModel) -> PatchableGraph:
        result = object.__new__(cls)
        Module.__init__(result)
        result._set_up(captured)
        return result

    @classmethod
    def from_exported(cls, program: Any, *, flat_args_adapter: Any = None) -> PatchableGraph:
        """Returns a `PatchableGraph` of an exported program, with the module hierarchy of the model that was exported.

        The program runs once, on its own example inputs. Operations have the names that they have in the program
        (`relu_op` where a submodule is called `relu`), and inputs and outputs the structure that they had in the model.
        A module that is called several times is one with several calls (`name_0`, `name_1`) where the program does the
        same in each, else a module for each call (`name`, `name_call_1`). Calls that the program does not allow raise
        its own errors, before anything runs. The weights are copies of the program's.

        Args:
            program: The result of `torch.export.export`, or a file written by `torch.export.save`.
            flat_args_adapter: A `torch.export.FlatArgsAdapter` for calls with another structure than the program's.

        Raises:
            TypeError: It is neither an exported program nor the name of a file.
            FileNotFoundError: The file does not exist.
            GraphError: The file was not written by `torch.export.save`.
            GraphError: Torch is older than 2.6.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
            >>> program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(2, 3)), (torch.ones(1, 2),))
            >>> pg = PatchableGraph.from_exported(program)
            >>> with pg.patch({"sub_0.linear": ZeroPatch()}):
            ...     print(pg(torch.ones(1, 2)).tolist())
            [[0.0, 0.0, 0.0]]
        """
        from graphpatch_notebook.graphs.exported import exported_model

        return cls._of(*exported_model(program, flat_args_adapter), ExtractionOptions())

    def _set_up(self, captured: CapturedModel) -> None:
        state, module = self.__dict__, captured.module
        state["_captured"], state["_module"], state["_blocks"] = captured, module, None
        own = module.__dict__.get(GENERATION_CONFIG) if callable(getattr(module, "generate", None)) else None
        copies_config = captured.options.copy_transformers_generation_config
        state["_generation_config"] = copy.deepcopy(own) if copies_config else None

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> NodePath:
        """The root of the hierarchy, as a `NodePath`: tab completes its children, its repr is the tree.

        Example:
            >>> import torch
            >>> PatchableGraph(torch.nn.ReLU(), torch.ones(2)).graph
            <root>: ReLU
            ├─input: Tensor(2)
            ├─relu: Tensor(2)
            └─output: Tensor(2)
        """
        from graphpatch_notebook.inspection.node_path import NodePath

        return NodePath(self._captured.root, self._code_of)

    def browse(
        self,
        path: str | NodePath = "",
        *,
        inputs: Any = None,
        circuit: Circuit | AttributionGraph | None = None,
        pages: Mapping[str, FeaturePage] | None = None,
        views: Iterable[str] = (),
    ) -> Browser:
        """Returns a widget with the tree of the graph: inspect nodes and their code, choose patches by click, run.

        `%graphpatch` and other browsers of this graph share the chosen patches. Outside of notebooks, the tree is shown
        as text. With a tokenizer (`pg.tokenizer`), tokens are texts.

        Args:
            path: The path of the node or graph to open.
            inputs: Inputs for *Run*, instead of the example inputs: a tuple of arguments, a dict of keyword arguments,
                or one value.
            circuit: A circuit of this model. Its picture is shown above the tree, to patch components by click.
            pages: Pages of features, which the nodes of an attribution graph open: as for `show_circuit`.
            views: The names of views to show with the tree: "attention", "lens", and "graph", which draws the dataflow
                of the module at the path. What is selected in one is selected in all.

        Raises:
            UnknownPathError: The path does not exist; the message names the closest ones.
            ValueError: Unknown name of a view.
            GraphError: The front end of a source checkout is not built, or a view does not have anything to show.

        Example:
            >>> import torch
            >>> PatchableGraph(torch.nn.ReLU(), torch.ones(2)).browse()
            <root>: ReLU
            ├─input: Tensor(2)
            ├─relu: Tensor(2)
            └─output: Tensor(2)
        """
        from graphpatch_notebook.notebook.views.browser import browser_of
        from graphpatch_notebook.notebook.views.linked import workspace_of_user

        workspace = workspace_of_user(sys._getframe(1).f_globals)
        return browser_of(self, workspace, str(path), inputs=inputs, circuit=circuit, pages=pages, views=views)

    @property
    def nodes(self) -> NodeMap:
        """A read-only mapping of every patchable path to its `NodeMeta`, in execution order.

        Example:
            >>> import torch
            >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
            >>> {path: node.kind for path, node in pg.nodes.items()}
            {'input': 'input', 'weight': 'parameter', 'bias': 'parameter', 'linear': 'op', 'output': 'output'}
        """
        return self._captured.nodes

    @property
    def components(self) -> Components:
        """The standard components of the model by name (`layers[3].resid_post`), found in its graph.

        No list of architectures and no names of modules are used. What was not found is in `.missing`, with the reason.

        Example:
            >>> import torch
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
            >>> pg = PatchableGraph(model, torch.randn(1, 5, 8))
            >>> pg.components["layers[0].mlp_out"].path
            'layers_0.dropout2.output'
        """
        return find(self._captured.root)

    def _run_on(self, args: Sequence[Any], kwargs: Mapping[str, Any], patches: Mapping[str, Patch[Any]]) -> None:
        """Runs the model with patches, on copies of inputs; its state stays as it is."""
        unpatched = copy.copy(self)  # contexts belong to the object that they were entered with
        own_args, own_kwargs = copied((args, kwargs))
        patch_map: dict[str | NodePath, Patch[Any] | Sequence[Patch[Any]]] = dict(patches.items())
        with preserved(self._captured.root.module), torch.no_grad(), unpatched.patch(patch_map).quiet():
            unpatched(*own_args, **own_kwargs)

    @property
    def weights(self) -> Weights:
        """The weights of the components: ``pg.weights.W_Q[layer, head]``. See `Weights`.

        Example:
            >>> import torch
            >>> class Block(torch.nn.Sequential):
            ...     def forward(self, x):
            ...         return x + super().forward(x)
            >>> block = Block(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
            >>> PatchableGraph(torch.nn.Sequential(block), torch.ones(1, 3, 4)).weights.W_in[0].shape
            torch.Size([4, 8])
        """
        from graphpatch_notebook.components import Weights

        return Weights(self._captured.root)

    @property
    def _graph_module(self) -> GraphModule:
        """The hierarchy of graph modules, callable like the model."""
        return self._captured.hierarchy

    def verify(self, *args: Any, **kwargs: Any) -> VerificationReport:
        """Compares the graph of every frame with the model's own code on these inputs, bit for bit.

        Returns:
            A report on each frame, which can be printed. The inputs, the model's state (buffers, attributes) and that
            of the random generators do not change. Both run without patches; the report names the permanent ones.

        Example:
            >>> import torch
            >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
            >>> print(pg.verify(torch.ones(5, 2)))
            1 frame: 1 equal
        """
        from graphpatch_notebook.graphs.verification import verify

        self._refuse_graphs()
        self._captured.check_weights()
        report = verify(self._graph_module, args, kwargs)
        return dataclasses.replace(report, permanent=self._captured.permanent_paths)

    def report(self) -> str:
        r"""Returns what an issue about this model should say, as text: versions, the model's class, sizes and inputs.

        It also names the modules without a graph, and why the graphs of others may not hold for other inputs. There
        are no values of the model or of its inputs in it.

        Example:
            >>> import torch
            >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
            >>> print(*pg.report().splitlines()[2:], sep="\n")
            model: torch.nn.modules.linear.Linear (training), 9 parameters
            weights: 2 float32 on cpu
            inputs: input [1, 2]; calls of modules: 1, values: 5
        """
        from graphpatch_notebook.inspection.report import report

        return report(self._captured.root, self.nodes)

    def interpreter(self, on_node: Callable[[str, Any], object] | None = None) -> GraphInterpreter:
        """Returns an interpreter that runs the graphs node by node (`torch.fx.Interpreter`); errors name their node.

        It runs the graphs, not the model, without patches: to look into a graph, say one that differs in `verify`.
        Whether they equal the model on such inputs, `verify` finds out. The model's state, and that of the random
        generators, do not change.

        Args:
            on_node: Called with the path and the value of each node, when it is computed.

        Example:
            >>> import torch
            >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
            >>> _ = pg.verify(torch.ones(2))
            >>> pg.interpreter().run(torch.ones(2))
            tensor([1., 1.])
        """
        return GraphInterpreter(self._graph_module, on_node, self._refuse_patches)

    def _refuse_elsewhere(self) -> None:
        """Raises an error if the model does not run in this process alone."""
        if self._captured.sharding is not None:
            raise GraphError(
                "the graphs of a model that is sharded over processes do not run, and are not saved or copied: make "
                "the PatchableGraph of the model in one process (on the meta device, say)"
            )

    def _refuse_graphs(self) -> None:
        """Raises an error if the graphs here do not cover the whole model."""
        self._refuse_elsewhere()
        if any(frame.splices for frame in self._captured.root.walk()):
            raise GraphError(
                "its graphs do not have the spliced SAEs: take the PatchableGraph that splice() was called on"
            )

    def _refuse_patches(self) -> None:
        self._refuse_graphs()
        self._captured.check_weights()
        if self._captured.permanent:
            raise GraphError("graphs are interpreted without patches: interpret the graph that edit() was called on")
        self._refuse_context("graphs are interpreted without patches")

    def _refuse_context(self, what: str) -> None:
        if innermost(self._captured) is not None:
            raise GraphError(f"{what}: do that outside of patch()")

    def to_fx(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        allow_doubts: bool = False,
        any_size: bool = False,
    ) -> fx.GraphModule:
        """Returns a snapshot of the model, with the patches that are active, as a nested `torch.fx.GraphModule`.

        For `torch.compile(..., fullgraph=True)`, `torch.export` and other tools that work on graphs. The modules have
        the names that they have in the model and share its parameters and buffers; patches are modules in the graphs
        (`patch_mul`), whose values are read in each run. Compilers cannot trace `RecordPatch`.

        The graphs are a record of the run on the example inputs. The result was compared with this `PatchableGraph` on
        `args` and `kwargs`, bit for bit. It raises an error on inputs of another structure than the example's,
        and in another mode (`train()`, `eval()`) than the captured one. Of an object among the inputs, such
        as a static cache, it reads and writes the tensors; it raises an error if their shapes, or plain values in the
        object, differ from the example's.

        A snapshot does not follow the model: writes into weights reach it, and nothing else does. If an attribute, the
        config, a hook, a global or another value that the model's code reads changes, or the model gets another
        parameter or submodule, it returns the old numbers, without an error: call `to_fx` again. (What `compile`
        returns does raise an error then.)

        Args:
            args: Inputs to compare with, positional.
            kwargs: Inputs to compare with, by keyword.
            allow_doubts: Accept graphs of a model whose control flow depends on values (without it, the error lists
                where).
            any_size: Accept inputs of other sizes (with as many dimensions). Sizes that the model uses as plain numbers
                stay what they were: compare with the model on such inputs.

        Raises:
            TypeError: `args` is not a tuple, or `kwargs` is not a dict.
            GraphError: A part of the model does not have a graph, the graphs are in doubt, or the results differ.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
            >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(1, 2))
            >>> with pg.patch({"sub_0.linear": ZeroPatch()}):
            ...     compiled = torch.compile(pg.to_fx((torch.ones(1, 2),)), fullgraph=True, backend="eager")
            >>> compiled(torch.ones(1, 2)).tolist()
            [[0.0, 0.0]]
        """
        from graphpatch_notebook.patching import verified_fx_module

        self._refuse_graphs()
        given: Any = (args, kwargs or {})
        if not isinstance(given[0], (tuple, list)) or not isinstance(given[1], Mapping):
            raise TypeError(
                "to_fx takes inputs as a tuple, and those by name as a dict: pg.to_fx((x,), {'mask': mask})"
            )
        self._captured.check_weights()
        context = innermost(self._captured)
        plan = context.plan if context is not None else self._captured.permanent_plan
        entries = plan.entries if plan is not None else ()
        return verified_fx_module(
            self._graph_module,
            entries,
            self,
            args,
            dict(kwargs or {}),
            examples=self._captured.examples,
            allow_doubts=allow_doubts,
            any_size=any_size,
        )

    def compile(  # type: ignore[override]  # that of `nn.Module` compiles a module in place
        self,
        patches: Mapping[str | NodePath, Patch[Any] | Sequence[Patch[Any]]],
        *inputs: Any,
        allow_doubts: bool = False,
        any_size: bool = False,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
        **input_kwargs: Any,
    ) -> CompiledModel:
        """Returns the model with patches, compiled by `torch.compile` as one graph.

        The values of the patches are inputs of the compiled graph: each call reads them, and another value of the same
        shape and dtype does not compile again. Numbers may be any number. The result returns what this
        `PatchableGraph` returns in `with pg.patch(patches):`, within the tolerance of `torch.compile`. Patches that are
        active now are part of it, too.

        The graph is made by `to_fx`, which compares it with the patched model on `inputs`, bit for bit; what is said
        there holds for it, too. It is compiled at the first call.

        Args:
            patches: The patch map, of `ZeroPatch`, `AddPatch` and `ReplacePatch` (or other classes with
                `is_pure = True`) on tensors.
            inputs: Inputs to compare with, positional.
            allow_doubts: Accept graphs of a model whose control flow depends on values, as for `to_fx`. Models of
                transformers look at their masks, for example.
            any_size: Accept inputs of other sizes, as for `to_fx`.
            backend: The backend of `torch.compile`.
            mode: The mode of `torch.compile`: `"reduce-overhead"` uses CUDA graphs.
            input_kwargs: Inputs to compare with, by keyword.

        Raises:
            UnknownPathError, PatchMapError: The patch map is not valid.
            GraphError: A patch cannot be compiled (it runs Python code, keeps what it sees, is limited to steps or
                positions, or is on a number), a part of the model does not have a graph, the graphs are in doubt, or
                the results differ.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import AddPatch, PatchableGraph
            >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(1, 2))
            >>> steer = AddPatch(value=torch.tensor([1.0, 2.0]))
            >>> compiled = pg.compile({"sub_0.output": steer}, torch.ones(1, 2), backend="eager")
            >>> compiled(torch.ones(1, 2)).tolist()
            [[2.0, 3.0]]
            >>> steer.value = torch.tensor([10.0, 20.0])
            >>> compiled(torch.ones(1, 2)).tolist()
            [[11.0, 21.0]]
        """
        from graphpatch_notebook.patching import CompiledModel, CompiledPatches, check_compilable

        check_input_names(self._captured.root, input_kwargs, PatchableGraph.compile)
        entries = self._captured.entries_of(patches)
        check_compilable(entries)
        copies = CompiledPatches(patches, entries)
        with self.patch(copies.patch_map):
            context = innermost(self._captured)
            assert context is not None
            check_compilable(context.plan.entries)
            graph = self.to_fx(inputs, input_kwargs, allow_doubts=allow_doubts, any_size=any_size)
        return CompiledModel(graph, copies, self._captured.module, backend, mode)

    def _code_of(self, frame: Frame) -> str:
        found = self._captured.graph_of(frame)
        assert isinstance(found, CompiledGraphModule)
        return found.code

    # -- texts ---------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given, else an attribute of the model of this name, else `None`. It can be set.

        Example:
            >>> import torch
            >>> PatchableGraph(torch.nn.ReLU(), torch.ones(2)).tokenizer is None
            True
        """
        return self._captured.tokenizer or getattr(self._module, "tokenizer", None)

    @_or_of_the_model
    def to_tokens(self, texts: Text) -> Tensor:
        """Returns the token ids of a text, a chat, or several, of dtype int64 and of shape (batch, positions).

        Shorter texts are padded, on the `padding_side` of the tokenizer. If no tokenizer was given, and the model has a
        method of this name, that is called; likewise for `to_str_tokens` and `to_single_token`.

        Raises:
            GraphError: There is no tokenizer.
            ValueError: A text has no tokens.

        Example:
            >>> import torch
            >>> from types import SimpleNamespace
            >>> letters = SimpleNamespace(
            ...     encode=lambda text: [ord(letter) - 97 for letter in text],
            ...     decode=lambda ids: "".join(chr(97 + number) for number in ids),
            ... )
            >>> pg = PatchableGraph(torch.nn.Embedding(26, 2), "abc", tokenizer=letters)
            >>> pg.to_tokens("cab"), pg.to_str_tokens("cab"), pg.to_single_token("b")
            (tensor([[2, 0, 1]]), ['c', 'a', 'b'], 1)
            >>> pg(["ab", "ba"]).shape
            torch.Size([2, 2, 2])
        """
        return padded(self._captured.tokenizer, texts)[0]

    @_or_of_the_model
    def to_str_tokens(self, texts: Text | Tensor) -> Any:
        """Returns the text of each token of a text, or of token ids: a list, or lists in the form of a tensor of ids.

        Raises:
            GraphError: There is no tokenizer.

        Example:
            >>> import torch
            >>> from types import SimpleNamespace
            >>> words = ["the", "cat", "sat"]
            >>> tokenizer = SimpleNamespace(
            ...     encode=lambda text: [words.index(word) for word in text.split()], decode=lambda ids: words[ids[0]]
            ... )
            >>> pg = PatchableGraph(torch.nn.Embedding(3, 2), "the cat", tokenizer=tokenizer)
            >>> pg.to_str_tokens("cat sat"), pg.to_str_tokens(torch.tensor([0, 2]))
            (['cat', 'sat'], ['the', 'sat'])
            >>> pg.to_str_tokens(torch.tensor([[0, 1, 9]]).argmax())
            'sat'
        """
        if (isinstance(texts, Tensor) and texts.ndim > 1) or (isinstance(texts, list) and not is_one_text(texts)):
            several: Any = texts
            return [self.to_str_tokens(each) for each in several]
        ids: Any = texts.tolist() if isinstance(texts, Tensor) else encoded(self._captured.tokenizer, texts)
        if isinstance(ids, int):
            return token_text(self._captured.tokenizer, ids)
        return [token_text(self._captured.tokenizer, number) for number in ids]

    @_or_of_the_model
    def to_single_token(self, text: str) -> int:
        """Returns the id of the token that a text is, without the tokenizer's special tokens.

        Raises:
            GraphError: There is no tokenizer.
            ValueError: The text is several tokens, or none.

        Example:
            >>> import torch
            >>> from types import SimpleNamespace
            >>> words = ["the", "cat", "sat"]
            >>> tokenizer = SimpleNamespace(
            ...     encode=lambda text: [words.index(word) for word in text.split()], decode=lambda ids: words[ids[0]]
            ... )
            >>> pg = PatchableGraph(torch.nn.Embedding(3, 2), "the cat", tokenizer=tokenizer)
            >>> pg.to_single_token("sat")
            2
        """
        found = encoded(self._captured.tokenizer, text, is_whole=False)
        if len(found) != 1:
            raise ValueError(f"{text!r} is {len(found)} tokens, not one: {found}")
        return found[0]

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        file: str | os.PathLike[str] | IO[bytes],
        *,
        check: Sequence[tuple[Sequence[Any], dict[str, Any]]] = (),
    ) -> None:
        """Writes graphs, structure and weights to one file, without pickle: JSON in a safetensors file.

        The graphs are snapshots of the model as it was captured. The loaded graph accepts inputs of other sizes where
        the model's code, as far as the capture saw, takes the same branches. Calls of modules whose graph may differ
        from them are not stored, with a `GraphPatchWarning` that has the reason. Active patches have no effect.

        Args:
            file: The name of the file, or an open binary file such as an `io.BytesIO`.
            check: Calls (arguments, keyword arguments) on which to compare what is loaded with the model, bit for bit.

        Raises:
            SerializationError: Graph and model differ on one of the `check` calls; or a graph that *is* its module
                (edited, or custom) cannot be stored. Then nothing is written.
            FileNotFoundError, IsADirectoryError: The folder does not exist, or `file` is a folder.
            TypeError: `file` is neither the name of a file nor an open binary file.

        Example:
            >>> import tempfile, torch
            >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pg.save(f"{folder}/linear.safetensors")
            ...     loaded = PatchableGraph.load(f"{folder}/linear.safetensors")
            >>> torch.equal(loaded(torch.ones(4, 2)), pg(torch.ones(4, 2)))
            True
        """
        from graphpatch_notebook import files

        self._refuse_graphs()
        self._captured.check_weights()
        if self._captured.permanent:
            raise GraphError(
                "a graph with permanent patches is saved in two files: save the graph that edit() was called on, and "
                "the patches with save_patches(file, patches); then PatchableGraph.load(...).edit(load_patches(...))"
            )
        edited = own_graphs(self._graph_module) if self._captured.runs_own_graphs else ()

        def unpatched(*args: Any, **kwargs: Any) -> Any:
            # A context belongs to the object that it was entered with, not to its copies.
            return copy.copy(self)(*args, **kwargs)

        files.save(self._captured.root, edited, file, check, unpatched, self._of)

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | IO[bytes],
        *,
        model: Module | None = None,
        allow: Iterable[str] = (),
    ) -> PatchableGraph:
        """Returns the `PatchableGraph` that `save` wrote to `file`. The model's classes are not needed.

        Nothing in the file is run, and nothing is imported except what `allow` names. The result raises an error for
        calls that its graphs do not cover: other flags, other inputs than the example had, sizes that take another
        branch in the model's code.

        Args:
            file: The name of the file, or an open binary file, which is read from its current position.
            model: The model itself. It runs the frames that could not be stored. Its weights are used.
            allow: Names of functions and classes outside of torch that the graphs may use (`"mylib.my_op"`), or of
                whole packages (`"mylib"`). Loading imports these, which runs their code.

        Raises:
            SerializationError: The file was not written by `save`, is damaged, uses names that are not allowed, or is
                not of this `model`.
            FileNotFoundError, IsADirectoryError: The file does not exist, or is a folder.

        Example:
            >>> import tempfile, torch
            >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pg.save(f"{folder}/linear.safetensors")
            ...     loaded = PatchableGraph.load(f"{folder}/linear.safetensors")
            >>> list(loaded.nodes) == list(pg.nodes)
            True
        """
        from graphpatch_notebook import files

        module, root, unstored = files.load(file, model, allow)
        return cls._around(CapturedModel(module, root, ExtractionOptions(), unstored=unstored))

    @property
    def unstored(self) -> dict[str, str]:
        """The paths of frames that the file has no graph of, with the reasons; empty if it was not loaded from a file.

        Example:
            >>> import torch
            >>> PatchableGraph(torch.nn.ReLU(), torch.ones(2)).unstored
            {}
        """
        return dict(self._captured.unstored)

    # -- patching ------------------------------------------------------------------------------------------------------

    def patch(
        self, patch_map: Mapping[str | NodePath, Patch[Any] | Sequence[Patch[Any]]], *, strict: bool = False
    ) -> PatchContext:
        """Returns a context manager in which calls of this object, and of its methods, run with these patches.

        Several patches on one path run in order. Contexts nest and add up: patches of inner ones run after those of
        outer ones. A context is active in the thread (or task) that entered it. Calls of the original model are never
        affected, and after the block the model is as it was. Patches with `steps` or `positions` only have an effect at
        some steps of a generation, or positions of the sequence: see `Patch`.

        Args:
            patch_map: From node paths (strings or `NodePath` objects) to a patch or a list of patches. A path may be a
                pattern, in which `*` is any text within a name, and `**` any text: `"h_*.mlp.output"`. What is a path
                is never taken for a pattern. Patches that change the value at a path of its own, and an empty list,
                which means no patch, replace those of patterns, and of names of several values, there.
            strict: Whether a patch that never fires during a call is an error rather than a warning.

        Raises:
            UnknownPathError: On entry; a `KeyError`: paths that lead to no value. The message names all of them.
            PatchMapError: On entry; a `ValueError`. Likewise, where all paths exist.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import AddPatch, PatchableGraph, ProbePatch
            >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
            >>> probe = ProbePatch()
            >>> with pg.patch({"relu": [AddPatch(value=1.0), probe]}):
            ...     _ = pg(torch.ones(2))
            >>> probe.activation
            tensor([2., 2.])
        """
        return PatchContext(self._captured, patch_map, is_strict=strict)

    def record(
        self,
        patterns: str | NodePath | Iterable[str | NodePath],
        *inputs: Any,
        positions: PositionSelection | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        stop_at_last: bool = True,
        **input_kwargs: Any,
    ) -> Recording:
        """Returns the values at several paths, from one forward of the model that ends after the last of them.

        Active patches have their effect. A value that the model does not compute on these inputs is missing in the
        result, with a `GraphPatchWarning` of kind `not fired`; then the forward runs to its end.

        Args:
            patterns: A path, a pattern, or several. In a pattern, `*` is any text within a name, and `**` any text:
                `"transformer.h_*.output"`, `"**.attn.z"`. What is a path is never taken for a pattern.
            *inputs: Inputs of the model, positional.
            positions: The positions in the sequence to record, in this order, as for patches; negative ones count from
                the end. `None` for all.
            dtype: The dtype to convert the values to.
            device: The device to move the values to.
            stop_at_last: Whether the forward ends after the last value.
            **input_kwargs: Inputs of the model, by keyword.

        Returns:
            A mapping from paths to values: the model's own tensors unless `positions`, `dtype` or `device` are given.

        Raises:
            UnknownPathError: A path does not exist, or a pattern matches nothing; nothing ran.
            PatchMapError: A value does not have `positions`; nothing ran.
            PatchValueError: The sequence does not have one of the positions.
            ExperimentError: A keyword is a misspelled option; nothing ran.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import PatchableGraph
            >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(1, 2))
            >>> pg.record(["input", "sub_*.output"], torch.ones(1, 2))
            <Recording of 3 values>
            input: Tensor(1, 2)
            sub_0.output: Tensor(1, 2)
            sub_1.output: Tensor(1, 2)
        """
        check_input_names(self._captured.root, input_kwargs, PatchableGraph.record)
        run = functools.partial(self, *inputs, **input_kwargs)
        return record(
            self._captured, run, patterns, positions=positions, dtype=dtype, device=device, stop_at_last=stop_at_last
        )

    def run_until(self, path: str | NodePath, *inputs: Any, **input_kwargs: Any) -> Any:
        """Returns the value at a path, from a forward of the model that ends there: what `StopPatch` does.

        Args:
            path: The path.
            *inputs: Inputs of the model, positional.
            **input_kwargs: Inputs of the model, by keyword.

        Raises:
            UnknownPathError: The path does not exist; nothing ran.
            PatchNotFiredError: The model did not compute this value.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import PatchableGraph
            >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax(-1)), torch.ones(2))
            >>> pg.run_until("sub_0.output", torch.tensor([-1.0, 3.0]))
            tensor([0., 3.])
        """
        check_input_names(self._captured.root, input_kwargs, PatchableGraph.run_until, like=PatchableGraph.record)
        with self.patch({path: StopPatch()}, strict=True):
            return self(*inputs, **input_kwargs)

    def edit(self, patch_map: Mapping[str | NodePath, Patch[Any] | Sequence[Patch[Any]]]) -> PatchableGraph:
        """Returns a `PatchableGraph` of the same model whose calls all run with these patches.

        This one, and the model, stay as they are; nothing runs, and no weight is copied. Patches of
        `with edited.patch(...)` run after the permanent ones, and so do those of sweeps and experiments. The result can
        be edited again, which adds patches. The patches themselves are shared: a tensor in a patch may be trained.

        Args:
            patch_map: As for `patch`.

        Raises:
            UnknownPathError: A `KeyError`: paths that lead to no value. The message names all of them.
            PatchMapError: A `ValueError`. Likewise, where all paths exist.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import AddPatch, PatchableGraph
            >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
            >>> edited = pg.edit({"relu": AddPatch(value=1.0)})
            >>> edited(torch.ones(2)), pg(torch.ones(2))
            (tensor([2., 2.]), tensor([1., 1.]))
        """
        result = self._around(self._captured.edited(patch_map))
        result.__dict__["_generation_config"] = copy.deepcopy(self.__dict__["_generation_config"])
        return result

    def splice(self, saes: Any, *, error: bool = True, across: bool = False, name: str = "sae") -> PatchableGraph:
        """Returns a `PatchableGraph` of the same model with sparse autoencoders (SAEs), whose parts are nodes.

        Those of an SAE at `layers[5].resid_post` are `layers[5].resid_post.sae.latents`, `.error`, `.reconstruction`,
        and `.value` and `.output`, what it reads and what follows reads: values like any other, for patches, records
        and experiments. `.latents[7]` is a feature, `.latents[*]` is each of them. Until one of them is patched, the
        numbers and gradients are those of the model, and the SAE does not run.

        The SAE reads the value as patched. A patched part has the effect `value + (reconstruction - decoded) +
        (error - residue)`, in which `decoded` and `residue` are what reconstruction and error are without patches. So
        the gradient of latents is that through their reconstruction, the gradient of the error is that of the output,
        and what comes before the SAE has the gradients that it has without it.

        This graph and the model stay as they are; no weight is copied. In the block of `with pg.splice(...):`, `pg`
        itself is what is returned, in all threads. The model runs once on the example inputs, to the last value that is
        read, without gradients, and each SAE on these values.

        Args:
            saes: A dict from paths to SAEs. An SAE is any object with methods `encode`, from a tensor of shape
                `(..., size)` to latents `(..., features)`, and `decode`, back: those of SAELens and dictionary_learning
                are taken as they are. Of a transcoder, the key is a pair: the value that it encodes, and the one that
                it replaces, which comes later. An attribute `W_skip`, `(out, in)`, adds a map of what it encodes.
                Patterns and names of several values take the SAE to each. In place of a dict, SAEs whose
                `cfg.metadata` has a `hook_name` (and `hook_name_out`) of TransformerLens.
            error: Whether the error of the reconstruction is added; else the model runs on the reconstruction.
            across: Whether each SAE works across all values that its key means: `encode` gets, and `decode` returns, a
                tensor of shape (places, rows, size). If latents have the shape (places, rows, features), it is a
                cross-layer transcoder: those of a place depend on what is read there, and what is written at a place
                on those until there. If it is (rows, features), it is a crosscoder: its latents are at the last of the
                values, and it writes there only, since they are not known before.
            name: What paths call the SAE; several at one value need a name each.

        Raises:
            UnknownPathError: There is no such value.
            PatchMapError: Something is not an SAE, or not for this value.
            PatchValueError: `encode` or `decode` returns another shape.
            GraphError: The model has no weights or example inputs, is sharded over processes, or runs edited graphs.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
            >>> class SparseAutoencoder(torch.nn.Linear):
            ...     def encode(self, value):
            ...         return torch.relu(self(value))
            ...     def decode(self, latents):
            ...         return latents @ self.weight
            >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Tanh()), torch.ones(1, 2))
            >>> spliced = pg.splice({"sub_0.output": SparseAutoencoder(2, 8)})
            >>> spliced.nodes["sub_0.sae.latents"].shape
            torch.Size([1, 8])
            >>> with spliced.patch({"sub_0.sae.latents": ZeroPatch(slice=(..., 3))}):
            ...     _ = spliced(torch.ones(1, 2))
            >>> with pg.splice({"sub_0.output": SparseAutoencoder(2, 8)}):
            ...     shape = pg.record("sub_0.sae.latents", torch.ones(5, 2))["sub_0.sae.latents"].shape
            >>> shape, "sub_0.sae.latents" in pg.nodes
            (torch.Size([5, 8]), False)

        Source:
            Marks et al., Sparse feature circuits (2024), for the error as a node.
        """

        def recorded(paths: Sequence[str]) -> Mapping[str, Tensor]:
            probes = {path: ProbePatch() for path in paths}
            examples = self._captured.examples or ExampleInputs((), {})
            if not examples.args and not examples.kwargs and any(self._captured.root.inputs()):
                raise GraphError("a splice needs the example inputs, which a loaded graph does not have")
            self._run_on(examples.args, examples.kwargs, probes)
            return {path: probe.activation for path, probe in probes.items()}

        result = self._around(self._captured.spliced(saes, recorded, name=name, has_error=error, across=across))
        result.__dict__["_blocks"] = self, []
        return result

    def __enter__(self) -> PatchableGraph:
        if self._blocks is None:
            raise GraphError("only what pg.splice(...) returns is a context, and pg.patch(...)")
        unspliced, before = self._blocks
        unspliced._refuse_context("SAEs are spliced")
        before.append(unspliced._captured)
        unspliced.__dict__["_captured"] = self._captured
        return self

    def __exit__(self, *_: object) -> None:
        assert self._blocks is not None
        unspliced, before = self._blocks
        unspliced.__dict__["_captured"] = before.pop()

    def sweep(
        self,
        axes: Mapping[str, Any],
        make_patches: Callable[..., Mapping[Any, Patch[Any] | Sequence[Patch[Any]]]],
        *inputs: Any,
        metric: Callable[[Any], Any],
        batch: int | str | None = "auto",
        progress: bool = True,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_key: str = "",
        executor: Any = None,
        recipe: Any = None,
        **input_kwargs: Any,
    ) -> DataArray:
        """Returns the metric for each combination of the values of `axes`, as an `xarray.DataArray`.

        A sweep of pure functions is the loop `for ...: with pg.patch(make_patches(...)): metric(pg(*inputs))`, under
        `torch.no_grad()`. Cells share forwards as rows of a batch if their patches declare that they are pure:
        `ZeroPatch`, `AddPatch`, `ReplacePatch`, `CustomPatch(..., by_row=True)`, and kinds of yours with
        `is_pure = True`. Cells with other patches run alone, just after their patches were made. Patches are copied
        when they are made, so you may reuse tensors and patches.

        What the cells have in common is computed once: modules that ran before the first patched value return what
        they returned without patches, and language models do not compute logits that the metric does not read. In
        batches the last bits may differ; `batch=None` is the loop. One of the cells that share forwards runs again
        alone, and so does the first one at the end: if a number differs by more than rounding, a `GraphPatchWarning`
        names the cell, and the loop is run. `attrs["remarks"]` says why cells ran one by one.

        If a cell fails, it is NaN, `attrs["errors"]` has the reason, and the other cells run; one `GraphPatchWarning`
        is raised at the end.

        Args:
            axes: The dimensions of the result: a dict from names to values.
            make_patches: Maps a value of each axis to the patch map of a cell: a pure function, perhaps called twice.
            *inputs: Positional inputs of the model, which may write into them: each run gets a copy.
            metric: Maps the output of the model to a number, an array of numbers, or a dict from names to numbers: a
                pure function. It is first called on the run without patches.
            batch: The number of cells in one forward, `"auto"`, or `None` for one cell at a time.
            progress: Whether to show the progress, the cells per second, and the remaining time.
            checkpoint: The name of a folder to which finished cells are saved, forward by forward. After an interrupt,
                a crash or a power cut, the same call continues from it; cells that failed run again. The folder of
                another sweep (with other axes, patches, metric, inputs, weights, metric without patches, or
                `checkpoint_key`) is refused and left unchanged. As with `executor`, all patch maps are made before any
                cell runs.
            checkpoint_key: A text that identifies the version of your functions; change it when you change them or what
                they refer to. `checkpoint` requires it unless patches are `ZeroPatch`, `AddPatch` and `ReplacePatch`.
            executor: Runs the chunks, in any order: an executor as in `concurrent.futures`, whose method `submit`
                returns a future. Threads share the graph of this process. Other executors (processes, `joblib`'s, a
                Dask `Client`, a `RayExecutor`) need a `recipe`; weights are not sent to workers. If a worker is lost,
                its chunk is submitted once more; cells that are lost again are NaN, with the reason. Each cell needs
                probes of its own.
            recipe: How another process gets the graph: a function without arguments that returns it, with the same
                mode, dtype and weights as here, or the name of a file written by `pg.save`. Each process calls it once.
            **input_kwargs: Keyword inputs of the model.

        Raises:
            KeyboardInterrupt: On an interrupt while cells run; its `.result` has the
                finished cells.
            ExperimentError: Arguments are not valid (raised before any cell runs), or all cells failed.
            UnknownPathError, PatchMapError: `pg.patch` would refuse a path or patch. Raised before any cell runs, if
                all cells share forwards.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
            >>> pg = PatchableGraph(torch.nn.Linear(2, 2), torch.ones(1, 2))
            >>> result = pg.sweep(
            ...     {"unit": range(2)},
            ...     lambda unit: {"output": ZeroPatch(slice=(..., unit))},
            ...     torch.ones(1, 2),
            ...     metric=lambda output: (output == 0).sum(),
            ...     progress=False,
            ... )
            >>> result.dims, result.values
            (('unit',), array([1., 1.]))
        """
        from graphpatch_notebook.experiments.engine.inputs import Inputs
        from graphpatch_notebook.experiments.methods.sweeps import run_sweep

        return run_sweep(
            self, axes, make_patches, Inputs(inputs, input_kwargs),
            metric=metric, batch=batch, progress=progress, checkpoint=checkpoint,
            checkpoint_key=checkpoint_key, executor=executor, recipe=recipe,
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model, with the active patches if there are any."""
        return self._call(self._module, *self._captured.tokenized(args, kwargs))

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self._captured
        context = innermost(model)
        if context is None and model.has_patched_calls:
            context = PatchContext(model, {}, is_of_one_call=True)
            with context if model.permanent else context.quiet():
                return self._call(function, args, kwargs)
        model.check_weights()
        name = "forward" if isinstance(function, Module) else getattr(function, "__name__", "")
        with calling(model.root, name):
            if model.sharding is not None:
                model.sharding.check_call(name, args, kwargs, () if context is None else context.plan.entries)
            try:
                return function(*args, **kwargs) if context is None else context.call(function, args, kwargs)
            except Exception as error:
                call_sites.hide_frames(error)
                if name in ("forward", "generate") and args and is_text(args[0]):
                    add_note(error, NO_TOKENIZER)
                raise

    # -- being the model -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or "_module" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} yet")
        config = self.__dict__["_generation_config"]
        if name == GENERATION_CONFIG and config is not None:
            return config
        try:
            value = getattr(self._module, name)
        except AttributeError as error:
            if name not in METHODS:
                raise
            raise AttributeError(f"{error}; for {name!r} of another tool, write {METHODS[name]}") from None
        if inspect.ismethod(value) and value.__self__ is self._module:
            function = generating_with(config, value) if name == "generate" and config is not None else value

            @functools.wraps(value)
            def method(*args: Any, **kwargs: Any) -> Any:
                if name == "generate":
                    args, kwargs = self._captured.tokenized(args, kwargs, is_generation=True)
                return self._call(function, args, kwargs)

            return method
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = isinstance(getattr(type(self), name, None), property) and name not in ("training", "tokenizer")
        if name in _OWN or is_own:
            raise AttributeError(f"{name!r} of a PatchableGraph cannot be set")
        if "_module" not in self.__dict__:
            super().__setattr__(name, value)
        elif name == "tokenizer":
            check_tokenizer(value)
            self._captured.tokenizer = value
        elif name == GENERATION_CONFIG and self.__dict__["_generation_config"] is not None:
            self.__dict__["_generation_config"] = value
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._module)})

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchableGraph:
        self._refuse_elsewhere()
        result = memo[id(self)] = self._around(copy.deepcopy(self._captured, memo))
        result.__dict__["_generation_config"] = copy.deepcopy(self.__dict__["_generation_config"], memo)
        return result

    def __copy__(self) -> PatchableGraph:
        return self._around(self._captured.edited())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GraphError(
            "a PatchableGraph cannot be pickled, and so not be saved by torch.save: use pg.save(file) and "
            "PatchableGraph.load(file); for the weights alone, torch.save(pg.state_dict(), file)"
        )

    def _repr_html_(self) -> str:
        return self.graph._repr_html_()

    def __repr__(self) -> str:
        inside = repr(self._graph_module).replace("\n", "\n  ")
        paths = self._captured.permanent_paths
        permanent = f"\n  permanent patches: {', '.join(paths)}" if paths else ""
        return f"{type(self).__name__}(\n  (_graph_module): {inside}{permanent}\n)"


def captured(pg: PatchableGraph) -> CapturedModel:
    """Returns the captured model in a `PatchableGraph`. For the rest of this package, not for users.

    A function, since an attribute would hide one of the model's.
    """
    return pg.__dict__["_captured"]  # type: ignore[no-any-return]
