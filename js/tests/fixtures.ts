/** What tests of all parts share: a model that is no more than a map, a small transformer, a large one, a view. */

import {
  type About,
  type Columns,
  type Component,
  FLAG,
  KINDS,
  type Kind,
  type PatchKind,
  type PatchState,
  type RequestName,
  type Requests,
  type Spec,
  type Traits,
} from "../src/kernel/protocol";
import { Skeleton } from "../src/tree/skeleton";
import type { Answer, Kernel, Model, Notices, View } from "../src/view";
import { Selection, SharedFilter } from "../src/views/selection";
import patchKinds from "./fixtures/patch_kinds.json";

type Listener = (...args: never[]) => void;

/** A model as anywidget gives it. `sent` has what was sent, `saved` counts the calls of `save_changes`. */
export class FakeModel<T extends object = Traits> implements Model<T> {
  readonly sent: unknown[] = [];
  saved = 0;
  private readonly listeners = new Map<string, Set<Listener>>();

  constructor(readonly traits: T) {}

  get<K extends keyof T>(name: K): T[K] {
    return this.traits[name];
  }

  /** As Backbone does: tells its listeners, of this view and of all others. */
  set<K extends keyof T>(name: K, value: T[K]): void {
    if (Object.is(this.traits[name], value)) return;
    this.traits[name] = value;
    this.trigger(`change:${String(name)}`);
    this.trigger("change");
  }

  save_changes(): void {
    this.saved += 1;
  }

  send(content: unknown): void {
    this.sent.push(content);
  }

  on(event: string, listener: Listener): void {
    const listeners = this.listeners.get(event) ?? new Set();
    this.listeners.set(event, listeners.add(listener));
  }

  off(event?: string | null, listener?: Listener | null): void {
    for (const [name, listeners] of this.listeners) {
      if (event && name !== event) continue;
      if (listener) listeners.delete(listener);
      else listeners.clear();
    }
  }

  /** What the kernel does: `trigger("msg:custom", content, buffers)`. */
  trigger(event: string, ...args: unknown[]): void {
    for (const listener of [...(this.listeners.get(event) ?? [])]) (listener as (...args: unknown[]) => void)(...args);
  }

  /** How many listeners there are: none once a view is gone. */
  get listening(): number {
    return [...this.listeners.values()].reduce((sum, listeners) => sum + listeners.size, 0);
  }
}

/** Builds `Columns` row by row: `graph` opens a graph, `row` adds a row, `end` closes what is open. */
export class ColumnsBuilder {
  readonly columns: Columns = {
    names: [],
    ops: [],
    specs: [],
    name: [],
    depth: [],
    kind: [],
    op: [],
    spec: [],
    flags: [],
    notes: {},
  };
  private readonly known = new Map<string, number>();
  private level = 0;

  graph(name: string, module: string, inside: () => void, flags = 0): void {
    this.row("graph", name, { op: module, flags });
    this.inside(inside);
  }

  /** Runs `make`, whose rows are inside the last one. */
  inside(make: () => void): void {
    this.level += 1;
    make();
    this.level -= 1;
  }

  row(kind: Kind, name: string, more: { op?: string; spec?: Spec | null; flags?: number; note?: string } = {}): number {
    const { columns } = this;
    const row = columns.name.length;
    columns.name.push(this.position("names", name));
    columns.depth.push(this.level);
    columns.kind.push(KINDS.indexOf(kind));
    columns.op.push(this.position("ops", more.op ?? kind));
    columns.spec.push(more.spec ? this.position("specs", more.spec) : -1);
    const isPatchable = more.spec && kind !== "constant" && (more.spec[3] === "tensor" || more.spec[3] === "number");
    columns.flags.push((more.flags ?? 0) | (isPatchable ? FLAG.patchable : 0));
    if (more.note) columns.notes[row] = more.note;
    return row;
  }

  private position(table: "names" | "ops" | "specs", value: string | Spec): number {
    const key = `${table} ${JSON.stringify(value)}`;
    const known = this.known.get(key);
    if (known !== undefined) return known;
    const values = this.columns[table] as unknown[];
    this.known.set(key, values.length);
    return values.push(value) - 1;
  }
}

export function tensor(...shape: number[]): Spec {
  return [`[${shape.join(", ")}] f32`, shape, "float32", "tensor"];
}

const NUMBER: Spec = ["int(8)", null, null, "number"];

/** A transformer as a capture of it looks. Each of its layers has 34 rows. */
export function transformer(layers = 4, width = 64): Columns {
  const tree = new ColumnsBuilder();
  tree.graph("<root>", "TinyLM", () => {
    tree.row("input", "input_ids", { spec: ["[1, 8] i64", [1, 8], "int64", "tensor"] });
    tree.row("input", "use_cache", { spec: ["bool(True)", null, null, "number"], flags: FLAG.hidden });
    tree.graph("transformer", "TinyModel", () => {
      tree.row("input", "input_ids", { spec: ["[1, 8] i64", [1, 8], "int64", "tensor"] });
      tree.row("op", "size", { op: "size", spec: NUMBER, flags: FLAG.size });
      tree.graph("wte", "Embedding", () => {
        tree.row("parameter", "weight", { spec: tensor(1000, width) });
        tree.row("op", "embedding", { op: "embedding", spec: tensor(1, 8, width) });
        tree.row("output", "output", { spec: tensor(1, 8, width) });
      });
      for (let layer = 0; layer < layers; layer++) addLayer(tree, layer, width);
      addLinear(tree, "ln_f", "LayerNorm", width, width);
      tree.row("output", "output", { spec: ["dict of 1", null, null, "container"] });
      tree.inside(() => tree.row("item", "last_hidden_state", { spec: tensor(1, 8, width) }));
    });
    addLinear(tree, "lm_head", "Linear", width, 1000);
    tree.row("unused", "extra_head", { op: "Linear", note: "never called on the example inputs" });
    tree.row("output", "output", { spec: ["tuple of 2", null, null, "container"] });
    tree.inside(() => {
      tree.row("item", "sub_0", { spec: tensor(1, 8, 1000) });
      tree.row("item", "sub_1", { spec: ["dict of 1", null, null, "container"] });
      tree.inside(() => tree.row("item", '"a.b"', { spec: tensor(1, 8, width) }));
    });
  });
  return tree.columns;
}

function addLayer(tree: ColumnsBuilder, layer: number, width: number): void {
  tree.graph(`h_${layer}`, "Block", () => {
    tree.row("input", "hidden_states", { spec: tensor(1, 8, width) });
    addLinear(tree, "ln_1", "LayerNorm", width, width);
    tree.graph("attn", "Attention", () => {
      tree.row("constant", "layer_idx", { spec: [`int(${layer})`, null, null, "number"], flags: FLAG.hidden });
      addLinear(tree, "c_attn", "Linear", width, 3 * width);
      tree.row("op", "size", { op: "size", spec: NUMBER, flags: FLAG.size });
      for (const name of ["query", "key", "value"]) {
        tree.row("op", name, { op: "view", spec: tensor(1, 4, 8, width / 4) });
      }
      tree.row("op", "attn_weights", { op: "matmul", spec: tensor(1, 4, 8, 8) });
      tree.row("op", "attn_weights_1", { op: "softmax", spec: tensor(1, 4, 8, 8) });
      tree.row("op", "attn_output", { op: "matmul", spec: tensor(1, 4, 8, width / 4), flags: FLAG.mutated });
      tree.row("output", "output", { spec: tensor(1, 8, width) });
    });
    tree.row("op", "hidden_states_1", { op: "add", spec: tensor(1, 8, width) });
    tree.graph("mlp", "MLP", () => {
      addLinear(tree, "c_fc", "Linear", width, 4 * width);
      tree.row("op", "mul", { op: "mul", spec: tensor(1, 8, 4 * width) });
      addLinear(tree, "c_proj", "Linear", 4 * width, width);
      tree.row("output", "output", { spec: tensor(1, 8, width) });
    });
    tree.graph("drop", "Dropout", () => tree.row("output", "output", { spec: tensor(1, 8, width) }), FLAG.opaque);
    tree.row("output", "output", { spec: tensor(1, 8, width) });
  });
}

function addLinear(tree: ColumnsBuilder, name: string, module: string, from: number, to: number): void {
  tree.graph(name, module, () => {
    tree.row("input", "input", { spec: tensor(1, 8, from) });
    tree.row("parameter", "weight", { spec: tensor(to, from) });
    tree.row("op", "linear", { op: "linear", spec: tensor(1, 8, to) });
    tree.row("output", "output", { spec: tensor(1, 8, to) });
  });
}

export const ABOUT: About = {
  view: "tree",
  name: "pg",
  module: "TinyLM",
  nodes: 100,
  model_id: "fake",
  arguments: "ids",
  has_given_inputs: false,
  no_inputs: null,
  has_tokenizer: false,
  measures: { FLOPs: "operations", mean: "of its output" },
  patch_kinds: patchKinds as PatchKind[],
  version: "0.0.0",
};

/** The traits of a widget that shows `columns` and has no patches. Its skeleton is empty: `deflated` makes a true one. */
export function traits(changes: Partial<Traits> = {}): Traits {
  return {
    front_end: "",
    skeleton: new DataView(new ArrayBuffer(0)),
    about: ABOUT,
    session: { version: 0, patches: [], can_undo: false, can_redo: false, note: "" },
    group: "one",
    selection: [],
    expanded: null,
    selected: 0,
    query: "",
    shows_sizes: false,
    shows_graph: false,
    edges: new DataView(new ArrayBuffer(0)),
    components: new DataView(new ArrayBuffer(0)),
    scores: new DataView(new ArrayBuffer(0)),
    score_names: [],
    circuit: null,
    run: null,
    ...changes,
  };
}

/** Columns as the kernel sends them. */
export async function deflated(columns: Columns | Component[]): Promise<DataView> {
  return deflatedParts([JSON.stringify(columns)]);
}

/** Numbers as the kernel sends them. */
export async function deflatedParts(parts: BlobPart[]): Promise<DataView> {
  const stream = new Blob(parts).stream().pipeThrough(new CompressionStream("deflate"));
  return new DataView(await new Response(stream).arrayBuffer());
}

type Script = { [N in RequestName]?: (payload: Requests[N]["payload"]) => Answer<N> | Promise<Answer<N>> };

/** Answers with `script[request](payload)`, and keeps the requests. */
export class FakeKernel implements Kernel {
  readonly state = "idle" as const;
  readonly asked: [name: RequestName, payload: unknown][] = [];
  script: Script = {};

  async ask<N extends RequestName>(request: N, payload: Requests[N]["payload"]): Promise<Answer<N>> {
    this.asked.push([request, payload]);
    const answer = this.script[request];
    if (answer === undefined) throw new Error(`no answer to ${request}`);
    return answer(payload);
  }

  onChange(): () => void {
    return () => undefined;
  }

  count(request: RequestName): number {
    return this.asked.filter(([name]) => name === request).length;
  }

  last<N extends RequestName>(request: N): Requests[N]["payload"] {
    return this.asked.filter(([name]) => name === request).at(-1)?.[1] as Requests[N]["payload"];
  }
}

/** What a view needs, with everything that it was told. */
export class FakeView implements View {
  readonly root = document.createElement("div");
  readonly said: string[] = [];
  readonly errors: string[] = [];
  readonly calls: unknown[][] = [];
  readonly notices: Notices = {
    announce: (text) => this.said.push(text),
    error: (message) => this.errors.push(message),
    clear: () => this.errors.splice(0),
  };
  private readonly undos: (() => void)[] = [];
  readonly selection: Selection;
  readonly filter: SharedFilter;

  constructor(
    readonly model: FakeModel = new FakeModel(traits()),
    readonly skeleton: Skeleton = new Skeleton(transformer()),
    readonly kernel: FakeKernel = new FakeKernel(),
  ) {
    this.selection = new Selection(model, (undo) => this.undos.push(undo));
    this.filter = new SharedFilter(model, (undo) => this.undos.push(undo));
    this.root.className = "gp-root";
    document.body.append(this.root);
    this.undos.push(() => this.root.remove());
  }

  row(path: string): number {
    const row = this.skeleton.find(path);
    if (row === null) throw new Error(`no row ${path}`);
    return row;
  }

  onRemove(undo: () => void): void {
    this.undos.push(undo);
  }

  remove(): void {
    for (const undo of this.undos.splice(0).reverse()) undo();
  }

  reveal(row: number): void {
    this.calls.push(["reveal", row]);
  }

  focusTree(): void {
    this.calls.push(["focusTree"]);
  }

  showDetails(row: number, anchor: Element): void {
    this.calls.push(["showDetails", row, anchor]);
  }

  editPatch(target: { row: number } | { number: number }, anchor: Element): void {
    this.calls.push(["editPatch", target, anchor]);
  }
}

export function patch(number: number, more: Partial<PatchState> = {}): PatchState {
  return {
    number,
    path: "transformer.h_0.output",
    kind: "zero",
    slice: null,
    value: null,
    name: null,
    steps: null,
    positions: null,
    position_dim: null,
    any_shape: false,
    allow_empty: false,
    is_enabled: true,
    row: 10,
    shape: [1, 8, 64],
    sliced: [1, 8, 64],
    warning: null,
    ...more,
  };
}
