/**
 * The lines of the tree: which rows are visible, and in which order.
 *
 * The id of a line is the number of its row, or `~first` for the marker of folded rows whose first row is `first`.
 */
import { type Component, FLAG, KINDS } from "../kernel/protocol";
import type { Skeleton } from "./skeleton";

/** `count` siblings from the position `from` on: a group of `period` of them, `times` times. */
interface Repetition {
  from: number;
  count: number;
  period: number;
  times: number;
}

const GRAPH = KINDS.indexOf("graph");
const MAX_PERIOD = 24;
// A marker replaces three rows at least: fewer would not save space.
const MIN_ROWS = 3;
// Ops without a graph between them are folded only among so many siblings, and from so many repetitions on.
const MANY_SIBLINGS = 40;
const MANY_TIMES = 4;

/** Finds repetitions among rows. Rows for which `isShown` is false are ignored. */
export class Folding {
  private readonly stems: Int32Array;
  private readonly shapes: Int32Array;
  /** By parent: the result for the last siblings. */
  private readonly cache = new Map<number, { siblings: readonly number[]; repetitions: Repetition[] }>();

  constructor(
    private readonly skeleton: Skeleton,
    private readonly isShown: (row: number) => boolean,
  ) {
    this.stems = stemsOf(skeleton.columns.names);
    this.shapes = shapesOf(skeleton, isShown);
  }

  /** The repetitions among siblings, in order; rows that are in none are left out. */
  repetitions(siblings: readonly number[]): Repetition[] {
    if (siblings.length < MIN_ROWS) return [];
    const parent = this.skeleton.parent[siblings[0] ?? 0] ?? 0;
    const known = this.cache.get(parent);
    // The siblings change when a hidden row is patched, which is then shown.
    if (known && known.siblings.length === siblings.length) {
      if (siblings.every((row, at) => row === known.siblings[at])) return known.repetitions;
    }
    const repetitions = this.findRepetitions(siblings);
    this.cache.set(parent, { siblings, repetitions });
    return repetitions;
  }

  private findRepetitions(siblings: readonly number[]): Repetition[] {
    const keys = siblings.map((row) => this.key(row));
    const isGraph = siblings.map((row) => this.skeleton.kind[row] === GRAPH);
    const repetitions: Repetition[] = [];
    for (let from = 0; from < keys.length; ) {
      const repetition = repetitionAt(keys, isGraph, from);
      if (repetition) repetitions.push(repetition);
      from += repetition?.count ?? 1;
    }
    return repetitions;
  }

  /**
   * The rows that correspond to `row` in each repetition, itself included: `h_0.attn`, `h_1.attn`, ...
   *
   * @param isEach Whether the row itself represents all repetitions, if it is repeated.
   */
  corresponding(row: number, isEach = true): number[] {
    const parent = this.skeleton.parent[row] ?? -1;
    if (parent < 0) return [row];
    const siblings = this.siblings(parent);
    const own = siblings.indexOf(row);
    if (own < 0) return [row];
    const repetition = isEach
      ? this.repetitions(siblings).find(({ from, count }) => from <= own && own < from + count)
      : undefined;
    const first = repetition ? repetition.from + ((own - repetition.from) % repetition.period) : own;
    const places = Array.from(
      { length: repetition?.times ?? 1 },
      (_, time) => first + time * (repetition?.period ?? 0),
    );
    return this.corresponding(parent).flatMap((other) => {
      const there = other === parent ? siblings : this.siblings(other);
      return places.flatMap((place) => there[place] ?? []);
    });
  }

  /** The shown children of a row, plumbing first. */
  private siblings(row: number): number[] {
    return splitPlumbing(this.skeleton, [...this.skeleton.children(row)].filter(this.isShown)).flat();
  }

  /** Equal for rows that differ only in the number at the end of their own names. */
  private key(row: number): number {
    return (this.shapes[row] ?? 0) * (this.stems.length + 1) + (this.stems[this.skeleton.name[row] ?? 0] ?? 0);
  }
}

function repetitionAt(keys: readonly number[], isGraph: readonly boolean[], from: number): Repetition | null {
  const longest = Math.min(MAX_PERIOD, Math.floor((keys.length - from) / 2));
  for (let period = 1; period <= longest; period++) {
    let end = from + period;
    while (end < keys.length && keys[end] === keys[end - period]) end += 1;
    const times = Math.floor((end - from) / period);
    const count = times * period;
    if (times < 2 || count < MIN_ROWS) continue;
    const hasGraph = isGraph.slice(from, from + period).includes(true);
    if (hasGraph || (times >= MANY_TIMES && keys.length >= MANY_SIBLINGS)) return { from, count, period, times };
  }
  return null;
}

/** By name: an id that is equal for names that differ only in the number at their end. */
function stemsOf(names: readonly string[]): Int32Array {
  const known = new Map<string, number>();
  return Int32Array.from(names, (name) => {
    const stem = name.replace(/_?[0-9]+$/, "");
    const number = known.get(stem) ?? known.size + 1;
    known.set(stem, number);
    return number;
  });
}

/** By row: a number that is equal for rows whose descendants are equal, whatever their own names. */
function shapesOf(skeleton: Skeleton, isShown: (row: number) => boolean): Int32Array {
  const known = new Map<string, number>();
  const shapes = new Int32Array(skeleton.length);
  for (let row = skeleton.length - 1; row >= 0; row--) {
    const { op, spec, kind, name } = skeleton;
    const parts = [op[row], spec[row], kind[row], Number(skeleton.has(row, FLAG.opaque))];
    for (const child of skeleton.children(row)) if (isShown(child)) parts.push(name[child], shapes[child]);
    const text = parts.join();
    shapes[row] = known.get(text) ?? known.size;
    known.set(text, shapes[row] ?? 0);
  }
  return shapes;
}

export const LEAF = 0;
export const CLOSED = 1;
export const OPEN = 2;

/** The rows that a marker represents: a repetition; or, with a `name`, the plumbing of a graph or the components of a layer. */
export interface Folded extends Repetition {
  rows: number[];
  name?: string;
}

export const PLUMBING = "plumbing";

/** What determines the lines. */
interface LayoutOptions {
  isOpen(row: number): boolean;
  /** Without sizes and clutter, unless these are shown. */
  isShown(row: number): boolean;
  /** `null`: all; else the rows that match a search or pass a filter, and their ancestors. */
  keptRows: Uint8Array | null;
  /** `null`: nothing is folded, not even plumbing. */
  folding: Folding | null;
  isFoldedOpen(first: number): boolean;
  /** `null`: in the order of the graph. */
  order: ((a: number, b: number) => number) | null;
}

/** The lines, with their ARIA levels and positions. */
export class Lines {
  /** By line: the row, or `~first`. */
  ids: Int32Array;
  /** 1 for the root, ... */
  readonly levels: Uint16Array;
  /** From 1, among the siblings; and the number of siblings. */
  readonly positions: Int32Array;
  readonly sizes: Int32Array;
  readonly states: Uint8Array;
  /** The line that each is in; -1 for the first. */
  readonly parents: Int32Array;
  readonly folded = new Map<number, Folded>();
  length = 0;
  /** By row: its line, plus one. */
  private readonly lineByRow: Int32Array;
  private readonly lineByMarker = new Map<number, number>();
  private readonly markerByRow = new Map<number, number>();

  /** @param most How many lines there may be. */
  constructor(
    private readonly skeleton: Skeleton,
    most: number,
  ) {
    this.ids = new Int32Array(most);
    this.levels = new Uint16Array(most);
    this.positions = new Int32Array(most);
    this.sizes = new Int32Array(most);
    this.states = new Uint8Array(most);
    this.parents = new Int32Array(most);
    this.lineByRow = new Int32Array(skeleton.length);
  }

  /** The line of a row or marker; if it is not visible, that of its nearest visible ancestor. */
  lineOf(id: number): number {
    const own = this.ownLine(id);
    if (own !== null) return own;
    for (let row = id < 0 ? ~id : id; row > 0; row = this.skeleton.parent[row] ?? 0) {
      const line = this.ownLine(row) ?? this.ownLine(this.markerByRow.get(row) ?? row);
      if (line !== null) return line;
    }
    return 0;
  }

  /** Whether a row has a line of its own. */
  has(id: number): boolean {
    return this.ownLine(id) !== null;
  }

  private ownLine(id: number): number | null {
    if (id < 0) return this.lineByMarker.get(id) ?? null;
    const line = this.lineByRow[id] ?? 0;
    return line > 0 ? line - 1 : null;
  }

  add(id: number, parent: number, level: number, position: number, size: number, state: number): number {
    const line = this.length++;
    this.ids[line] = id;
    this.levels[line] = level;
    this.positions[line] = position;
    this.sizes[line] = size;
    this.states[line] = state;
    this.parents[line] = parent;
    if (id < 0) this.lineByMarker.set(id, line);
    else this.lineByRow[id] = line + 1;
    return line;
  }

  addFolded(folded: Folded): void {
    const marker = ~(folded.rows[0] ?? 0);
    this.folded.set(marker, folded);
    for (const row of folded.rows) this.markerByRow.set(row, marker);
  }
}

export function layOut(skeleton: Skeleton, choice: LayoutOptions): Lines {
  // A marker replaces three rows at least.
  const lines = new Lines(skeleton, skeleton.length + (choice.folding ? Math.ceil(skeleton.length / 3) : 0));
  const children = (row: number) => childrenOf(skeleton, row, choice);

  function addRow(row: number, parent: number, level: number, position: number, size: number): void {
    const isEmpty = !hasChild(skeleton, row, choice);
    const isOpen = !isEmpty && choice.isOpen(row);
    const line = lines.add(row, parent, level, position, size, isEmpty ? LEAF : isOpen ? OPEN : CLOSED);
    if (isOpen) addRows(children(row), line, level + 1);
  }

  function addRows(all: number[], parent: number, level: number): void {
    const [aside, rows] = choice.folding ? splitPlumbing(skeleton, all) : [[], all];
    const repetitions = choice.folding?.repetitions(rows) ?? [];
    let position = Math.min(aside.length, 1);
    const size = position + rows.length - repetitions.reduce((sum, repetition) => sum + repetition.count - 1, 0);
    if (position) addFolded(groupOf(PLUMBING, aside), parent, level, position, size);
    for (let at = 0, next = 0; at < rows.length; position += 1) {
      const repetition = repetitions[next];
      if (repetition?.from === at) {
        addFolded({ ...repetition, rows: rows.slice(at, at + repetition.count) }, parent, level, position + 1, size);
        at += repetition.count;
        next += 1;
      } else {
        addRow(rows[at] ?? 0, parent, level, position + 1, size);
        at += 1;
      }
    }
  }

  function addFolded(folded: Folded, parent: number, level: number, position: number, size: number): void {
    const first = folded.rows[0] ?? 0;
    const isOpen = choice.isFoldedOpen(first);
    lines.addFolded(folded);
    const line = lines.add(~first, parent, level, position, size, isOpen ? OPEN : CLOSED);
    if (isOpen) for (const [at, row] of folded.rows.entries()) addRow(row, line, level + 1, at + 1, folded.count);
  }

  addRow(0, -1, 1, 1, 1);
  lines.ids = lines.ids.slice(0, lines.length);
  return lines;
}

/** A marker for rows that need not be consecutive. */
function groupOf(name: string, rows: number[]): Folded {
  return { name, rows, from: 0, count: rows.length, period: rows.length, times: 1 };
}

/** Splits siblings into plumbing and the rest, if a marker saves a line and other rows remain. */
export function splitPlumbing(skeleton: Skeleton, siblings: number[]): [plumbing: number[], rest: number[]] {
  const aside = siblings.filter((row) => skeleton.has(row, FLAG.plumbing));
  if (aside.length < 2 || aside.length === siblings.length) return [[], siblings];
  return [aside, siblings.filter((row) => !skeleton.has(row, FLAG.plumbing))];
}

/** Lays out the view by components: a marker for each layer with its components, and the components outside layers. */
export function layOutComponents(skeleton: Skeleton, components: readonly Component[], choice: LayoutOptions): Lines {
  const lines = new Lines(skeleton, 1 + 2 * components.length);
  const groups = componentGroups(components, choice);
  const isOpen = choice.isOpen(0);
  lines.add(0, -1, 1, 1, 1, groups.length === 0 ? LEAF : isOpen ? OPEN : CLOSED);
  for (const [at, { name, rows }] of isOpen ? groups.entries() : []) {
    const first = rows[0] ?? 0;
    if (name === "") {
      lines.add(first, 0, 2, at + 1, groups.length, LEAF);
      continue;
    }
    const isGroupOpen = choice.isFoldedOpen(first);
    lines.addFolded(groupOf(name, rows));
    const line = lines.add(~first, 0, 2, at + 1, groups.length, isGroupOpen ? OPEN : CLOSED);
    if (isGroupOpen) for (const [below, row] of rows.entries()) lines.add(row, line, 3, below + 1, rows.length, LEAF);
  }
  lines.ids = lines.ids.slice(0, lines.length);
  return lines;
}

/** The visible rows by layer; each row outside layers is a group without a name. A row occurs once. */
function componentGroups(
  components: readonly Component[],
  { keptRows: kept, order }: LayoutOptions,
): { name: string; rows: number[] }[] {
  const groups: { name: string; rows: number[] }[] = [];
  const seen = new Set<number>();
  for (const { row, name } of components) {
    if (seen.has(row) || kept?.[row] === 0) continue;
    seen.add(row);
    const layer = layerOf(name);
    const last = groups.at(-1);
    if (layer !== "" && last?.name === layer) last.rows.push(row);
    else groups.push({ name: layer, rows: [row] });
  }
  if (!order) return groups;
  for (const { rows } of groups) rows.sort(order);
  return groups.sort((a, b) => order(a.rows[0] ?? 0, b.rows[0] ?? 0));
}

/** The layer that a component is in: `decoder.layers[3]` of `decoder.layers[3].attn.q`; empty for `@embed`. */
export function layerOf(component: string): string {
  return /^(?:.+\.)?layers\[[0-9]+\](?=\.)/.exec(component)?.[0] ?? "";
}

function isVisible(row: number, { isShown, keptRows: kept }: LayoutOptions): boolean {
  return kept === null ? isShown(row) : kept[row] !== 0;
}

function hasChild(skeleton: Skeleton, row: number, choice: LayoutOptions): boolean {
  for (const child of skeleton.children(row)) if (isVisible(child, choice)) return true;
  return false;
}

function childrenOf(skeleton: Skeleton, row: number, choice: LayoutOptions): number[] {
  const rows = [...skeleton.children(row)].filter((child) => isVisible(child, choice));
  return choice.order ? rows.sort(choice.order) : rows;
}

/** By row: 1 for `rows` and their ancestors. */
export function withAncestors(skeleton: Skeleton, rows: readonly number[]): Uint8Array {
  const kept = new Uint8Array(skeleton.length);
  kept[0] = 1;
  for (const row of rows) {
    for (let at = row; kept[at] === 0; at = skeleton.parent[at] ?? 0) kept[at] = 1;
  }
  return kept;
}

const INITIAL_LINES = 24;

/**
 * Which rows are open at first: breadth first, as many as make some 20 to 25 lines, plumbing and equal layers
 * counted as one. A graph that holds most rows is always opened, so that the layers are visible. Graphs of ops only are
 * opened if there is space for all of them.
 */
export function firstOpen(skeleton: Skeleton, folding: Folding, isShown: (row: number) => boolean): number[] {
  const open: number[] = [];
  const ends: { row: number; lines: number }[] = [];
  let left = INITIAL_LINES - 1;
  const queue = [0];
  for (const row of queue) {
    const [aside, children] = splitPlumbing(skeleton, [...skeleton.children(row)].filter(isShown));
    const graphs = children.filter((child) => skeleton.kind[child] === GRAPH);
    const repetitions = folding.repetitions(children);
    const lines =
      Math.min(aside.length, 1) +
      children.length -
      repetitions.reduce((sum, repetition) => sum + repetition.count - 1, 0);
    const holdsMost = (skeleton.end[row] ?? 0) - row > 0.5 * skeleton.length;
    if (graphs.length === 0 && row > 0) ends.push({ row, lines });
    if (lines === 0 || (graphs.length === 0 && row > 0) || (lines > left && !holdsMost)) continue;
    open.push(row);
    left -= lines;
    const repeated = new Set(
      repetitions.flatMap((repetition) => children.slice(repetition.from, repetition.from + repetition.count)),
    );
    queue.push(...graphs.filter((child) => !repeated.has(child)));
  }
  const all = ends.reduce((sum, end) => sum + end.lines, 0);
  return all <= left ? [...open, ...ends.map((end) => end.row)] : open;
}
