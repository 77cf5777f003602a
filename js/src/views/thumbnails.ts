/** Thumbnails of all heads on one canvas, a row for each layer: hovering previews a head, a click selects it. */
import { element, replaceChildren, setAttribute } from "../page/dom";
import { type Cell, clamp, placeBox, watchCells } from "../page/grid";
import { type ColorMap, color, fade, positionOn, type Rgb, type Scale } from "../plots/matrix";
import type { HeadIndex, Pattern, Patterns } from "./attention_data";

interface ThumbnailOptions {
  /** Called with the head under the pointer or the keyboard's cursor, and with `null` when there is none. */
  preview(place: HeadIndex | null): void;
  choose(place: HeadIndex, isMore: boolean): void;
  /** Selects all heads of a layer. */
  chooseLayer(layer: number): void;
  /** The name of a head for screen readers. */
  describe(place: HeadIndex): string;
}

/** How heads are drawn. */
interface DrawOptions {
  scaleOf(place: HeadIndex): Scale;
  /** The numbers of the patches on a head; on all heads of a layer, for `null`. */
  patchesOf(layer: number, head: number | null): string;
  /** Whether a head passes the filter; the others are faint. */
  isKept(place: HeadIndex): boolean;
}

const GAP = 3;
const [MIN_SIDE, MAX_SIDE] = [18, 72];
const LABELS = 64;

/** The colors of 256 steps of a map. */
const COLOR_TABLES = new Map<ColorMap, Rgb[]>();

function colorTable(map: ColorMap): Rgb[] {
  const known = COLOR_TABLES.get(map) ?? Array.from({ length: 256 }, (_, step) => color(step / 255, map));
  COLOR_TABLES.set(map, known);
  return known;
}

export class Thumbnails {
  readonly element: HTMLElement;
  private readonly canvas = element("canvas", { "aria-hidden": "true" });
  private readonly marks = element("div.gp-head-marks");
  private readonly patched = element("div.gp-patched-heads");
  private readonly cursor = element("div.gp-head-cursor", { hidden: true });
  private readonly labels = element("div.gp-layer-labels.gp-muted", { "aria-hidden": "true" });
  private readonly numbers = element("div.gp-head-numbers.gp-muted", { "aria-hidden": "true" });
  private readonly liveRegion = element("div.gp-visually-hidden", { "aria-live": "polite" });
  private readonly field: HTMLElement;
  private readonly ratio = globalThis.devicePixelRatio || 1;
  private size = 40;
  private current: Cell | null = null;
  private patterns: Patterns | null = null;
  private heads = 0;

  constructor(private readonly options: ThumbnailOptions) {
    this.field = element(
      "div.gp-heads-field",
      {
        role: "group",
        tabindex: 0,
        "aria-label": "Heads: arrow keys go from head to head, Enter selects one, Shift and Enter add one",
      },
      this.canvas,
      this.patched,
      this.marks,
      this.cursor,
    );
    this.element = element("div.gp-heads", this.numbers, this.labels, this.field, this.liveRegion);
    watchCells(this.field, {
      rows: () => this.patterns?.about.layers.length ?? 0,
      columns: (layer) => this.patterns?.about.layers[layer]?.heads ?? 0,
      cellAt: (x, y) => this.cellAt(x, y),
      show: (cell, isByKey) => this.showCursor(cell, isByKey),
      choose: (place, isMore) => options.choose(place, isMore),
    });
    this.labels.addEventListener("click", ({ target }) => {
      const layer = [...this.labels.children].indexOf(target as Element);
      if (layer >= 0) this.options.chooseLayer(layer);
    });
  }

  /** Draws all heads, for a width in CSS pixels. */
  draw(shown: Pattern[][], patterns: Patterns, width: number, { scaleOf, patchesOf, isKept }: DrawOptions): void {
    this.patterns = patterns;
    const { layers } = patterns.about;
    this.heads = Math.max(...layers.map(({ heads }) => heads));
    const room = Math.floor((width - LABELS) / this.heads) - GAP;
    this.size = Math.max(MIN_SIDE, Math.min(MAX_SIDE, room));
    const step = this.size + GAP;
    this.canvas.width = Math.round(this.heads * step * this.ratio);
    this.canvas.height = Math.round(layers.length * step * this.ratio);
    this.canvas.style.width = `${this.heads * step}px`;
    this.canvas.style.height = `${layers.length * step}px`;
    this.element.style.setProperty("--gp-step", `${step}px`);
    replaceChildren(
      this.labels,
      ...layers.map(({ title }, layer) => {
        const patches = patchesOf(layer, null);
        return element("span", { title: `Layer ${title}: all heads` }, title, patches && element("mark", patches));
      }),
    );
    replaceChildren(this.numbers, ...Array.from({ length: this.heads }, (_, head) => element("span", `${head}`)));
    const context = this.canvas.getContext("2d");
    if (context === null) return;
    const patched: HTMLElement[] = [];
    const side = Math.round(this.size * this.ratio);
    for (const [layer, heads] of shown.entries()) {
      for (const [head, pattern] of heads.entries()) {
        const image = toImage(pattern, side, scaleOf([layer, head]));
        const patches = patchesOf(layer, head);
        if (patches) {
          const mark = element("mark", patches);
          this.place(mark, [layer, head]);
          patched.push(mark);
        }
        if (!isKept([layer, head])) fade(image);
        context.putImageData(image, Math.round(head * step * this.ratio), Math.round(layer * step * this.ratio));
      }
    }
    replaceChildren(this.patched, ...patched);
  }

  mark(places: readonly HeadIndex[], colorOf: (at: number) => string, layers: ReadonlySet<number>): void {
    const boxes = places.map((place, at) => {
      const box = element("div.gp-head-mark");
      this.place(box, place);
      if (places.length > 1) box.style.outlineColor = colorOf(at);
      return box;
    });
    replaceChildren(this.marks, ...boxes);
    for (const [layer, label] of [...this.labels.children].entries()) {
      setAttribute(label, "data-selected", layers.has(layer));
    }
  }

  private place(box: HTMLElement, place: HeadIndex): void {
    const [step, size] = [this.size + GAP, this.size];
    placeBox(box, place, { width: step, height: step }, { width: size, height: size });
  }

  private cellAt(x: number, y: number): Cell | null {
    const layers = this.patterns?.about.layers ?? [];
    const [layer, head] = [Math.floor(y * layers.length), Math.floor(x * this.heads)];
    return head >= 0 && head < (layers[layer]?.heads ?? 0) ? [layer, head] : null;
  }

  private showCursor(place: Cell | null, isByKey: boolean): void {
    const isSame = String(place) === String(this.current);
    this.current = place;
    this.cursor.hidden = place === null;
    if (place !== null) this.place(this.cursor, place);
    if (place !== null && isByKey) this.liveRegion.textContent = this.options.describe(place);
    if (!isSame) this.options.preview(place);
  }
}

/** Draws a pattern as a square of device pixels; with more cells than pixels, a pixel shows the largest of its block. */
function toImage({ rows, columns, values }: Pattern, side: number, scale: Scale): ImageData {
  const image = new ImageData(side, side);
  const table = colorTable(scale.map);
  const [down, across] = [cellRanges(rows, side), cellRanges(columns, side)];
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
      const rgb = table[Math.round(255 * clamp(positionOn(scale, largest), 0, 1))];
      for (let channel = 0; channel < 3; channel++) image.data[pixel + channel] = rgb?.[channel] ?? 0;
      image.data[pixel + 3] = 255;
      pixel += 4;
    }
  }
  return image;
}

/** For each of `side` pixels, the range of its cells: the first, and the one after the last. */
function cellRanges(count: number, side: number): [number, number][] {
  return Array.from({ length: side }, (_, pixel) => {
    const from = Math.floor((pixel * count) / side);
    return [from, Math.max(from + 1, Math.floor(((pixel + 1) * count) / side))];
  });
}
