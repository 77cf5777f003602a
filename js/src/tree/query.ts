/**
 * The search grammar: from the text of a query to its terms. The same as `graphpatch_notebook/notebook/search/query.py`, whose
 * docstring explains it; tested by tests/notebook/search/test_search_parity.py.
 */

/** The text is not a valid query; the message suggests a correction. */
export class QueryError extends Error {}

/** Sizes; `null` is any size. */
type Sizes = readonly (number | null)[];

/** `size`: among the dimensions (`first` is null); `first`: the whole shape; `last`: behind `...`. */
interface ShapeTerm {
  size: number | null;
  first: Sizes | null;
  last: Sizes | null;
}

type Meaning =
  | { kind: "text" | "exact" | "op" | "dtype" | "is" | "module"; value: string }
  | { kind: "shape"; value: ShapeTerm };
export type Term = Meaning & { isExcluded: boolean };

const NODE_KINDS = ["input", "parameter", "buffer", "attribute", "op", "output"];
const STATES = ["patched", "opaque", "size", "tensor", "number", ...NODE_KINDS];
const EXAMPLES: Record<string, string> = {
  op: "op:mul",
  module: "module:Linear",
  shape: "shape:64",
  dtype: "dtype:f16",
  is: "is:parameter",
  kind: "kind:op",
};

/** What Python takes for white space, for use between brackets. */
const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const END = `(?![^${SPACE}])`;
const SPACES = new RegExp(`[${SPACE}]*`, "y");
const WORD = new RegExp(`[^${SPACE}]+`, "y");
const BRACKETED = new RegExp(`shape:(\\[[^\\]]*\\]|\\([^)]*\\))${END}`, "y");
const QUOTED = new RegExp(`"([^"]*)"${END}|'([^']*)'${END}`, "y");

/** The terms of a query; throws `QueryError`. */
export function parseQuery(text: string): Term[] {
  const terms: Term[] = [];
  let position = skip(text, 0);
  while (position < text.length) {
    const isExcluded = text[position] === "-";
    if (isExcluded) position += 1;
    if (skip(text, position) > position || position === text.length) {
      throw new QueryError("there is nothing after '-': write -term to leave out what the term finds");
    }
    const [meaning, end] = readTerm(text, position);
    terms.push({ ...meaning, isExcluded });
    position = skip(text, end);
  }
  return terms;
}

function skip(text: string, position: number): number {
  return position + (matchAt(SPACES, text, position)?.[0].length ?? 0);
}

function matchAt(pattern: RegExp, text: string, position: number): RegExpExecArray | null {
  pattern.lastIndex = position;
  return pattern.exec(text);
}

/** The term at `position`, and where it ends. */
function readTerm(text: string, position: number): [Meaning, number] {
  const first = text[position];
  const rest = text.slice(position);
  if (first === '"' || first === "'") {
    const quoted = matchAt(QUOTED, text, position);
    if (!quoted) throw new QueryError(`the quote does not end: ${rest}; write ${first}name${first}`);
    return [{ kind: "exact", value: quoted[1] ?? quoted[2] ?? "" }, position + quoted[0].length];
  }
  if (first === "/") {
    throw new QueryError(
      "no path has a '/' in it, and regular expressions are not searched: write words and *, as in h_*.attn",
    );
  }
  const bracketed = matchAt(BRACKETED, text, position);
  if (bracketed) return [{ kind: "shape", value: shapeTerm(bracketed[1] ?? "") }, position + bracketed[0].length];
  const word = matchAt(WORD, text, position)?.[0] ?? "";
  return [wordTerm(word), position + word.length];
}

function wordTerm(word: string): Meaning {
  const written = /^([A-Za-z]+):/.exec(word)?.[1];
  if (written === undefined) return { kind: "text", value: word.toLowerCase() };
  const key = written.toLowerCase();
  const value = word.slice(written.length + 1);
  const example = EXAMPLES[key];
  if (example === undefined) {
    const meant = nearest(key, Object.keys(EXAMPLES));
    throw new QueryError(`unknown search key '${written}:'; nearest: ${meant}:; for the text itself write *${word}`);
  }
  if (!value) throw new QueryError(`there is nothing after '${key}:'; write ${example}`);
  return keyedTerm(key, value);
}

function keyedTerm(key: string, value: string): Meaning {
  const lower = value.toLowerCase();
  switch (key) {
    case "shape":
      return { kind: "shape", value: shapeTerm(value) };
    case "dtype":
      return { kind: "dtype", value: longDtype(lower.replace(/^torch\./, "")) };
    case "is":
      return { kind: "is", value: oneOf(lower, STATES, `unknown search word 'is:${value}'`, "is:") };
    case "kind":
      return { kind: "is", value: oneOf(lower, NODE_KINDS, `unknown 'kind:${value}'`, "kind:") };
    default:
      return { kind: key === "op" ? "op" : "module", value: lower };
  }
}

function oneOf(value: string, words: string[], problem: string, prefix: string): string {
  if (words.includes(value)) return value;
  throw new QueryError(`${problem}; nearest: ${prefix}${nearest(value, words)}; there are ${words.join(", ")}`);
}

function longDtype(value: string): string {
  const short = /^(bf|f|c|u|i)([0-9][\p{L}\p{N}_]*)$/u.exec(value);
  const names: Record<string, string> = { bf: "bfloat", f: "float", c: "complex", u: "uint", i: "int" };
  return short ? `${names[short[1] ?? ""]}${short[2]}` : value;
}

function shapeTerm(value: string): ShapeTerm {
  const isBracketed = ["[]", "()"].includes(`${value[0]}${value.at(-1)}`);
  const inside = isBracketed ? value.slice(1, -1) : value;
  if (!isBracketed && !value.includes(",") && value !== "...") {
    return { size: readSize(value, value), first: null, last: null };
  }
  const texts = inside.split(",").map((part) => part.replace(new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "g"), ""));
  if (texts.at(-1) === "") texts.pop(); // `[]`, or a comma at the end as in `(3,)`
  const gap = texts.indexOf("...");
  const sizes = (parts: string[]) => parts.map((part) => readSize(part, value));
  if (gap < 0) return { size: null, first: sizes(texts), last: null };
  return { size: null, first: sizes(texts.slice(0, gap)), last: sizes(texts.slice(gap + 1)) };
}

function readSize(text: string, value: string): number | null {
  if (text === "*") return null;
  if (/^[0-9]+$/.test(text)) return Number(text);
  throw new QueryError(`not a shape: ${value}; write shape:64 for a size, shape:[1,*,64] for a whole shape`);
}

/** Whether a shape is one of those meant. */
export function matchesShape({ size, first, last }: ShapeTerm, shape: readonly number[]): boolean {
  if (first === null) return size === null ? shape.length > 0 : shape.includes(size);
  if (last === null) return shape.length === first.length && sizesMatch(first, shape, 0);
  return (
    shape.length >= first.length + last.length &&
    sizesMatch(first, shape, 0) &&
    sizesMatch(last, shape, shape.length - last.length)
  );
}

function sizesMatch(sizes: Sizes, shape: readonly number[], from: number): boolean {
  return sizes.every((wanted, at) => wanted === null || wanted === shape[from + at]);
}

/** The word that is spelled most like `text`. */
function nearest(text: string, words: readonly string[]): string {
  const distances = words.map((word) => distance(text, word));
  return words[distances.indexOf(Math.min(...distances))] ?? "";
}

/** How many letters must be put in, taken out or changed to make `b` of `a`. */
function distance(a: string, b: string): number {
  let above = Array.from({ length: b.length + 1 }, (_, column) => column);
  for (let row = 1; row <= Math.min(a.length, 40); row++) {
    const line = [row];
    for (let column = 1; column <= b.length; column++) {
      const change = (above[column - 1] ?? 0) + (a[row - 1] === b[column - 1] ? 0 : 1);
      line.push(Math.min(change, (above[column] ?? 0) + 1, (line[column - 1] ?? 0) + 1));
    }
    above = line;
  }
  return above[b.length] ?? 0;
}
