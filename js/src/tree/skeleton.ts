/** The rows of the tree: what the kernel sent once, as typed arrays. */

import { inflateText } from "../inflate";
import { type Columns, FLAG, KINDS, type Kind, NEXT, type Spec } from "../kernel/protocol";

const GRAPH = KINDS.indexOf("graph");
const ITEM = KINDS.indexOf("item");

/** Why the rows of a widget cannot be read, in words. */
export class BrokenSkeleton extends Error {}

/** The rows, in order: each before its children. Row 0 is the whole model. */
export class Skeleton {
  readonly length: number;
  readonly name: Int32Array;
  readonly depth: Int32Array;
  readonly kind: Uint8Array;
  readonly op: Int32Array;
  readonly spec: Int32Array;
  readonly flags: Uint8Array;
  /** The row that each is in; -1 for row 0. */
  readonly parent: Int32Array;
  /** The first row behind a row and all that is in it. */
  readonly end: Int32Array;

  constructor(readonly columns: Columns) {
    const { name, depth, kind, op, spec, flags } = columns;
    const isWhole = [name, depth, kind, op, spec, flags].every((list) => list?.length === name?.length);
    if (!isWhole || name.length === 0) throw new BrokenSkeleton("the rows of this graph are incomplete");
    this.length = name.length;
    this.name = expandNext(name);
    this.depth = new Int32Array(depth);
    this.kind = new Uint8Array(kind);
    this.op = expandNext(op);
    this.spec = expandNext(spec);
    this.flags = new Uint8Array(flags);
    this.parent = new Int32Array(this.length).fill(-1);
    this.end = new Int32Array(this.length);
    this.link();
  }

  /** The name of a row, as a path writes it. */
  nameOf(row: number): string {
    return this.columns.names[at(this.name, row)] ?? "";
  }

  /** The path of a row; empty for row 0. */
  path(row: number): string {
    const parent = at(this.parent, row);
    if (parent < 0) return "";
    const name = this.nameOf(row);
    return parent === 0 ? name : this.path(parent) + this.separator(row) + name;
  }

  /** The row of a path; `null`: there is none. */
  find(path: string, inside = 0): number | null {
    for (const row of this.children(inside)) {
      const start = inside === 0 ? this.nameOf(row) : this.separator(row) + this.nameOf(row);
      if (path === start) return row;
      const found = path.startsWith(start) ? this.find(path.slice(start.length), row) : null;
      if (found !== null) return found;
    }
    return null;
  }

  /** The separator before the name of a row in a path: `|` after a container, else a dot. */
  separator(row: number): "|" | "." {
    return this.kind[row] === ITEM && this.kind[at(this.parent, row)] !== ITEM ? "|" : ".";
  }

  kindOf(row: number): Kind {
    return KINDS[at(this.kind, row)] ?? "constant";
  }

  /** The torch function of an op, the class of the module of a graph, else the kind's word. */
  opOf(row: number): string {
    return this.columns.ops[at(this.op, row)] ?? "";
  }

  specOf(row: number): Spec | null {
    return this.columns.specs[at(this.spec, row)] ?? null;
  }

  /** What was recorded of the value: `[1, 8, 64] f32`; empty for graphs. */
  labelOf(row: number): string {
    return this.specOf(row)?.[0] ?? "";
  }

  /** Why a graph is opaque, and the like. */
  noteOf(row: number): string | null {
    return this.columns.notes[row] ?? null;
  }

  has(row: number, flag: number): boolean {
    return (at(this.flags, row) & flag) !== 0;
  }

  /** Whether a row is only shown on request: it, or what it is in, carries sizes or is clutter. */
  isHiddenByDefault(row: number): boolean {
    return this.has(row, FLAG.size | FLAG.hidden);
  }

  hasChildren(row: number): boolean {
    return at(this.end, row) > row + 1;
  }

  /** The rows right below a row. */
  *children(row: number): Generator<number> {
    for (let child = row + 1; child < at(this.end, row); child = at(this.end, child)) yield child;
  }

  /** The rows above a row, nearest first, row 0 last. */
  *ancestors(row: number): Generator<number> {
    for (let above = at(this.parent, row); above >= 0; above = at(this.parent, above)) yield above;
  }

  /** The node that a row is or is inside of: for the items of a container the row that holds the container. */
  nodeOf(row: number): number {
    let node = row;
    while (this.kind[node] === ITEM) node = at(this.parent, node);
    return node;
  }

  /** The graph that a row is in; for a graph, itself. */
  graphOf(row: number): number {
    let graph = row;
    while (graph > 0 && this.kind[graph] !== GRAPH) graph = at(this.parent, graph);
    return graph;
  }

  private link(): void {
    const open: number[] = [];
    for (let row = 0; row < this.length; row++) {
      const depth = at(this.depth, row);
      if (depth > open.length || depth < 0 || (depth === 0) !== (row === 0)) {
        throw new BrokenSkeleton("the rows of this graph are out of order");
      }
      while (open.length > depth) this.end[open.pop() ?? 0] = row;
      this.parent[row] = open.at(-1) ?? -1;
      open.push(row);
    }
    for (const row of open) this.end[row] = this.length;
  }
}

/** The skeleton in the trait: deflated JSON. Rejects with `BrokenSkeleton`. */
export async function decodeSkeleton(data: DataView): Promise<Skeleton> {
  let columns: Columns;
  try {
    columns = JSON.parse(await inflateText(data));
    if (typeof columns?.name !== "object") throw new TypeError("no columns");
  } catch (cause) {
    throw new BrokenSkeleton("the rows of this graph cannot be read", { cause });
  }
  return new Skeleton(columns);
}

/** A column of positions in a table, where `NEXT` means the first position that was not used yet. */
function expandNext(column: number[]): Int32Array {
  let next = 0;
  return Int32Array.from(column, (position) => (position === NEXT ? next++ : position));
}

function at(array: Int32Array | Uint8Array, position: number): number {
  return array[position] ?? -1;
}

// -- Why a row cannot be patched, and what to patch instead --------------------------------------------------------------

interface Unpatchable {
  /** In words. */
  why: string;
  /** The row to patch instead, if any. */
  instead: number | null;
}

/** The row whose value a patch of `row` changes: for a module, the first value that it returns; `null`: there is none. */
export function patchedRow(skeleton: Skeleton, row: number): number | null {
  if (skeleton.has(row, FLAG.patchable)) return row;
  return skeleton.kind[row] === GRAPH ? outputOf(skeleton, row) : null;
}

/** Returns why a row cannot be patched; `null` if it can. */
export function whyUnpatchable(skeleton: Skeleton, row: number): Unpatchable | null {
  if (patchedRow(skeleton, row) !== null) return null;
  const kind = skeleton.kindOf(row);
  if (kind === "unused") {
    return { why: "The run on the example inputs never called this module: there is nothing to patch.", instead: null };
  }
  if (kind === "graph") {
    return { why: "This module returns neither a tensor nor a number: patch a node inside of it.", instead: null };
  }
  if (kind === "constant") {
    return { why: "This constant is written in the code: patch the node that uses it.", instead: null };
  }
  if (skeleton.specOf(row)?.[3] === "container") {
    return { why: "This value is a container: patch one of the values in it.", instead: firstPatchable(skeleton, row) };
  }
  const label = skeleton.labelOf(row);
  return {
    why: `This value${label ? ` (${label})` : ""} is neither a tensor nor a number: only those can be patched.`,
    instead: null,
  };
}

function outputOf(skeleton: Skeleton, graph: number): number | null {
  const outputs = [...skeleton.children(graph)].filter((child) => skeleton.kindOf(child) === "output");
  for (const output of outputs) {
    const found = firstPatchable(skeleton, output);
    if (found !== null) return found;
  }
  return null;
}

/** The row itself, or the first one in it that can be patched. */
function firstPatchable(skeleton: Skeleton, row: number): number | null {
  for (let inside = row; inside < (skeleton.end[row] ?? 0); inside++) {
    if (skeleton.has(inside, FLAG.patchable)) return inside;
  }
  return null;
}
