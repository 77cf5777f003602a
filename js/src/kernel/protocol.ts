/**
 * What kernel and front end exchange:
 * - traits: what every view must have, and what is saved in the notebook (`Traits`);
 * - requests: the front end asks, the kernel replies (`Requests`);
 *   what both hold is in messages.ts, generated from the kernel's definitions;
 *   each reply belongs to one request by its id;
 * - nothing else: the kernel sends no events. While something runs, the front end asks how far it is.
 */

import type {
  About,
  AboutView,
  Attention,
  CellItems,
  CircuitPicture,
  Coloring,
  Generation,
  Item,
  Lens,
  Requests,
  ResultHeatmap,
  RunState,
  SessionState,
} from "./messages";

export type {
  ComponentRow as Component,
  OutputChange as Change,
  PatchKindForm as PatchKind,
  RowKind as Kind,
} from "./messages";
export * from "./messages";

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
  groups?: CircuitTraits["groups"]; // Of the circuit; set by the front end.
}

/** The traits of the attention view. Only `row` and `selection` are set by the front end. */
export interface AttentionTraits extends LinkedTraits {
  attention: Attention;
  cells: DataView; // Deflated; `packed` in notebook/views/attention.py says how it is laid out.
  row: number; // The row of the batch that is shown; -1: the mean.
}

/** The traits of a lens view, which `show_lens` shows. Besides `selection`, the front end sets `stream`. */
export interface LensTraits extends LinkedTraits {
  lens: Lens;
  cells: DataView; // Deflated numbers: see `readLens` in lens_view.ts.
  stream: string; // The stream that is shown.
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

export type Score = "probability" | "entropy";

/** The traits of the widget of `show_circuit`, which has `front_end` besides, and nothing else of the above. */
export interface CircuitTraits {
  circuit: CircuitPicture;
  pinned: Pinned | null; // What is pinned: a node or an edge, by its number; set by the front end.
  /** The supernodes of an attribution graph, with the numbers of their nodes there; set by the front end. */
  groups?: Record<string, number[]>;
  model_id: string;
}
export type Pinned = [kind: "node" | "edge", number: number];

/** The traits of the widget of `show_heatmap`, which has `front_end` besides, and nothing else of the above. */
export interface HeatmapTraits {
  heatmap: ResultHeatmap;
  values: DataView; // A float32 per cell, row by row, little-endian; NaN without a number.
  /** The selected cell, counted from the top left one; set by the front end. */
  cell: [row: number, column: number] | null;
  /** What its cells select, for a heatmap that takes part in the selection of a graph: it has `LinkedTraits`, too. */
  cell_items?: CellItems;
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
