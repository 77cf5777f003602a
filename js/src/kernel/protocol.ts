/**
 * What kernel and front end exchange:
 * - traits: what every view must have, and what is saved in the notebook (`Traits`);
 * - requests: the front end asks, the kernel replies (`Requests` in messages.ts, generated from the kernel's definition);
 *   each reply belongs to one request by its id;
 * - nothing else: the kernel sends no events. While something runs, the front end asks how far it is.
 */

import type { Item, PatchKindForm, Requests, RunState, SessionState } from "./messages";

export type {
  ComponentRow as Component,
  OutputChange as Change,
  PatchKindForm as PatchKind,
  RowKind as Kind,
} from "./messages";
export * from "./messages";

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
  patch_kinds: PatchKindForm[];
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
