/** Two strips of tokens: what a token attends to, and which tokens attend to it. Hovering previews, a click pins. */
import type { AttentionImage } from "../kernel/protocol";
import { consume, element, replaceChildren, setAttribute } from "../page/dom";
import { isChoice } from "../page/grid";
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

export class TokenStrips {
  readonly element: HTMLElement;
  private readonly strips: Strip[];
  private readonly note = element(
    "p.gp-note",
    "Point at a token to see what it looks at, and what looks at it; click to pin it.",
  );

  constructor(options: StripOptions) {
    const looksAt = new Strip("looks at", "key", options);
    const lookedAt = new Strip("is looked at by", "query", options);
    this.strips = [looksAt, lookedAt];
    this.element = element("div.gp-stack.gp-strips", looksAt.element, lookedAt.element, this.note);
  }

  show({ pattern, queries, keys, query, key, run, patched, image }: StripContent): void {
    const [looksAt, lookedAt] = this.strips;
    const { rows, columns, values, isFull: isWhole } = pattern;
    for (const strip of this.strips) [strip.error, strip.patched, strip.image] = [pattern.error, patched, image];
    const isUsable = isWhole && queries.length === rows && keys.length === columns;
    const row = isUsable && query !== null ? values.subarray(query * columns, (query + 1) * columns) : null;
    const column =
      isUsable && key !== null ? Float32Array.from({ length: rows }, (_, at) => values[at * columns + key] ?? 0) : null;
    looksAt?.show(keys, row, query, query === null ? null : (queries[query] ?? null), run);
    if (key === null && query === null && isUsable) lookedAt?.showReceived(keys, received(pattern), run);
    else lookedAt?.show(queries, column, key, key === null ? null : (keys[key] ?? null), run);
    this.note.hidden = query !== null || key !== null;
  }
}

function received({ rows, columns, values }: Pattern): Float32Array {
  const sums = new Float32Array(columns);
  values.forEach((value, at) => {
    sums[at % columns] = (sums[at % columns] ?? 0) + value / rows;
  });
  return sums;
}

class Strip {
  readonly element: HTMLElement;
  private readonly title = element("div.gp-caption.gp-strip-title");
  private readonly line: HTMLElement;
  private texts: readonly string[] = [];
  private position = 0;
  error: Pattern["error"] = () => 0;
  patched: ReadonlySet<number> = new Set();
  image: TokenImage | null = null;
  private shownImage: TokenImage | null = null;
  private tokens: HTMLElement[] = [];

  constructor(
    private readonly verb: string,
    side: Side,
    options: StripOptions,
  ) {
    this.line = element("div.gp-token-strip", {
      role: "group",
      tabindex: 0,
      "aria-label": `Tokens, ${verb}: arrow keys go from token to token, Enter pins one`,
    });
    const numberOf = (event: Event) => {
      const found = (event.target as Element).closest<HTMLElement>("[data-at]");
      return found === null ? null : Number(found.dataset.at);
    };
    this.line.addEventListener("pointerover", (event) => {
      const at = numberOf(event);
      if (at !== null) options.preview(at, side);
    });
    this.line.addEventListener("pointerleave", () => options.preview(null, side));
    this.line.addEventListener("blur", () => options.preview(null, side));
    this.line.addEventListener("click", (event) => {
      const at = numberOf(event);
      if (at !== null) options.choose(at, side, event.shiftKey);
    });
    this.line.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      if (step === undefined && !isChoice(event)) return;
      consume(event);
      this.title.setAttribute("aria-live", "polite");
      if (step === undefined) {
        options.choose(this.position, side, event.shiftKey);
        return;
      }
      this.position = Math.max(0, Math.min(this.texts.length - 1, this.position + step));
      options.preview(this.position, side);
    });
    this.element = element("div.gp-strip", this.title, this.line);
  }

  /** `weights`: of each token; `null`: unknown, or there is no token. `of`: the token that the strip describes. */
  show(
    texts: readonly string[],
    weights: Float32Array | null,
    position: number | null,
    of: string | null,
    run: string,
  ): void {
    if (texts !== this.texts || this.image !== this.shownImage) this.fill(texts);
    if (position !== null) this.position = position;
    const most = largestMagnitude(weights ?? []);
    for (const [at, token] of this.tokens.entries()) {
      const weight = weights?.[at] ?? 0;
      const strongest = token.classList.contains("gp-patch") ? MAX_OVERLAY : MAX_BACKGROUND;
      const part = most > 0 ? Math.round((Math.abs(weight) / most) * strongest) : 0;
      const own = weight < 0 ? "var(--gp-negative)" : "var(--gp-positive)";
      token.style.backgroundColor = part > 0 ? `color-mix(in srgb, ${own} ${part}%, transparent)` : "";
      setAttribute(token, "data-active", at === position);
      setAttribute(token, "data-patched", this.patched.has(at));
    }
    replaceChildren(this.title, run, ...this.titleParts(weights, of, position));
  }

  /** Tokens in a line; those that are patches of a picture, over it. */
  private fill(texts: readonly string[]): void {
    const { image } = this;
    [this.texts, this.shownImage] = [texts, image];
    const patches = new Set(image?.positions);
    this.tokens = texts.map((text, at) => {
      const attributes = { "data-at": at, title: `${at}` };
      return patches.has(at)
        ? element("span.gp-patch", attributes)
        : element("span.gp-token", attributes, visibleToken(text));
    });
    const picture = image && element("div.gp-image", ...image.positions.map((at) => this.tokens[at]));
    if (picture) {
      picture.style.backgroundImage = `url("${image?.picture}")`;
      picture.style.gridTemplate = `repeat(${image?.grid[0]}, 1fr) / repeat(${image?.grid[1]}, 1fr)`;
      picture.style.aspectRatio = `${image?.grid[1]} / ${image?.grid[0]}`;
    }
    replaceChildren(this.line, picture, ...this.tokens.filter((_, at) => !patches.has(at)));
    setAttribute(this.line, "data-image", picture !== null);
  }

  /** Without a token: shows how much attention each token receives, as the mean over the queries. */
  showReceived(texts: readonly string[], weights: Float32Array, run: string): void {
    this.show(texts, weights, null, null, run);
    replaceChildren(this.title, run, `received, mean over the queries: ${this.strongest(weights)}`);
  }

  private strongest(weights: Float32Array): string {
    const order = [...weights.keys()].sort((one, other) => Math.abs(weights[other] ?? 0) - Math.abs(weights[one] ?? 0));
    const named = order
      .slice(0, MAX_NAMED)
      .filter((at) => weights[at] !== 0)
      .map(
        (at) =>
          `${visibleToken(this.texts[at] ?? "")} (${at}) ${formatWithError(weights[at] ?? 0, this.error(weights[at] ?? 0))}`,
      );
    return named.join(", ") || "0 everywhere";
  }

  private titleParts(
    weights: Float32Array | null,
    of: string | null,
    position: number | null,
  ): (HTMLElement | string)[] {
    if (of === null || weights === null) return [`… ${this.verb}`];
    return [element("strong", visibleToken(of)), ` (${position}) ${this.verb}: ${this.strongest(weights)}`];
  }
}
