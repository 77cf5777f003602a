/** A heatmap on a canvas, with axes, a color scale, and a cell cursor that follows the mouse and the arrow keys. */

import type { Heatmap } from "../kernel/protocol";
import { buttonElement, element } from "../page/dom";
import { formatCount, formatNumber, sentence } from "../page/numbers";
import { visibleToken } from "../page/visible";
import { type AxisLabels, HeatmapFrame, makeZoom, widest, type Zoom } from "./heatmap_frame";
import {
  type CellSize,
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
  /** For the heatmap of a result. */
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
  box?: CellSize;
}

/** The value that a heatmap shows a part of; a result has no slice. */
type HeatmapSource = Pick<Heatmap, "full" | "reduced"> & { slice?: string };

export type Cell = [row: number, column: number];
/** A cell that is selected; with `null`, a whole row or column. */
export type CellSelection = [row: number | null, column: number | null];

const BOX: CellSize = { width: 420, height: 320 };
const SMALL_BOX: CellSize = { width: 240, height: 132 };
const RESULT_BOX: CellSize = { width: 720, height: 480 };
/** The size of a zoomed cell, in CSS pixels, beside which labels are easy to read. */
const LARGE_CELL = 36;
/** The maximum side of a canvas, in device pixels: browsers do not draw larger ones. */
const MAX_CANVAS_SIDE = 8192;
/** The size of cells with text, in CSS pixels. */
const TEXT_CELL = { narrow: 40, wide: 90, height: 22 };
const FONT_SIZE = 11;
/** The maximum width of cells of a result that are widened so that labels stay horizontal, in CSS pixels. */
const WIDE_CELL = 56;
const LABEL_GAP = 6;
const PAGE_STEP = 10;

function drawMissing(context: CanvasRenderingContext2D, x: number, y: number, cell: CellSize): void {
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
  cell: CellSize,
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
function describePosition(noun: string, index: number, count: number, full: number, labels: string[] | null): string {
  if (count !== full) {
    const block = Math.ceil(full / count);
    const first = index * block;
    const last = Math.min(first + block, full) - 1;
    return last > first ? `${noun}s ${first} to ${last}` : `${noun} ${first}`;
  }
  const label = labels?.[index];
  return label === undefined ? `${noun} ${index}` : `${noun} ${index} (${visibleToken(label)})`;
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

export class HeatmapFigure {
  readonly element: HTMLElement;
  private readonly summary: Summary;
  private readonly fittedCell: CellSize;
  private readonly frame: HeatmapFrame;
  private readonly zoom: Zoom | null;
  private readonly ratio = globalThis.devicePixelRatio || 1;
  private readonly canvas: HTMLCanvasElement;
  private readonly cursor = element("div", { class: "gp-heatmap-cursor", hidden: true });
  private readonly marks = element("div", { class: "gp-heatmap-marks" });
  private readonly readout = element("div", { class: "gp-readout" });
  private readonly legend = element("div", { class: "gp-legend" });
  private isClipped: boolean;
  private row = 0;
  private column = 0;
  private selected: readonly CellSelection[] = [];

  constructor(
    private readonly heatmap: HeatmapSource,
    private readonly matrix: Matrix,
    private readonly options: PlotOptions,
  ) {
    this.summary = summarize(this.matrix);
    this.isClipped = this.summary.clipped !== null;
    const { result } = options;
    this.fittedCell = this.fittingCell();
    const label = describeHeatmap(heatmap, matrix, this.summary, options.title);
    const more = result ? " Enter selects one." : "";
    this.canvas = element("canvas", { role: "img", tabindex: "0", "aria-label": label + more });
    const cells = element("div", { class: "gp-heatmap-cells" }, this.canvas, this.marks, this.cursor);
    this.frame = new HeatmapFrame(cells, () => this.cursor.hidden && this.clearCursor());
    this.zoom = result ? makeZoom(this.maxZoom(), () => this.layOut()) : null;
    this.element = element("figure", { class: "gp-plot gp-heatmap" });
    const legend = this.zoom ? element("div", { class: "gp-legend" }, this.legend, this.zoom.element) : this.legend;
    this.element.append(...this.titled(), this.readout, legend, ...this.notes());
    this.clearCursor();
    this.listen();
    this.layOut();
  }

  /** Marks what is selected. */
  markSelected(chosen: readonly CellSelection[]): void {
    this.selected = chosen;
    const { rows, columns } = this.matrix;
    const marks = chosen.map(([row, column]) => {
      const mark = element("div", { class: "gp-heatmap-mark" });
      this.placeBox(mark, row ?? 0, column ?? 0, row === null ? rows : 1, column === null ? columns : 1);
      return mark;
    });
    this.marks.replaceChildren(...marks);
  }

  /** Moves the cursor to a cell that another figure points at; `null` hides it. */
  preview(cell: Cell | null): void {
    this.cursor.hidden = cell === null;
    if (cell !== null) this.placeBox(this.cursor, ...cell);
  }

  /** In whole device pixels. */
  private get cell(): CellSize {
    const factor = this.zoom?.factor ?? 1;
    const most = LARGE_CELL * this.ratio;
    const zoomed = (size: number) => Math.round(Math.min(size * factor, Math.max(size, most)));
    return { width: zoomed(this.fittedCell.width), height: zoomed(this.fittedCell.height) };
  }

  private get cssCell(): CellSize {
    const { width, height } = this.cell;
    return { width: width / this.ratio, height: height / this.ratio };
  }

  /** The width that all texts need, if a canvas can be as large: scrolling is better than truncated text. */
  private narrowestCell(cellText: NonNullable<ResultOptions["cellText"]>): number {
    const { columns, values } = this.matrix;
    const texts = Array.from(values, (_, index) => cellText(Math.floor(index / columns), index % columns));
    const wide = Math.min(Math.max(TEXT_CELL.narrow, Math.ceil(1.15 * widest(texts)) + 8), TEXT_CELL.wide);
    return wide * columns * this.ratio <= MAX_CANVAS_SIDE ? wide : TEXT_CELL.narrow;
  }

  private fittingCell(): CellSize {
    const { isSmall, result } = this.options;
    const fitting = cellSize(this.matrix, result?.box ?? (result ? RESULT_BOX : isSmall ? SMALL_BOX : BOX), this.ratio);
    if (result?.cellText) {
      const fitting = Math.min((result.cellsWidth ?? 0) / this.matrix.columns, TEXT_CELL.wide);
      const wide = Math.max(fitting, this.narrowestCell(result.cellText));
      return { width: Math.floor(wide * this.ratio), height: Math.ceil(TEXT_CELL.height * this.ratio) };
    }
    if (!result?.columnLabels) return fitting;
    const wide = widest(result.columnLabels.texts) + LABEL_GAP;
    const isRoom = wide <= WIDE_CELL && wide * this.matrix.columns <= RESULT_BOX.width;
    return isRoom ? { ...fitting, width: Math.max(fitting.width, Math.ceil(wide * this.ratio)) } : fitting;
  }

  private maxZoom(): number {
    const { rows, columns } = this.matrix;
    const { width, height } = this.fittedCell;
    const large = (LARGE_CELL * this.ratio) / Math.min(width, height);
    return Math.min(large, MAX_CANVAS_SIDE / (width * columns), MAX_CANVAS_SIDE / (height * rows));
  }

  /** The frame; for a result also the titles of its axes, which do not scroll. */
  private titled(): HTMLElement[] {
    const { result } = this.options;
    if (result === undefined) return [this.frame.element];
    const rows = element("div", { class: "gp-heatmap-row-title" }, result.rowTitle);
    const columns = element("div", { class: "gp-heatmap-column-title" }, result.columnTitle);
    return [rows, element("div", { class: "gp-heatmap-titled" }, this.frame.element, columns)];
  }

  private layOut(): void {
    const { cssCell, matrix: plane } = this;
    const { columnTokens, result, rowTokens } = this.options;
    const resize = () => {
      this.canvas.style.width = `${plane.columns * cssCell.width}px`;
      this.canvas.style.height = `${plane.rows * cssCell.height}px`;
    };
    const rows = result ? result.rowLabels : tokenLabels(rowTokens, plane.rows);
    const columns = result ? result.columnLabels : tokenLabels(columnTokens, plane.columns);
    this.frame.layOut(cssCell, resize, rows, columns);
    this.draw();
    this.markSelected(this.selected);
    const first = this.marks.firstElementChild;
    if (first instanceof HTMLElement) this.frame.keepInSight(first);
  }

  private notes(): HTMLElement[] {
    const notes = this.heatmap.reduced === null ? [] : [sentence(this.heatmap.reduced)];
    const { missing } = this.summary;
    const why = this.options.result?.missing ?? "NaN, infinite, or the fill value of a mask";
    if (missing > 0) notes.push(`${formatCount(missing, "value")} hatched: ${why}.`);
    return notes.map((note) => element("p", { class: "gp-note" }, note));
  }

  private isKept(index: number): boolean {
    const { columns } = this.matrix;
    return this.options.result?.isKept?.(Math.floor(index / columns), index % columns) ?? true;
  }

  /** Draws the cells and the legend. */
  draw(): void {
    const given = this.options.result?.scale;
    const scale = given ?? (this.isClipped ? this.summary.clipped : null) ?? this.summary.full;
    const mixed = this.options.result?.overlay;
    const colorAt = (value: number, index: number) => mixed?.color(index) ?? colorOf(value, scale);
    drawMatrix(this.canvas, this.matrix, colorAt, this.cell, (index) => this.isKept(index));
    this.writeTexts(scale);
    this.legend.replaceChildren(...this.legendParts(scale));
  }

  /** Writes the texts of the cells, truncated to their width. */
  private writeTexts(scale: Scale): void {
    const { cellText } = this.options.result ?? {};
    const context = cellText && this.canvas.getContext("2d");
    if (!context) return;
    const { width, height } = this.cell;
    const { columns, values } = this.matrix;
    const font = getComputedStyle(this.canvas).getPropertyValue("--gp-mono") || "monospace";
    context.font = `${FONT_SIZE * this.ratio}px ${font}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const room = width - 6 * this.ratio;
    values.forEach((value, index) => {
      const [row, column] = [Math.floor(index / columns), index % columns];
      if (!this.isKept(index)) return;
      context.fillStyle = isLight(colorOf(value, scale) ?? MISSING) ? "#000" : "#fff";
      context.fillText(truncated(context, cellText(row, column), room), (column + 0.5) * width, (row + 0.5) * height);
    });
  }

  private legendParts(scale: Scale): HTMLElement[] {
    if (this.summary.minimum === null) return [];
    const bar = element("span", { class: "gp-legend-bar", "aria-hidden": "true" });
    bar.style.backgroundImage = cssGradient(scale.map);
    const { full: whole, clipped: cut, outliers: beyond } = this.summary;
    const { result } = this.options;
    if (result?.overlay) return [result.overlay.legend];
    const end = (value: number, isCut: boolean, sign: string) => {
      const text = result?.endText?.(value) ?? formatNumber(value, 3);
      return element("span", { class: "gp-number" }, `${isCut ? `${sign} ` : ""}${text}`);
    };
    if (result !== undefined) {
      const { minimum, maximum } = this.summary; // of float32 numbers
      const ends = [
        end(scale.low, minimum < Math.fround(scale.low), "≤"),
        bar,
        end(scale.high, (maximum ?? 0) > Math.fround(scale.high), "≥"),
      ];
      return [element("span", {}, result.name), element("span", { class: "gp-range" }, ...ends)];
    }
    const parts = [
      end(scale.low, this.isClipped && scale.low > whole.low, "≤"),
      bar,
      end(scale.high, this.isClipped && scale.high < whole.high, "≥"),
    ];
    if (cut === null) return parts;
    const text = this.isClipped ? `${formatCount(beyond, "value")} beyond the scale` : "Outliers included";
    const toggle = buttonElement({ class: "gp-underlined", "aria-pressed": String(this.isClipped) }, text);
    toggle.title = this.isClipped
      ? `Values go from ${formatNumber(this.summary.minimum)} to ${formatNumber(this.summary.maximum)}. Click for colors over all of them.`
      : "Click for colors over nearly all values, without the outliers.";
    toggle.addEventListener("click", () => {
      this.isClipped = !this.isClipped;
      this.draw();
      this.legend.querySelector("button")?.focus();
    });
    return [...parts, toggle];
  }

  private listen(): void {
    const point = (event: PointerEvent | MouseEvent) => {
      const { width, height } = this.canvas.getBoundingClientRect();
      this.readout.removeAttribute("aria-live");
      this.moveTo(
        Math.floor((event.offsetY / height) * this.matrix.rows),
        Math.floor((event.offsetX / width) * this.matrix.columns),
      );
    };
    this.canvas.addEventListener("pointermove", point);
    this.canvas.addEventListener("click", (event) => {
      point(event);
      this.options.result?.onSelect(this.row, this.column, event.shiftKey);
    });
    this.canvas.addEventListener("pointerleave", () => this.clearCursor());
    this.canvas.addEventListener("blur", () => this.clearCursor());
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  private onKey(event: KeyboardEvent): void {
    const isWhole = event.ctrlKey || event.metaKey;
    const { rows, columns } = this.matrix;
    const targets: Record<string, [row: number, column: number]> = {
      ArrowUp: [this.row - 1, this.column],
      ArrowDown: [this.row + 1, this.column],
      ArrowLeft: [this.row, this.column - 1],
      ArrowRight: [this.row, this.column + 1],
      PageUp: [this.row - PAGE_STEP, this.column],
      PageDown: [this.row + PAGE_STEP, this.column],
      Home: [isWhole ? 0 : this.row, 0],
      End: [isWhole ? rows - 1 : this.row, columns - 1],
    };
    const target = targets[event.key];
    const chooses = this.options.result !== undefined && (event.key === "Enter" || event.key === " ");
    if (!(target || chooses) || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    if (target === undefined) {
      if (!this.cursor.hidden) this.options.result?.onSelect(this.row, this.column, event.shiftKey);
      return;
    }
    this.readout.setAttribute("aria-live", "polite");
    // The first key only shows the cursor.
    if (this.cursor.hidden) this.moveTo(this.row, this.column);
    else this.moveTo(...target);
    this.frame.keepInSight(this.cursor);
  }

  private placeBox(box: HTMLElement, row: number, column: number, rows = 1, columns = 1): void {
    const { width, height } = this.cssCell;
    box.style.transform = `translate(${column * width}px, ${row * height}px)`;
    box.style.width = `${columns * width}px`;
    box.style.height = `${rows * height}px`;
  }

  private moveTo(row: number, column: number): void {
    const { rows, columns, values } = this.matrix;
    if (rows === 0 || columns === 0) return;
    this.row = Math.min(Math.max(row, 0), rows - 1);
    this.column = Math.min(Math.max(column, 0), columns - 1);
    this.cursor.hidden = false;
    this.placeBox(this.cursor, this.row, this.column);
    const { full } = this.heatmap;
    const where = this.describe(full);
    const { result } = this.options;
    const number = values[this.row * columns + this.column] ?? Number.NaN;
    const value = result?.valueText?.(this.row, this.column) ?? formatNumber(number, 5);
    this.readout.replaceChildren(
      element("span", {}, `${where}: `),
      element("strong", { class: "gp-number" }, value),
      rows === full[0] && columns === full[1] ? "" : " (several values)",
    );
    result?.onHover?.([this.row, this.column]);
  }

  private describe(full: readonly number[]): string {
    const { rowTokens = null, columnTokens = null, result } = this.options;
    if (result !== undefined) return result.describe(this.row, this.column);
    const { rows, columns } = this.matrix;
    return [
      describePosition("row", this.row, rows, full[0] ?? rows, rowTokens),
      describePosition("column", this.column, columns, full[1] ?? columns, columnTokens),
    ].join(", ");
  }

  /** The text shown while the pointer is not on a value. */
  private clearCursor(): void {
    this.cursor.hidden = true;
    this.options.result?.onHover?.(null);
    const { slice, full } = this.heatmap;
    this.readout.removeAttribute("aria-live");
    if (this.options.result) {
      const more = this.frame.hasMore ? "; scroll to see the others" : "";
      this.readout.replaceChildren(`${full[0]} × ${full[1]}: point at a cell, click to select it${more}`);
    } else this.readout.replaceChildren(element("code", {}, `[${slice}]`), ` ${full[0]} × ${full[1]}`);
  }
}

export function makeHeatmap(heatmap: Heatmap, buffers: readonly DataView[], options: PlotOptions): HTMLElement {
  return new HeatmapFigure(heatmap, readMatrix(heatmap, buffers), options).element;
}
