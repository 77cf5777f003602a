/** A heatmap on a canvas, with axes, a color scale, and a cell cursor that follows the mouse and the arrow keys. */

import type { Heatmap } from "../kernel/protocol";
import { buttonElement, element, icon, refresh, replaceChildren, setAttribute } from "../page/dom";
import { type Cell, clamp, placeBox, type Size, watchCells } from "../page/grid";
import { formatCount, formatNumber, sentence, visibleToken } from "../page/text";
import type { Part } from "../view";
import {
  type ColorMap,
  cellSize,
  colorOf,
  cssColor,
  cssGradient,
  fade,
  isLight,
  type Matrix,
  MISSING,
  MISSING_STRIPE,
  type Rgb,
  readMatrix,
  type Scale,
  type Summary,
  summarize,
} from "./matrix";

export interface PlotOptions {
  /** `Activation of transformer.h_0.attn`. */
  title: string;
  /** The texts of the tokens, if rows or columns are positions. */
  rowTokens?: string[] | null;
  columnTokens?: string[] | null;
  /** Whether it is one of several in a list. */
  isSmall?: boolean;
  /** All values that have the same colors, with those of other figures. */
  colorsOf?: Float32Array;
  result?: ResultOptions;
}

export interface ResultOptions {
  /** The color scale, which the kernel computes from more than the values. */
  scale: Scale;
  /** The name of the numbers, and which number has no color. */
  name: string;
  /** Why cells are hatched. */
  missing: string | null;
  rowTitle: string;
  columnTitle: string;
  rowLabels: AxisLabels | null;
  columnLabels: AxisLabels | null;
  /** The position of a cell, as text. */
  describe(row: number, column: number): string;
  /** Called when the user selects a cell; `isMore`: with Shift. */
  onSelect(row: number, column: number, isMore: boolean): void;
  /** The text of a cell. Without it, cells have no text. */
  cellText?(row: number, column: number): string;
  /** The width for all cells with text, in CSS pixels. */
  cellsWidth?: number;
  /** The value of a cell as text, instead of the number. */
  valueText?(row: number, column: number): string;
  /** The ends of the scale as text, instead of the numbers. */
  endText?(value: number): string;
  /** Called with the cell under the pointer, and with `null` when the pointer leaves. */
  onHover?(cell: Cell | null): void;
  /** Whether a cell passes the filter; the others are faint. */
  isKept?(row: number, column: number): boolean;
  /** The color of a cell that combines several values, instead of a color of the scale; with its legend. */
  overlay?: { color(index: number): Rgb; legend: HTMLElement };
  /** The approximate size of all cells together. */
  box?: Size;
}

/** The value that a heatmap shows a part of; a result has no slice. */
type HeatmapSource = Pick<Heatmap, "full" | "reduced"> & { slice?: string };

/** A cell that is selected; with `null`, a whole row or column. */
export type CellSelection = [row: number | null, column: number | null];

const BOX: Size = { width: 420, height: 320 };
const SMALL_BOX: Size = { width: 240, height: 132 };
const RESULT_BOX: Size = { width: 720, height: 480 };
/** The size of a zoomed cell, in CSS pixels, beside which labels are easy to read. */
const LARGE_CELL = 36;
/** The maximum side of a canvas, in device pixels: browsers do not draw larger ones. */
const MAX_CANVAS_SIDE = 8192;
/** The size of cells with text, in CSS pixels. */
const TEXT_CELL = { narrow: 40, wide: 90, height: 22 };
const FONT_SIZE = 11;
/** The largest cell of a result that fills the width, in CSS pixels. */
const FILLING_CELL: Size = { width: 120, height: 30 };
/** More than the width of a scroll bar, in CSS pixels. */
const SCROLL_BAR = 24;
/** The most of the width that labels of rows take, in CSS pixels: as in plots.css. */
const ROW_LABELS = 220;
const LABEL_GAP = 6;

function drawMissing(context: CanvasRenderingContext2D, x: number, y: number, cell: Size): void {
  context.fillStyle = cssColor(MISSING);
  context.fillRect(x, y, cell.width, cell.height);
  if (Math.min(cell.width, cell.height) < 4) return;
  context.save();
  context.beginPath();
  context.rect(x, y, cell.width, cell.height);
  context.clip();
  context.strokeStyle = cssColor(MISSING_STRIPE);
  context.beginPath();
  for (let start = -cell.height; start < cell.width; start += 5) {
    context.moveTo(x + start, y + cell.height);
    context.lineTo(x + start + cell.height, y);
  }
  context.stroke();
  context.restore();
}

/** Draws each value as a block of exactly `cell` device pixels. */
function drawMatrix(
  canvas: HTMLCanvasElement,
  plane: Matrix,
  colorAt: (value: number, index: number) => Rgb | null,
  cell: Size,
  isKept: (index: number) => boolean = () => true,
): void {
  canvas.width = plane.columns * cell.width;
  canvas.height = plane.rows * cell.height;
  const context = canvas.getContext("2d");
  if (context === null) return;
  const image = document.createElement("canvas");
  image.width = plane.columns;
  image.height = plane.rows;
  const pixels = new ImageData(plane.columns, plane.rows);
  const missing: number[] = [];
  plane.values.forEach((value, index) => {
    const rgb = colorAt(value, index);
    if (rgb === null) missing.push(index);
    else pixels.data.set(rgb, 4 * index);
    pixels.data[4 * index + 3] = 255;
    if (!isKept(index)) fade(pixels, index, 1);
  });
  image.getContext("2d")?.putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  for (const index of missing) {
    const column = index % plane.columns;
    drawMissing(context, column * cell.width, Math.floor((index - column) / plane.columns) * cell.height, cell);
  }
}

/** The text of a heatmap for screen readers. */
function describeHeatmap(heatmap: HeatmapSource, { rows, columns }: Matrix, summary: Summary, title: string): string {
  const size = `${formatCount(rows, "row")} by ${formatCount(columns, "column")}`;
  const parts = [`${title}: heatmap of ${size}`];
  if (heatmap.reduced !== null) parts.push(heatmap.reduced);
  if (summary.minimum === null) parts.push("no finite values");
  else {
    const [least, most, mean] = [summary.minimum, summary.maximum, summary.mean].map((value) => formatNumber(value));
    parts.push(`from ${least} to ${most}, mean ${mean}`);
  }
  if (summary.missing > 0) parts.push(`${formatNumber(summary.missing)} not finite`);
  return `${parts.join("; ")}. Arrow keys read single values.`;
}

/** `row 3 (␣the)`, or `rows 6 to 8` where a cell represents a block of several; all blocks but the last have the same size. */
export function describePosition(
  noun: string,
  index: number,
  count: number,
  full: number,
  labels: readonly string[] | null,
  plural = `${noun}s`,
): string {
  if (count !== full) {
    const block = Math.ceil(full / count);
    const first = index * block;
    const last = Math.min(first + block, full) - 1;
    return last > first ? `${plural} ${first} to ${last}` : `${noun} ${first}`;
  }
  const label = labels?.[index];
  return label === undefined ? `${noun} ${index}` : `${noun} ${index} (${label})`;
}

function tokenLabels(tokens: string[] | null | undefined, count: number): AxisLabels | null {
  if (tokens?.length !== count) return null;
  const texts = tokens.map(visibleToken);
  return { texts, describe: (index) => texts[index] ?? "" };
}

function truncated(context: CanvasRenderingContext2D, text: string, room: number): string {
  if (context.measureText(text).width <= room) return text;
  const letters = [...text];
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}

export interface HeatmapFigure extends Part {
  /** Draws the cells and the legend. */
  draw(): void;
  markSelected(chosen: readonly CellSelection[]): void;
  /** Moves the cursor to a cell that another figure points at; `null` hides it. */
  preview(cell: Cell | null): void;
  /** How far the cells are scrolled to the right, in pixels. */
  scrolledTo: number;
}

export function makeFigure(heatmap: HeatmapSource, matrix: Matrix, options: PlotOptions): HeatmapFigure {
  const { full, reduced, slice } = heatmap;
  const { rows, columns, values } = matrix;
  const { isSmall, result, title } = options;
  const summary = summarize(values);
  /** Of the values that decide the colors. */
  const colors = options.colorsOf ? summarize(options.colorsOf) : summary;
  const ratio = globalThis.devicePixelRatio || 1;
  let isClipped = colors.clipped !== null;
  let filledWidth = 0;
  let selected: readonly CellSelection[] = [];
  const figure = element("figure.gp-plot.gp-heatmap");
  const label = `${describeHeatmap(heatmap, matrix, summary, title)}${result ? " Enter selects one." : ""}`;
  const canvas = element("canvas", { role: "img", tabindex: "0", "aria-label": label });
  const cursor = element("div.gp-heatmap-cursor", { hidden: true });
  const marks = element("div.gp-heatmap-marks");
  const readout = element("div.gp-caption.gp-readout");
  const legend = element("div.gp-line.gp-tight.gp-legend.gp-muted");
  const [rowLabels, columnLabels] = result
    ? [result.rowLabels, result.columnLabels]
    : [tokenLabels(options.rowTokens, rows), tokenLabels(options.columnTokens, columns)];
  const placeOf = (index: number): Cell => [Math.floor(index / columns), index % columns];
  const isKept = (index: number) => result?.isKept?.(...placeOf(index)) ?? true;

  // -- The size of the cells ---------------------------------------------------------------------------------------------

  /** Whether the cells are as wide as the place of the figure allows. */
  const isFilling = result !== undefined && result.box === undefined && result.cellText === undefined;
  /** The width that all texts need, if a canvas can be as large: scrolling is better than truncated text. */
  const narrowestCell = (texts: readonly string[]) => {
    const wide = Math.min(Math.max(TEXT_CELL.narrow, Math.ceil(1.15 * widest(texts)) + 8), TEXT_CELL.wide);
    return wide * columns * ratio <= MAX_CANVAS_SIDE ? wide : TEXT_CELL.narrow;
  };
  const fittingCell = (): Size => {
    const { cellText } = result ?? {};
    if (cellText) {
      const fitting = Math.min((result?.cellsWidth ?? 0) / columns, TEXT_CELL.wide);
      const texts = Array.from(values, (_, index) => cellText(...placeOf(index)));
      const wide = Math.max(fitting, narrowestCell(texts));
      return { width: Math.floor(wide * ratio), height: Math.ceil(TEXT_CELL.height * ratio) };
    }
    if (!isFilling) return cellSize(matrix, result?.box ?? (isSmall ? SMALL_BOX : BOX), ratio);
    const labels = Math.min(widest(rowLabels?.texts ?? []), ROW_LABELS) + LABEL_GAP;
    const room = (figure.clientWidth || RESULT_BOX.width) - labels;
    const fit = (length: number, count: number, most: number) =>
      Math.max(Math.ceil(ratio), Math.floor(Math.min(length / count, most) * ratio));
    return {
      width: fit(room, columns, FILLING_CELL.width),
      height: fit(RESULT_BOX.height, rows, FILLING_CELL.height),
    };
  };
  let fitted = fittingCell();
  const maxZoom = () => {
    const { width, height } = fitted;
    const large = (LARGE_CELL * ratio) / Math.min(width, height);
    return Math.min(large, MAX_CANVAS_SIDE / (width * columns), MAX_CANVAS_SIDE / (height * rows));
  };
  const zoom = result ? makeZoom(maxZoom, () => layOut()) : null;
  /** In whole device pixels. */
  const cellInPixels = (): Size => {
    const most = LARGE_CELL * ratio;
    const zoomed = (size: number) => Math.round(Math.min(size * (zoom?.factor ?? 1), Math.max(size, most)));
    return { width: zoomed(fitted.width), height: zoomed(fitted.height) };
  };
  const cssCell = (): Size => {
    const { width, height } = cellInPixels();
    return { width: width / ratio, height: height / ratio };
  };
  const fill = () => {
    // Labels that turn around may add or remove a scroll bar of the page: cells do not grow into its place.
    const { clientWidth } = figure;
    if (clientWidth >= filledWidth && clientWidth < filledWidth + SCROLL_BAR) return;
    filledWidth = clientWidth;
    const { width, height } = fittingCell();
    if (width === fitted.width && height === fitted.height) return;
    fitted = { width, height };
    layOut();
  };
  const layOut = () => {
    const cell = cssCell();
    const resize = () => {
      canvas.style.width = `${columns * cell.width}px`;
      canvas.style.height = `${rows * cell.height}px`;
    };
    frame.layOut(cell, resize, rowLabels, columnLabels);
    draw();
    markSelected(selected);
    const first = marks.firstElementChild;
    if (first instanceof HTMLElement) frame.keepInSight(first);
  };

  // -- What is drawn -----------------------------------------------------------------------------------------------------

  const draw = () => {
    const scale = result?.scale ?? (isClipped ? colors.clipped : null) ?? colors.full;
    const colorAt = (value: number, index: number) => result?.overlay?.color(index) ?? colorOf(value, scale);
    drawMatrix(canvas, matrix, colorAt, cellInPixels(), isKept);
    writeTexts(scale);
    replaceChildren(legend, ...legendParts(scale));
  };
  /** Writes the texts of the cells, truncated to their width. */
  const writeTexts = (scale: Scale) => {
    const { cellText } = result ?? {};
    const context = cellText && canvas.getContext("2d");
    if (!context) return;
    const { width, height } = cellInPixels();
    const font = getComputedStyle(canvas).getPropertyValue("--gp-mono") || "monospace";
    context.font = `${FONT_SIZE * ratio}px ${font}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    values.forEach((value, index) => {
      const [row, column] = placeOf(index);
      if (!isKept(index)) return;
      context.fillStyle = isLight(colorOf(value, scale) ?? MISSING) ? "#000" : "#fff";
      const text = truncated(context, cellText(row, column), width - 6 * ratio);
      context.fillText(text, (column + 0.5) * width, (row + 0.5) * height);
    });
  };
  const legendParts = (scale: Scale): HTMLElement[] => {
    const { clipped, maximum, minimum, outliers } = colors; // of float32 numbers
    if (minimum === null) return [];
    if (result?.overlay) return [result.overlay.legend];
    const end = (value: number, isCut: boolean, sign: string) =>
      `${isCut ? `${sign} ` : ""}${result?.endText?.(value) ?? formatNumber(value, 3)}`;
    const low = end(scale.low, minimum < Math.fround(scale.low), "≤");
    const range = makeRange(scale.map, low, end(scale.high, (maximum ?? 0) > Math.fround(scale.high), "≥"));
    if (result !== undefined) return [element("span", result.name), range];
    if (clipped === null) return [range];
    const onclick = () => {
      isClipped = !isClipped;
      draw();
    };
    const text = isClipped ? `${formatCount(outliers, "value")} beyond the scale` : "Outliers included";
    const why = isClipped
      ? `Values go from ${formatNumber(minimum)} to ${formatNumber(maximum)}. Click for colors over all of them.`
      : "Click for colors over nearly all values, without the outliers.";
    const attributes = { class: "gp-underlined", "aria-pressed": isClipped, title: why, onclick };
    return [range, buttonElement(attributes, text)];
  };
  const notes = () => {
    const texts = reduced === null ? [] : [sentence(reduced)];
    const why = result?.missing ?? "NaN, infinite, or the fill value of a mask";
    if (summary.missing > 0) texts.push(`${formatCount(summary.missing, "value")} hatched: ${why}.`);
    return texts.map((text) => element("p.gp-note", text));
  };

  // -- The cursor --------------------------------------------------------------------------------------------------------

  const place = (box: HTMLElement, cell: Cell, across = 1, down = 1) => {
    const step = cssCell();
    placeBox(box, cell, step, { width: across * step.width, height: down * step.height });
  };
  const markSelected = (chosen: readonly CellSelection[]) => {
    selected = chosen;
    const boxes = chosen.map(([row, column]) => {
      const mark = element("div.gp-heatmap-mark");
      place(mark, [row ?? 0, column ?? 0], column === null ? columns : 1, row === null ? rows : 1);
      return mark;
    });
    marks.replaceChildren(...boxes);
  };
  const preview = (cell: Cell | null) => {
    cursor.hidden = cell === null;
    if (cell !== null) place(cursor, cell);
  };
  const describe = (row: number, column: number) => {
    if (result !== undefined) return result.describe(row, column);
    return [
      describePosition("row", row, rows, full[0], options.rowTokens?.map(visibleToken) ?? null),
      describePosition("column", column, columns, full[1], options.columnTokens?.map(visibleToken) ?? null),
    ].join(", ");
  };
  const moveTo = ([row, column]: Cell) => {
    if (rows === 0 || columns === 0) return;
    preview([row, column]);
    const value = result?.valueText?.(row, column) ?? formatNumber(values[row * columns + column] ?? Number.NaN, 5);
    readout.replaceChildren(
      element("span", `${describe(row, column)}: `),
      element("strong.gp-number", value),
      rows === full[0] && columns === full[1] ? "" : " (several values)",
    );
    result?.onHover?.([row, column]);
  };
  /** The text shown while the pointer is not on a value. */
  const clearCursor = () => {
    preview(null);
    result?.onHover?.(null);
    const size = `${full[0]} × ${full[1]}`;
    const more = frame.hasMore() ? "; scroll to see the others" : "";
    if (result) replaceChildren(readout, `${size}: point at a cell, click to select it${more}`);
    else replaceChildren(readout, element("code", `[${slice}]`), ` ${size}`);
  };
  const at = (part: number, count: number) => clamp(Math.floor(part * count), 0, count - 1);
  const onSelect = result?.onSelect;
  watchCells(canvas, {
    rows: () => rows,
    columns: () => columns,
    cellAt: (x, y) => [at(y, rows), at(x, columns)],
    show: (cell, isByKey) => {
      setAttribute(readout, "aria-live", isByKey ? "polite" : null);
      if (cell === null) return clearCursor();
      moveTo(cell);
      if (isByKey) frame.keepInSight(cursor);
    },
    ...(onSelect && { choose: (cell, isMore) => onSelect(...cell, isMore) }),
  });

  const cells = element("div.gp-heatmap-cells", canvas, marks, cursor);
  const frame = makeFrame(cells, () => cursor.hidden && clearCursor());
  const titled = result && [
    // The titles of the axes do not scroll.
    element("div.gp-caption.gp-heatmap-row-title", result.rowTitle),
    element(
      "div.gp-heatmap-titled",
      frame.element,
      element("div.gp-caption.gp-heatmap-column-title", result.columnTitle),
    ),
  ];
  const bar = zoom ? element("div.gp-line.gp-tight.gp-legend.gp-muted", legend, zoom.element) : legend;
  figure.append(...(titled ?? [frame.element]), readout, bar, ...notes());
  clearCursor();
  layOut();
  if (isFilling) new ResizeObserver(fill).observe(figure);
  return {
    element: figure,
    draw,
    markSelected,
    preview,
    get scrolledTo() {
      return frame.frame.scrollLeft;
    },
    set scrolledTo(left) {
      frame.frame.scrollLeft = Math.min(left, frame.frame.scrollWidth);
    },
  };
}

/** A color map with what is at its ends. */
export function makeRange(map: ColorMap, low: string, high: string): HTMLElement {
  const bar = element("span.gp-legend-bar", { "aria-hidden": "true" });
  bar.style.backgroundImage = cssGradient(map);
  return element("span.gp-pair.gp-range", element("span.gp-number", low), bar, element("span.gp-number", high));
}

export function makeHeatmap(heatmap: Heatmap, buffers: readonly DataView[], options: PlotOptions): HTMLElement {
  return makeFigure(heatmap, readMatrix(heatmap, buffers), options).element;
}

// -- The frame in which the cells of a heatmap scroll, with labels, and arrows at edges with more cells ------------------

/** The labels of the rows or columns. */
export interface AxisLabels {
  texts: readonly string[];
  /** The full text of a label. */
  describe(index: number): string;
}

const SIDES = ["left", "right", "top", "bottom"] as const;
/** The minimum size of a cell with a label, in CSS pixels. */
const MIN_LABELED_SIZE = 11;
/** The approximate width of a character of a label, and of a full-width character, in CSS pixels. */
const [LETTER_WIDTH, SQUARE_WIDTH] = [6.1, 10];
const FIRST_SQUARE = 0x1100;

/** The approximate width of a label, in CSS pixels. */
function labelWidth(text: string): number {
  let width = 0;
  for (const character of text) width += (character.codePointAt(0) ?? 0) < FIRST_SQUARE ? LETTER_WIDTH : SQUARE_WIDTH;
  return width;
}

export function widest(texts: readonly string[]): number {
  return texts.reduce((most, text) => Math.max(most, labelWidth(text)), 0);
}

function makeAxis(name: string, { texts, describe: whole }: AxisLabels, size: number): HTMLElement {
  const spans = texts.map((text, index) => element("span", { title: whole(index) }, text));
  const made = element("div", { class: `gp-heatmap-${name} gp-muted`, "aria-hidden": "true" }, ...spans);
  made.style.setProperty("--gp-cell", `${size}px`);
  return made;
}

/** `onMore`: called when `hasMore` changes. */
function makeFrame(cells: HTMLElement, onMore: () => void) {
  const frame = element("div.gp-heatmap-frame", { onscroll: () => showEdges() });
  const edges = SIDES.map((side) =>
    element("span.gp-heatmap-edge", { "data-side": side, "aria-hidden": "true", hidden: true }, icon("chevron")),
  );
  const main = element("div.gp-heatmap-scroll", frame, ...edges);
  let columnAxis: HTMLElement | null = null;
  /** Whether some of the cells are out of sight. */
  const hasMore = () => edges.some((edge) => !edge.hidden);
  /** The space of the labels in the frame. */
  const margins = () => ({ left: cells.offsetLeft - frame.offsetLeft, below: columnAxis?.offsetHeight ?? 0 });
  /** The middle of the visible cells, as a fraction of all cells. */
  const middle = () => {
    const { left, below } = margins();
    const part = (before: number, seen: number, all: number) =>
      all > 0 ? (before + Math.min(seen, all) / 2) / all : 0;
    return {
      x: part(frame.scrollLeft, frame.clientWidth - left, cells.offsetWidth),
      y: part(frame.scrollTop, frame.clientHeight - below, cells.offsetHeight),
    };
  };
  /** Shows labels if cells of this size have space for them; keeps the cell in the middle in place. */
  const layOut = (cell: Size, resize: () => void, rows: AxisLabels | null, columns: AxisLabels | null) => {
    const place = middle();
    resize();
    const fits = columns !== null && widest(columns.texts) <= cell.width - 2;
    columnAxis = columns && cell.width >= MIN_LABELED_SIZE ? makeAxis("columns", columns, cell.width) : null;
    columnAxis?.toggleAttribute("data-level", fits);
    const labels = rows && cell.height >= MIN_LABELED_SIZE ? makeAxis("rows", rows, cell.height) : null;
    const corner = labels && columnAxis && element("div.gp-heatmap-corner", { "aria-hidden": "true" });
    // The cells stay, which may have the focus.
    for (const child of [...frame.children]) if (child !== cells) child.remove();
    if (cells.parentElement === null) frame.append(cells);
    if (labels) cells.before(labels);
    cells.after(...[corner, columnAxis].filter((one) => one !== null));
    const { left, below } = margins();
    frame.scrollLeft = place.x * cells.offsetWidth - (frame.clientWidth - left) / 2;
    frame.scrollTop = place.y * cells.offsetHeight - (frame.clientHeight - below) / 2;
    showEdges();
  };
  /** Scrolls a box into view, within the frame only. */
  const keepInSight = (box: HTMLElement) => {
    const cell = box.getBoundingClientRect();
    const seen = frame.getBoundingClientRect();
    const { left, below } = margins();
    const [right, bottom] = [seen.left + frame.clientWidth, seen.top + frame.clientHeight];
    const over = (first: number, last: number) => Math.max(last, 0) + Math.min(first, 0);
    frame.scrollLeft += over(cell.left - seen.left - left, cell.right - right);
    frame.scrollTop += over(cell.top - seen.top, cell.bottom - bottom + below);
  };
  const showEdges = () => {
    const { left, below } = margins();
    const [width, height] = [frame.offsetWidth - frame.clientWidth, frame.offsetHeight - frame.clientHeight];
    const sizes = { left, right: width, top: 0, bottom: below + height };
    for (const [side, size] of Object.entries(sizes)) main.style.setProperty(`--gp-${side}`, `${size}px`);
    main.parentElement?.style.setProperty("--gp-labels", `${left}px`);
    const beyond = {
      left: frame.scrollLeft,
      right: frame.scrollWidth - frame.clientWidth - frame.scrollLeft,
      top: frame.scrollTop,
      bottom: frame.scrollHeight - frame.clientHeight - frame.scrollTop,
    };
    const had = hasMore();
    edges.forEach((edge, at) => {
      edge.hidden = beyond[SIDES[at] ?? "left"] < 4; // the margin does not belong to the cells
    });
    if (had !== hasMore()) onMore();
  };
  const observer = new ResizeObserver(showEdges);
  for (const part of [frame, cells]) observer.observe(part);
  return { element: main, frame, hasMore, layOut, keepInSight };
}

const STEP = 1.5;

export interface Zoom {
  readonly element: HTMLElement;
  /** The size of cells relative to their initial size. */
  readonly factor: number;
}

/** `most`: returns the largest factor; `onChange`: called after each change. */
export function makeZoom(most: () => number, onChange: () => void): Zoom {
  let steps = 0;
  const largest = () => Math.max(0, Math.floor(Math.log(Math.max(most(), 1)) / Math.log(STEP)));
  const button = (by: number, text: string, label: string) => {
    const isOff = () => steps + by < 0 || steps + by > largest();
    const onclick = () => {
      if (isOff()) return;
      steps += by;
      refresh(buttons);
      onChange();
    };
    return buttonElement({ class: "gp-button gp-step", "aria-label": label, "aria-disabled": isOff, onclick }, text);
  };
  const attributes = { role: "group", "aria-label": "Size of cells", hidden: largest() === 0 };
  const [smaller, larger] = [button(-1, "−", "Smaller cells"), button(1, "+", "Larger cells")];
  const buttons = element("span.gp-pair.gp-zoom", attributes, smaller, larger);
  return {
    element: buttons,
    get factor() {
      return STEP ** steps;
    },
  };
}
