/** Finds rows by a query, as `graphpatch_notebook/notebook/search/search.py` finds nodes. */

import { type Component, FLAG, KINDS } from "../kernel/protocol";
import { matchingRows } from "./component_names";
import { matchesShape, parseQuery, QueryError, type Term } from "./query";
import type { Skeleton } from "./skeleton";

type Test = (row: number) => boolean;

const GRAPH = KINDS.indexOf("graph");
const INPUT = KINDS.indexOf("input");
const OP = KINDS.indexOf("op");

/** The rows that can be found: all, those that only carry sizes, and the others. */
type Candidates = Record<"all" | "onlySizes" | "withoutSizes", number[]>;

/** The properties of rows that queries test, computed by the first query that needs them. */
export class SearchIndex {
  private cachedPaths: string[] | null = null;
  private cachedTexts: JoinedTexts | null = null;
  private cachedNodes: Int32Array | null = null;
  private components: readonly Component[] = [];
  private cachedCandidates: Candidates | null = null;

  constructor(private readonly skeleton: Skeleton) {}

  /** Adds the names of components to the texts that plain words are searched in. */
  setComponents(components: readonly Component[]): void {
    this.components = components;
    this.cachedTexts = null;
  }

  /** Computes the texts that plain words are searched in, so that the first query does not wait for them. */
  prepare(): void {
    void this.texts;
    void this.candidates;
  }

  /** The number of nodes that can be found, without values that only carry sizes. */
  get size(): number {
    return this.candidates.withoutSizes.length;
  }

  /** The rows that match all terms, in order. Values that only carry sizes match if a term asks for them. */
  find(terms: readonly Term[], patched: ReadonlySet<number>): number[] {
    const asksForSizes = terms.some((term) => term.kind === "is" && term.value === "size" && !term.isExcluded);
    return this.filterRows(asksForSizes ? "all" : "withoutSizes", terms, patched);
  }

  /** How many values that only carry sizes the terms hold for. */
  countOnlySizes(terms: readonly Term[], patched: ReadonlySet<number>): number {
    return this.filterRows("onlySizes", terms, patched).length;
  }

  private filterRows(which: keyof Candidates, terms: readonly Term[], patched: ReadonlySet<number>): number[] {
    let rows = this.candidates[which];
    for (const term of terms) {
      if (rows.length === 0) break;
      const test = this.test(term, patched);
      rows = rows.filter((row) => test(row) !== term.isExcluded);
    }
    return rows;
  }

  /** By row: its path. */
  get paths(): string[] {
    if (this.cachedPaths === null) {
      const { skeleton } = this;
      const paths = new Array<string>(skeleton.length).fill("");
      for (let row = 1; row < skeleton.length; row++) {
        const above = skeleton.parent[row] ?? 0;
        const name = skeleton.nameOf(row);
        paths[row] = above === 0 ? name : paths[above] + skeleton.separator(row) + name;
      }
      this.cachedPaths = paths;
    }
    return this.cachedPaths;
  }

  /** By row: path, torch function and names of components in lower case. */
  private get texts(): JoinedTexts {
    if (this.cachedTexts === null) {
      const { skeleton, nodes } = this;
      const ops = skeleton.columns.ops.map((op) => `\n${op.toLowerCase()}`);
      const texts = this.paths.map((path, row) => {
        const node = nodes[row] ?? 0;
        return path.toLowerCase() + (skeleton.kind[node] === OP ? (ops[skeleton.op[node] ?? 0] ?? "") : "");
      });
      for (const { row, name } of this.components) texts[row] += `\n${name.toLowerCase()}`;
      this.cachedTexts = new JoinedTexts(texts);
    }
    return this.cachedTexts;
  }

  /** By row: the node of the row, or of the container around it. */
  private get nodes(): Int32Array {
    this.cachedNodes ??= Int32Array.from({ length: this.skeleton.length }, (_, row) => this.skeleton.nodeOf(row));
    return this.cachedNodes;
  }

  private get candidates(): Candidates {
    if (this.cachedCandidates === null) {
      const { skeleton, nodes } = this;
      const all: number[] = [];
      for (let row = 1; row < skeleton.length; row++) {
        if (skeleton.has(row, FLAG.patchable) && skeleton.kind[row] !== GRAPH && !isAbsent(skeleton, row))
          all.push(row);
      }
      const isSize = (row: number) => skeleton.has(nodes[row] ?? row, FLAG.size);
      const [onlySizes, withoutSizes] = [all.filter(isSize), all.filter((row) => !isSize(row))];
      this.cachedCandidates = { all, onlySizes, withoutSizes };
    }
    return this.cachedCandidates;
  }

  /** Returns a function that checks a row for a term, ignoring whether the term is negated. */
  private test(term: Term, patched: ReadonlySet<number>): Test {
    const { skeleton } = this;
    switch (term.kind) {
      case "text": {
        const { texts } = this;
        const parts = term.value.split("*");
        const meant = matchingRows(term.value, this.components);
        const has = texts.containing(parts.reduce((longest, part) => (part.length > longest.length ? part : longest)));
        if (parts.length === 1) return (row) => has[row] === 1 || meant.has(row);
        return (row) => (has[row] === 1 && hasParts(texts.of(row), parts)) || meant.has(row);
      }
      case "exact": {
        const { paths } = this;
        const { value } = term;
        const meant = matchingRows(value, this.components);
        for (const { row, name } of this.components) if (hasNames(name, value)) meant.add(row);
        return (row) => hasNames(paths[row] ?? "", value) || meant.has(row);
      }
      case "op": {
        const { nodes } = this;
        const isMeant = matchNames(skeleton.columns.ops, term.value);
        return (row) => {
          const node = nodes[row] ?? 0;
          return skeleton.kind[node] === OP && isMeant[skeleton.op[node] ?? 0] === true;
        };
      }
      case "module": {
        const isMeant = matchNames(skeleton.columns.ops, term.value);
        return (row) => isMeant[skeleton.op[skeleton.graphOf(row)] ?? 0] === true;
      }
      case "dtype": {
        const isMeant = matchNames(
          skeleton.columns.specs.map((spec) => spec[2] ?? ""),
          term.value,
        );
        return (row) => isMeant[skeleton.spec[row] ?? -1] === true;
      }
      case "shape": {
        const isMeant = skeleton.columns.specs.map(([, shape]) => shape !== null && matchesShape(term.value, shape));
        return (row) => isMeant[skeleton.spec[row] ?? -1] === true;
      }
      case "is":
        return this.stateTest(term.value, patched);
    }
  }

  private stateTest(state: string, patched: ReadonlySet<number>): Test {
    const { skeleton, nodes } = this;
    switch (state) {
      case "patched":
        return (row) => patched.has(row);
      case "opaque":
        return (row) => skeleton.has(skeleton.graphOf(row), FLAG.opaque);
      case "size":
        return (row) => skeleton.has(nodes[row] ?? 0, FLAG.size);
      case "tensor":
      case "number": {
        const isMeant = skeleton.columns.specs.map((spec) => spec[3] === state);
        return (row) => isMeant[skeleton.spec[row] ?? -1] === true;
      }
      default: {
        const kind = (KINDS as readonly string[]).indexOf(state);
        return (row) => skeleton.kind[nodes[row] ?? 0] === kind;
      }
    }
  }
}

const MAX_CACHED = 4;

/** Texts joined into one string: searching it takes a fraction of the time of searching each. */
class JoinedTexts {
  private readonly all: string;
  /** By text: its start in `all`; one more at the end. */
  private readonly starts: Int32Array;
  private readonly cache = new Map<string, Uint8Array>();

  constructor(texts: readonly string[]) {
    this.all = texts.join("\0");
    this.starts = new Int32Array(texts.length + 1);
    for (const [at, text] of texts.entries()) this.starts[at + 1] = (this.starts[at] ?? 0) + text.length + 1;
  }

  of(at: number): string {
    return this.all.slice(this.starts[at], (this.starts[at + 1] ?? 0) - 1);
  }

  /** By text: 1 where it contains `part`. */
  containing(part: string): Uint8Array {
    const known = this.cache.get(part) ?? this.search(part);
    if (this.cache.size >= MAX_CACHED) this.cache.clear();
    this.cache.set(part, known);
    return known;
  }

  private search(part: string): Uint8Array {
    const { all, starts } = this;
    const found = new Uint8Array(starts.length - 1);
    if (part === "") return found.fill(1);
    for (let at = 0, from = all.indexOf(part); from >= 0; from = all.indexOf(part, starts[at])) {
      while ((starts[at + 1] ?? all.length) <= from) at += 1;
      found[at++] = 1;
      if (at >= found.length) break;
    }
    return found;
  }
}

/** Whether a row is an input that the example inputs do not have: it can be patched, but does not have a value. */
function isAbsent(skeleton: Skeleton, row: number): boolean {
  return skeleton.kind[row] === INPUT && skeleton.labelOf(row) === "NoneType";
}

/** For each name, whether it matches, ignoring case; `*` matches any letters. */
function matchNames(names: readonly string[], pattern: string): boolean[] {
  const parts = pattern.split("*");
  return names.map((name) => name !== "" && matchesGlob(name.toLowerCase(), parts));
}

/** Whether a name consists of the parts in this order, with any text between them. */
function matchesGlob(name: string, parts: readonly string[]): boolean {
  const [first = "", last = ""] = [parts[0], parts.at(-1)];
  if (parts.length < 2) return name === first;
  if (name.length < first.length + last.length || !name.startsWith(first) || !name.endsWith(last)) return false;
  return hasParts(name.slice(first.length, name.length - last.length), parts.slice(1, -1));
}

/** Whether `text` contains all parts in this order: a pattern with `*` between the parts. */
function hasParts(text: string, parts: readonly string[]): boolean {
  let from = 0;
  for (const part of parts) {
    const at = text.indexOf(part, from);
    if (at < 0) return false;
    from = at + part.length;
  }
  return true;
}

/** Whether `path` contains `wanted`, one or several names with dots, as whole names. */
function hasNames(path: string, wanted: string): boolean {
  if (!path.includes('"')) {
    return path.includes(wanted) && `.${path.replaceAll("|", ".")}.`.includes(`.${wanted.replaceAll("|", ".")}.`);
  }
  const names = namesOf(path);
  const parts = wanted.split(/[.|]/);
  return (
    names.includes(wanted) || names.some((_, from) => parts.every((part, offset) => names[from + offset] === part))
  );
}

/** The names in a path, without their quotes. */
function namesOf(path: string): string[] {
  return (path.match(/"(?:[^"\\]|\\.)*"|[^.|"]+/g) ?? []).map((name) => (name[0] === '"' ? JSON.parse(name) : name));
}

export class SearchResult {
  /** The matching rows, in order; `null` without a query. */
  matches: number[] | null = null;
  /** How many values that only carry sizes match, if nothing else does. */
  onlySizesCount = 0;
  /** Why the text in the search field is not a valid query. */
  error: string | null = null;
  readonly index: SearchIndex;

  constructor(skeleton: Skeleton) {
    this.index = new SearchIndex(skeleton);
  }

  /** Searches. If the text is not a valid query, `error` says why and what was found before stays. */
  search(text: string, patched: ReadonlySet<number>): void {
    this.error = null;
    try {
      const terms = parseQuery(text);
      this.matches = terms.length ? this.index.find(terms, patched) : null;
      this.onlySizesCount = this.matches?.length === 0 ? this.index.countOnlySizes(terms, patched) : 0;
    } catch (error) {
      if (!(error instanceof QueryError)) throw error;
      this.error = error.message;
    }
  }

  /** Whether a row itself matches. */
  has(row: number): boolean {
    const matches = this.matches ?? [];
    let [from, to] = [0, matches.length];
    while (from < to) {
      const middle = (from + to) >> 1;
      if ((matches[middle] ?? 0) < row) from = middle + 1;
      else to = middle;
    }
    return matches[from] === row;
  }
}

/** The position in `rows` after or before that of `row`; wraps around. */
export function nextPosition(rows: readonly number[], row: number, step: 1 | -1): number {
  const here = rows.indexOf(row);
  if (here >= 0) return (here + step + rows.length) % rows.length;
  const beyond = step > 0 ? rows.findIndex((other) => other > row) : rows.findLastIndex((other) => other < row);
  return beyond >= 0 ? beyond : step > 0 ? 0 : rows.length - 1;
}
