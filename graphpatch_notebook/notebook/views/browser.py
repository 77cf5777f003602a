"""The widget of the tree browser in the kernel. Its front end is js/.

front end  -- expanded, selected, query, shows_sizes -->  traits, validated
front end  -- requests ---------------------------------->  `Browser._handlers`, which include those of all views
"""

from __future__ import annotations

import math
import os
import re
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import traitlets
from msgspec import Meta
from torch import Tensor

from graphpatch_notebook.capture.records import RECORD, Frame, Node, Ref, SourceLine
from graphpatch_notebook.errors import GraphError, SessionError, UnknownPathError
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection import node_path
from graphpatch_notebook.inspection.node_path import Location, NodePath, location_of, signature_line
from graphpatch_notebook.inspection.resolution import is_patchable
from graphpatch_notebook.inspection.tree import Row, TreeEntry, opened
from graphpatch_notebook.notebook.display.tables import escaped, file_label, visible
from graphpatch_notebook.notebook.messages import (
    ActivationRequest,
    ColumnsRequest,
    Details,
    Empty,
    JobRef,
    JobStatus,
    Link,
    Natural,
    Source,
)
from graphpatch_notebook.notebook.runs import Job, RunResult
from graphpatch_notebook.notebook.session.chosen_patch import PATCH_KINDS, ChosenPatch
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace, counted
from graphpatch_notebook.notebook.views.linked import (
    Answer,
    Handlers,
    LinkedView,
    RequestContext,
    interrupt_job,
    job_status,
    session_for_view,
)
from graphpatch_notebook.notebook.views.measures import MEASURES, Found, measure
from graphpatch_notebook.notebook.views.results import GroupedView, picture_of, static_circuit
from graphpatch_notebook.notebook.views.selection import item_of
from graphpatch_notebook.notebook.views.skeleton import HIDDEN, PATCHABLE, SIZE, Skeleton, skeleton_of
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import (
    ContainerSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    dtype_name,
    leaves,
)

if TYPE_CHECKING:
    from xarray import DataArray

    from graphpatch_notebook.experiments.circuits.attribution_graph import AttributionGraph
    from graphpatch_notebook.experiments.circuits.circuit import Circuit
    from graphpatch_notebook.experiments.datasets.feature_pages import FeaturePage


class Browser(GroupedView, LinkedView):
    """The tree of a graph, to inspect and to patch by clicking. `pg.browse()` returns it.

    All browsers of a graph and the magics share the chosen patches: a change in one appears in all. A browser keeps its
    graph alive only if the user does not have a variable with the graph, and only until it is closed. Views of the
    graph follow what is selected in the tree, and the tree follows them.

    A notebook shows the widget, together with static HTML for readers without a kernel. Elsewhere, it prints the tree.

    Attributes:
        views: The views that are shown above the tree, as `pg.browse(views=("attention",))` asks for them.
        shows_graph: Whether the dataflow of the selected module is drawn, as `pg.browse(views=("graph",))` asks for.

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
    shows_graph = traitlets.Bool().tag(sync=True)
    edges = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    components = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    scores = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    score_names = traitlets.List(traitlets.Unicode(), read_only=True).tag(sync=True, echo_update=False)
    run = traitlets.Dict(default_value=None, allow_none=True, read_only=True).tag(sync=True, echo_update=False)
    circuit = traitlets.Dict(default_value=None, allow_none=True, read_only=True).tag(sync=True, echo_update=False)

    FRONT_END: ClassVar[Mapping[str, Any]] = {
        **LinkedView.FRONT_END,
        **GroupedView.GROUPS,
        "expanded": list[Natural] | None,
        "selected": Natural,
        "query": Annotated[str, Meta(max_length=10_000)],
        "shows_sizes": bool,
        "shows_graph": bool,
    }
    VIEW: ClassVar[str] = "tree"

    def __init__(
        self,
        graph: PatchableGraph,
        session: Session,
        workspace: Workspace,
        path: str = "",
        views: Iterable[LinkedView] = (),
        *,
        shows_graph: bool = False,
    ) -> None:
        skeleton = skeleton_of(graph)
        row = skeleton.row(path)
        self._shown = weakref.ref(skeleton)
        self._scores: dict[str, float] = {}
        self._scores_name = ""
        self._measured: Found = {}
        self._measuring: tuple[Any, Job[Found]] | None = None
        self._pages: Mapping[str, FeaturePage] = {}
        self._has_components, self._has_edges = False, shows_graph
        self._opened_at = skeleton.path(row)
        self.views = tuple(views)
        super().__init__(graph, session, workspace, selected=row, shows_graph=shows_graph, **_opened(skeleton, row))

    # -- public methods ------------------------------------------------------------------------------------------------

    @property
    def selected_path(self) -> str | None:
        """The path of the selected row: empty for the model, `None` for a module that was never called."""
        skeleton = self._skeleton()
        return None if skeleton.kind[self.selected] == "unused" else skeleton.path(self.selected)

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
        self._scores_name = str(name or getattr(scores, "name", None) or "score")
        self.renew("scores", "score_names")

    def clear_scores(self) -> None:
        """Removes the scores."""
        self._scores, self._scores_name = {}, ""
        self.renew("scores", "score_names")

    def show_columns(self, *names: str) -> None:
        """Shows columns of numbers beside the rows, to sort by, and waits for the run of the model that fills them.

        The run is that of *Run*, without the chosen patches. The columns replace those that were shown; scores stay.

        Args:
            names: Any of "parameters", "bytes", "FLOPs" (as `torch.utils.flop_counter` counts them), "ms" (the time
                of a module's call), "mean", "std", "norm", "NaN" (the share of the elements) and "gradient" (the
                norm of the gradient of the output's loss). Statistics of a module are those of its output.

        Raises:
            ValueError: There is not a column of this name.
            SessionError: The run failed, or there is no loss for gradients.

        Example:
            >>> import torch
            >>> browser = PatchableGraph(torch.nn.Linear(3, 2), torch.ones(4, 3)).browse()
            >>> browser.show_columns("parameters", "FLOPs")
            >>> browser.score_names
            ['parameters', 'FLOPs']
        """
        if unknown := {*names} - MEASURES.keys():
            raise ValueError(f"unknown column {unknown.pop()!r}; columns are {', '.join(map(repr, MEASURES))}")
        job = self._measure(names, None) if names else None
        if job is not None:
            job.wait()
            if job.state == "failed":
                raise SessionError(job.error or "the run failed")
        self._show_measured(names, job)

    def set_circuit(
        self, circuit: Circuit | AttributionGraph | None, pages: Mapping[str, FeaturePage] | None = None
    ) -> None:
        """Shows the picture of a circuit above the tree; `None` removes it.

        A component that is pinned in the picture becomes the selected row, and has a button to patch it.

        Args:
            circuit: A circuit of this graph's model.
            pages: Pages of features, as for `show_circuit`.
        """
        self._pages = pages or {}
        self.show(circuit)

    def _draw(self) -> None:
        self.renew("circuit")

    @property
    def last_run(self) -> RunResult | None:
        """The results of the last run in any browser of the graph; `None` before the first one."""
        return self._runs.last

    # -- messages of the front end -------------------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        return {
            **super()._handlers(),
            "columns": self._columns,
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

    def _columns(self, _: RequestContext, payload: ColumnsRequest) -> Answer:
        names = [name for name in payload.names if name in MEASURES]
        if not names:
            self._show_measured((), None)
            return JobStatus(id=0, state="done", seconds=0.0), []
        job = self._measure(names, payload.inputs)
        job.wait(_WAIT)
        state = job.state
        if state == "done":
            self._show_measured(names, job)
        error = job.error if state == "failed" else None
        return JobStatus(id=0, state=state, seconds=job.seconds, error=error), []

    def _measure(self, names: Sequence[str], inputs: str | None) -> Job[Found]:
        """Returns the job that measures the columns: the last one if it has the same inputs."""
        skeleton, timed, differentiated = self._rows(), "ms" in names, "gradient" in names
        key = (self._runs.key(inputs), timed, differentiated)
        if self._measuring is not None and self._measuring[0] == key and self._measuring[1].state != "failed":
            return self._measuring[1]
        if self._measuring is not None:
            self._measuring[1].interrupt()
        calls = self._runs.calls(inputs)

        def work(job: Job[Found]) -> Found:
            return measure(job, calls, skeleton, timed=timed, differentiated=differentiated)

        job = Job(work)
        self._measuring = key, job
        return job

    def _show_measured(self, names: Sequence[str], job: Job[Found] | None) -> None:
        found = None if job is None else job.result
        self._measured = {} if found is None else {name: found[name] for name in MEASURES if name in names}
        self.renew("scores", "score_names")

    def _activation(self, context: RequestContext, payload: ActivationRequest) -> Answer:
        skeleton, row = self._rows(), payload.row
        path = skeleton.path(row) if row < len(skeleton) else ""
        if not path:
            raise SessionError(f"row {row} is not a node, so it does not have an activation")
        return context.runs.status(
            context.runs.start_activation(path, payload.plane, payload.is_patched, payload.inputs, payload.axes)
        )

    _checked_trait = traitlets.validate("expanded", "selected", "query")(LinkedView.checked)

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        skeleton = self._shown()
        count = len(skeleton) if skeleton is not None else 0
        if any(row >= count for row in {"selected": [value], "expanded": value or []}.get(name, ())):
            raise traitlets.TraitError(f"{name!r} must be rows of the tree, from 0 to {count - 1:,}")

    @traitlets.observe("shows_graph")
    def _find_edges(self, change: Any) -> None:
        if change["new"] and not self._has_edges:
            self._has_edges = True
            self.renew("edges")

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
                self._measured, self._measuring = {}, None
                with self.hold_sync():
                    self.expanded, self.selected = None, 0
                    self.renew(*self._makers())
        return skeleton

    def _row_of(self, path: str) -> int | None:
        skeleton = self._shown() or skeleton_of(self.graph)
        return skeleton.find(path)

    def _makers(self) -> Mapping[str, Callable[[], Any]]:
        skeleton = self._shown() or skeleton_of(self.graph)
        components, edges = self._has_components, self._has_edges
        return {
            **super()._makers(),
            "skeleton": lambda: skeleton.data,
            "edges": lambda: skeleton.packed_edges() if edges else b"",
            "components": lambda: skeleton.packed_components() if components else b"",
            "scores": lambda: b"".join(packed(column, len(skeleton)) for _, column in self._score_columns(skeleton)),
            "score_names": lambda: [name for name, _ in self._score_columns(skeleton)],
            "run": lambda: self._runs.state,
            "circuit": lambda: None if self._circuit is None else picture_of(self._circuit, self._pages, skeleton.find),
        }

    def _score_columns(self, skeleton: Skeleton) -> list[tuple[str, dict[int, float]]]:
        """Returns the columns: the scores, and what was measured; paths without a row are ignored."""
        scores = {row: number for path, number in self._scores.items() if (row := skeleton.find(path)) is not None}
        return [*([(self._scores_name, scores)] if scores else []), *self._measured.items()]

    def _about(self) -> dict[str, Any]:
        return super()._about() | {
            "measures": dict(MEASURES),
            "module": type(captured(self.graph).module).__name__,
            "nodes": len(self.graph.nodes),
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
        """Saves the tree as a page of HTML, with the names of the components and the dataflow.

        Args:
            file: The file to write; it replaces a file of that name.

        Raises:
            ValueError: The widget is closed.
        """
        if self.comm is not None:
            self._find_components()
            self._has_edges = True
            self.renew("edges")
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
            title = f"{name}: {type(captured(graph).module).__name__}, {len(graph.nodes):,} nodes"
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
    path = [row]
    while path[-1]:
        path.append(skeleton.parent[path[-1]])
    is_hidden = any(skeleton.flags[one] & (SIZE | HIDDEN) for one in path)
    return {"expanded": sorted({*before, *path[1:]}), **({"shows_sizes": True} if is_hidden else {})}


def browser_of(
    graph: PatchableGraph,
    workspace: Workspace,
    path: str = "",
    *,
    inputs: Any = None,
    typed: str | None = None,
    circuit: Circuit | AttributionGraph | None = None,
    pages: Mapping[str, FeaturePage] | None = None,
    views: Iterable[str] = (),
) -> Browser:
    """Returns a new browser of a graph: `pg.browse`. `typed` are the inputs as Python code, evaluated for each run.

    All browsers of a graph share the chosen patches and the runs.
    """
    # The runs exist as long as something refers to them.
    session, _runs = session_for_view(graph, workspace, inputs=inputs, typed=typed)
    from graphpatch_notebook.notebook.views.attention import attention_of
    from graphpatch_notebook.notebook.views.lens import lens_of

    known: dict[str, Callable[..., LinkedView]] = {"attention": attention_of, "lens": lens_of}
    wanted = [views] if isinstance(views, str) else [*views]
    if unknown := {*wanted} - {*known, "graph"}:
        raise ValueError(f"unknown view {unknown.pop()!r}; views are 'attention', 'graph' and 'lens'")
    above = [known[name](graph, workspace) for name in wanted if name != "graph"]
    browser = Browser(graph, session, workspace, path, above, shows_graph="graph" in wanted)
    browser.set_circuit(circuit, pages)
    workspace.news.clear()  # the browser shows it
    return browser


# --------------------------------------------------------------------------------------------------------------------
# Scores of nodes and graphs, such as the results of a sweep or an attribution, which color the rows


_LARGEST = 3.4028234663852886e38  # of a float32
_WAIT = 0.05
"""For so many seconds an answer waits for a run that may end soon."""


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
        try:
            plain = value.detach() if isinstance(value, Tensor) else value
            number = float("text" if isinstance(plain, str) else plain)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"the score of {path!r} is {value!r:.80}, not a number: {error}") from None
        if math.isinf(number) or abs(number) > _LARGEST:
            raise ValueError(f"the score of {path!r} is {number}: scores must be finite, or NaN for no score")
        if not math.isnan(number):
            found[skeleton.path(row)] = number
    if unknown:
        more = f"; and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UnknownPathError("; ".join(unknown[:3]) + more)
    return found


def packed(scores: Mapping[int, float], count: int) -> bytes:
    """Returns a little-endian float32 for each of `count` rows, NaN without a score."""
    column = [scores.get(row, math.nan) for row in range(count)]
    return struct.pack(f"<{count}f", *(min(max(number, -_LARGEST), _LARGEST) for number in column))


# --------------------------------------------------------------------------------------------------------------------
# The tree as static HTML, which a saved notebook, nbconvert or GitHub shows in place of the browser


MOST_BYTES = 30_000
_MOST_LINES = 160
_MOST_PATCHES = 100


def static_tree(title: str, entry: TreeEntry, patches: Sequence[ChosenPatch] = ()) -> str:
    """Returns the HTML, of at most about `MOST_BYTES`; all text is escaped.

    Example:
        >>> print(static_tree("pg: ReLU", TreeEntry("<root>", "", "graph")))
        <p><strong>pg: ReLU</strong> (a picture of the tree; to browse it, run the cell)</p>
        <p>No patch is chosen.</p>
        <ul>
        <li><code>&lt;root&gt;</code></li>
        </ul>
    """
    most = _MOST_LINES
    while True:
        lines = [
            f"<p><strong>{escaped(title)}</strong> (a picture of the tree; to browse it, run the cell)</p>",
            *_patch_lines(patches, min(most, _MOST_PATCHES)),
            *("<ul>", *_tree_lines(opened(entry, most), is_open=True), "</ul>"),
        ]
        text = "\n".join(lines)
        if len(text.encode()) <= MOST_BYTES or most < 4:
            return text
        most = most * 2 // 3


def _patch_lines(patches: Sequence[ChosenPatch], most: int) -> Iterator[str]:
    if not patches:
        yield "<p>No patch is chosen.</p>"
        return
    yield f"<p>{counted(len(patches))} chosen:</p>\n<ul>"
    for patch in patches[:most]:
        yield f"<li><code>{escaped(f'#{patch.number} {patch}')}</code>{'' if patch.is_enabled else ' (off)'}</li>"
    if len(patches) > most:
        yield f"<li>… {len(patches) - most} more</li>"
    yield "</ul>"


def _tree_lines(row: Row, *, is_open: bool = False) -> Iterator[str]:
    if row.run:
        yield f"<li><em>{escaped(row.note)}</em></li>"
        return
    text = f"<code>{escaped(row.entry.name)}</code>"
    label = f": {escaped(row.entry.label)}" if row.entry.label else ""
    if not row.rows:
        yield f"<li>{text}{label}{escaped(row.note)}</li>"
        return
    yield f"<li><details{' open' * is_open}><summary>{text}{label}{escaped(row.note)}</summary>\n<ul>"
    for child in row.rows:
        yield from _tree_lines(child)
    yield "</ul>\n</details></li>"


# --------------------------------------------------------------------------------------------------------------------
# The details of a row for the popup: notes, code, source lines, and the inputs and users of the value


_MOST_CODE_LINES = 2_000


def details(pg: PatchableGraph, skeleton: Skeleton, row: int) -> Details:
    """Returns the details of a row. Does not run the model.

    Example:
        >>> import torch
        >>> from graphpatch_notebook.notebook.views.skeleton import skeleton_of
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
        >>> found = details(pg, skeleton_of(pg), 2)
        >>> found.path, found.code, found.users
        ('relu', 'relu = torch.nn.functional.relu(input_1, inplace = False)', [Link(row=3, text='output')])
    """
    if not 0 <= row < len(skeleton):
        raise SessionError(f"unknown row {row}: the tree has {len(skeleton):,}; show the graph again")
    place = skeleton.place(row)
    if place is None:
        above = skeleton.path(skeleton.parent[row])
        note = (
            f"{skeleton.op[row]}: the run on the example inputs did not call this module of {above or 'the model'}, so "
            "it does not have a graph; if its parameters were used, they are nodes of the graph that used them"
        )
        return Details(row, ".".join(filter(None, (above, skeleton.name[row]))), "unused", [note])
    if place.graph is not None:
        notes = _notes_of_graph(place.graph)
    else:
        notes = [] if place.node is None else _notes_of_value(place, place.node, skeleton, row)
    found = Details(row, place.path, skeleton.kind[row], [visible(note) for note in notes if note])
    if isinstance(spec := place.spec, TensorSpec):
        found.shape, found.dtype, found.device = list(spec.shape), dtype_name(spec.dtype), str(spec.device)
    found.code = _code(pg, place)
    found.source = [_source(line) for line in _source_lines(place)]
    found.inputs = list(_links(node_path.sources(place), place, skeleton))
    found.users = list(_links(node_path.users(place), place, skeleton))
    return found


# --------------------------------------------------------------------------------------------------------------------
# Notes


def _notes_of_graph(frame: Frame) -> list[str | None]:
    call, reason = frame.call, frame.opaque_reason
    is_repeated = call is not None and call.call_count > 1
    times = f", called {call.call_count} times; this is call {call.call_index + 1}" if call and is_repeated else ""
    runs = "this graph was edited: it runs" if frame.is_edited else "this graph runs"
    return [
        f"the graph of {type(frame.module).__name__}{times}",
        None if reason is None else f"opaque: {reason}; its inputs, its output and what it calls can be patched",
        frame.custom_failure,
        f"{runs} in place of the module" if frame.is_edited or frame.custom_graph is not None else None,
        "captured in train mode" if frame.conditions.training else None,
        *map(str, frame.doubts),
    ]


def _what(place: Location, node: Node) -> str:
    owner = type(place.frame.module).__name__
    if place.dig:
        words = node.spec.type.__name__ if isinstance(node.spec, ContainerSpec) else str(node.spec)
        return f"a value in the {words} that {format_path(place.names)} holds"
    match node.kind:
        case "op":
            call = node.composite
            opened = "" if call is None else f", a step of {call.name}" + ", which it opens" * call.is_fused
            return f"what {node.op} returned{opened}" if node.whole is node else f"a part of what {node.op} returned"
        case "output":
            return f"what {owner} returned"
        case "constant":
            return f"a constant in the code of {owner}"
    return f"the {node.kind} {node.target} of {owner}"


def _notes_of_value(place: Location, node: Node, skeleton: Skeleton, row: int) -> list[str | None]:
    spec = place.spec
    has_tensors = any(isinstance(leaf, TensorSpec) for _, leaf in leaves(node.spec))
    why = "the code unpacks it" if has_tensors else "it only carries sizes"
    placement = spec.placement if isinstance(spec, TensorSpec) else ""
    return [
        _what(place, node),
        skeleton.notes.get(row),
        f"its value was {spec.value!r}" if isinstance(spec, ScalarSpec) and spec.is_number else None,
        f"{why}: hidden from the tree, unless it is asked for" if node.is_size else None,
        _why_not_patchable(spec, node, bool(skeleton.flags[row] & PATCHABLE)),
        f"over the processes of the model: {placement}; its shape is that of the whole value" if placement else None,
        "the model writes into this tensor later, which overwrites the changes of a patch there"
        if node.is_mutated_later
        else None,
        "it is a view that the model writes into later: a patch detaches it from its base tensor"
        if node.is_view_filled_later
        else None,
    ]


def _why_not_patchable(spec: ValueSpec | None, node: Node, can_be_patched: bool) -> str | None:
    if not is_patchable(node) and node.kind != "constant":
        return "it cannot be patched: arithmetic on sizes happens in plain Python, where a patch cannot see it"
    if isinstance(spec, ContainerSpec):
        return f"a container ({spec}): patch the values in it"
    if not can_be_patched:
        what = "None" if str(spec) == "NoneType" else f"an object ({spec})"
        what = "a constant" if node.kind == "constant" else f"neither a tensor nor a number but {what}"
        return f"it cannot be patched: it is {what}"
    is_new = isinstance(spec, UnknownSpec)
    return "its value is not known yet: it was added to the graph and has not run" if is_new else None


# --------------------------------------------------------------------------------------------------------------------
# Code


def _code(pg: PatchableGraph, place: Location) -> str:
    """Returns the code of a graph, or the line of it that computes the value of a node."""
    module = captured(pg).graph_of(place.graph or place.frame)
    if not isinstance(module, CompiledGraphModule):
        return ""
    try:
        lines = module.code.strip("\n").splitlines()
    except GraphError as error:
        return f"# {error}"
    if place.graph is None:
        return _line_of(module, place.node, lines)
    if (more := len(lines) - _MOST_CODE_LINES) > 0:  # long code is slow to display
        where = ".".join(filter(None, ("pg.graph", module.path, "_code")))
        lines[_MOST_CODE_LINES:] = [f"# ... {more:,} more lines: {where}"]
    return "\n".join(lines)


def _line_of(module: CompiledGraphModule, node: Node | None, lines: list[str]) -> str:
    assert node is not None  # only the root graph does not have a node
    if node.kind == "input":
        return lines[0].strip()
    if node.kind == "output":
        return next((line.strip() for line in reversed(lines) if line.strip().startswith("return")), "")
    names = {n.name for n in module.graph.nodes if n.meta.get(RECORD) is node} or {node.name}
    makes = re.compile(rf"\s*(?:.*;  )?({'|'.join(map(re.escape, names))})(?: : [^=]+)? = ")
    # After two spaces, fx deletes values.
    return next((re.sub(r";  [\w\s=]+ = None$", "", line).strip() for line in lines if makes.match(line)), "")


def _source_lines(place: Location) -> list[SourceLine]:
    node = place.node
    if node is None:
        return []
    if node.site is not None:
        return node.site.source_lines()
    line = signature_line(place.frame.module) if node.kind in ("input", "output") else None
    return [line] if line is not None else []


def _source(line: SourceLine) -> Source:
    label = file_label(line.file)
    is_cell = label == "cell" or label.startswith("In[")
    return Source(visible(label if is_cell else line.file), line.line, visible(line.function), line.text)


# --------------------------------------------------------------------------------------------------------------------
# Links


def _links(refs: list[Ref], place: Location, skeleton: Skeleton) -> Iterator[Link]:
    """Yields a link for each value with a row, without duplicates."""
    here = format_path(place.frame.path)
    seen: set[int] = set()
    for ref in refs:
        row = skeleton.row_of_ref(ref)
        if row is not None and row not in seen:
            seen.add(row)
            path = skeleton.path(row)
            # As seen from the graph; the whole path if it is outside of the graph.
            yield Link(row, path.removeprefix(f"{here}.") if here else path)
