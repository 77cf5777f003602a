/** A heatmap on a canvas, with axes, a color scale, and a cell cursor that follows the mouse and the arrow keys. */

import type { Heatmap } from "../kernel/protocol";
import { buttonElement, element, icon, setAttribute } from "../page/dom";
import { type Cell, clamp, placeBox, type Size, watchCells } from "../page/grid";
import { formatCount, formatNumber, sentence, visibleToken } from "../page/text";
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

export class HeatmapFigure {
  readonly element: HTMLElement = element("figure.gp-plot.gp-heatmap");
  private readonly summary: Summary;
  /** Of the values that decide the colors. */
  private readonly colors: Summary;
  private fittedCell: Size;
  private filledWidth = 0;
  private readonly frame: HeatmapFrame;
  private readonly zoom: Zoom | null;
  private readonly ratio = globalThis.devicePixelRatio || 1;
  private readonly canvas: HTMLCanvasElement;
  private readonly cursor = element("div.gp-heatmap-cursor", { hidden: true });
  private readonly marks = element("div.gp-heatmap-marks");
  private readonly readout = element("div.gp-caption.gp-readout");
  private readonly legend = element("div.gp-line.gp-tight.gp-legend.gp-muted");
  private isClipped: boolean;
  private selected: readonly CellSelection[] = [];

  constructor(
    private readonly heatmap: HeatmapSource,
    private readonly matrix: Matrix,
    private readonly options: PlotOptions,
  ) {
    this.summary = summarize(this.matrix.values);
    this.colors = options.colorsOf ? summarize(options.colorsOf) : this.summary;
    this.isClipped = this.colors.clipped !== null;
    const { result } = options;
    this.fittedCell = this.fittingCell();
    const label = describeHeatmap(heatmap, matrix, this.summary, options.title);
    const more = result ? " Enter selects one." : "";
    this.canvas = element("canvas", { role: "img", tabindex: "0", "aria-label": label + more });
    const cells = element("div.gp-heatmap-cells", this.canvas, this.marks, this.cursor);
    this.frame = new HeatmapFrame(cells, () => this.cursor.hidden && this.clearCursor());
    this.zoom = result
      ? makeZoom(
          () => this.maxZoom(),
          () => this.layOut(),
        )
      : null;
    const legend = this.zoom
      ? element("div.gp-line.gp-tight.gp-legend.gp-muted", this.legend, this.zoom.element)
      : this.legend;
    this.element.append(...this.titled(), this.readout, legend, ...this.notes());
    this.clearCursor();
    this.listen();
    this.layOut();
    if (this.isFilling) new ResizeObserver(() => this.fill()).observe(this.element);
  }

  private fill(): void {
    // Labels that turn around may add or remove a scroll bar of the page: cells do not grow into its place.
    const { clientWidth } = this.element;
    if (clientWidth >= this.filledWidth && clientWidth < this.filledWidth + SCROLL_BAR) return;
    this.filledWidth = clientWidth;
    const { width, height } = this.fittingCell();
    if (width === this.fittedCell.width && height === this.fittedCell.height) return;
    this.fittedCell = { width, height };
    this.layOut();
  }

  markSelected(chosen: readonly CellSelection[]): void {
    this.selected = chosen;
    const { rows, columns } = this.matrix;
    const marks = chosen.map(([row, column]) => {
      const mark = element("div.gp-heatmap-mark");
      this.placeBox(mark, [row ?? 0, column ?? 0], row === null ? rows : 1, column === null ? columns : 1);
      return mark;
    });
    this.marks.replaceChildren(...marks);
  }

  /** How far the cells are scrolled to the right, in pixels. */
  get scrolledTo(): number {
    return this.frame.scrolledTo;
  }

  set scrolledTo(left: number) {
    this.frame.scrolledTo = left;
  }

  /** Moves the cursor to a cell that another figure points at; `null` hides it. */
  preview(cell: Cell | null): void {
    this.cursor.hidden = cell === null;
    if (cell !== null) this.placeBox(this.cursor, cell);
  }

  /** In whole device pixels. */
  private get cell(): Size {
    const factor = this.zoom?.factor ?? 1;
    const most = LARGE_CELL * this.ratio;
    const zoomed = (size: number) => Math.round(Math.min(size * factor, Math.max(size, most)));
    return { width: zoomed(this.fittedCell.width), height: zoomed(this.fittedCell.height) };
  }

  private get cssCell(): Size {
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

  private fittingCell(): Size {
    const { isSmall, result } = this.options;
    const fitting = cellSize(this.matrix, result?.box ?? (result ? RESULT_BOX : isSmall ? SMALL_BOX : BOX), this.ratio);
    if (result?.cellText) {
      const fitting = Math.min((result.cellsWidth ?? 0) / this.matrix.columns, TEXT_CELL.wide);
      const wide = Math.max(fitting, this.narrowestCell(result.cellText));
      return { width: Math.floor(wide * this.ratio), height: Math.ceil(TEXT_CELL.height * this.ratio) };
    }
    if (!this.isFilling) return fitting;
    const { rows, columns } = this.matrix;
    const labels = Math.min(widest(result?.rowLabels?.texts ?? []), ROW_LABELS) + LABEL_GAP;
    const room = (this.element.clientWidth || RESULT_BOX.width) - labels;
    const fit = (length: number, count: number, most: number) =>
      Math.max(Math.ceil(this.ratio), Math.floor(Math.min(length / count, most) * this.ratio));
    return {
      width: fit(room, columns, FILLING_CELL.width),
      height: fit(RESULT_BOX.height, rows, FILLING_CELL.height),
    };
  }

  /** Whether the cells are as wide as the place of the figure allows. */
  private get isFilling(): boolean {
    const { result } = this.options;
    return result !== undefined && result.box === undefined && result.cellText === undefined;
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
    const rows = element("div.gp-caption.gp-heatmap-row-title", result.rowTitle);
    const columns = element("div.gp-caption.gp-heatmap-column-title", result.columnTitle);
    return [rows, element("div.gp-heatmap-titled", this.frame.element, columns)];
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
    return notes.map((note) => element("p.gp-note", note));
  }

  private isKept(index: number): boolean {
    const { columns } = this.matrix;
    return this.options.result?.isKept?.(Math.floor(index / columns), index % columns) ?? true;
  }

  /** Draws the cells and the legend. */
  draw(): void {
    const given = this.options.result?.scale;
    const scale = given ?? (this.isClipped ? this.colors.clipped : null) ?? this.colors.full;
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
    const { clipped: cut, maximum, minimum, outliers: beyond } = this.colors; // of float32 numbers
    if (minimum === null) return [];
    const { result } = this.options;
    if (result?.overlay) return [result.overlay.legend];
    const end = (value: number, isCut: boolean, sign: string) =>
      `${isCut ? `${sign} ` : ""}${result?.endText?.(value) ?? formatNumber(value, 3)}`;
    const low = end(scale.low, minimum < Math.fround(scale.low), "≤");
    const range = makeRange(scale.map, low, end(scale.high, (maximum ?? 0) > Math.fround(scale.high), "≥"));
    if (result !== undefined) return [element("span", result.name), range];
    if (cut === null) return [range];
    const text = this.isClipped ? `${formatCount(beyond, "value")} beyond the scale` : "Outliers included";
    const toggle = buttonElement({ class: "gp-underlined", "aria-pressed": String(this.isClipped) }, text);
    toggle.title = this.isClipped
      ? `Values go from ${formatNumber(minimum)} to ${formatNumber(maximum)}. Click for colors over all of them.`
      : "Click for colors over nearly all values, without the outliers.";
    toggle.addEventListener("click", () => {
      this.isClipped = !this.isClipped;
      this.draw();
      this.legend.querySelector("button")?.focus();
    });
    return [range, toggle];
  }

  private listen(): void {
    const { rows, columns } = this.matrix;
    const onSelect = this.options.result?.onSelect;
    const at = (part: number, count: number) => clamp(Math.floor(part * count), 0, count - 1);
    watchCells(this.canvas, {
      rows: () => rows,
      columns: () => columns,
      cellAt: (x, y) => [at(y, rows), at(x, columns)],
      show: (cell, isByKey) => {
        setAttribute(this.readout, "aria-live", isByKey ? "polite" : null);
        if (cell === null) return this.clearCursor();
        this.moveTo(cell);
        if (isByKey) this.frame.keepInSight(this.cursor);
      },
      ...(onSelect && { choose: (cell, isMore) => onSelect(...cell, isMore) }),
    });
  }

  private placeBox(box: HTMLElement, cell: Cell, rows = 1, columns = 1): void {
    const { width, height } = this.cssCell;
    placeBox(box, cell, this.cssCell, { width: columns * width, height: rows * height });
  }

  private moveTo([row, column]: Cell): void {
    const { rows, columns, values } = this.matrix;
    if (rows === 0 || columns === 0) return;
    this.cursor.hidden = false;
    this.placeBox(this.cursor, [row, column]);
    const { full } = this.heatmap;
    const { result } = this.options;
    const value = result?.valueText?.(row, column) ?? formatNumber(values[row * columns + column] ?? Number.NaN, 5);
    this.readout.replaceChildren(
      element("span", `${this.describe(row, column)}: `),
      element("strong.gp-number", value),
      rows === full[0] && columns === full[1] ? "" : " (several values)",
    );
    result?.onHover?.([row, column]);
  }

  private describe(row: number, column: number): string {
    const { rowTokens = null, columnTokens = null, result } = this.options;
    if (result !== undefined) return result.describe(row, column);
    const { rows, columns } = this.matrix;
    const [allRows, allColumns] = this.heatmap.full;
    return [
      describePosition("row", row, rows, allRows, rowTokens?.map(visibleToken) ?? null),
      describePosition("column", column, columns, allColumns, columnTokens?.map(visibleToken) ?? null),
    ].join(", ");
  }

  /** The text shown while the pointer is not on a value. */
  private clearCursor(): void {
    this.cursor.hidden = true;
    this.options.result?.onHover?.(null);
    const { slice, full } = this.heatmap;
    if (this.options.result) {
      const more = this.frame.hasMore ? "; scroll to see the others" : "";
      this.readout.replaceChildren(`${full[0]} × ${full[1]}: point at a cell, click to select it${more}`);
    } else this.readout.replaceChildren(element("code", `[${slice}]`), ` ${full[0]} × ${full[1]}`);
  }
}

/** A color map with what is at its ends. */
export function makeRange(map: ColorMap, low: string, high: string): HTMLElement {
  const bar = element("span.gp-legend-bar", { "aria-hidden": "true" });
  bar.style.backgroundImage = cssGradient(map);
  return element("span.gp-pair.gp-range", element("span.gp-number", low), bar, element("span.gp-number", high));
}

export function makeHeatmap(heatmap: Heatmap, buffers: readonly DataView[], options: PlotOptions): HTMLElement {
  return new HeatmapFigure(heatmap, readMatrix(heatmap, buffers), options).element;
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

export class HeatmapFrame {
  readonly element: HTMLElement;
  private readonly frame = element("div.gp-heatmap-frame");
  private readonly edges = SIDES.map((side) =>
    element("span.gp-heatmap-edge", { "data-side": side, "aria-hidden": "true", hidden: true }, icon("chevron")),
  );
  private columns: HTMLElement | null = null;

  /** `onMore`: called when `hasMore` changes. */
  constructor(
    private readonly cells: HTMLElement,
    private readonly onMore: () => void,
  ) {
    this.element = element("div.gp-heatmap-scroll", this.frame, ...this.edges);
    this.frame.addEventListener("scroll", () => this.showEdges(), { passive: true });
    const observer = new ResizeObserver(() => this.showEdges());
    observer.observe(this.frame);
    observer.observe(cells);
  }

  get scrolledTo(): number {
    return this.frame.scrollLeft;
  }

  set scrolledTo(left: number) {
    this.frame.scrollLeft = Math.min(left, this.frame.scrollWidth);
  }

  /** Whether some of the cells are out of sight. */
  get hasMore(): boolean {
    return this.edges.some((edge) => !edge.hidden);
  }

  /** Shows labels if cells of this size have space for them; keeps the cell in the middle in place. */
  layOut(cell: Size, resize: () => void, rows: AxisLabels | null, columns: AxisLabels | null): void {
    const { frame, cells } = this;
    const place = this.middle();
    resize();
    const fits = columns !== null && widest(columns.texts) <= cell.width - 2;
    this.columns = columns && cell.width >= MIN_LABELED_SIZE ? makeAxis("columns", columns, cell.width) : null;
    this.columns?.toggleAttribute("data-level", fits);
    const labels = rows && cell.height >= MIN_LABELED_SIZE ? makeAxis("rows", rows, cell.height) : null;
    const corner = labels && this.columns && element("div.gp-heatmap-corner", { "aria-hidden": "true" });
    // The cells stay, which may have the focus.
    for (const child of [...frame.children]) if (child !== cells) child.remove();
    if (cells.parentElement === null) frame.append(cells);
    if (labels) cells.before(labels);
    cells.after(...[corner, this.columns].filter((one) => one !== null));
    const { left, below } = this.margins();
    frame.scrollLeft = place.x * cells.offsetWidth - (frame.clientWidth - left) / 2;
    frame.scrollTop = place.y * cells.offsetHeight - (frame.clientHeight - below) / 2;
    this.showEdges();
  }

  /** Scrolls a box into view, within the frame only. */
  keepInSight(box: HTMLElement): void {
    const cell = box.getBoundingClientRect();
    const frame = this.frame.getBoundingClientRect();
    const { left, below } = this.margins();
    const [right, bottom] = [frame.left + this.frame.clientWidth, frame.top + this.frame.clientHeight];
    const over = (first: number, last: number) => Math.max(last, 0) + Math.min(first, 0);
    this.frame.scrollLeft += over(cell.left - frame.left - left, cell.right - right);
    this.frame.scrollTop += over(cell.top - frame.top, cell.bottom - bottom + below);
  }

  /** The middle of the visible cells, as a fraction of all cells. */
  private middle(): { x: number; y: number } {
    const { frame, cells } = this;
    const { left, below } = this.margins();
    const part = (before: number, seen: number, all: number) =>
      all > 0 ? (before + Math.min(seen, all) / 2) / all : 0;
    return {
      x: part(frame.scrollLeft, frame.clientWidth - left, cells.offsetWidth),
      y: part(frame.scrollTop, frame.clientHeight - below, cells.offsetHeight),
    };
  }

  /** The space of the labels in the frame. */
  private margins(): { left: number; below: number } {
    return { left: this.cells.offsetLeft - this.frame.offsetLeft, below: this.columns?.offsetHeight ?? 0 };
  }

  private showEdges(): void {
    const { frame } = this;
    const { left, below } = this.margins();
    const [width, height] = [frame.offsetWidth - frame.clientWidth, frame.offsetHeight - frame.clientHeight];
    const margins = { left, right: width, top: 0, bottom: below + height };
    for (const [side, size] of Object.entries(margins)) this.element.style.setProperty(`--gp-${side}`, `${size}px`);
    this.element.parentElement?.style.setProperty("--gp-labels", `${left}px`);
    const beyond = {
      left: frame.scrollLeft,
      right: frame.scrollWidth - frame.clientWidth - frame.scrollLeft,
      top: frame.scrollTop,
      bottom: frame.scrollHeight - frame.clientHeight - frame.scrollTop,
    };
    const had = this.hasMore;
    for (const [index, side] of SIDES.entries()) {
      const edge = this.edges[index];
      if (edge) edge.hidden = beyond[side] < 4; // the margin does not belong to the cells
    }
    if (had !== this.hasMore) this.onMore();
  }
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
  const button = (by: number, text: string, label: string) =>
    buttonElement({ class: "gp-button gp-step", "aria-label": label, onclick: () => change(by) }, text);
  const smaller = button(-1, "−", "Smaller cells");
  const larger = button(1, "+", "Larger cells");
  const show = () => {
    setAttribute(smaller, "aria-disabled", steps === 0);
    setAttribute(larger, "aria-disabled", steps === largest());
  };
  const change = (by: number) => {
    const wanted = Math.min(Math.max(steps + by, 0), largest());
    if (wanted === steps) return;
    steps = wanted;
    show();
    onChange();
  };
  show();
  return {
    element: element(
      "span.gp-pair.gp-zoom",
      { role: "group", "aria-label": "Size of cells", hidden: largest() === 0 },
      smaller,
      larger,
    ),
    get factor() {
      return STEP ** steps;
    },
  };
}
