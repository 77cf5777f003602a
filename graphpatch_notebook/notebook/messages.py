"""The messages between the kernel and the front end: each request with its reply, and the states that they carry.

front end -> {"id": 7, "request": "details", "payload": {"row": 3}}
kernel    -> {"id": 7, "result": {...}}, with binary parts, or {"id": 7, "error": {"message": ..., "field": ...}}

js/src/kernel/messages.ts is generated from this file by `python js/messages.py`; the comments become its comments.
Everything that arrives is converted to these classes, so a part of another type or an unknown field is an error.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypedDict, get_args

from msgspec import UNSET, Meta, Struct, UnsetType, field

Natural: TypeAlias = Annotated[int, Meta(ge=0)]
RowKind: TypeAlias = Literal[
    "graph",  # the frame of a module that was called; row 0 is the whole model
    "input",
    "parameter",
    "buffer",
    "attribute",
    "constant",
    "op",
    "output",
    "item",  # a value inside the container that the row above it holds
    "unused",  # a module that the run on the example inputs never called
]
"""What a row of the tree is."""
KINDS: tuple[RowKind, ...] = get_args(RowKind)
FLAGS = {
    "size": 1,  # only carries sizes: shown on request
    "hidden": 2,  # a constant, a flag or clutter: shown on request, too
    "opaque": 4,  # a graph that could not be looked into; `notes` says why
    "patchable": 8,  # a tensor or number: one can patch it
    "mutated": 16,  # the model writes into this tensor later
    "viewFilled": 32,  # ... which is a view, so that a patch cuts it off from its base
    "plumbing": 64,  # a mask, an index, a position, ...: folded away
}
"""The bits of `Columns.flags`."""
NEXT = -2
"""In columns of positions in a table: the first position that was not used yet. Long runs of it compress well."""
ViewName: TypeAlias = Literal["tree", "attention", "lens", "tokens", "generation", "result"]


class Message(Struct, forbid_unknown_fields=True):
    """The base class of messages and of their parts."""


# --------------------------------------------------------------------------------------------------------------------
# The chosen patches


class PatchFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a patch that a user types; `null` for an empty field."""

    path: str
    kind: str  # The name of a `PatchKind`.
    slice: str | None = None  # The text between brackets: `:, -1, 3:5`.
    value: str | None = None  # A Python expression; for the kinds that take a value.
    name: str | None = None  # The variable that receives what the patch keeps. `null`: the kernel finds a free name.
    steps: str | None = None  # `prefill`, `decoding`, or numbers: `0`, `2, 4`, `1:`.
    positions: str | None = None
    position_dim: int | None = None
    any_shape: bool = False
    allow_empty: bool = False  # Whether the slice may select nothing.


class PatchState(PatchFields, frozen=True, kw_only=True):
    """A chosen patch."""

    number: int  # The number of `#3`, which is never reused.
    is_enabled: bool
    row: int  # The row in the skeleton; -1 if there is none.
    shape: list[int] | None  # The recorded shape of the value.
    sliced: list[int] | None  # The shape of its slice.
    warning: str | None


class SessionState(Message):
    """The chosen patches of a graph."""

    version: int
    patches: list[PatchState]
    can_undo: bool
    can_redo: bool
    note: str = ""  # Where they are from, until the next edit.


class PatchInput(Message):
    """What a user types as the value of a patch."""

    noun: str  # What it must be: `a number or a tensor`.
    example: str


class PatchKindForm(Message):
    """A kind of patch, which defines the fields of the editor."""

    name: str
    summary: str  # What the patch does: `sets the value to zero`.
    fields: list[str]  # The fields of `PatchFields` that a user may fill in, besides the kind.
    value: PatchInput | None


class Item(TypedDict):
    """One selected thing: a component or node, or a layer, head, position or key; `null` for what it does not have."""

    name: Annotated[str, Meta(max_length=1000)] | None  # Of a component, or the path of a node.
    layer: Natural | None
    head: Natural | None
    position: Natural | None  # Of the query, where there are queries and keys.
    key: Natural | None


Items: TypeAlias = Annotated[list[Item], Meta(max_length=1000)]
Act: TypeAlias = Literal["zero", "mean", "other_run", "steer", "probe"]


class AddEdit(Message, tag_field="action", tag="add"):
    """Adds a patch."""

    patch: PatchFields


class ChangeEdit(Message, tag_field="action", tag="change"):
    """Replaces the fields of a patch."""

    number: int
    patch: PatchFields


class EnableEdit(Message, tag_field="action", tag="enable"):
    """Enables or disables a patch."""

    number: int
    is_enabled: bool


class MoveEdit(Message, tag_field="action", tag="move"):
    """Moves a patch to another position in the order."""

    number: int
    position: Natural


class RemoveEdit(Message, tag_field="action", tag="remove"):
    """Removes patches."""

    numbers: list[int]


class ActEdit(Message, tag_field="action", tag="act"):
    """Adds a patch for each of the selected items."""

    act: Act
    items: Items
    value: str | None  # What was typed, for the acts that need it.
    steps: str | None  # As in a patch.


class ClearEdit(Message, tag_field="action", tag="clear"):
    """Removes all patches."""


class UndoEdit(Message, tag_field="action", tag="undo"):
    """Undoes the last edit."""


class RedoEdit(Message, tag_field="action", tag="redo"):
    """Repeats the edit that was undone last."""


Edit: TypeAlias = AddEdit | ChangeEdit | EnableEdit | MoveEdit | RemoveEdit | ActEdit | ClearEdit | UndoEdit | RedoEdit


class EditRequest(Message):
    """An edit of the chosen patches."""

    based_on: int  # The version that the user saw.
    edit: Edit


class Edited(Message):
    """The version after an edit."""

    version: int


class CheckRequest(Message):
    """A patch that the user is typing."""

    patch: PatchFields
    number: int | None  # The patch that is changed; `null` for a new one.


class Checked(Message):
    """The value that a patch would be applied to."""

    shape: list[int] | None
    sliced: list[int] | None
    warning: str | None
    name: str | None  # The variable for a patch that keeps something, if none is typed.


# --------------------------------------------------------------------------------------------------------------------
# The details of a row


class RowRequest(Message):
    """A row of the tree."""

    row: Natural


class ComponentRow(Message):
    """A value with a standard name: `layers[3].attn.q`."""

    row: int
    name: str
    axes: list[str]  # What the dimensions of the value are: `batch`, `head`, ...
    shape: list[int]


class Flow(Message):
    """The edges of all graphs, in the order of the rows that use the values: what each node is computed from."""

    users: list[int]  # By edge: the row that uses the value, as the difference from that of the edge before.
    values: list[int]  # How many rows before the user the value is: a node, its part, the output of a called graph.


class Source(Message):
    """A line of the user's code."""

    file: str
    line: int
    function: str
    text: str


class Link(Message):
    """A row that another one refers to."""

    row: int
    text: str  # The path as seen from the graph that both are in, else the whole path.


class Details(Message):
    """The content of the popup of a row."""

    row: int
    path: str
    kind: RowKind
    notes: list[str]  # What it is, and what is to be known of it (opaque and why, mutated later, ...).
    shape: list[int] | None = None
    dtype: str | None = None
    device: str | None = None
    code: str = ""  # The Python code of a graph; for a node the line of it that makes the value.
    source: list[Source] = []  # The user's lines that made it, outermost first.
    inputs: list[Link] = []
    users: list[Link] = []


# --------------------------------------------------------------------------------------------------------------------
# Values


class Statistics(Message):
    """Statistics of a value. Moments are those of the finite elements; `null` without any."""

    shape: list[int]
    dtype: str
    device: str
    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    nan: int = 0
    infinite: int = 0


class Heatmap(Message, tag_field="type", tag="heatmap"):
    """A heatmap of float32 values, row by row."""

    buffer: int  # Which of the buffers of the reply holds the values.
    rows: int
    columns: int
    full: tuple[int, int]  # The numbers of rows and columns before they were reduced.
    reduced: str | None  # How they were reduced; `null`: every value is there.
    slice: str  # Which part of the value it is: `0, 3, :, :`.
    constant: float | None  # The only value in this part, if there is only one.


class Histogram(Message, tag_field="type", tag="histogram"):
    """A histogram."""

    counts: list[int]
    edges: list[float]  # One more than counts.
    slice: str | None


class Facets(Message, tag_field="type", tag="facets"):
    """A heatmap for each index of one or two dimensions, in the order of the indices."""

    titles: list[str]
    plots: list[Heatmap]
    per_row: int | None  # How many are beside one another, of two dimensions; `null`: as many as there is room for.
    slice: str


class NoPlot(Message, tag_field="type", tag="none"):
    """A text in place of a plot."""

    why: str


Plot: TypeAlias = Heatmap | Histogram | Facets | NoPlot


class ActivationView(Message):
    """A value with its plot."""

    path: str
    statistics: Statistics
    plot: Plot
    row_labels: list[str] | None  # The tokens of the rows of a heatmap, if its rows are positions of tokens.
    column_labels: list[str] | None


# --------------------------------------------------------------------------------------------------------------------
# Runs

AttentionRun: TypeAlias = Literal["clean", "patched"]
RunState: TypeAlias = Literal["running", "done", "failed", "interrupted"]
Place: TypeAlias = tuple[int, float]


class LargeChange(Message):
    """An entry that changed."""

    index: list[int]
    before: float
    after: float


class OutputChange(Message):
    """One tensor or number of the model's output, without and with the patches."""

    path: str
    shape: list[int]
    dtype: str
    norm_before: float | None
    norm_after: float | None
    norm_difference: float | None
    largest: list[LargeChange]  # The entries that changed most.
    note: str | None  # Why the two cannot be compared.


class ProbeReport(Message):
    """The value of a probe."""

    number: int
    name: str
    path: str
    view: ActivationView | None  # `null`: it did not fire; `note` says so.
    note: str | None
    change: OutputChange | None  # What the patches changed; `null`: nothing was patched, or there are no numbers.
    before: Plot | None  # Of the value without the patches, and of what they add; `null` if they change nothing.
    difference: Plot | None


class Prediction(Message):
    """A token or class, with its rank (the most probable has rank 0) and its probability in each run."""

    text: str
    before: Place
    after: Place


class Predictions(Message):
    """What is among the most probable in either run, in the order of the larger probability."""

    position: int | None  # After which these are the next tokens; `null`: these are classes.
    prompt: str | None  # Which row of a batch of several they are for: its text.
    rows: list[Prediction]


class RunReport(Message):
    """The report of a run."""

    call: str  # What ran, as Python: `pg(ids)`.
    seconds: float
    patches: list[int]  # The numbers of the patches that were applied.
    warnings: list[str]
    predictions: list[
        Predictions
    ]  # By row: of language models with a tokenizer, and classifiers whose config has labels.
    changes: list[OutputChange]
    probes: list[ProbeReport]


class JobRef(Message):
    """A job: a run, or the computation of an activation."""

    id: int


class JobStatus(Message, kw_only=True):
    """The status of a job. The front end asks for it until the job is not running any more."""

    id: int
    state: RunState
    seconds: float
    fraction: float | None = None  # The part of the calls that have ended; `null` before the first one has.
    error: str | None = None  # Why it failed.
    waits_for: str | None = None  # After an interrupt: the line of Python that must end first.


class RunStatus(JobStatus, kw_only=True):
    """The status of a run."""

    report: RunReport | None = None


class ActivationStatus(JobStatus, kw_only=True):
    """The status of the computation of an activation."""

    view: ActivationView | None = None


class RunRequest(Message):
    """Starts a run."""

    inputs: str | None  # Arguments of the call as Python; `null`: the example inputs.


class ActivationRequest(Message):
    """Shows the value of a row. Another slice of the value that is shown does not run the model again."""

    row: Natural
    plane: str | None  # A slice with two dimensions (or one); `null`: the last two.
    axes: (
        tuple[Natural, Natural] | None
    )  # The dimensions of rows and columns; the slice may leave two more, for facets.
    is_patched: bool
    inputs: str | None


# --------------------------------------------------------------------------------------------------------------------
# Views


class ColumnsRequest(Message):
    """Shows columns of the tree. Runs the model if they have not been measured for these inputs."""

    names: list[str]
    inputs: str | None  # As in a run.


class LensRequest(Message):
    """Computes the numbers of a lens view for the patches as they are now, and for another stream."""

    stream: str | None


class GenerationRequest(Message):
    """Generates for the patches as they are now; adds a branch, or removes one."""

    line: int | None
    step: int | None
    token: int | None
    remove: int | None  # The number of a branch.


class HeadRequest(Message):
    """Asks for the whole pattern of a head, as bytes."""

    version: int
    run: AttentionRun
    layer: Natural  # Its position in `Attention.layers`.
    head: Natural


class Head(Message):
    """The pattern of a head, in a buffer of bytes: `scale` times the squares of their parts of 255."""

    scale: float


# --------------------------------------------------------------------------------------------------------------------
# Traits: what views show. Tests check that the values of traits are of these types


class Spec(Struct, array_like=True):
    """What was recorded of a value: `["[1, 8, 64] f32", [1, 8, 64], "float32", "tensor"]`."""

    label: str
    shape: list[int] | None
    dtype: str | None
    what: Literal["tensor", "number", "container", "object"]
    placement: str | UnsetType = UNSET  # Over the processes of a sharded model.


class Columns(Message):
    """All rows of the tree, each before its children, by column. Tables hold values once; columns have positions."""

    names: list[str]
    ops: list[str]
    specs: list[Spec]
    name: list[int]  # Per row: its name as a path writes it.
    depth: list[int]  # Per row: 0 for the root, 1 for what is in it, ...
    kind: list[int]
    op: list[int]  # Per row: a torch function, the class of a module, else the word for the kind.
    spec: list[int]  # Per row: -1 for graphs and unused modules.
    flags: list[int]
    notes: dict[str, str]  # By row: why a graph is opaque, and the like.


class AboutView(Message):
    """What every view of a graph says of itself."""

    view: ViewName
    name: str  # The variable that holds the graph: `pg`.
    model_id: str  # The widget's model id, by which it is found among the outputs of a notebook.
    version: str  # The version of graphpatch-notebook.


class About(AboutView):
    """What the tree says of itself."""

    module: str  # The class of the model.
    nodes: int  # How many nodes can be patched.
    arguments: str | None  # The example inputs as the Python code of a call: `ids, attention_mask=mask`.
    no_inputs: str | None  # Why there are no example inputs that *Run* could use; `null`: there are some.
    has_given_inputs: bool  # Whether runs are made on inputs that were given to the browser.
    has_tokenizer: bool
    measures: dict[str, str]  # The columns that a run can fill, with what they say.
    patch_kinds: list[PatchKindForm]  # In the order of the editor; the first is the one of a new patch.


class AttentionLayer(Message):
    """The patterns of one attention."""

    name: str  # `layers[3].attn`.
    title: str
    layer: int
    is_cross: bool  # Whether the keys are those of another sequence.
    heads: int
    value_heads: int  # How many heads the values have; 0 if the lengths of values are not known.
    full: tuple[int, int]  # The numbers of queries and keys.
    shape: tuple[int, int]  # The rows and columns of what was sent.
    queries: int  # Which of `tokens` are the labels.
    keys: int
    image: int | None  # Which of `images` its keys are.


class AttentionImage(Message):
    """Tokens that are the patches of a picture, row by row."""

    positions: list[int]
    grid: tuple[int, int]  # Its rows and columns.


class Attention(Message):
    """The patterns of all heads."""

    version: int  # Counts what was sent: `head` refers to it.
    patches: int  # The version of the patches that the run `patched` was made with.
    runs: list[AttentionRun]
    rows: int  # How many rows the batch has.
    is_whole: bool  # Whether all patterns were sent as they are; else as smaller pictures.
    layers: list[AttentionLayer]
    tokens: list[list[str]]  # The labels of positions, which layers refer to.
    picture: str | None  # The image among the inputs, as a URL.
    images: list[AttentionImage]  # Which tokens are its patches, which layers refer to.


class LensRow(Message):
    """A row of a lens: the state after a component."""

    name: str  # The component.
    layer: int | None  # The layer that computes it; `null` for the embeddings.
    label: str


class LensStream(Message):
    """The rows of a stream."""

    name: str
    rows: list[LensRow]


class Lens(Message):
    """What the states of streams say at each position: the probable tokens, and the probability of a target."""

    streams: list[LensStream]  # Those whose numbers are there.
    available: list[str]  # Those that the model has.
    row: int  # The row of the batch that the numbers are of, and how many rows the batch has.
    rows: int
    positions: list[str] | None  # The text of each position; `null`: they are numbers.
    vocabulary: list[str]  # The texts of all tokens that are shown.
    target: list[int]  # The target of each position, as a position in the vocabulary.
    has_target: bool  # Whether it was given; else it is what the model itself finds most probable.
    top: int  # How many probable tokens each cell has.
    runs: int  # 1: without patches; 2: also with the patches.
    version: int  # The version of the patches that the numbers are for.
    remarks: list[str]


class Coloring(Message):
    """Tokens with colors."""

    name: str  # The path of the value.
    scores: list[str]
    rows: list[list[str]]  # The texts of the tokens of each row of the batch.
    runs: int  # 1: without patches; 2: also with the patches.
    version: int  # The version of the patches that the numbers are for.


class GenerationLine(Message):
    """A continuation of the prompt."""

    name: str
    steps: int
    branch: int | None  # The number of the branch; `null` for the lines that are none.
    start: int  # The step in which the branch has another token.


class Generation(Message):
    """Generated tokens: a line without patches, one with them if there are any, and branches."""

    prompt: list[str]  # The texts of the prompt; empty if they are not known.
    vocabulary: list[str]  # The texts of all tokens that are shown.
    tokens: list[int]  # Their numbers.
    size: int  # How many tokens the model knows.
    top: int  # How many probable tokens each step has.
    lines: list[GenerationLine]
    version: int  # The version of the patches that the numbers are for.
    remarks: list[str]


class CircuitBand(Message):
    """The area behind the rows of a layer."""

    label: str
    y: float
    height: float


class CircuitNode(Message):
    """A node, with its place in the picture."""

    name: str  # The component: `layers[2].attn.heads[3].z`.
    label: str
    x: float  # The center.
    y: float
    width: float
    height: float
    ports: list[tuple[str, float]]  # The inputs at which edges end, and where: `[["q", 112], ...]`.
    row: int  # The row in the skeleton; -1 without a tree, or if there is none.
    position: int | None  # In the sequence; `null`: all of them.
    members: list[int] | UnsetType = UNSET  # The nodes of an attribution graph that it stands for, by their numbers.
    is_error: bool | UnsetType = UNSET  # What no feature of an attribution graph explains.
    page: str | UnsetType = UNSET  # The page of a feature, as HTML.


class CircuitEdge(Message, kw_only=True):
    """An edge, with its line in the picture."""

    sender: str
    receiver: str
    score: float
    position: int | None
    start: int = field(name="from")  # The node where it begins.
    to: list[int]  # Those where it ends: several, if heads share the keys or values there.
    thickness: float  # Of its line.
    line: str  # The `d` of an SVG path.


class CircuitColumn(Message):
    """A position: its token, and its center."""

    label: str
    x: float


class CircuitLink(Message):
    """A line from where a component reads to another position at which it writes: these two nodes, and the line."""

    ends: tuple[int, int]
    line: str


class CircuitPicture(Message):
    """A circuit, with the place of everything in its picture, in pixels from the top left."""

    width: float
    height: float
    bands: list[CircuitBand]
    nodes: list[CircuitNode]  # From the lowest row to the highest, each from the left.
    edges: list[CircuitEdge]  # The strongest first: the largest |score|, or the most influence.
    columns: list[CircuitColumn]  # The positions, of edges that have some.
    links: list[CircuitLink]
    first: int  # How many edges are shown at first.
    summary: str  # `40 of 1,230 edges, faithfulness 0.91`.
    python: str  # The code that makes the circuit.
    json: str
    is_by_influence: bool | UnsetType = UNSET


class CellItems(Message):
    """What each row and column of a heatmap selects; `null`: nothing. A cell is both, and what all cells have."""

    rows: list[Item] | None
    columns: list[Item] | None
    all: Item  # Its name, and names of rows and columns, may have `*` for the layer and the head of the cell.


class ResultSide(Message):
    """The rows or columns of a result."""

    name: str  # The dimension.
    title: str
    values: list[str]  # The coordinate of each row or column; of a block, the first and the last.
    labels: list[str] | None  # The labels beside the cells, shortened; `null`: none.
    tokens: list[str] | None  # The full texts of tokens, with invisible characters escaped.


class ResultHeatmap(Message):
    """A result with two dimensions, in the order in which it is seen: the top row first."""

    title: str | None
    name: str  # What the numbers are.
    rows: ResultSide
    columns: ResultSide
    full: tuple[int, int]  # The numbers of rows and columns of the result; a cell may be a block of these.
    map: Literal["sequential", "diverging"]
    low: float
    high: float
    center: str | None  # Which number has no color, in words; `null`: all have one, or it is zero.
    missing: str | None  # Why cells have no number.
    reduced: str | None  # What cells are, if they are blocks.
    model_id: str  # As in `About`.


class Code(Message):
    """Exported code."""

    code: str


class Empty(Message):
    """Nothing."""


REQUESTS: dict[str, tuple[type[Message], type[Message]]] = {
    "edit": (EditRequest, Edited),
    "check": (CheckRequest, Checked),
    "details": (RowRequest, Details),
    "columns": (ColumnsRequest, JobStatus),
    "components": (Empty, Empty),  # Finds the components, which takes a while; the trait has them.
    "run": (RunRequest, RunStatus),
    "run_status": (JobRef, RunStatus),
    "run_interrupt": (JobRef, RunStatus),
    "activation": (ActivationRequest, ActivationStatus),
    "activation_status": (JobRef, ActivationStatus),
    "activation_interrupt": (JobRef, ActivationStatus),
    "activation_close": (JobRef, Empty),
    "lens": (LensRequest, JobStatus),
    "generation": (GenerationRequest, JobStatus),
    "update": (Empty, JobStatus),  # Computes the numbers of a view for the patches as they are now.
    "head": (HeadRequest, Head),
    "export": (RunRequest, Code),
}
"""The payload of each request, and the result of its reply."""
