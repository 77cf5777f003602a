/** The lens view: what each layer says at each position, without and with the patches, as heatmaps. */
import { PackedNumbers } from "../inflate";
import type { Item, Lens, LensTraits } from "../kernel/protocol";
import { element, replaceChildren, setOptions } from "../page/dom";
import type { Cell } from "../page/grid";
import { formatNumber, formatPercent, visibleToken } from "../page/text";
import { type CellSelection, HeatmapFigure, type ResultOptions } from "../plots/heatmap";
import { largestMagnitude, type Scale } from "../plots/matrix";
import { makeTokenTable } from "../plots/plots";
import { type Linked, listen, type Part, saveChanges } from "../view";
import {
  labeled,
  type MakeView,
  makeActions,
  makePatchStrip,
  makeUpdates,
  showRemarks,
  showTraits,
} from "./linked_view";
import { isOfOneStack, itemOf, makeFilterNote } from "./selection";

/** What the color of a cell shows. */
const COLORS = {
  target: "probability of the target",
  top: "probability of the top token",
  rank: "rank of the target",
} as const;
type ColorChoice = keyof typeof COLORS;

const STREAMS: Record<string, string> = { residual: "residual stream", attention: "attention", mlp: "MLP" };
const NO_KERNEL = "This stream was not computed before the kernel stopped.";

type Comparison = "clean" | "patched" | "difference";
const KINDS: readonly Comparison[] = ["clean", "patched", "difference"];
const RUNS: Record<Comparison, string> = {
  clean: "Without the patches",
  patched: "With the patches",
  difference: "Difference: with − without",
};

/** Widths in CSS pixels: of a view before it is in the page, the details, gaps, labels, and the narrowest cell. */
const [DEFAULT_WIDTH, DETAILS, GAP, LABELS_WIDTH, MIN_CELL] = [1000, 280, 20, 56, 40];

export const makeLensView: MakeView<LensTraits> = async (view, place, onError) => {
  const shown = new LensView(view);
  place(shown);
  const read = async () => {
    const lens = view.model.get("lens");
    return [lens, await readLens(lens, view.model.get("cells"))] as const;
  };
  await showTraits(view, ["lens", "cells"], read, (found) => shown.show(...found), onError);
};

/** The readouts of one stream in one run; row by row, from the first layer. */
interface Readouts {
  /** Positions in the vocabulary, the most probable first: `top` for each cell. */
  tokens: Uint32Array;
  probabilities: Float32Array;
  /** Of the target of the position, one for each cell. */
  target: Float32Array;
  /** How many tokens are more probable than the target. */
  rank: Uint32Array;
}

/** The runs: without patches, and with them if there are any; the streams of each by name. */
type LensRuns = Map<string, Readouts>[];

/** Reads the numbers as `LensView._packed` in notebook/views/lens.py writes them. */
async function readLens(lens: Lens, data: DataView): Promise<LensRuns> {
  const packed = await PackedNumbers.of(data);
  const runs = Array.from({ length: lens.runs }, () => {
    const streams = lens.streams.map(({ name, rows }): [string, Readouts] => {
      const cells = rows.length * lens.target.length;
      const tokens = packed.unsigned(cells * lens.top);
      const probabilities = packed.floats(cells * lens.top);
      return [name, { tokens, probabilities, target: packed.floats(cells), rank: packed.unsigned(cells) }];
    });
    return new Map(streams);
  });
  packed.checkAllRead();
  return runs;
}

class LensView implements Part {
  readonly element: HTMLElement;
  private readonly figures = element("div.gp-beside");
  private readonly details = element("div.gp-lens-details");
  private readonly streams = element("select.gp-field");
  private readonly colors = element("select.gp-field");
  private readonly batch = element("span.gp-muted");
  private readonly remarks = element("ul.gp-remarks.gp-note");
  private readonly updates;
  private lens!: Lens;
  private runs: LensRuns = [];
  private drawn: HeatmapFigure[] = [];
  private hovered: Cell | null = null;

  constructor(private readonly view: Linked<LensTraits>) {
    this.updates = makeUpdates(
      view,
      () => view.model.get("lens").version,
      () => view.kernel.ask("lens", { stream: null }),
      this.figures,
    );
    this.streams.addEventListener("change", () => this.chooseStream(this.streams.value));
    this.colors.addEventListener("change", () => this.draw());
    const bar = element(
      "div.gp-line",
      element("h3.gp-heading.gp-muted", "Logit lens"),
      this.batch,
      labeled("Stream", this.streams),
      labeled("Color", this.colors),
      this.updates.element,
    );
    this.element = element(
      "section.gp-result.gp-stack.gp-lens",
      { "aria-label": "Logit lens" },
      bar,
      makeFilterNote(view.filter, view.onRemove),
      this.figures,
      this.remarks,
      makeActions(view).element,
      makePatchStrip(view).element,
    );
    view.onRemove(view.selection.onChange(() => this.followSelection()));
    view.onRemove(view.filter.onChange(() => this.drawn.map((figure) => figure.draw())));
    view.onRemove(view.kernel.onChange(() => this.lens && this.showStreams()));
    listen(view, "change:stream", () => {
      this.streams.value = view.model.get("stream");
      this.draw();
    });
  }

  show(lens: Lens, runs: LensRuns): void {
    const before = this.colors.value;
    this.lens = lens;
    this.runs = runs;
    const colors = Object.entries(COLORS).map(([value, text]) => [value, this.nameTarget(text)] as const);
    setOptions(this.colors, colors, before || "target");
    this.batch.textContent = lens.rows > 1 ? `row ${lens.row} of the batch (${lens.rows} rows)` : "";
    this.batch.hidden = !(lens.rows > 1);
    showRemarks(this.remarks, lens.remarks);
    this.showStreams();
    this.draw();
  }

  private nameTarget(text: string): string {
    const { has_target, target } = this.lens;
    const [first = 0] = target;
    if (!has_target) return text.replace("the target", "the model's prediction");
    const isOne = target.every((token) => token === first);
    return isOne ? text.replace("the target", this.token(first)) : text;
  }

  private showStreams(): void {
    const { available, streams } = this.lens;
    const isLost = this.view.kernel.state === "lost";
    const computed = new Set(streams.map(({ name }) => name));
    const names = available.map((name) => [name, STREAMS[name] ?? name] as const);
    setOptions(this.streams, names, this.stream);
    for (const option of this.streams.options) {
      option.disabled = isLost && !computed.has(option.value);
      if (option.disabled) option.title = NO_KERNEL;
    }
  }

  private get stream(): string {
    const { model } = this.view;
    return model.get("stream") || this.lens.streams[0]?.name || "residual";
  }

  private async chooseStream(name: string): Promise<void> {
    if (!this.lens.streams.some((stream) => stream.name === name)) {
      const asked = this.view.kernel.ask("lens", { stream: name });
      this.updates.follow(asked);
      this.requestedStream = name;
      return;
    }
    this.view.model.set("stream", name);
    saveChanges(this.view.model);
  }

  /** The stream to show once it is computed. */
  private requestedStream: string | null = null;

  /** Of the stream that is drawn, the first layer first. */
  private rows: Lens["streams"][number]["rows"] = [];

  private readoutsOf(run: number): Readouts | undefined {
    return this.runs[run]?.get(this.stream);
  }

  private draw(): void {
    if (this.requestedStream !== null && this.lens.streams.some(({ name }) => name === this.requestedStream)) {
      const { requestedStream: wanted } = this;
      this.requestedStream = null;
      void this.chooseStream(wanted);
      return;
    }
    this.rows = this.lens.streams.find(({ name }) => name === this.stream)?.rows ?? [];
    const kinds = this.lens.runs > 1 ? KINDS : KINDS.slice(0, 1);
    const scroll = this.drawn[0]?.scrolledTo ?? Number.POSITIVE_INFINITY;
    this.drawn = []; // new figures call `onHover` with `null`
    this.drawn = kinds.map((kind) => this.figure(kind));
    const sections = this.drawn.map(({ element: figure }, place) => {
      const heading = this.lens.runs > 1 && element("h4.gp-run-title", RUNS[kinds[place] ?? "clean"]);
      return element("div.gp-lens-figure", heading, figure);
    });
    this.figures.replaceChildren(...sections, this.details);
    for (const figure of this.drawn) figure.scrolledTo = scroll; // at first to the last position, whose token is next
    this.followSelection();
  }

  private figure(kind: Comparison): HeatmapFigure {
    const [rows, columns] = [this.rows.length, this.lens.target.length];
    const values = new Float32Array(rows * columns);
    const [clean, run] = [this.readoutsOf(0), this.readoutsOf(kind === "clean" ? 0 : 1)];
    if (clean === undefined || run === undefined) throw new Error("the numbers of this stream are not there");
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const cell = this.index(row, column);
        const value = this.colorValue(run, cell);
        values[row * columns + column] = kind === "difference" ? value - this.colorValue(clean, cell) : value;
      }
    }
    const title = this.lens.runs > 1 ? `Logit lens, ${RUNS[kind].toLowerCase()}` : "Logit lens";
    const source = { full: [rows, columns] as [number, number], reduced: null };
    return new HeatmapFigure(source, { rows, columns, values }, { title, result: this.options(kind, values, run) });
  }

  private options(kind: Comparison, values: Float32Array, run: Readouts): ResultOptions {
    const { positions, target } = this.lens;
    const rowLabels = [...this.rows].reverse().map(({ label }) => label);
    const columnLabels = target.map((_, position) => this.position(position));
    const what = this.nameTarget(COLORS[this.color]);
    const isDifference = kind === "difference";
    const isRank = this.color === "rank";
    return {
      scale: this.scale(isDifference, values),
      name: isDifference ? `change of the ${isRank ? `${what}, orders of magnitude` : what}` : what,
      missing: null,
      rowTitle: "layer",
      columnTitle: positions === null ? "position" : "position (token)",
      rowLabels: { texts: rowLabels, describe: (row) => `layer ${rowLabels[row]}` },
      columnLabels: { texts: columnLabels, describe: (column) => this.describePosition(column) },
      describe: (row, column) => `layer ${rowLabels[row]}, ${this.describePosition(column)}`,
      onSelect: (row, column, isMore) => this.view.selection.click(this.item(row, column), isMore),
      cellsWidth: this.room,
      cellText: (row, column) => this.token(run.tokens[this.index(row, column) * this.lens.top] ?? 0),
      valueText: (row, column) => this.describeValue(kind, row, column),
      ...(isRank && !isDifference ? { endText: (value) => `rank ${formatNumber(Math.round(10 ** -value - 1))}` } : {}),
      onHover: (cell) => this.onHover(KINDS.indexOf(kind), cell),
      isKept: (row, column) => this.isKept(row, column),
    };
  }

  /** The width for the cells of a figure, which leaves space for the other run or the details beside it, if both fit. */
  private get room(): number {
    const whole = this.element.clientWidth || DEFAULT_WIDTH;
    const part = (this.lens.runs > 1 ? (whole - GAP) / 2 : whole - GAP - DETAILS) - LABELS_WIDTH;
    return part >= this.lens.target.length * MIN_CELL ? part : whole - LABELS_WIDTH;
  }

  private scale(isDifference: boolean, values: Float32Array): Scale {
    const most = largestMagnitude(values);
    if (isDifference) return { map: "diverging", low: -most, high: most };
    if (this.color === "rank") return { map: "sequential", low: -most, high: 0 };
    return { map: "sequential", low: 0, high: 1 };
  }

  private get color(): ColorChoice {
    return this.colors.value as ColorChoice;
  }

  /** The number that determines the color; for ranks the order of magnitude, so that the best rank is the brightest. */
  private colorValue(run: Readouts, cell: number): number {
    if (this.color === "top") return run.probabilities[cell * this.lens.top] ?? 0;
    return this.color === "rank" ? -Math.log10((run.rank[cell] ?? 0) + 1) : (run.target[cell] ?? 0);
  }

  private describeValue(kind: Comparison, row: number, column: number): string {
    const cell = this.index(row, column);
    const words = (run: Readouts | undefined) => {
      if (run === undefined) return "";
      if (this.color === "rank") return `rank ${formatNumber(run.rank[cell] ?? 0)}`;
      return formatPercent(this.colorValue(run, cell));
    };
    if (kind !== "difference") return words(this.readoutsOf(kind === "clean" ? 0 : 1));
    return `${words(this.readoutsOf(0))} → ${words(this.readoutsOf(1))}`;
  }

  /** The last layer is the top row. */
  private index(row: number, column: number): number {
    return (this.rows.length - 1 - row) * this.lens.target.length + column;
  }

  private token(index: number): string {
    return visibleToken(this.lens.vocabulary[index] ?? "");
  }

  private position(position: number): string {
    const { positions } = this.lens;
    return positions === null ? String(position) : visibleToken(positions[position] ?? "");
  }

  private describePosition(position: number): string {
    const { positions } = this.lens;
    return positions === null ? `position ${position}` : `position ${position} (${this.position(position)})`;
  }

  private item(row: number, column: number): Item {
    const { name, layer } = this.rows[this.rows.length - 1 - row] ?? { name: null, layer: null };
    return itemOf(name, { layer, position: column });
  }

  /** Scores of heads and MLPs filter the layers that they are in. */
  private isKept(row: number, column: number): boolean {
    const item = this.item(row, column);
    return this.view.filter.keeps(item.layer === null ? item : { ...item, name: null });
  }

  private followSelection(): void {
    const places = this.view.selection.items.flatMap((item) => this.cellsOf(item));
    for (const figure of this.drawn) figure.markSelected(places);
    this.showDetails();
  }

  /** The cells of an item: those of its layer, at its position. */
  private cellsOf({ name, layer, position }: Item): CellSelection[] {
    const own = this.rows.findIndex((row) => row.name === name);
    const isOfLayer = (row: Lens["streams"][number]["rows"][number]) =>
      layer !== null && row.layer === layer && isOfOneStack(name, row.name);
    const found = own >= 0 ? own : this.rows.findIndex(isOfLayer);
    const row = found >= 0 ? this.rows.length - 1 - found : null;
    const column = position !== null && position < this.lens.target.length ? position : null;
    return row === null && column === null ? [] : [[row, column]];
  }

  private onHover(kind: number, cell: Cell | null): void {
    for (const [place, figure] of this.drawn.entries()) if (place !== kind) figure.preview(cell);
    if (this.hovered?.[0] === cell?.[0] && this.hovered?.[1] === cell?.[1]) return;
    this.hovered = cell;
    this.showDetails();
  }

  /** Shows the probable tokens of the cell under the pointer, else of the first selected cell. */
  private showDetails(): void {
    const chosen = this.view.selection.items.flatMap((item) => this.cellsOf(item));
    const pinned = chosen.find(([row, column]) => row !== null && column !== null) as Cell | undefined;
    // Without either, the prediction of the model itself.
    const [row, column] = this.hovered ?? pinned ?? [0, this.lens.target.length - 1];
    const label = this.rows[this.rows.length - 1 - row]?.label ?? "";
    const lists = this.runs.map((_, run) => this.tokenTable(run, row, column));
    const heading = element("h4.gp-run-title", `layer ${label}, ${this.describePosition(column)}`);
    replaceChildren(this.details, heading, element("div.gp-beside", ...lists));
  }

  private tokenTable(run: number, row: number, column: number): HTMLElement {
    const { top, target, vocabulary } = this.lens;
    const found = this.readoutsOf(run);
    const cell = this.index(row, column);
    const wanted = target[column] ?? 0;
    const rank = ` (${this.lens.has_target ? "target" : "prediction"}, rank ${formatNumber(found?.rank[cell] ?? 0)})`;
    const line = (token: number, probability: number) => {
      const isMarked = token === wanted;
      return { token: vocabulary[token] ?? "", probability, isMarked, note: isMarked && rank };
    };
    const tokens = Array.from({ length: top }, (_, place) => found?.tokens[cell * top + place] ?? 0);
    const lines = tokens.map((token, place) => line(token, found?.probabilities[cell * top + place] ?? 0));
    if (!tokens.includes(wanted)) lines.push(line(wanted, found?.target[cell] ?? 0));
    const caption = this.runs.length > 1 ? (RUNS[run === 0 ? "clean" : "patched"] ?? "") : "Most probable tokens";
    return makeTokenTable(caption, lines);
  }
}
