/**
 * Finds rows by a query, as `graphpatch_notebook/notebook/search.py` finds nodes; its docstring explains the
 * grammar. tests/notebook/search/test_search_parity.py compares the two.
 */

import { type Component, FLAG, KINDS, type Spec } from "../kernel/protocol";
import type { Skeleton } from "./skeleton";

/** The text is not a valid query; the message suggests a correction. */
export class QueryError extends Error {}

/** One term of a query; `key` is one of `KEYS`, or `text`. */
interface Term {
  key: string;
  value: string;
  isExcluded: boolean;
}

type Test = (row: number) => boolean;

const GRAPH = KINDS.indexOf("graph");
const INPUT = KINDS.indexOf("input");
const OP = KINDS.indexOf("op");

/** The keys of terms, each with an example. */
const KEYS: Record<string, string> = {
  op: "op:mul",
  shape: "shape:64, or shape:[1,*,64]",
  is: "is:parameter",
};
const STATES = "patched opaque size tensor number input parameter buffer attribute op output".split(" ");

/** What Python takes for white space, for use between brackets. */
const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const TERM = new RegExp(`(-?)(shape:\\[[^\\]]*\\](?![^${SPACE}])|[^${SPACE}]+)`, "gi");
const SHAPE = new RegExp(`^(?:[0-9]+|\\*|\\[[${SPACE}]*(?:(?:[0-9]+|\\*)[${SPACE}]*(?:,[${SPACE}]*|(?=\\])))*\\])$`);

/** The terms of a query; throws `QueryError`. */
export function parseQuery(text: string): Term[] {
  return [...text.matchAll(TERM)].map(([, minus, word = ""]) => ({ ...parseTerm(word), isExcluded: minus === "-" }));
}

function parseTerm(word: string): { key: string; value: string } {
  const [, written, value = ""] = /^([A-Za-z]+):(.*)$/s.exec(word) ?? [];
  if (written === undefined) {
    if (word === "-") throw new QueryError("there is nothing after '-': write -term to leave out what the term finds");
    return { key: "text", value: word.toLowerCase() };
  }
  const key = written.toLowerCase();
  const example = KEYS[key];
  if (example === undefined) {
    throw new QueryError(
      `unknown search key in '${word}': keys are ${Object.keys(KEYS).join(", ")}; for the text write *${word}`,
    );
  }
  if (!value || (key === "shape" && !SHAPE.test(value)))
    throw new QueryError(`'${word}' is not a search; write ${example}`);
  if (key === "is" && !STATES.includes(value.toLowerCase()))
    throw new QueryError(`unknown state '${word}'; there are ${STATES.join(", ")}`);
  return { key, value: value.toLowerCase() };
}

/** The properties of rows that queries test. */
export class SearchIndex {
  readonly paths: readonly string[];
  /** By row: the torch function of an op, in lower case; else empty. */
  private readonly ops: readonly string[];
  /** By row: the node of the row, or of the container around it. */
  private readonly nodes: Int32Array;
  /** By row: path, torch function and names of components, in lower case. */
  private texts: string[];
  /** The rows that can be found: those that only carry sizes, and the others. */
  private readonly sizes: number[] = [];
  private readonly others: number[] = [];

  constructor(private readonly skeleton: Skeleton) {
    const { columns, length } = skeleton;
    const paths = new Array<string>(length).fill("");
    const ops = new Array<string>(length).fill("");
    const names = columns.ops.map((op) => op.toLowerCase());
    this.nodes = new Int32Array(length);
    for (let row = 1; row < length; row++) {
      const above = skeleton.parent[row] ?? 0;
      paths[row] = above === 0 ? skeleton.nameOf(row) : paths[above] + skeleton.separator(row) + skeleton.nameOf(row);
      const node = skeleton.nodeOf(row);
      this.nodes[row] = node;
      if (skeleton.kind[node] === OP) ops[row] = names[skeleton.op[node] ?? 0] ?? "";
      if (!skeleton.has(row, FLAG.patchable) || skeleton.kind[row] === GRAPH || isAbsent(skeleton, row)) continue;
      (skeleton.has(node, FLAG.size) ? this.sizes : this.others).push(row);
    }
    [this.paths, this.ops] = [paths, ops];
    this.texts = this.textsWith([]);
  }

  /** Adds the names of components to the texts that plain words are searched in. */
  setComponents(components: readonly Component[]): void {
    this.texts = this.textsWith(components);
  }

  private textsWith(components: readonly Component[]): string[] {
    const texts = this.paths.map((path, row) => `${path.toLowerCase()}\n${this.ops[row]}`);
    for (const { row, name } of components) texts[row] += `\n${name.toLowerCase()}`;
    return texts;
  }

  /** The number of nodes that can be found, without values that only carry sizes. */
  get size(): number {
    return this.others.length;
  }

  /** The rows that match all terms, in order; those that only carry sizes with `onlySizes`, or if a term asks for them. */
  find(terms: readonly Term[], patched: ReadonlySet<number>, onlySizes = false): number[] {
    const asksForSizes = terms.some(({ key, value, isExcluded }) => key === "is" && value === "size" && !isExcluded);
    let rows = onlySizes || asksForSizes ? this.sizes : this.others;
    for (const term of terms) {
      const test = this.test(term, patched);
      rows = rows.filter((row) => test(row) !== term.isExcluded);
    }
    return rows;
  }

  /** Returns a function that checks a row for a term, ignoring whether the term is negated. */
  private test({ key, value }: Term, patched: ReadonlySet<number>): Test {
    switch (key) {
      case "text": {
        const parts = value.split("*");
        return (row) => hasParts(this.texts[row] ?? "", parts);
      }
      case "op":
        return nameTest(this.ops, value);
      case "shape": {
        const sizes = value.match(/[0-9]+|\*/g) ?? [];
        return this.specTest(([, shape]) => shape !== null && fits(shape, sizes, value.startsWith("[")));
      }
      default:
        return this.stateTest(value, patched);
    }
  }

  private stateTest(state: string, patched: ReadonlySet<number>): Test {
    const { nodes, skeleton } = this;
    switch (state) {
      case "patched":
        return (row) => patched.has(row);
      case "opaque":
        return (row) => skeleton.has(skeleton.graphOf(row), FLAG.opaque);
      case "size":
        return (row) => skeleton.has(nodes[row] ?? 0, FLAG.size);
      case "tensor":
      case "number":
        return this.specTest((spec) => spec[3] === state);
      default: {
        const kind = (KINDS as readonly string[]).indexOf(state);
        return (row) => skeleton.kind[nodes[row] ?? 0] === kind;
      }
    }
  }

  private specTest(test: (spec: Spec) => boolean): Test {
    const isMeant = this.skeleton.columns.specs.map(test);
    return (row) => isMeant[this.skeleton.spec[row] ?? -1] === true;
  }
}

/** Whether a row is an input that the example inputs do not have: it can be patched, but does not have a value. */
function isAbsent(skeleton: Skeleton, row: number): boolean {
  return skeleton.kind[row] === INPUT && skeleton.labelOf(row) === "NoneType";
}

/** Whether the whole name of a row matches; `*` is any text. */
function nameTest(names: readonly string[], pattern: string): Test {
  const parts = `\n${pattern}\n`.split("*");
  const wanted = new Set([...new Set(names)].filter((name) => name !== "" && hasParts(`\n${name}\n`, parts)));
  return (row) => wanted.has(names[row] ?? "");
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

/** Whether a shape consists of these sizes, or without `isWhole` has the only one; `*` is any size. */
function fits(shape: readonly number[], sizes: readonly string[], isWhole: boolean): boolean {
  if (!isWhole) return sizes[0] === "*" ? shape.length > 0 : shape.includes(Number(sizes[0]));
  return shape.length === sizes.length && sizes.every((size, at) => size === "*" || size === String(shape[at]));
}

export class SearchResult {
  /** The matching rows, in order; `null` without a query. */
  matches: number[] | null = null;
  /** How many values that only carry sizes match, if nothing else does. */
  onlySizesCount = 0;
  /** Why the text in the search field is not a valid query. */
  error: string | null = null;
  private cached: SearchIndex | null = null;
  private found: ReadonlySet<number> = new Set();

  constructor(private readonly skeleton: Skeleton) {}

  get index(): SearchIndex {
    this.cached ??= new SearchIndex(this.skeleton);
    return this.cached;
  }

  /** Searches. If the text is not a valid query, `error` says why and what was found before stays. */
  search(text: string, patched: ReadonlySet<number>): void {
    this.error = null;
    try {
      const terms = parseQuery(text);
      this.matches = terms.length ? this.index.find(terms, patched) : null;
      this.onlySizesCount = this.matches?.length === 0 ? this.index.find(terms, patched, true).length : 0;
      this.found = new Set(this.matches);
    } catch (error) {
      if (!(error instanceof QueryError)) throw error;
      this.error = error.message;
    }
  }

  /** Whether a row itself matches. */
  has(row: number): boolean {
    return this.found.has(row);
  }
}

/** The position in `rows` after or before that of `row`; wraps around. */
export function nextPosition(rows: readonly number[], row: number, step: 1 | -1): number {
  const here = rows.indexOf(row);
  if (here >= 0) return (here + step + rows.length) % rows.length;
  const beyond = step > 0 ? rows.findIndex((other) => other > row) : rows.findLastIndex((other) => other < row);
  return beyond >= 0 ? beyond : step > 0 ? 0 : rows.length - 1;
}
