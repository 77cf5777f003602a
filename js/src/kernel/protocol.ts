/**
 * The messages between kernel and front end. The other half is `graphpatch_notebook/notebook/browser/widget.py`.
 *
 * Three ways:
 * - traits: what every view must have, and what is saved in the notebook (`Traits`);
 * - requests: the front end asks, the kernel replies (`Requests`); each reply belongs to one request by its id;
 * - nothing else: the kernel sends no events. While something runs, the front end asks how far it is.
 */

/** What a row of the tree is, by its number in `Columns.kind`. */
export const KINDS = [
  "graph", // the frame of a module that was called; row 0 is the whole model
  "input",
  "parameter",
  "buffer",
  "attribute",
  "constant",
  "op",
  "output",
  "item", // a value inside the container that the row above it holds
  "unused", // a module that the run on the example inputs never called
] as const;
export type Kind = (typeof KINDS)[number];

/** Bits of `Columns.flags`. */
export const FLAG = {
  size: 1, // only carries sizes: shown on request
  hidden: 2, // a constant, a flag or clutter: shown on request, too
  opaque: 4, // a graph that could not be looked into; `notes` says why
  patchable: 8, // a tensor or number: one can patch it
  mutated: 16, // the model writes into this tensor later
  viewFilled: 32, // ... which is a view, so that a patch cuts it off from its base
  plumbing: 64, // a mask, an index, a position, ...: folded away
} as const;

/** In `name`, `op` and `spec`: the first position of the table that was not used yet. Long runs of it compress well. */
export const NEXT = -2;

/** [label, shape, dtype, what]: `["[1, 8, 64] f32", [1, 8, 64], "float32", "tensor"]`, `["int(5)", null, null, "number"]`. */
export type Spec = [label: string, shape: number[] | null, dtype: string | null, what: SpecWhat, placement?: string];
type SpecWhat = "tensor" | "number" | "container" | "object";

/**
 * The skeleton: all rows of the tree, in order (each row before its children), as columns. Deflated JSON (zlib) in the
 * trait `skeleton`. Tables (`names`, `ops`, `specs`) hold each value once; the columns have positions in them.
 */
export interface Columns {
  names: string[];
  ops: string[];
  specs: Spec[];
  /** Per row: its name as a path writes it, quoted where a path would quote it. */
  name: number[];
  /** Per row: 0 for the root, 1 for what is in it, ... */
  depth: number[];
  kind: number[];
  /** Per row: the torch function of an op, the class of the module of a graph or unused module, else the kind's word. */
  op: number[];
  /** Per row: -1 for graphs and unused modules. */
  spec: number[];
  flags: number[];
  /** By row: why a graph is opaque, and the like. */
  notes: Record<string, string>;
}

/** The traits of every view of a graph. Only `selection` is set by the front end. */
export interface LinkedTraits {
  /** Deflated JSON of `{css, js}`: the front end itself, which `loader.ts` unpacks. Empty where anywidget loads it from files. */
  front_end: DataView;
  about: AboutView;
  session: SessionState;
  /** Identifies the views that share a selection. */
  group: string;
  selection: Item[];
}

/** One selected thing; see `graphpatch_notebook/notebook/views/selection.py`. */
export interface Item {
  /** Of a component, or the path of a node. */
  name: string | null;
  layer: number | null;
  head: number | null;
  /** Of the query, where there are queries and keys. */
  position: number | null;
  key: number | null;
}

/** Traits of the tree. Only `expanded`, `selected`, `query`, `shows_sizes` and `selection` are set by the front end. */
export interface Traits extends LinkedTraits {
  /** Deflated JSON of `Columns`. */
  skeleton: DataView;
  about: About;
  /** Rows that are open; `null` before a view has chosen some. */
  expanded: number[] | null;
  /** The row that has the focus of the tree. */
  selected: number;
  query: string;
  /** Whether rows with only sizes, and hidden rows, are shown. */
  shows_sizes: boolean;
  /** Deflated JSON of `Component[]`, layer by layer. Empty: not asked for yet. */
  components: DataView;
  /** A float32 per row, little-endian; NaN without a score. Empty: no scores. */
  scores: DataView;
  scores_name: string;
  /** The current or last run of any view; `null` before the first one. */
  run: { id: number; state: RunState } | null;
  /** The circuit that is shown above the tree; `null`: none is. */
  circuit: CircuitPicture | null;
}

/** The traits of the attention view. Only `row` and `selection` are set by the front end. */
export interface AttentionTraits extends LinkedTraits {
  attention: Attention;
  /** Deflated; `notebook/views/patterns.py` says how it is laid out. */
  cells: DataView;
  /** The row of the batch that is shown; -1: the mean. */
  row: number;
}

export type AttentionRun = "clean" | "patched";

export interface Attention {
  /** Counts what was sent: `head` refers to it. */
  version: number;
  /** The version of the patches that the run `patched` was made with. */
  patches: number;
  runs: AttentionRun[];
  /** How many rows the batch has. */
  rows: number;
  /** Whether the mean over the rows is shown: then patterns times lengths are sent in place of lengths. */
  is_mean: boolean;
  /** What ran, as Python: `pg(ids)`. */
  call: string;
  /** Whether all patterns were sent as they are; else as smaller pictures. */
  is_whole: boolean;
  layers: AttentionLayer[];
  /** The labels of positions, which layers refer to. */
  tokens: string[][];
}

export interface AttentionLayer {
  /** `layers[3].attn`. */
  name: string;
  title: string;
  layer: number;
  /** Whether the keys are those of another sequence. */
  is_cross: boolean;
  heads: number;
  /** How many heads the values have, which several heads may share; 0 if the lengths of values are not known. */
  value_heads: number;
  /** The numbers of queries and keys. */
  full: [queries: number, keys: number];
  /** The rows and columns of what was sent. */
  shape: [rows: number, columns: number];
  /** Which of `tokens` are the labels. */
  queries: number;
  keys: number;
}

/** The traits of a lens view, which `show_lens` shows. Besides `selection`, the front end sets `stream`. */
export interface LensTraits extends LinkedTraits {
  lens: Lens;
  /** Deflated numbers: see `readLens` in lens_view.ts. */
  cells: DataView;
  /** The stream that is shown. */
  stream: string;
}

/** What the states of streams say at each position: the probable tokens, and the probability of a target. */
export interface Lens {
  /** Those whose numbers are there. */
  streams: { name: string; rows: LensRow[] }[];
  /** Those that the model has. */
  available: string[];
  /** The row of the batch that the numbers are of, and how many rows the batch has. */
  row: number;
  rows: number;
  /** The text of each position; `null`: they are numbers. */
  positions: string[] | null;
  /** The texts of all tokens that are shown. */
  vocabulary: string[];
  /** The target of each position, as a position in the vocabulary. */
  target: number[];
  /** Whether it was given; else it is what the model itself finds most probable. */
  has_target: boolean;
  /** How many probable tokens each cell has. */
  top: number;
  /** 1: without patches; 2: also with the patches. */
  runs: 1 | 2;
  /** The version of the patches that the numbers are for. */
  version: number;
  remarks: string[];
}

interface LensRow {
  /** The component. */
  name: string;
  /** The layer that computes it; `null` for the embeddings. */
  layer: number | null;
  label: string;
}

/** The traits of a generation view, which `show_generation` shows. */
export interface GenerationTraits extends LinkedTraits {
  generation: Generation;
  /** Deflated numbers: see `readGeneration` in generation_view.ts. */
  numbers: DataView;
}

export type Score = "log_probability" | "entropy" | "given";

/** Generated tokens: a line without patches, one with them if there are any, and branches. */
export interface Generation {
  /** The texts of the prompt; empty if they are not known. */
  prompt: string[];
  /** The texts of all tokens that are shown. */
  vocabulary: string[];
  /** Their numbers. */
  tokens: number[];
  /** How many probable tokens each step has. */
  top: number;
  lines: GenerationLine[];
  /** What the colors are at first. */
  score: Score;
  /** Whether numbers were given, for the first line. */
  has_given: boolean;
  /** The version of the patches that the numbers are for. */
  version: number;
  remarks: string[];
}

interface GenerationLine {
  name: string;
  steps: number;
  /** The number of the branch; `null` for the lines that are none. */
  branch: number | null;
  /** The step in which the branch has another token. */
  start: number;
}

/** The traits of the widget of `show_circuit`, which has `front_end` besides, and nothing else of the above. */
export interface CircuitTraits {
  circuit: CircuitPicture;
  /** What is pinned: a node or an edge, by its number; set by the front end. */
  pinned: Pinned | null;
  model_id: string;
}
export type Pinned = [kind: "node" | "edge", number: number];

/** A circuit, with the place of everything in its picture, in pixels from the top left. */
export interface CircuitPicture {
  width: number;
  height: number;
  bands: CircuitBand[];
  /** From the lowest row to the highest, each from the left. */
  nodes: CircuitNode[];
  /** The strongest first. */
  edges: CircuitEdge[];
  /** The positions, of edges that have some: their token, and their center. */
  columns: { label: string; x: number }[];
  /** Lines from where a component reads to the other positions at which it writes: these two nodes, and the line. */
  links: { ends: [number, number]; line: string }[];
  /** How many edges are shown at first. */
  first: number;
  /** `40 of 1,230 edges, faithfulness 0.91`. */
  summary: string;
  /** The code that makes the circuit. */
  python: string;
  json: string;
}

/** The area behind the rows of a layer. */
interface CircuitBand {
  label: string;
  y: number;
  height: number;
}

export interface CircuitNode {
  /** The component: `layers[2].attn.heads[3].z`. */
  name: string;
  label: string;
  /** The center. */
  x: number;
  y: number;
  width: number;
  height: number;
  /** The inputs at which edges end, and where: `[["q", 112], ...]`. */
  ports: [name: string, x: number][];
  /** The row in the skeleton; -1 without a tree, or if there is none. */
  row: number;
  /** In the sequence; `null`: all of them. */
  position: number | null;
}

export interface CircuitEdge {
  sender: string;
  receiver: string;
  score: number;
  position: number | null;
  /** The node where it begins, and those where it ends: several, if heads share the keys or values there. */
  from: number;
  to: number[];
  /** Of its line. */
  thickness: number;
  /** The `d` of an SVG path. */
  line: string;
}

/** The traits of the widget of `show_heatmap`, which has `front_end` besides, and nothing else of the above. */
export interface HeatmapTraits {
  heatmap: ResultHeatmap;
  /** A float32 per cell, row by row, little-endian; NaN without a number. */
  values: DataView;
  /** The selected cell, counted from the top left one; set by the front end. */
  cell: [row: number, column: number] | null;
  /** What its cells select, for a heatmap that takes part in the selection of a graph: it has `LinkedTraits`, too. */
  cell_items?: CellItems;
}

/** What each row and column selects; `null`: nothing. A cell is both, and what all cells have. */
interface CellItems {
  rows: Item[] | null;
  columns: Item[] | null;
  /** Its name, and names of rows and columns, may have `*` for the layer and the head of the cell. */
  all: Item;
}

/** A result with two dimensions, in the order in which it is seen: the top row first. */
export interface ResultHeatmap {
  title: string | null;
  /** What the numbers are. */
  name: string;
  rows: ResultSide;
  columns: ResultSide;
  /** The numbers of rows and columns of the result; a cell may be a block of these. */
  full: [rows: number, columns: number];
  map: "sequential" | "diverging";
  low: number;
  high: number;
  /** Which number has no color, in words; `null`: all have one, or it is zero. */
  center: string | null;
  /** Why cells have no number. */
  missing: string | null;
  /** What cells are, if they are blocks. */
  reduced: string | null;
  /** As in `About`. */
  model_id: string;
}

export interface ResultSide {
  /** The dimension. */
  name: string;
  title: string;
  /** The coordinate of each row or column; of a block, the first and the last. */
  values: string[];
  /** The labels beside the cells, shortened; `null`: none. */
  labels: string[] | null;
  /** The full texts of tokens, with invisible characters escaped; `null` if they are not tokens. */
  tokens: string[] | null;
}

interface AboutView {
  /** Which view it is. */
  view: "tree" | "attention" | "lens" | "generation" | "result";
  /** The variable that holds the graph: `pg`. */
  name: string;
  /** The widget's model id, by which it is found among the outputs of a notebook. */
  model_id: string;
  /** The version of graphpatch-notebook. */
  version: string;
}

export interface About extends AboutView {
  /** The class of the model. */
  module: string;
  /** How many nodes can be patched. */
  nodes: number;
  /** The example inputs as the Python code of a call: `ids, attention_mask=mask`; `null` if unknown. */
  arguments: string | null;
  /** Why there are no example inputs that *Run* could use; `null`: there are some. */
  no_inputs: string | null;
  /** Whether runs are made on inputs that were given to the browser instead of the example inputs. */
  has_given_inputs: boolean;
  has_tokenizer: boolean;
  /** All kinds of patches, in the order of the editor; the first is the one of a new patch. */
  patch_kinds: PatchKind[];
}

/** A kind of patch, as registered in the kernel. It defines the fields of the editor. */
export interface PatchKind {
  name: string;
  /** What the patch does: `sets the value to zero`. */
  summary: string;
  /** The fields that a user may fill in, besides the kind. */
  fields: (keyof PatchFields)[];
  /** For kinds that take a value: what it must be (`a number or a tensor`), and an expression as an example. */
  value: { noun: string; example: string } | null;
}

/** The fields of a patch that a user types; `null` for an empty field. */
export interface PatchFields {
  path: string;
  /** The name of a `PatchKind`. */
  kind: string;
  /** The text between brackets: `:, -1, 3:5`. */
  slice: string | null;
  /** A Python expression; for the kinds that take a value. */
  value: string | null;
  /** The variable that receives what the patch keeps, for the kinds that keep something. `null`: the kernel finds a free name. */
  name: string | null;
  /** `prefill`, `decoding`, or numbers: `0`, `2, 4`, `1:`. */
  steps: string | null;
  positions: string | null;
  position_dim: number | null;
  any_shape: boolean;
  /** Whether the slice may select nothing. */
  allow_empty: boolean;
}

export interface PatchState extends PatchFields {
  /** The number of `#3`, which is never reused. */
  number: number;
  is_enabled: boolean;
  /** The session file of the value, which the user must trust before it is evaluated; `null` for other values. */
  untrusted: string | null;
  /** The row in the skeleton; -1 if it is not there any more. */
  row: number;
  /** The recorded shape of the value, and of its slice. */
  shape: number[] | null;
  sliced: number[] | null;
  warning: string | null;
}

export interface SessionState {
  version: number;
  patches: PatchState[];
  can_undo: boolean;
  can_redo: boolean;
}

export type Edit =
  | { action: "add"; patch: PatchFields }
  | { action: "change"; number: number; patch: Partial<PatchFields & { is_enabled: boolean }> }
  | { action: "move"; number: number; position: number }
  | { action: "remove"; numbers: number[] }
  /** Trusts the file that this patch is from. */
  | { action: "trust"; number: number }
  /** Adds a patch for each of the selected items. `value`: what was typed, for the acts that need it; `steps`: as in a patch. */
  | { action: "act"; act: Act; items: Item[]; value: string | null; steps: string | null }
  | { action: "clear" | "undo" | "redo" };

/** What can be done with a selection. */
export type Act = "zero" | "mean" | "other_run" | "steer" | "probe";

/** The value that a patch would be applied to. */
export interface Checked {
  shape: number[] | null;
  sliced: number[] | null;
  warning: string | null;
  /** The variable for a patch that keeps something, if none is typed. */
  name: string | null;
}

export interface Source {
  file: string;
  line: number;
  function: string;
  text: string;
}

export interface Link {
  row: number;
  /** What to write: the path as seen from the graph that both are in, else the whole path. */
  text: string;
}

/** A value with a standard name: `layers[3].attn.q`. */
export interface Component {
  row: number;
  name: string;
  /** What the dimensions of the value are: `batch`, `head`, ... */
  axes: string[];
  shape: number[];
}

/** What the popup shows. */
export interface Details {
  row: number;
  path: string;
  kind: Kind;
  /** In words: what it is, and what is to be known of it (opaque and why, mutated later, ...). */
  notes: string[];
  shape: number[] | null;
  dtype: string | null;
  device: string | null;
  /** The Python code of a graph; for a node the line of it that makes the value. */
  code: string;
  /** The user's lines that made it, outermost first. */
  source: Source[];
  inputs: Link[];
  users: Link[];
}

export interface Statistics {
  shape: number[];
  dtype: string;
  device: string;
  count: number;
  /** Of the finite values; `null` without any, or if they are not numbers. */
  mean: number | null;
  std: number | null;
  min: number | null;
  max: number | null;
  nan: number;
  infinite: number;
}

/** Which of the buffers of the reply holds the float32 values, row by row. */
export interface Heatmap {
  type: "heatmap";
  buffer: number;
  rows: number;
  columns: number;
  /** The size before it was reduced: [rows, columns]. */
  full: [number, number];
  /** How it was reduced, in words; `null`: every value is there. */
  reduced: string | null;
  /** Which part of the value it is, as a slice: `0, 3, :, :`. */
  slice: string;
  /** What all values of this part are, where they are one and the same. */
  constant?: number | null;
}
export interface Histogram {
  type: "histogram";
  counts: number[];
  /** One more than counts. */
  edges: number[];
  slice: string | null;
}
export type Plot = Heatmap | Histogram | { type: "none"; why: string };

export interface ActivationView {
  path: string;
  statistics: Statistics;
  plot: Plot;
  /** For the positions of a heatmap, where they are tokens: their texts. */
  row_labels: string[] | null;
  column_labels: string[] | null;
}

type RunState = "running" | "done" | "failed" | "interrupted";
export type Token = [text: string, probability: number];

/** One tensor or number of the model's output, without and with the patches. */
export interface Change {
  path: string;
  shape: number[];
  dtype: string;
  norm_before: number;
  norm_after: number;
  norm_difference: number;
  /** The entries that changed most. */
  largest: { index: number[]; before: number; after: number }[];
  /** In words, where the two cannot be compared. */
  note: string | null;
}

/** What the patches have changed at a probe. A number is `null` where it is not known; `note` says why. */
export interface ProbeChange {
  norm_before: number | null;
  norm_after: number | null;
  norm_difference: number | null;
  note: string | null;
}

export interface ProbeReport {
  number: number;
  name: string;
  path: string;
  /** `null`: it did not fire; `note` says so. */
  statistics: Statistics | null;
  plot: Plot;
  row_labels: string[] | null;
  column_labels: string[] | null;
  note: string | null;
  /** `null`: nothing was patched, or there are no numbers to compare. */
  change?: ProbeChange | null;
}

export interface RunReport {
  /** What ran, as Python: `pg(ids)`. */
  call: string;
  seconds: number;
  /** The numbers of the patches that were applied. */
  patches: number[];
  warnings: string[];
  /** The most probable next tokens, for language models with a tokenizer. */
  tokens: { position: number; before: Token[]; after: Token[] } | null;
  changes: Change[];
  probes: ProbeReport[];
}

/** What `RunStatus` and `ActivationStatus` have in common. */
export interface JobStatus {
  id: number;
  state: RunState;
  seconds: number;
  /** The part of the calls of the model that have ended, from 0 to 1; `null` before the first one has. */
  fraction: number | null;
  /** Why it failed, in words. */
  error: string | null;
}

export interface RunStatus extends JobStatus {
  /** There when done. */
  report: RunReport | null;
}

export interface ActivationStatus extends JobStatus {
  view: ActivationView | null;
}

/** By the name of a request: what it says, and what the reply holds. */
export interface Requests {
  edit: { payload: { based_on: number; edit: Edit }; result: { version: number } };
  /** `number`: the patch that is being changed, if it is one. */
  check: { payload: { patch: PatchFields; number: number | null }; result: Checked };
  details: { payload: { row: number }; result: Details };
  /** Finds the components, which takes a while, so that they are asked for after the tree is shown; the trait has them. */
  components: { payload: Record<string, never>; result: Record<string, never> };
  /** `inputs`: arguments of the call as Python; `null`: the example inputs. */
  run: { payload: { inputs: string | null }; result: RunStatus };
  run_status: { payload: { id: number }; result: RunStatus };
  run_interrupt: { payload: { id: number }; result: RunStatus };
  /** `plane`: a slice with two dimensions (or one); `null`: the last two. A new slice of the same value runs the model only if a
   * cell ran since. */
  activation: {
    payload: { row: number; plane: string | null; is_patched: boolean; inputs: string | null };
    result: ActivationStatus;
  };
  activation_status: { payload: { id: number }; result: ActivationStatus };
  activation_interrupt: { payload: { id: number }; result: ActivationStatus };
  /** Numbers of a lens view for the patches as they are now, and for another stream; asked again until they are there. */
  lens: { payload: { stream: string | null }; result: JobStatus };
  /** Tokens for the patches as they are now; `line`, `step` and `token` of a new branch; the number of one to remove. */
  generation: {
    payload: { line: number | null; step: number | null; token: number | null; remove: number | null };
    result: JobStatus;
  };
  /** The view was closed: the kernel drops the value. */
  activation_close: { payload: { id: number }; result: Record<string, never> };
  /** Patterns of an attention view for the patches as they are now; asked again until they are there. */
  attend: { payload: Record<string, never>; result: JobStatus };
  /**
   * The whole pattern of a head, as bytes: the first buffer. 255 is the first of `scales`. Of the mean over a batch, the
   * second is the pattern times the lengths. `layer`: its place in `Attention.layers`.
   */
  head: {
    payload: { version: number; run: AttentionRun; layer: number; head: number };
    result: { scales: number[] };
  };
  /** `inputs`: as for `run`. */
  export: { payload: { form: "graphpatch" | "hooks"; inputs: string | null }; result: { code: string } };
}
export type RequestName = keyof Requests;

/** What the front end sends. */
export interface Request<N extends RequestName = RequestName> {
  id: number;
  request: N;
  payload: Requests[N]["payload"];
}

/** What the kernel sends; binary parts come beside it as buffers. */
export type Reply<N extends RequestName = RequestName> =
  | { id: number; result: Requests[N]["result"] }
  | { id: number; error: RequestError };

export interface RequestError {
  /** In words: what failed, and what to do. */
  message: string;
  /** The field of the patch that is wrong, or `inputs`, `plane`, `version` (the patches have changed since). */
  field: string | null;
}
