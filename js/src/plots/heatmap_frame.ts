/** The frame in which the cells of a heatmap scroll, with labels, and arrows at edges with more cells. */
import { buttonElement, element, icon, replaceChildren, setAttribute } from "../page/dom";
import type { CellSize } from "./matrix";

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
  const made = element("div", { class: `gp-heatmap-${name}`, "aria-hidden": "true" }, ...spans);
  made.style.setProperty("--gp-cell", `${size}px`);
  return made;
}

export class HeatmapFrame {
  readonly element: HTMLElement;
  private readonly frame = element("div", { class: "gp-heatmap-frame" });
  private readonly edges = SIDES.map((side) =>
    element(
      "span",
      { class: "gp-heatmap-edge", "data-side": side, "aria-hidden": "true", hidden: true },
      icon("chevron"),
    ),
  );
  private columns: HTMLElement | null = null;

  /** `onMore`: called when `hasMore` changes. */
  constructor(
    private readonly cells: HTMLElement,
    private readonly onMore: () => void,
  ) {
    this.element = element("div", { class: "gp-heatmap-scroll" }, this.frame, ...this.edges);
    this.frame.addEventListener("scroll", () => this.showEdges(), { passive: true });
    const observer = new ResizeObserver(() => this.showEdges());
    observer.observe(this.frame);
    observer.observe(cells);
  }

  /** Whether some of the cells are out of sight. */
  get hasMore(): boolean {
    return this.edges.some((edge) => !edge.hidden);
  }

  /** Shows labels if cells of this size have space for them; keeps the cell in the middle in place. */
  layOut(cell: CellSize, resize: () => void, rows: AxisLabels | null, columns: AxisLabels | null): void {
    const { frame, cells } = this;
    const place = this.middle();
    resize();
    const fits = columns !== null && widest(columns.texts) <= cell.width - 2;
    this.columns = columns && cell.width >= MIN_LABELED_SIZE ? makeAxis("columns", columns, cell.width) : null;
    this.columns?.toggleAttribute("data-level", fits);
    const labels = rows && cell.height >= MIN_LABELED_SIZE ? makeAxis("rows", rows, cell.height) : null;
    const corner = labels && this.columns && element("div", { class: "gp-heatmap-corner", "aria-hidden": "true" });
    replaceChildren(frame, labels, cells, corner, this.columns);
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

/** `most`: the largest factor; `onChange`: called after each change. */
export function makeZoom(most: number, onChange: () => void): Zoom {
  let steps = 0;
  const largest = Math.max(0, Math.floor(Math.log(Math.max(most, 1)) / Math.log(STEP)));
  const button = (by: number, text: string, label: string) =>
    buttonElement({ class: "gp-step", "aria-label": label, onclick: () => change(by) }, text);
  const smaller = button(-1, "−", "Smaller cells");
  const larger = button(1, "+", "Larger cells");
  const show = () => {
    setAttribute(smaller, "aria-disabled", steps === 0);
    setAttribute(larger, "aria-disabled", steps === largest);
  };
  const change = (by: number) => {
    const wanted = Math.min(Math.max(steps + by, 0), largest);
    if (wanted === steps) return;
    steps = wanted;
    show();
    onChange();
  };
  show();
  return {
    element: element(
      "span",
      { class: "gp-zoom", role: "group", "aria-label": "Size of cells", hidden: largest === 0 },
      smaller,
      larger,
    ),
    get factor() {
      return STEP ** steps;
    },
  };
}
