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
  name: number[]; // Per row: its name as a path writes it, quoted where a path would quote it.
  depth: number[]; // Per row: 0 for the root, 1 for what is in it, ...
  kind: number[];
  /** Per row: the torch function of an op, the class of the module of a graph or unused module, else the kind's word. */
  op: number[];
  spec: number[]; // Per row: -1 for graphs and unused modules.
  flags: number[];
  notes: Record<string, string>; // By row: why a graph is opaque, and the like.
}

/** The traits of every view of a graph. Only `selection` is set by the front end. */
export interface LinkedTraits {
  /** `IPY_MODEL_` and the id of the model with the front end, which `loader.ts` unpacks. */
  front_end: string;
  about: AboutView;
  session: SessionState;
  group: string; // Identifies the views that share a selection.
  selection: Item[];
}

/** Traits of the tree. Only `expanded`, `selected`, `query`, `shows_...` and `selection` are set by the front end. */
export interface Traits extends LinkedTraits {
  skeleton: DataView; // Deflated JSON of `Columns`.
  about: About;
  expanded: number[] | null; // Rows that are open; `null` before a view has chosen some.
  selected: number; // The row that has the focus of the tree.
  query: string;
  shows_sizes: boolean; // Whether rows with only sizes, and hidden rows, are shown.
  shows_graph: boolean; // Whether the dataflow is drawn.
  edges: DataView; // Deflated JSON of `Flow`. Empty: it has not been shown yet.
  components: DataView; // Deflated JSON of `Component[]`, layer by layer. Empty: not asked for yet.
  scores: DataView; // By column: a float32 per row, little-endian; NaN without a score. Empty: no scores.
  score_names: string[]; // Of the columns.
  run: { id: number; state: RunState } | null; // The current or last run of any view; `null` before the first one.
  circuit: CircuitPicture | null; // The circuit that is shown above the tree; `null`: none is.
}

/** The traits of the attention view. Only `row` and `selection` are set by the front end. */
export interface AttentionTraits extends LinkedTraits {
  attention: Attention;
  cells: DataView; // Deflated; `packed` in notebook/views/attention.py says how it is laid out.
  row: number; // The row of the batch that is shown; -1: the mean.
}

export type AttentionRun = "clean" | "patched";

export interface Attention {
  version: number; // Counts what was sent: `head` refers to it.
  patches: number; // The version of the patches that the run `patched` was made with.
  runs: AttentionRun[];
  rows: number; // How many rows the batch has.
  is_whole: boolean; // Whether all patterns were sent as they are; else as smaller pictures.
  layers: AttentionLayer[];
  tokens: string[][]; // The labels of positions, which layers refer to.
  picture: string | null; // The image among the inputs, as a URL.
  images: AttentionImage[]; // Which tokens are its patches, which layers refer to.
}

/** Tokens that are the patches of a picture, row by row. */
export interface AttentionImage {
  positions: number[];
  grid: [rows: number, columns: number];
}

export interface AttentionLayer {
  name: string; // `layers[3].attn`.
  title: string;
  layer: number;
  is_cross: boolean; // Whether the keys are those of another sequence.
  heads: number;
  /** How many heads the values have, which several heads may share; 0 if the lengths of values are not known. */
  value_heads: number;
  full: [queries: number, keys: number]; // The numbers of queries and keys.
  shape: [rows: number, columns: number]; // The rows and columns of what was sent.
  queries: number; // Which of `tokens` are the labels.
  keys: number;
  image: number | null; // Which of `images` its keys are.
}

/** The traits of a lens view, which `show_lens` shows. Besides `selection`, the front end sets `stream`. */
export interface LensTraits extends LinkedTraits {
  lens: Lens;
  cells: DataView; // Deflated numbers: see `readLens` in lens_view.ts.
  stream: string; // The stream that is shown.
}

/** What the states of streams say at each position: the probable tokens, and the probability of a target. */
export interface Lens {
  streams: { name: string; rows: LensRow[] }[]; // Those whose numbers are there.
  available: string[]; // Those that the model has.
  row: number; // The row of the batch that the numbers are of, and how many rows the batch has.
  rows: number;
  positions: string[] | null; // The text of each position; `null`: they are numbers.
  vocabulary: string[]; // The texts of all tokens that are shown.
  target: number[]; // The target of each position, as a position in the vocabulary.
  has_target: boolean; // Whether it was given; else it is what the model itself finds most probable.
  top: number; // How many probable tokens each cell has.
  runs: 1 | 2; // 1: without patches; 2: also with the patches.
  version: number; // The version of the patches that the numbers are for.
  remarks: string[];
}

interface LensRow {
  name: string; // The component.
  layer: number | null; // The layer that computes it; `null` for the embeddings.
  label: string;
}

/** The traits of a generation view, which `show_generation` shows. */
export interface GenerationTraits extends LinkedTraits {
  generation: Generation;
  numbers: DataView; // Deflated numbers: see `readGeneration` in generation_view.ts.
}

/** The traits of a view of colored tokens, which `show_tokens` shows. */
export interface TokensTraits extends LinkedTraits {
  coloring: Coloring;
  numbers: DataView; // Deflated float32, by run, score, row and position.
}

export interface Coloring {
  name: string; // The path of the value.
  scores: string[];
  rows: string[][]; // The texts of the tokens of each row of the batch.
  runs: 1 | 2; // 1: without patches; 2: also with the patches.
  version: number; // The version of the patches that the numbers are for.
}

export type Score = "probability" | "entropy";

/** Generated tokens: a line without patches, one with them if there are any, and branches. */
export interface Generation {
  prompt: string[]; // The texts of the prompt; empty if they are not known.
  vocabulary: string[]; // The texts of all tokens that are shown.
  tokens: number[]; // Their numbers.
  size: number; // How many tokens the model knows.
  top: number; // How many probable tokens each step has.
  lines: GenerationLine[];
  version: number; // The version of the patches that the numbers are for.
  remarks: string[];
}

interface GenerationLine {
  name: string;
  steps: number;
  branch: number | null; // The number of the branch; `null` for the lines that are none.
  start: number; // The step in which the branch has another token.
}

/** The traits of the widget of `show_circuit`, which has `front_end` besides, and nothing else of the above. */
export interface CircuitTraits {
  circuit: CircuitPicture;
  pinned: Pinned | null; // What is pinned: a node or an edge, by its number; set by the front end.
  /** The supernodes of an attribution graph, with the numbers of their nodes there; set by the front end. */
  groups?: Record<string, number[]>;
  model_id: string;
}
export type Pinned = [kind: "node" | "edge", number: number];

/** A circuit, with the place of everything in its picture, in pixels from the top left. */
export interface CircuitPicture {
  width: number;
  height: number;
  bands: CircuitBand[];
  nodes: CircuitNode[]; // From the lowest row to the highest, each from the left.
  edges: CircuitEdge[]; // The strongest first: the largest |score|, or, in an attribution graph, the most influence.
  is_by_influence?: boolean;
  columns: { label: string; x: number }[]; // The positions, of edges that have some: their token, and their center.
  /** Lines from where a component reads to the other positions at which it writes: these two nodes, and the line. */
  links: { ends: [number, number]; line: string }[];
  first: number; // How many edges are shown at first.
  summary: string; // `40 of 1,230 edges, faithfulness 0.91`.
  python: string; // The code that makes the circuit.
  json: string;
}

/** The area behind the rows of a layer. */
interface CircuitBand {
  label: string;
  y: number;
  height: number;
}

export interface CircuitNode {
  name: string; // The component: `layers[2].attn.heads[3].z`.
  label: string;
  x: number; // The center.
  y: number;
  width: number;
  height: number;
  ports: [name: string, x: number][]; // The inputs at which edges end, and where: `[["q", 112], ...]`.
  row: number; // The row in the skeleton; -1 without a tree, or if there is none.
  position: number | null; // In the sequence; `null`: all of them.
  members?: number[]; // The nodes of an attribution graph that it stands for, by their numbers there.
  is_error?: boolean; // What no feature of an attribution graph explains.
  page?: string; // The page of a feature, as HTML.
}

export interface CircuitEdge {
  sender: string;
  receiver: string;
  score: number;
  position: number | null;
  /** The node where it begins, and those where it ends: several, if heads share the keys or values there. */
  from: number;
  to: number[];
  thickness: number; // Of its line.
  line: string; // The `d` of an SVG path.
}

/** The traits of the widget of `show_heatmap`, which has `front_end` besides, and nothing else of the above. */
export interface HeatmapTraits {
  heatmap: ResultHeatmap;
  values: DataView; // A float32 per cell, row by row, little-endian; NaN without a number.
  /** The selected cell, counted from the top left one; set by the front end. */
  cell: [row: number, column: number] | null;
  /** What its cells select, for a heatmap that takes part in the selection of a graph: it has `LinkedTraits`, too. */
  cell_items?: CellItems;
}

/** What each row and column selects; `null`: nothing. A cell is both, and what all cells have. */
interface CellItems {
  rows: Item[] | null;
  columns: Item[] | null;
  all: Item; // Its name, and names of rows and columns, may have `*` for the layer and the head of the cell.
}

/** A result with two dimensions, in the order in which it is seen: the top row first. */
export interface ResultHeatmap {
  title: string | null;
  name: string; // What the numbers are.
  rows: ResultSide;
  columns: ResultSide;
  /** The numbers of rows and columns of the result; a cell may be a block of these. */
  full: [rows: number, columns: number];
  map: "sequential" | "diverging";
  low: number;
  high: number;
  center: string | null; // Which number has no color, in words; `null`: all have one, or it is zero.
  missing: string | null; // Why cells have no number.
  reduced: string | null; // What cells are, if they are blocks.
  model_id: string; // As in `About`.
}

export interface ResultSide {
  name: string; // The dimension.
  title: string;
  values: string[]; // The coordinate of each row or column; of a block, the first and the last.
  labels: string[] | null; // The labels beside the cells, shortened; `null`: none.
  /** The full texts of tokens, with invisible characters escaped; `null` if they are not tokens. */
  tokens: string[] | null;
}

interface AboutView {
  view: "tree" | "attention" | "lens" | "tokens" | "generation" | "result"; // Which view it is.
  name: string; // The variable that holds the graph: `pg`.
  model_id: string; // The widget's model id, by which it is found among the outputs of a notebook.
  version: string; // The version of graphpatch-notebook.
}

export interface About extends AboutView {
  module: string; // The class of the model.
  nodes: number; // How many nodes can be patched.
  /** The example inputs as the Python code of a call: `ids, attention_mask=mask`; `null` if unknown. */
  arguments: string | null;
  no_inputs: string | null; // Why there are no example inputs that *Run* could use; `null`: there are some.
  /** Whether runs are made on inputs that were given to the browser instead of the example inputs. */
  has_given_inputs: boolean;
  has_tokenizer: boolean;
  measures: Record<string, string>; // The columns that a run can fill, with what they say.
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

/** What the kernel refuses a request with; it sends `{id, result}`, with binary parts as buffers, or `{id, error}`. */
export interface RequestError {
  message: string; // In words: what failed, and what to do.
  /** The field of the patch that is wrong, or `inputs`, `plane`, `version` (the patches have changed since). */
  field: string | null;
}
