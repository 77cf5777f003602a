/** Two strips of tokens: what a token attends to, and which tokens attend to it. Hovering previews, a click pins. */
import type { AttentionImage } from "../kernel/protocol";
import { consume, element, replaceChildren, setAttribute } from "../page/dom";
import { clamp, isChoice } from "../page/grid";
import { formatWithError, visibleToken } from "../page/text";
import { largestMagnitude } from "../plots/matrix";
import type { Pattern } from "./attention_data";

/** Whether the tokens of a strip are queries or keys. */
export type Side = "query" | "key";

export interface TokenImage extends AttentionImage {
  /** A URL. */
  picture: string;
}

interface StripOptions {
  preview(position: number | null, side: Side): void;
  choose(position: number, side: Side, isMore: boolean): void;
}

/** The content of the strips; `query` and `key`: the tokens that they describe. */
interface StripContent {
  pattern: Pattern;
  queries: readonly string[];
  keys: readonly string[];
  query: number | null;
  key: number | null;
  /** A prefix that names the run, if there are two: `patched: `. */
  run: string;
  /** The positions at which the heads are patched. */
  patched: ReadonlySet<number>;
  /** The picture of which some tokens are patches. */
  image: TokenImage | null;
}

/** The maximum strength of the background, in percent: text on it is readable. */
const MAX_BACKGROUND = 45;
const MAX_OVERLAY = 85;
const MAX_NAMED = 3;

export function makeTokenStrips(options: StripOptions) {
  const looksAt = makeStrip("looks at", "key", options);
  const lookedAt = makeStrip("is looked at by", "query", options);
  const hint = "Point at a token to see what it looks at, and what looks at it; click to pin it.";
  const note = element("p.gp-note", hint);
  const show = ({ pattern, queries, keys, query, key, ...look }: StripContent) => {
    const { error, rows, columns, values, isFull: isWhole } = pattern;
    const isUsable = isWhole && queries.length === rows && keys.length === columns;
    const row = isUsable && query !== null ? values.subarray(query * columns, (query + 1) * columns) : null;
    const column =
      isUsable && key !== null ? Float32Array.from({ length: rows }, (_, at) => values[at * columns + key] ?? 0) : null;
    const of = (texts: readonly string[], position: number | null) =>
      position === null ? null : (texts[position] ?? null);
    looksAt.show({ ...look, error, texts: keys, weights: row, position: query, of: of(queries, query) });
    const isAll = key === null && query === null && isUsable;
    if (isAll) lookedAt.show({ ...look, error, texts: keys, weights: received(pattern), position: null, of: null });
    else lookedAt.show({ ...look, error, texts: queries, weights: column, position: key, of: of(keys, key) });
    note.hidden = query !== null || key !== null;
  };
  return { element: element("div.gp-stack.gp-strips", looksAt.element, lookedAt.element, note), show };
}

function received({ rows, columns, values }: Pattern): Float32Array {
  const sums = new Float32Array(columns);
  values.forEach((value, at) => {
    sums[at % columns] = (sums[at % columns] ?? 0) + value / rows;
  });
  return sums;
}

interface Strip extends Pick<StripContent, "run" | "patched" | "image"> {
  error: Pattern["error"];
  texts: readonly string[];
  /** Of each token; `null`: unknown. */
  weights: Float32Array | null;
  /** The token that the strip describes; without one, weights are how much attention each token receives. */
  position: number | null;
  of: string | null;
}

function makeStrip(verb: string, side: Side, options: StripOptions) {
  const title = element("div.gp-caption.gp-strip-title");
  let texts: readonly string[] = [];
  let shownImage: TokenImage | null = null;
  let tokens: HTMLElement[] = [];
  let position = 0;
  const numberOf = (event: Event, act: (at: number) => void) => {
    const found = (event.target as Element).closest<HTMLElement>("[data-at]");
    if (found !== null) act(Number(found.dataset.at));
  };
  const leave = () => options.preview(null, side);
  const line = element("div.gp-token-strip", {
    role: "group",
    tabindex: 0,
    "aria-label": `Tokens, ${verb}: arrow keys go from token to token, Enter pins one`,
    onpointerover: (event: Event) => numberOf(event, (at) => options.preview(at, side)),
    onpointerleave: leave,
    onblur: leave,
    onclick: (event: MouseEvent) => numberOf(event, (at) => options.choose(at, side, event.shiftKey)),
    onkeydown: (event: KeyboardEvent) => {
      const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      if (step === undefined && !isChoice(event)) return;
      consume(event);
      title.setAttribute("aria-live", "polite");
      if (step === undefined) return options.choose(position, side, event.shiftKey);
      position = clamp(position + step, 0, texts.length - 1);
      options.preview(position, side);
    },
  });
  /** Tokens in a line; those that are patches of a picture, over it. */
  const fill = (image: TokenImage | null) => {
    const patches = new Set(image?.positions);
    tokens = texts.map((text, at) => {
      const attributes = { "data-at": at, title: `${at}` };
      return patches.has(at)
        ? element("span.gp-patch", attributes)
        : element("span.gp-token", attributes, visibleToken(text));
    });
    const picture = image && element("div.gp-image", ...image.positions.map((at) => tokens[at]));
    const [rows, columns] = image?.grid ?? [];
    Object.assign(picture?.style ?? {}, {
      backgroundImage: `url("${image?.picture}")`,
      gridTemplate: `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`,
      aspectRatio: `${columns} / ${rows}`,
    });
    replaceChildren(line, picture, ...tokens.filter((_, at) => !patches.has(at)));
    setAttribute(line, "data-image", picture !== null);
  };
  const show = (strip: Strip) => {
    const { weights, of, run } = strip;
    if (strip.texts !== texts || strip.image !== shownImage) {
      [texts, shownImage] = [strip.texts, strip.image];
      fill(strip.image);
    }
    position = strip.position ?? position;
    const most = largestMagnitude(weights ?? []);
    for (const [at, token] of tokens.entries()) {
      const weight = weights?.[at] ?? 0;
      const strongest = token.classList.contains("gp-patch") ? MAX_OVERLAY : MAX_BACKGROUND;
      const part = most > 0 ? Math.round((Math.abs(weight) / most) * strongest) : 0;
      const own = weight < 0 ? "var(--gp-negative)" : "var(--gp-positive)";
      token.style.backgroundColor = part > 0 ? `color-mix(in srgb, ${own} ${part}%, transparent)` : "";
      setAttribute(token, "data-active", at === strip.position);
      setAttribute(token, "data-patched", strip.patched.has(at));
    }
    const named = weights && strongestOf(texts, weights, strip.error);
    const all = strip.position === null && named !== null ? `received, mean over the queries: ${named}` : `… ${verb}`;
    const parts =
      of === null || named === null
        ? [all]
        : [element("strong", visibleToken(of)), ` (${strip.position}) ${verb}: ${named}`];
    replaceChildren(title, run, ...parts);
  };
  return { element: element("div.gp-strip", title, line), show };
}

/** Names the tokens with the largest weights. */
function strongestOf(texts: readonly string[], weights: Float32Array, error: Pattern["error"]): string {
  const weightOf = (at: number) => weights[at] ?? 0;
  const order = [...weights.keys()].sort((one, other) => Math.abs(weightOf(other)) - Math.abs(weightOf(one)));
  const named = order
    .slice(0, MAX_NAMED)
    .filter((at) => weightOf(at) !== 0)
    .map((at) => `${visibleToken(texts[at] ?? "")} (${at}) ${formatWithError(weightOf(at), error(weightOf(at)))}`);
  return named.join(", ") || "0 everywhere";
}
