/** Names of components that have numbers: what the kernel finds for them in graphpatch_notebook/components/names.py. */
import type { Component } from "../kernel/protocol";

const NUMBERS = "(\\[[^\\[\\]]*\\]|[^\\[\\]]*)\\]";
const IN_LAYERS = new RegExp(`^((?:[^\\[\\]@]+\\.)?layers\\[)${NUMBERS}\\.(.+)$`);
const OUTSIDE = /^((?:[^[\]@]+\.)?)(@.+)$/;
const SLICE = /^(.*[\w*])\[(\[?[^[\]]*\]?)\]$/;
const MEMBERS = new RegExp(`^((?:.*\\.)?)(heads|experts)(?:\\[${NUMBERS})?\\.(.+)$`);
const WHOLE = /^\s*-?\d+\s*$/;
/** A part of a slice of a value: `...`, a number, or a slice with a positive step. */
const PART = /^\s*(?:\.{3}|-?\d+|(?:-?\d+)?\s*:\s*(?:-?\d+)?\s*(?::\s*(?:0*[1-9]\d*)?)?)\s*$/;

const STREAM = "stream";
const NEURONS = "neurons";
const SORTS: Record<string, string> = {
  resid_pre: STREAM,
  resid_mid: STREAM,
  resid_post: STREAM,
  "mlp.pre": NEURONS,
  "mlp.post": NEURONS,
};

/** What a component is, in a word: `stream`, `neurons`; else its own: `q`, `pattern`, `attn_out`, `embed`. */
export function sortOf(name: string): string {
  const [, part = ""] = /([\w]+(?:\.\w+)?)$/.exec(name) ?? [];
  const last = part.slice(part.indexOf(".") + 1);
  return SORTS[part] ?? SORTS[last] ?? last;
}

/** The rows that a name means, such as `layers[-1].attn.heads[0:2].z[:, -1]`, `layers[0].resid_*` or `@embed[0]`. */
export function rowsMeant(text: string, components: readonly Component[]): Set<number> {
  const [, inside = "", layers = "", part = ""] = IN_LAYERS.exec(text) ?? [];
  const [, outside = "", word = ""] = OUTSIDE.exec(text) ?? [];
  if (!part) return new Set(word ? ofLayer(word, outside, components) : []);
  const inStack = components.filter(({ name }) => name.startsWith(inside));
  const count = 1 + Math.max(-1, ...inStack.map(({ name }) => Number.parseInt(name.slice(inside.length), 10)));
  const found = numbers(layers, count).map((layer) => ofLayer(part, `${inside}${layer}].`, inStack));
  const leavesOut = layers === "*" || layers === ":"; // layers that do not have it
  return new Set(leavesOut || found.every((rows) => rows.length > 0) ? found.flat() : []);
}

/** The rows that a part means, among the components whose names begin so; none if one of them lacks what it says. */
function ofLayer(part: string, start: string, components: readonly Component[]): number[] {
  const [, whole = part, slice] = SLICE.exec(part) ?? [];
  const [, before = "", word = "", list = "*", after = whole] = MEMBERS.exec(whole) ?? [];
  const heads = word === "heads";
  const path = pattern(before + (heads || !word ? "" : "experts.") + after);
  const named = components.filter(
    ({ name }) => name.startsWith(start) && !name.slice(start.length).startsWith("layers["),
  );
  let meant = named.filter(({ name }) => path.test(name.slice(start.length).replace(/\[\d+\]/, "")));
  if (heads && path.source.includes("*")) meant = meant.filter(({ axes }) => axes.includes("head"));
  if (word === "experts") {
    const numberOf = ({ name }: Component): number => Number(/experts\[(\d+)/.exec(name.slice(start.length))?.[1]);
    const count = 1 + Math.max(-1, ...meant.map(numberOf)); // experts that did not run have no row
    meant = numbers(list, count).flatMap((number) => meant.filter((one) => numberOf(one) === number));
  }
  const fits = ({ axes, shape }: Component): boolean => {
    const head = heads ? axes.indexOf("head") : -1;
    const rank = shape.length - Number(head >= 0);
    return (!heads || numbers(list, shape[head] ?? 0).length > 0) && (slice === undefined || isSlice(slice, rank));
  };
  return meant.every(fits) ? meant.map(({ row }) => row) : [];
}

/** What a pattern of words matches: `*` is any text within a word, `**` any text. */
function pattern(words: string): RegExp {
  const parts = words.split(/(\*\*\.|\*\*|\*)/);
  const of: Record<string, string> = { "**.": "(?:.*\\.)?", "**": ".*", "*": "[^.]*" };
  return new RegExp(`^${parts.map((part) => of[part] ?? part.replace(/[^\w]/g, "\\$&")).join("")}$`);
}

/** Whether a text is a slice of at most so many dimensions. The kernel sees whether it is in range, where it is used. */
function isSlice(text: string, rank: number): boolean {
  const parts = text.replace(/,\s*$/, "").split(",");
  const dots = parts.filter((part) => part.trim() === "...").length;
  return parts.length - dots <= rank && dots <= 1 && parts.every((part) => PART.test(part));
}

/** Which of `count` are meant by a number, several, a slice or `*`; none if one of them is out of range. */
function numbers(text: string, count: number): number[] {
  const given = text.trim();
  const isList = given.startsWith("[");
  if (given === "*") return Array.from({ length: count }, (_, number) => number);
  if (!isList && given.includes(":")) return sliced(given.split(":"), count);
  const chosen = (isList ? given.slice(1, -1) : given).split(",");
  const valid = chosen.every((one) => WHOLE.test(one) && -count <= Number(one) && Number(one) < count);
  return valid ? chosen.map((one) => (Number(one) + count) % count) : [];
}

/** The numbers that a slice of Python takes of `count`. */
function sliced(parts: readonly string[], count: number): number[] {
  const [from, to, by] = parts.map((part) => (part.trim() ? Number(part) : undefined));
  const step = by ?? 1;
  if (parts.length > 3 || !parts.every((part) => !part.trim() || WHOLE.test(part)) || step === 0) return [];
  const [low, high] = step > 0 ? [0, count] : [-1, count - 1];
  const bound = (given: number) => Math.min(Math.max(given < 0 ? given + count : given, low), high);
  const start = from === undefined ? (step > 0 ? low : high) : bound(from);
  const end = to === undefined ? (step > 0 ? high : low) : bound(to);
  const found: number[] = [];
  for (let number = start; step > 0 ? number < end : number > end; number += step) found.push(number);
  return found;
}
