/** Thumbnails of all heads on one canvas, a row for each layer: hovering previews a head, a click selects it. */
import type { AttentionLayer } from "../kernel/protocol";
import { element, replaceChildren, setAttribute } from "../page/dom";
import { type Cell, clamp, placeBox, watchCells } from "../page/grid";
import { type ColorMap, color, fade, positionOn, type Rgb, type Scale } from "../plots/matrix";
import type { HeadIndex, Pattern } from "./attention_data";

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

export function makeThumbnails(options: ThumbnailOptions) {
  const ratio = globalThis.devicePixelRatio || 1;
  let size = 40;
  let current: Cell | null = null;
  let layers: readonly AttentionLayer[] = [];
  let across = 0;
  const canvas = element("canvas", { "aria-hidden": "true" });
  const marks = element("div.gp-head-marks");
  const patched = element("div.gp-patched-heads");
  const cursor = element("div.gp-head-cursor", { hidden: true });
  const numbers = element("div.gp-head-numbers.gp-muted", { "aria-hidden": "true" });
  const labels = element("div.gp-layer-labels.gp-muted", {
    "aria-hidden": "true",
    onclick: ({ target }: MouseEvent) => {
      const layer = [...labels.children].indexOf(target as Element);
      if (layer >= 0) options.chooseLayer(layer);
    },
  });
  const liveRegion = element("div.gp-visually-hidden", { "aria-live": "polite" });
  const name = "Heads: arrow keys go from head to head, Enter selects one, Shift and Enter add one";
  const attributes = { role: "group", tabindex: 0, "aria-label": name };
  const field = element("div.gp-heads-field", attributes, canvas, patched, marks, cursor);
  const main = element("div.gp-heads", numbers, labels, field, liveRegion);
  watchCells(field, {
    rows: () => layers.length,
    columns: (layer) => layers[layer]?.heads ?? 0,
    cellAt: (x, y) => {
      const [layer, head] = [Math.floor(y * layers.length), Math.floor(x * across)];
      return head >= 0 && head < (layers[layer]?.heads ?? 0) ? [layer, head] : null;
    },
    show: (head, isByKey) => {
      const isSame = String(head) === String(current);
      current = head;
      cursor.hidden = head === null;
      if (head !== null) place(cursor, head);
      if (head !== null && isByKey) liveRegion.textContent = options.describe(head);
      if (!isSame) options.preview(head);
    },
    choose: options.choose,
  });
  const place = (box: HTMLElement, head: HeadIndex) => {
    placeBox(box, head, { width: size + GAP, height: size + GAP }, { width: size, height: size });
    return box;
  };
  /** Draws all heads, for a width in CSS pixels. */
  const draw = (shown: Pattern[][], about: readonly AttentionLayer[], width: number, how: DrawOptions) => {
    layers = about;
    across = Math.max(...layers.map(({ heads }) => heads));
    size = clamp(Math.floor((width - LABELS) / across) - GAP, MIN_SIDE, MAX_SIDE);
    const step = size + GAP;
    canvas.width = Math.round(across * step * ratio);
    canvas.height = Math.round(layers.length * step * ratio);
    canvas.style.width = `${across * step}px`;
    canvas.style.height = `${layers.length * step}px`;
    main.style.setProperty("--gp-step", `${step}px`);
    const names = layers.map(({ title }, layer) => {
      const patches = how.patchesOf(layer, null);
      return element("span", { title: `Layer ${title}: all heads` }, title, patches && element("mark", patches));
    });
    replaceChildren(labels, ...names);
    replaceChildren(numbers, ...Array.from({ length: across }, (_, head) => element("span", `${head}`)));
    const context = canvas.getContext("2d");
    const all = shown.flatMap((heads, layer) =>
      heads.map((pattern, head) => [pattern, [layer, head] as Cell] as const),
    );
    for (const [pattern, [layer, head]] of context === null ? [] : all) {
      const image = toImage(pattern, Math.round(size * ratio), how.scaleOf([layer, head]));
      if (!how.isKept([layer, head])) fade(image);
      context?.putImageData(image, Math.round(head * step * ratio), Math.round(layer * step * ratio));
    }
    const patches = all.map(([, head]) => [head, how.patchesOf(...head)] as const).filter(([, text]) => text !== "");
    replaceChildren(patched, ...patches.map(([head, text]) => place(element("mark", text), head)));
  };
  const mark = (heads: readonly HeadIndex[], colorOf: (at: number) => string, marked: ReadonlySet<number>) => {
    const boxes = heads.map((head, at) => {
      const box = place(element("div.gp-head-mark"), head);
      if (heads.length > 1) box.style.outlineColor = colorOf(at);
      return box;
    });
    replaceChildren(marks, ...boxes);
    for (const [layer, label] of [...labels.children].entries())
      setAttribute(label, "data-selected", marked.has(layer));
  };
  return { element: main, draw, mark };
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
