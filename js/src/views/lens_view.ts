/** The lens view: what each layer says at each position, without and with the patches, as heatmaps. */
import { PackedNumbers } from "../inflate";
import type { Item, Lens, LensRow, LensTraits } from "../kernel/protocol";
import { element, refresh, replaceChildren, setOptions } from "../page/dom";
import type { Cell } from "../page/grid";
import { formatNumber, formatPercent, visibleToken } from "../page/text";
import { type CellSelection, type HeatmapFigure, makeFigure, type ResultOptions } from "../plots/heatmap";
import { largestMagnitude, type Scale } from "../plots/matrix";
import { makeTokenTable } from "../plots/plots";
import { follow, saveChanges } from "../view";
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

export const makeLensView: MakeView<LensTraits> = async (view, place, onError) => {
  const { kernel, model, selection } = view;
  let lens = model.get("lens");
  let runs: LensRuns = [];
  let drawn: HeatmapFigure[] = [];
  /** Of the stream that is drawn, the first layer first. */
  let rows: LensRow[] = [];
  let hovered: Cell | null = null;
  /** The stream to show once it is computed. */
  let requestedStream: string | null = null;
  const figures = element("div.gp-beside");
  const details = element("div.gp-lens-details");
  const streams = element("select.gp-field", { onchange: () => chooseStream(streams.value) });
  const colors = element("select.gp-field", { onchange: () => draw() });
  const remarks = element("ul.gp-remarks.gp-note");
  const updates = makeUpdates(view, figures, {
    version: () => model.get("lens").version,
    ask: () => kernel.ask("lens", { stream: null }),
  });

  const token = (index: number) => visibleToken(lens.vocabulary[index] ?? "");
  const stream = () => model.get("stream") || lens.streams[0]?.name || "residual";
  const readoutsOf = (run: number) => runs[run]?.get(stream());
  const columnCount = () => lens.target.length;
  /** The last layer is the top row. */
  const rowAt = (row: number): LensRow | undefined => rows[rows.length - 1 - row];
  const index = (row: number, column: number) => (rows.length - 1 - row) * columnCount() + column;
  const nameTarget = (text: string) => {
    const [first = 0] = lens.target;
    if (!lens.has_target) return text.replace("the target", "the model's prediction");
    return lens.target.every((one) => one === first) ? text.replace("the target", token(first)) : text;
  };
  const positionText = (position: number) =>
    lens.positions === null ? String(position) : visibleToken(lens.positions[position] ?? "");
  const describePosition = (position: number) =>
    `position ${position}${lens.positions === null ? "" : ` (${positionText(position)})`}`;
  const itemAt = (row: number, column: number): Item => {
    const { name = null, layer = null } = rowAt(row) ?? {};
    return itemOf(name, { layer, position: column });
  };
  /** Scores of heads and MLPs filter the layers that they are in. */
  const isKept = (row: number, column: number) => {
    const item = itemAt(row, column);
    return view.filter.keeps(item.layer === null ? item : { ...item, name: null });
  };
  /** The number that determines the color; for ranks the order of magnitude, so that the best rank is the brightest. */
  const colorValue = (run: Readouts, cell: number) => {
    if (colors.value === "top") return run.probabilities[cell * lens.top] ?? 0;
    return colors.value === "rank" ? -Math.log10((run.rank[cell] ?? 0) + 1) : (run.target[cell] ?? 0);
  };
  const describeValue = (kind: Comparison, row: number, column: number) => {
    const cell = index(row, column);
    const words = (run: Readouts | undefined) => {
      if (run === undefined) return "";
      return colors.value === "rank"
        ? `rank ${formatNumber(run.rank[cell] ?? 0)}`
        : formatPercent(colorValue(run, cell));
    };
    if (kind !== "difference") return words(readoutsOf(kind === "clean" ? 0 : 1));
    return `${words(readoutsOf(0))} → ${words(readoutsOf(1))}`;
  };
  /** The cells of an item: those of its layer, at its position. */
  const cellsOf = ({ name, layer, position }: Item): CellSelection[] => {
    const own = rows.findIndex((row) => row.name === name);
    const isOfLayer = (row: LensRow) => layer !== null && row.layer === layer && isOfOneStack(name, row.name);
    const found = own >= 0 ? own : rows.findIndex(isOfLayer);
    const row = found >= 0 ? rows.length - 1 - found : null;
    const column = position !== null && position < columnCount() ? position : null;
    return row === null && column === null ? [] : [[row, column]];
  };

  const showStreams = () => {
    const computed = new Set(lens.streams.map(({ name }) => name));
    const names = lens.available.map((name) => [name, STREAMS[name] ?? name] as const);
    setOptions(streams, names, stream());
    for (const option of streams.options) {
      option.disabled = kernel.state === "lost" && !computed.has(option.value);
      if (option.disabled) option.title = NO_KERNEL;
    }
  };
  const chooseStream = (name: string) => {
    if (!lens.streams.some((one) => one.name === name)) {
      updates.follow(kernel.ask("lens", { stream: name }));
      requestedStream = name;
      return;
    }
    model.set("stream", name);
    saveChanges(model);
  };

  /** The width for the cells of a figure, which leaves space for the other run or the details beside it, if both fit. */
  const room = () => {
    const whole = main.clientWidth || DEFAULT_WIDTH;
    const part = (lens.runs > 1 ? (whole - GAP) / 2 : whole - GAP - DETAILS) - LABELS_WIDTH;
    return part >= columnCount() * MIN_CELL ? part : whole - LABELS_WIDTH;
  };
  const scaleOf = (isDifference: boolean, values: Float32Array): Scale => {
    const most = largestMagnitude(values);
    if (isDifference) return { map: "diverging", low: -most, high: most };
    return { map: "sequential", ...(colors.value === "rank" ? { low: -most, high: 0 } : { low: 0, high: 1 }) };
  };
  const figureOf = (kind: Comparison) => {
    const columns = columnCount();
    const isDifference = kind === "difference";
    const isRank = colors.value === "rank";
    const [clean, run] = [readoutsOf(0), readoutsOf(kind === "clean" ? 0 : 1)];
    if (clean === undefined || run === undefined) throw new Error("the numbers of this stream are not there");
    const values = Float32Array.from({ length: rows.length * columns }, (_, at) => {
      const cell = index(Math.floor(at / columns), at % columns);
      return colorValue(run, cell) - (isDifference ? colorValue(clean, cell) : 0);
    });
    const rowLabels = [...rows].reverse().map(({ label }) => label);
    const what = nameTarget(COLORS[colors.value as keyof typeof COLORS]);
    const result: ResultOptions = {
      scale: scaleOf(isDifference, values),
      name: isDifference ? `change of the ${isRank ? `${what}, orders of magnitude` : what}` : what,
      missing: null,
      rowTitle: "layer",
      columnTitle: lens.positions === null ? "position" : "position (token)",
      rowLabels: { texts: rowLabels, describe: (row) => `layer ${rowLabels[row]}` },
      columnLabels: { texts: lens.target.map((_, position) => positionText(position)), describe: describePosition },
      describe: (row, column) => `layer ${rowLabels[row]}, ${describePosition(column)}`,
      onSelect: (row, column, isMore) => selection.click(itemAt(row, column), isMore),
      cellsWidth: room(),
      cellText: (row, column) => token(run.tokens[index(row, column) * lens.top] ?? 0),
      valueText: (row, column) => describeValue(kind, row, column),
      ...(isRank && !isDifference ? { endText: (value) => `rank ${formatNumber(Math.round(10 ** -value - 1))}` } : {}),
      onHover: (cell) => onHover(KINDS.indexOf(kind), cell),
      isKept,
    };
    const title = lens.runs > 1 ? `Logit lens, ${RUNS[kind].toLowerCase()}` : "Logit lens";
    return makeFigure(
      { full: [rows.length, columns], reduced: null },
      { rows: rows.length, columns, values },
      { title, result },
    );
  };
  const draw = () => {
    if (requestedStream !== null && lens.streams.some(({ name }) => name === requestedStream)) {
      const wanted = requestedStream;
      requestedStream = null;
      return chooseStream(wanted);
    }
    rows = lens.streams.find(({ name }) => name === stream())?.rows ?? [];
    const kinds = lens.runs > 1 ? KINDS : KINDS.slice(0, 1);
    const scroll = drawn[0]?.scrolledTo ?? Number.POSITIVE_INFINITY;
    drawn = []; // new figures call `onHover` with `null`
    drawn = kinds.map(figureOf);
    const sections = drawn.map((figure, at) => {
      const heading = lens.runs > 1 && element("h4.gp-run-title", RUNS[kinds[at] ?? "clean"]);
      return element("div.gp-lens-figure", heading, figure.element);
    });
    replaceChildren(figures, ...sections, details);
    for (const figure of drawn) figure.scrolledTo = scroll; // at first to the last position, whose token is next
    followSelection();
  };
  const followSelection = () => {
    const places = selection.items.flatMap(cellsOf);
    for (const figure of drawn) figure.markSelected(places);
    showDetails();
  };
  const onHover = (kind: number, cell: Cell | null) => {
    for (const [at, figure] of drawn.entries()) if (at !== kind) figure.preview(cell);
    if (String(hovered) === String(cell)) return;
    hovered = cell;
    showDetails();
  };
  /** Shows the probable tokens of the cell under the pointer, else of the first selected cell. */
  const showDetails = () => {
    const chosen = selection.items.flatMap(cellsOf);
    const pinned = chosen.find(([row, column]) => row !== null && column !== null) as Cell | undefined;
    // Without either, the prediction of the model itself.
    const [row, column] = hovered ?? pinned ?? [0, columnCount() - 1];
    const lists = runs.map((_, run) => tokenTable(run, row, column));
    const heading = element("h4.gp-run-title", `layer ${rowAt(row)?.label ?? ""}, ${describePosition(column)}`);
    replaceChildren(details, heading, element("div.gp-beside", ...lists));
  };
  const tokenTable = (run: number, row: number, column: number) => {
    const { top, vocabulary } = lens;
    const found = readoutsOf(run);
    const cell = index(row, column);
    const wanted = lens.target[column] ?? 0;
    const rank = ` (${lens.has_target ? "target" : "prediction"}, rank ${formatNumber(found?.rank[cell] ?? 0)})`;
    const line = (one: number, probability: number) => {
      const isMarked = one === wanted;
      return { token: vocabulary[one] ?? "", probability, isMarked, note: isMarked && rank };
    };
    const tokens = Array.from({ length: top }, (_, at) => found?.tokens[cell * top + at] ?? 0);
    const lines = tokens.map((one, at) => line(one, found?.probabilities[cell * top + at] ?? 0));
    if (!tokens.includes(wanted)) lines.push(line(wanted, found?.target[cell] ?? 0));
    const caption = runs.length > 1 ? RUNS[run === 0 ? "clean" : "patched"] : "Most probable tokens";
    return makeTokenTable(caption, lines);
  };

  const batch = () => (lens.rows > 1 ? `row ${lens.row} of the batch (${lens.rows} rows)` : "");
  const bar = element(
    "div.gp-line",
    element("h3.gp-heading.gp-muted", "Logit lens"),
    element("span.gp-muted", { hidden: () => batch() === "" }, batch),
    labeled("Stream", streams),
    labeled("Color", colors),
    updates.element,
  );
  const main: HTMLElement = element(
    "section.gp-result.gp-stack.gp-lens",
    { "aria-label": "Logit lens" },
    bar,
    makeFilterNote(view.filter, view.onRemove),
    figures,
    remarks,
    makeActions(view).element,
    makePatchStrip(view).element,
  );
  place({ element: main });
  const show = ([found, numbers]: readonly [Lens, LensRuns]) => {
    [lens, runs] = [found, numbers];
    const names = Object.entries(COLORS).map(([value, text]) => [value, nameTarget(text)] as const);
    setOptions(colors, names, colors.value || "target");
    refresh(bar);
    showRemarks(remarks, lens.remarks);
    showStreams();
    draw();
  };
  const read = async () => {
    const found = model.get("lens");
    return [found, await readLens(found, model.get("cells"))] as const;
  };
  follow(view, [selection], followSelection);
  follow(view, [view.filter], () => drawn.map((figure) => figure.draw()));
  follow(view, [kernel], showStreams);
  follow(view, ["stream"], () => {
    streams.value = model.get("stream");
    draw();
  });
  await showTraits(view, ["lens", "cells"], read, show, onError);
};
