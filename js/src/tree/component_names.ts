/** Finds components by name, with the same results as graphpatch_notebook/components/names.py. */
import type { Component } from "../kernel/protocol";

const NUMBERS = "(\\[[^\\[\\]]*\\]|[^\\[\\]]*)\\]";
const IN_LAYERS = new RegExp(`^((?:[^\\[\\]@]+\\.)?layers\\[)${NUMBERS}\\.(.+)$`);
const OUTSIDE = /^((?:[^[\]@]+\.)?)(@.+)$/;
const SLICE = /^(.*[\w*])\[(\[?[^[\]]*\]?)\]$/;
const MEMBERS = new RegExp(`^((?:.*\\.)?)(heads|experts)(?:\\[${NUMBERS})?\\.(.+)$`);
const INTEGER = /^\s*-?\d+\s*$/;
/** A part of a slice of a value: `...`, a number, or a slice with a positive step. */
const SLICE_PART = /^\s*(?:\.{3}|-?\d+|(?:-?\d+)?\s*:\s*(?:-?\d+)?\s*(?::\s*(?:0*[1-9]\d*)?)?)\s*$/;

const STREAM = "stream";
const NEURONS = "neurons";
const TYPES: Record<string, string> = {
  resid_pre: STREAM,
  resid_mid: STREAM,
  resid_post: STREAM,
  "mlp.pre": NEURONS,
  "mlp.post": NEURONS,
};

/** The type of a component: `stream` or `neurons`, else the last part of its name: `q`, `pattern`, `attn_out`, `embed`. */
export function componentType(name: string): string {
  const [, part = ""] = /([\w]+(?:\.\w+)?)$/.exec(name) ?? [];
  const last = part.slice(part.indexOf(".") + 1);
  return TYPES[part] ?? TYPES[last] ?? last;
}

/** The rows that match a name such as `layers[-1].attn.heads[0:2].z[:, -1]`, `layers[0].resid_*` or `@embed[0]`. */
export function matchingRows(text: string, components: readonly Component[]): Set<number> {
  const [, inside = "", layers = "", part = ""] = IN_LAYERS.exec(text) ?? [];
  const [, outside = "", word = ""] = OUTSIDE.exec(text) ?? [];
  if (!part) return new Set(word ? rowsOfPart(word, outside, components) : []);
  const inStack = components.filter(({ name }) => name.startsWith(inside));
  const count = 1 + Math.max(-1, ...inStack.map(({ name }) => Number.parseInt(name.slice(inside.length), 10)));
  const found = parseIndices(layers, count).map((layer) => rowsOfPart(part, `${inside}${layer}].`, inStack));
  const skipsLayers = layers === "*" || layers === ":"; // layers that do not have it
  return new Set(skipsLayers || found.every((rows) => rows.length > 0) ? found.flat() : []);
}

/** The rows that match a part, among names that start with `start`; none if one lacks the heads, experts or slice. */
function rowsOfPart(part: string, start: string, components: readonly Component[]): number[] {
  const [, whole = part, slice] = SLICE.exec(part) ?? [];
  const [, before = "", container = "", list = "*", after = whole] = MEMBERS.exec(whole) ?? [];
  const heads = container === "heads";
  const path = globPattern(before + (heads || !container ? "" : "experts.") + after);
  const named = components.filter(
    ({ name }) => name.startsWith(start) && !name.slice(start.length).startsWith("layers["),
  );
  let matches = named.filter(({ name }) => path.test(name.slice(start.length).replace(/\[\d+\]/, "")));
  if (heads && path.source.includes("*")) matches = matches.filter(({ axes }) => axes.includes("head"));
  if (container === "experts") {
    const numberOf = ({ name }: Component): number => Number(/experts\[(\d+)/.exec(name.slice(start.length))?.[1]);
    const count = 1 + Math.max(-1, ...matches.map(numberOf)); // experts that did not run have no row
    matches = parseIndices(list, count).flatMap((number) => matches.filter((one) => numberOf(one) === number));
  }
  const fits = ({ axes, shape }: Component): boolean => {
    const head = heads ? axes.indexOf("head") : -1;
    const rank = shape.length - Number(head >= 0);
    return (!heads || parseIndices(list, shape[head] ?? 0).length > 0) && (slice === undefined || isSlice(slice, rank));
  };
  return matches.every(fits) ? matches.map(({ row }) => row) : [];
}

/** The regular expression of a glob: `*` is any text within a word, `**` any text. */
function globPattern(words: string): RegExp {
  const parts = words.split(/(\*\*\.|\*\*|\*)/);
  const of: Record<string, string> = { "**.": "(?:.*\\.)?", "**": ".*", "*": "[^.]*" };
  return new RegExp(`^${parts.map((part) => of[part] ?? part.replace(/[^\w]/g, "\\$&")).join("")}$`);
}

/** Whether a text is a slice of at most `rank` dimensions. The kernel checks whether it is in range. */
function isSlice(text: string, rank: number): boolean {
  const parts = text.replace(/,\s*$/, "").split(",");
  const dots = parts.filter((part) => part.trim() === "...").length;
  return parts.length - dots <= rank && dots <= 1 && parts.every((part) => SLICE_PART.test(part));
}

/** The indices below `count` that a number, a list, a slice or `*` selects; none if one of them is out of range. */
function parseIndices(text: string, count: number): number[] {
  const given = text.trim();
  const isList = given.startsWith("[");
  if (given === "*") return Array.from({ length: count }, (_, number) => number);
  if (!isList && given.includes(":")) return sliceIndices(given.split(":"), count);
  const chosen = (isList ? given.slice(1, -1) : given).split(",");
  const valid = chosen.every((one) => INTEGER.test(one) && -count <= Number(one) && Number(one) < count);
  return valid ? chosen.map((one) => (Number(one) + count) % count) : [];
}

/** The indices that a Python slice selects of `count`. */
function sliceIndices(parts: readonly string[], count: number): number[] {
  const [from, to, by] = parts.map((part) => (part.trim() ? Number(part) : undefined));
  const step = by ?? 1;
  if (parts.length > 3 || !parts.every((part) => !part.trim() || INTEGER.test(part)) || step === 0) return [];
  const [low, high] = step > 0 ? [0, count] : [-1, count - 1];
  const bound = (given: number) => Math.min(Math.max(given < 0 ? given + count : given, low), high);
  const start = from === undefined ? (step > 0 ? low : high) : bound(from);
  const end = to === undefined ? (step > 0 ? high : low) : bound(to);
  const found: number[] = [];
  for (let number = start; step > 0 ? number < end : number > end; number += step) found.push(number);
  return found;
}
