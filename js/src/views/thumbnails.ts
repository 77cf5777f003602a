/** All heads as small pictures on one canvas, a row for each layer: the pointer previews a head, a click selects it. */
import { element, replaceChildren, setAttribute } from "../page/dom";
import { type ColorMap, color, fade, largestMagnitude, type Rgb } from "../plots/plane";
import type { Pattern, Patterns, Place } from "./attention_data";

interface ThumbnailOptions {
  /** The head under the pointer or the keyboard's cursor; `null`: none any more. */
  preview(place: Place | null): void;
  choose(place: Place, isMore: boolean): void;
  /** Chooses all heads of a layer. */
  chooseLayer(layer: number): void;
  /** What a head is called when it is read out. */
  describe(place: Place): string;
}

/** How heads are drawn. */
interface Drawing {
  patternOf(place: Place): Pattern;
  map: ColorMap;
  /** Which number has the last color; `null`: about the largest of each head. */
  limit: number | null;
  /** Whether a filter leaves a head; the others are faint. */
  isLeft(place: Place): boolean;
}

const GAP = 3;
const [LEAST, MOST] = [18, 72];
const LABELS = 64;
const NEARLY_ALL = 0.98;
const ENOUGH = 600;

/** The colors of 256 steps of a map. */
const TABLES = new Map<ColorMap, Rgb[]>();

function tableOf(map: ColorMap): Rgb[] {
  const known = TABLES.get(map) ?? Array.from({ length: 256 }, (_, step) => color(step / 255, map));
  TABLES.set(map, known);
  return known;
}

export class Thumbnails {
  readonly element: HTMLElement;
  private readonly canvas = element("canvas", { "aria-hidden": "true" });
  private readonly marks = element("div", { class: "gp-head-marks" });
  private readonly cursor = element("div", { class: "gp-head-cursor", hidden: true });
  private readonly labels = element("div", { class: "gp-layer-labels", "aria-hidden": "true" });
  private readonly numbers = element("div", { class: "gp-head-numbers", "aria-hidden": "true" });
  private readonly spoken = element("div", { class: "gp-unseen", "aria-live": "polite" });
  private readonly field: HTMLElement;
  private readonly ratio = globalThis.devicePixelRatio || 1;
  private size = 40;
  private place: Place = { layer: 0, head: 0 };
  private patterns: Patterns | null = null;
  private heads = 0;

  constructor(private readonly options: ThumbnailOptions) {
    this.field = element(
      "div",
      {
        class: "gp-heads-field",
        role: "group",
        tabindex: 0,
        "aria-label": "Heads: arrow keys go from head to head, Enter selects one, Shift and Enter add one",
      },
      this.canvas,
      this.marks,
      this.cursor,
    );
    this.element = element("div", { class: "gp-heads" }, this.numbers, this.labels, this.field, this.spoken);
    this.field.addEventListener("pointermove", (event) => this.move(this.at(event)));
    this.field.addEventListener("pointerleave", () => this.leave());
    this.field.addEventListener("blur", () => this.leave());
    this.field.addEventListener("click", (event) => {
      const place = this.at(event);
      if (place !== null) this.options.choose(place, event.shiftKey);
    });
    this.labels.addEventListener("click", ({ target }) => {
      const layer = [...this.labels.children].indexOf(target as Element);
      if (layer >= 0) this.options.chooseLayer(layer);
    });
    this.field.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Draws all heads, for a width in CSS pixels. */
  draw(patterns: Patterns, width: number, { patternOf, map, limit, isLeft }: Drawing): void {
    this.patterns = patterns;
    const { layers } = patterns.about;
    this.heads = Math.max(...layers.map(({ heads }) => heads));
    const room = Math.floor((width - LABELS) / this.heads) - GAP;
    this.size = Math.max(LEAST, Math.min(MOST, room));
    const step = this.size + GAP;
    this.canvas.width = Math.round(this.heads * step * this.ratio);
    this.canvas.height = Math.round(layers.length * step * this.ratio);
    this.canvas.style.width = `${this.heads * step}px`;
    this.canvas.style.height = `${layers.length * step}px`;
    this.element.style.setProperty("--gp-step", `${step}px`);
    replaceChildren(
      this.labels,
      ...layers.map(({ title }) => element("span", { title: `Layer ${title}: all heads` }, title)),
    );
    replaceChildren(this.numbers, ...Array.from({ length: this.heads }, (_, head) => element("span", {}, `${head}`)));
    const context = this.canvas.getContext("2d");
    if (context === null) return;
    const side = Math.round(this.size * this.ratio);
    for (const [layer, { heads }] of layers.entries()) {
      for (let head = 0; head < heads; head++) {
        const image = drawn(patternOf({ layer, head }), side, map, limit);
        if (!isLeft({ layer, head })) fade(image);
        context.putImageData(image, Math.round(head * step * this.ratio), Math.round(layer * step * this.ratio));
      }
    }
  }

  /** Marks the heads that are selected, and layers in which something else is. */
  mark(places: readonly (Place & { color?: string })[], layers: ReadonlySet<number>): void {
    const step = this.size + GAP;
    const boxes = places.map(({ layer, head, color: own }) => {
      const box = element("div", { class: "gp-head-mark" });
      box.style.transform = `translate(${head * step}px, ${layer * step}px)`;
      box.style.width = box.style.height = `${this.size}px`;
      if (own) box.style.outlineColor = own;
      return box;
    });
    replaceChildren(this.marks, ...boxes);
    for (const [layer, label] of [...this.labels.children].entries()) {
      setAttribute(label, "data-selected", layers.has(layer));
    }
  }

  private at(event: MouseEvent): Place | null {
    const box = this.canvas.getBoundingClientRect();
    const step = this.size + GAP;
    const place = {
      layer: Math.floor((event.clientY - box.top) / step),
      head: Math.floor((event.clientX - box.left) / step),
    };
    return this.exists(place) ? place : null;
  }

  private exists({ layer, head }: Place): boolean {
    return head >= 0 && head < (this.patterns?.about.layers[layer]?.heads ?? 0);
  }

  private move(place: Place | null): void {
    if (place === null) return;
    const isSame = !this.cursor.hidden && place.layer === this.place.layer && place.head === this.place.head;
    this.place = place;
    const step = this.size + GAP;
    this.cursor.hidden = false;
    this.cursor.style.transform = `translate(${place.head * step}px, ${place.layer * step}px)`;
    this.cursor.style.width = this.cursor.style.height = `${this.size}px`;
    if (!isSame) this.options.preview(place);
  }

  private leave(): void {
    if (this.cursor.hidden) return;
    this.cursor.hidden = true;
    this.options.preview(null);
  }

  private onKey(event: KeyboardEvent): void {
    const { layer, head } = this.place;
    const last = (this.patterns?.about.layers[layer]?.heads ?? 1) - 1;
    const targets: Record<string, Place> = {
      ArrowUp: { layer: layer - 1, head },
      ArrowDown: { layer: layer + 1, head },
      ArrowLeft: { layer, head: head - 1 },
      ArrowRight: { layer, head: head + 1 },
      Home: { layer, head: 0 },
      End: { layer, head: last },
    };
    const target = targets[event.key];
    const chooses = event.key === "Enter" || event.key === " ";
    if ((!target && !chooses) || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    if (chooses) this.options.choose(this.place, event.shiftKey);
    const next = this.cursor.hidden ? this.place : target;
    if (!chooses && next && this.exists(next)) {
      this.move(next);
      this.spoken.textContent = this.options.describe(next);
    }
  }
}

/** A pattern as a square of device pixels; where it has more cells than there are pixels, by the largest of each block. */
function drawn({ rows, columns, values }: Pattern, side: number, map: ColorMap, limit: number | null): ImageData {
  const image = new ImageData(side, side);
  const table = tableOf(map);
  const most = limit ?? strong(values);
  const [low, range] = map === "diverging" ? [-most, 2 * most] : [0, most];
  const [down, across] = [bounds(rows, side), bounds(columns, side)];
  let pixel = 0;
  for (const [top, bottom] of down) {
    for (const [left, right] of across) {
      let largest = 0;
      for (let row = top; row < bottom; row++) {
        for (let column = left; column < right; column++) {
          const value = values[row * columns + column] ?? 0;
          if (Math.abs(value) > Math.abs(largest)) largest = value;
        }
      }
      const part = range > 0 ? (largest - low) / range : map === "diverging" ? 0.5 : 0;
      const rgb = table[Math.round(255 * Math.min(1, Math.max(0, part)))];
      for (let channel = 0; channel < 3; channel++) image.data[pixel + channel] = rgb?.[channel] ?? 0;
      image.data[pixel + 3] = 255;
      pixel += 4;
    }
  }
  return image;
}

/** What nearly all numbers of a head do not exceed: in a causal pattern, the first query has nothing but one weight of 1. */
function strong(values: Float32Array): number {
  // A part of them is enough: there are many heads, and this is done before anything is seen.
  const every = Math.max(1, Math.floor(values.length / ENOUGH));
  const amounts = values
    .filter((value, at) => value !== 0 && at % every === 0)
    .map(Math.abs)
    .sort();
  return amounts[Math.floor(NEARLY_ALL * (amounts.length - 1))] ?? largestMagnitude(values);
}

/** Which of `count` cells lie in each of `side` pixels: the first, and the one behind the last. */
function bounds(count: number, side: number): [number, number][] {
  return Array.from({ length: side }, (_, pixel) => {
    const from = Math.floor((pixel * count) / side);
    return [from, Math.max(from + 1, Math.floor(((pixel + 1) * count) / side))];
  });
}
