"""The widget of the tree browser in the kernel. Its front end is js/.

front end  -- expanded, selected, query, shows_sizes -->  traits, validated
front end  -- requests ---------------------------------->  `Browser._handlers`, which include those of all views
"""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import traitlets
from msgspec import Meta
from torch import Tensor

from graphpatch_notebook.errors import SessionError, UnknownPathError
from graphpatch_notebook.inspection.node_path import Location, NodePath, location_of
from graphpatch_notebook.notebook.browser.details import details
from graphpatch_notebook.notebook.browser.skeleton import HIDDEN, SIZE, Skeleton, skeleton_of
from graphpatch_notebook.notebook.browser.static_tree import static_tree
from graphpatch_notebook.notebook.display.circuit import picture_of, static_circuit
from graphpatch_notebook.notebook.messages import ActivationRequest, Empty, JobRef, Natural
from graphpatch_notebook.notebook.run.runs import RunResult
from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.linked import LinkedView, session_for_view
from graphpatch_notebook.notebook.views.requests import Answer, Handlers, RequestContext, interrupt_job, job_status
from graphpatch_notebook.notebook.views.selection import item_of
from graphpatch_notebook.patchable_graph import PatchableGraph, captured

if TYPE_CHECKING:
    from xarray import DataArray

    from graphpatch_notebook.experiments.circuits.circuit import Circuit


class Browser(LinkedView):
    """The tree of a graph, to inspect and to patch by clicking. `pg.browse()` returns it.

    All browsers of a graph and the magics share the chosen patches: a change in one appears in all. A browser keeps its
    graph alive only if the user does not have a variable with the graph, and only until it is closed. Views of the
    graph follow what is selected in the tree, and the tree follows them.

    A notebook shows the widget, together with static HTML for readers without a kernel. Elsewhere, it prints the tree.

    Attributes:
        views: The views that are shown above the tree, as `pg.browse(views=("attention",))` asks for them.

    Example:
        >>> import torch
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
        >>> browser = pg.browse("relu")
        >>> browser.selected_path
        'relu'
        >>> browser.set_scores({"relu": 0.5}, name="effect")
        >>> browser.close()
    """

    skeleton = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    expanded: Any = traitlets.List(traitlets.Int(), default_value=None, allow_none=True).tag(sync=True)
    selected = traitlets.Int().tag(sync=True)
    query = traitlets.Unicode().tag(sync=True)
    shows_sizes = traitlets.Bool().tag(sync=True)
    components = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    scores = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    scores_name = traitlets.Unicode(read_only=True).tag(sync=True, echo_update=False)
    run = traitlets.Dict(default_value=None, allow_none=True, read_only=True).tag(sync=True, echo_update=False)
    circuit = traitlets.Dict(default_value=None, allow_none=True, read_only=True).tag(sync=True, echo_update=False)

    FRONT_END: ClassVar[Mapping[str, Any]] = {
        **LinkedView.FRONT_END,
        "expanded": list[Natural] | None,
        "selected": Natural,
        "query": Annotated[str, Meta(max_length=10_000)],
        "shows_sizes": bool,
    }
    VIEW: ClassVar[str] = "tree"

    def __init__(
        self,
        graph: PatchableGraph,
        session: Session,
        workspace: Workspace,
        path: str = "",
        views: Iterable[LinkedView] = (),
    ) -> None:
        skeleton = skeleton_of(graph)
        row = skeleton.row(path)
        self._shown = weakref.ref(skeleton)
        self._scores: dict[str, float] = {}
        self._circuit: Circuit | None = None
        self._has_components = False
        self._opened_at = skeleton.path(row)
        self.views = tuple(views)
        super().__init__(graph, session, workspace, selected=row, **_opened(skeleton, row))

    # -- public methods ------------------------------------------------------------------------------------------------

    @property
    def selected_path(self) -> str | None:
        """The path of the selected row: empty for the model, `None` for a module that was never called."""
        skeleton = self._skeleton()
        if skeleton.kind(self.selected) == "unused":
            return None
        return skeleton.path(self.selected)

    def select(self, path: str | NodePath) -> None:
        """Selects the row of a node or graph, and expands the rows above it.

        Raises:
            UnknownPathError: The path does not exist; the message lists the nearest paths.
        """
        skeleton = self._skeleton()
        row = skeleton.row(str(path))
        for name, value in _opened(skeleton, row, self.expanded or ()).items():
            self.set_trait(name, value)
        self.selected = row
        self.selection = [item_of(str(path))] if row else []

    def set_scores(self, scores: Mapping[str | NodePath, Any] | DataArray, name: str | None = None) -> None:
        """Colors the rows by scores, which replace any previous scores.

        Args:
            scores: Maps paths of nodes, of values in containers, or of graphs to numbers: of Python or numpy, or
                tensors without dimensions. Or an `xarray.DataArray` with the dimension `path`, as `attribute` returns
                it. NaN means that a path has no score.
            name: The name of the scores. Default: the name of the array, or "score".

        Raises:
            UnknownPathError: Some paths do not exist; the message lists the nearest paths. Nothing was changed.
            TypeError: A score is not a number.
            ValueError: A score is infinite, or the array has other dimensions than `path`.
        """
        skeleton = self._skeleton()
        self._scores = scores_by_path(scores, skeleton)
        with self.hold_sync():
            self.set_trait("scores_name", str(name or getattr(scores, "name", None) or "score"))
            self.renew("scores")

    def clear_scores(self) -> None:
        """Removes the scores."""
        self._scores = {}
        with self.hold_sync():
            self.set_trait("scores_name", "")
            self.renew("scores")

    def set_circuit(self, circuit: Circuit | None) -> None:
        """Shows the picture of a circuit above the tree; `None` removes it.

        A component that is pinned in the picture becomes the selected row, and has a button to patch it.

        Args:
            circuit: A circuit of this graph's model.
        """
        self._circuit = circuit
        self.renew("circuit")

    @property
    def last_run(self) -> RunResult | None:
        """The results of the last run in any browser of the graph; `None` before the first one."""
        return self._runs.last

    # -- messages of the front end -------------------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        return {
            **super()._handlers(),
            "details": lambda _, payload: (details(self.graph, self._rows(), payload.row), []),
            "components": self._find_components,
            "activation": self._activation,
            "activation_status": job_status,
            "activation_interrupt": interrupt_job,
            "activation_close": _activation_close,
        }

    def _find_components(self, *_: Any) -> Answer:
        self._has_components = True
        self.renew("components")
        return Empty(), []

    def _activation(self, context: RequestContext, payload: ActivationRequest) -> Answer:
        skeleton, row = self._rows(), payload.row
        path = skeleton.path(row) if row < len(skeleton) else ""
        if not path:
            raise SessionError(f"row {row} is not a node, so it does not have an activation")
        return context.runs.status(
            context.runs.start_activation(path, payload.plane, payload.is_patched, payload.inputs)
        )

    @traitlets.validate("expanded", "selected", "query")
    def _checked_trait(self, proposal: Any) -> Any:
        return self._checked(proposal)

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        skeleton = self._shown()
        count = len(skeleton) if skeleton is not None else 0
        rows = {"selected": [value], "expanded": value or []}.get(name, [])
        if any(row >= count for row in rows):
            raise traitlets.TraitError(f"{name!r} must be rows of the tree, from 0 to {count - 1:,}")

    # -- values of traits ----------------------------------------------------------------------------------------------

    def _rows(self) -> Skeleton:
        """Returns the rows that the front end shows."""
        before = self._shown()
        skeleton = self._skeleton()
        if skeleton is not before:
            raise SessionError("the graph was edited, and the tree was updated; check the row and try again")
        return skeleton

    def _skeleton(self) -> Skeleton:
        """Returns the current rows, and updates the front end if they have changed."""
        skeleton = skeleton_of(self.graph)
        if skeleton is not self._shown():
            with self._lock:
                self._shown = weakref.ref(skeleton)
                self._has_components = False
                with self.hold_sync():
                    self.expanded, self.selected = None, 0
                    self.renew(*self._makers())
        return skeleton

    def _row_of(self, path: str) -> int | None:
        skeleton = self._shown() or skeleton_of(self.graph)
        return skeleton.find(path)

    def _makers(self) -> Mapping[str, Callable[[], Any]]:
        skeleton = self._shown() or skeleton_of(self.graph)
        components = self._has_components
        return {
            **super()._makers(),
            "skeleton": lambda: skeleton.data,
            "components": lambda: skeleton.packed_components() if components else b"",
            "scores": lambda: packed_scores(self._scores, skeleton) if self._scores else b"",
            "run": lambda: self._runs.state,
            "circuit": lambda: None if self._circuit is None else picture_of(self._circuit, skeleton.find),
        }

    def _about(self) -> dict[str, Any]:
        skeleton = self._shown() or skeleton_of(self.graph)
        return super()._about() | {
            "module": type(captured(self.graph).module).__name__,
            "nodes": skeleton.node_count,
            "arguments": self._runs.written(),
            "has_given_inputs": self._runs.is_given,
            "no_inputs": self._runs.no_inputs,
            "has_tokenizer": self._runs.tokenizer is not None,
            "patch_kinds": [msgspec.to_builtins(kind.message()) for kind in PATCH_KINDS.values()],
        }

    def follow_session(self) -> None:
        """Called after each change of the chosen patches."""
        with suppress(SessionError):
            self._skeleton()
        super().follow_session()

    def follow_runs(self) -> None:
        """Called when a run starts or ends, or the inputs of runs change."""
        self.renew("run", "about")

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Saves the tree as a page of HTML, with the names of the components.

        Args:
            file: The file to write; it replaces a file of that name.

        Raises:
            ValueError: The widget is closed.
        """
        if self.comm is not None:
            self._find_components()
        super().save_html(file)

    # -- display -------------------------------------------------------------------------------------------------------

    def _ipython_display_(self, **options: Any) -> None:
        for view in self.views:
            view._ipython_display_(**options)
        super()._ipython_display_(**options)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        place = self._place()
        if len(printer.stack) > 1 or place is None:
            printer.text(f"<Browser of {self._session.origin.graph}>")
        else:
            place._repr_pretty_(printer, cycle)

    def __repr__(self) -> str:
        place = self._place()
        return f"<Browser of {self._session.origin.graph}, which was deleted>" if place is None else repr(place)

    def _place(self) -> NodePath | None:
        """Returns the node or graph that was opened; `None` if it does not exist any more."""
        with suppress(SessionError, UnknownPathError):
            root = self.graph.graph
            return root[self._opened_at] if self._opened_at else root
        return None

    def _static_html(self) -> str | None:
        with suppress(SessionError):
            graph, name = self.graph, self._session.origin.graph
            root = Location.of_root(captured(graph).root).entry()
            title = f"{name}: {type(captured(graph).module).__name__}, {skeleton_of(graph).node_count:,} nodes"
            circuit = "" if self._circuit is None else f"{static_circuit(self._circuit)}\n"
            return circuit + static_tree(title, root, self._session.chosen.patches)
        return None


def _activation_close(context: RequestContext, payload: JobRef) -> Answer:
    context.runs.close_activation(payload.id)
    return Empty(), []


def _opened(skeleton: Skeleton, row: int, before: Iterable[int] = ()) -> dict[str, Any]:
    """Returns the traits that make a row visible; empty for the root."""
    if not row:
        return {}
    above: list[int] = []
    found: dict[str, Any] = {}
    here: int | None = row
    while here is not None:
        if skeleton.flags(here) & (SIZE | HIDDEN):
            found["shows_sizes"] = True
        here = skeleton.parent(here)
        above += [] if here is None else [here]
    return {**found, "expanded": sorted({*before, *above})}


def browser_of(
    graph: PatchableGraph,
    workspace: Workspace,
    path: str = "",
    *,
    inputs: Any = None,
    typed: str | None = None,
    tokenizer: Any = None,
    circuit: Circuit | None = None,
    views: Iterable[str] = (),
) -> Browser:
    """Returns a new browser of a graph: `pg.browse`. `typed` are the inputs as Python code, evaluated for each run.

    All browsers of a graph share the chosen patches and the runs.
    """
    # The runs exist as long as something refers to them.
    session, _runs = session_for_view(graph, workspace, inputs=inputs, typed=typed, tokenizer=tokenizer)
    shown = [_view(name, graph, workspace) for name in ([views] if isinstance(views, str) else views)]
    browser = Browser(graph, session, workspace, path, shown)
    browser.set_circuit(circuit)
    return browser


def _view(name: str, graph: PatchableGraph, workspace: Workspace) -> LinkedView:
    from graphpatch_notebook.notebook.views.attention import attention_of
    from graphpatch_notebook.notebook.views.lens import lens_of

    match name:
        case "attention":
            return attention_of(graph, workspace)
        case "lens":
            return lens_of(graph, workspace)
    raise ValueError(f"there is no view {name!r}; views are 'attention' and 'lens'")


# --------------------------------------------------------------------------------------------------------------------
# Scores of nodes and graphs, such as the results of a sweep or an attribution, which color the rows


_LARGEST = 3.4028234663852886e38  # of a float32


def scores_by_path(scores: Mapping[str | NodePath, Any] | Any, skeleton: Skeleton) -> dict[str, float]:
    """Returns scores by the canonical paths of their rows: `Browser.set_scores`, which names the errors."""
    # By its attributes, since xarray may not be installed, and importing it is slow.
    if hasattr(scores, "dims") and hasattr(scores, "coords"):
        if tuple(scores.dims) != ("path",) or "path" not in scores.coords:
            raise ValueError(
                f"these scores have the dimensions {tuple(scores.dims)}, not 'path' alone with the paths as "
                "its coordinate: reduce or select the others, and rename the one of paths"
            )
        array: Any = scores
        scores = dict(zip(array.coords["path"].values.tolist(), array.values.tolist(), strict=True))
    if not isinstance(scores, Mapping):
        raise TypeError(f"scores must be a dict from paths to numbers, not {type(scores).__name__}: {{'PATH': 0.5}}")
    found: dict[str, float] = {}
    unknown: list[str] = []
    for path, value in scores.items():
        if isinstance(path, NodePath) and location_of(path).root is not skeleton.nodes.root:
            raise UnknownPathError(f"the NodePath {str(path)!r} belongs to another PatchableGraph")
        try:
            row = skeleton.row(str(path))
        except UnknownPathError as problem:
            unknown.append(str(problem))
            continue
        if not math.isnan(number := _number(value, str(path))):
            found[skeleton.path(row)] = number
    if unknown:
        more = f"; and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UnknownPathError("; ".join(unknown[:3]) + more)
    return found


def _number(value: Any, path: str) -> float:
    try:
        plain = value.detach() if isinstance(value, Tensor) else value
        number = float("text" if isinstance(plain, str) else plain)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the score of {path!r} is {value!r:.80}, not a number: {error}") from None
    if math.isinf(number) or abs(number) > _LARGEST:
        raise ValueError(f"the score of {path!r} is {number}: scores must be finite, or NaN for no score")
    return number


def packed_scores(scores: Mapping[str, float], skeleton: Skeleton) -> bytes:
    """Returns a little-endian float32 for each row, NaN without a score. Ignores paths without a row."""
    column = [math.nan] * len(skeleton)
    for path, number in scores.items():
        if (row := skeleton.find(path)) is not None:
            column[row] = number
    return struct.pack(f"<{len(column)}f", *column)
