/** A value: its statistics, and the plot that the kernel chose for it. */
import type { ActivationView, Facets, Heatmap, Histogram, Plot, Statistics } from "../kernel/protocol";
import { element, setAttribute, svgElement, toggleClasses } from "../page/dom";
import { clamp, watchCells } from "../page/grid";
import { formatCount, formatNumber, formatPercent, formatShape, sentence, visibleToken } from "../page/text";
import { makeHeatmap, type PlotOptions } from "./heatmap";
import { joined, readMatrix } from "./matrix";

const WIDTH = 320;
const HEIGHT = 120;
const SMALL_WIDTH = 220;
const SMALL_HEIGHT = 72;

function describeBin(histogram: Histogram, bin: number): string {
  const [from, to] = [histogram.edges[bin] ?? Number.NaN, histogram.edges[bin + 1] ?? Number.NaN];
  return `${formatNumber(from)} to ${formatNumber(to)}: ${formatCount(histogram.counts[bin] ?? 0, "value")}`;
}

function describeHistogram(histogram: Histogram, title: string): string {
  const { counts, edges } = histogram;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const fullest = counts.indexOf(Math.max(...counts));
  const from = formatNumber(edges[0] ?? Number.NaN);
  const to = formatNumber(edges[edges.length - 1] ?? Number.NaN);
  const most = total > 0 ? `; most from ${describeBin(histogram, fullest)}` : "";
  return `${title}: histogram of ${formatCount(total, "value")} from ${from} to ${to}${most}. Arrow keys read single bins.`;
}

/** The bars and the axis. A bin that is not empty always has a visible bar. */
function bars(histogram: Histogram, width: number, height: number): SVGElement[] {
  const { counts, edges } = histogram;
  const most = Math.max(...counts, 1);
  const first = edges[0] ?? 0;
  const span = (edges[edges.length - 1] ?? 0) - first;
  const place = (edge: number) => (span > 0 ? (((edges[edge] ?? first) - first) / span) * width : 0);
  const rects = counts.map((count, bin) => {
    const x = span > 0 ? place(bin) : (bin / counts.length) * width;
    const wide = span > 0 ? place(bin + 1) - x : width / counts.length;
    const high = count === 0 ? 0 : Math.max(1.5, (count / most) * (height - 4));
    const gap = wide > 3 ? 0.5 : 0;
    return svgElement("rect.gp-bar", { x: x + gap, y: height - high, width: wide - 2 * gap, height: high });
  });
  const axis = svgElement("line.gp-axis", { x1: 0, x2: width, y1: height + 0.5, y2: height + 0.5 });
  if (first < 0 && first + span > 0) {
    const zero = (-first / span) * width;
    return [svgElement("line.gp-zero", { x1: zero, x2: zero, y1: 0, y2: height }), ...rects, axis];
  }
  return [...rects, axis];
}

/** Shows the bin under the mouse, or the one that arrow keys select. */
function listen(svg: SVGElement, histogram: Histogram, readout: HTMLElement, resting: string): void {
  const rects = [...svg.querySelectorAll(".gp-bar")];
  const { length } = rects;
  watchCells(svg, {
    rows: () => 1,
    columns: () => length,
    cellAt: (x) => [0, clamp(Math.floor(x * length), 0, length - 1)],
    show: (cell, isByKey) => {
      for (const [bin, rect] of rects.entries()) toggleClasses(rect, { "gp-current": bin === cell?.[1] });
      setAttribute(readout, "aria-live", isByKey ? "polite" : null);
      readout.textContent = cell === null ? resting : describeBin(histogram, cell[1]);
    },
  });
}

function makeHistogram(histogram: Histogram, options: PlotOptions): HTMLElement {
  const width = options.isSmall ? SMALL_WIDTH : WIDTH;
  const height = options.isSmall ? SMALL_HEIGHT : HEIGHT;
  const svg = svgElement("svg", {
    viewBox: `0 0 ${width} ${height + 1}`,
    width,
    height: height + 1,
    role: "img",
    tabindex: 0,
    "aria-label": describeHistogram(histogram, options.title),
  });
  svg.append(...bars(histogram, width, height));
  const edge = (index: number) => formatNumber(histogram.edges.at(index) ?? Number.NaN, 3);
  const total = histogram.counts.reduce((sum, count) => sum + count, 0);
  const resting = `${formatCount(total, "value")}, at most ${formatNumber(Math.max(...histogram.counts, 0))} in a bin`;
  const readout = element("div.gp-caption.gp-readout", resting);
  listen(svg, histogram, readout, resting);
  const ends = element("div.gp-histogram-ends.gp-number.gp-muted", { "aria-hidden": "true" });
  ends.append(element("span", edge(0)), element("span", edge(-1)));
  ends.style.width = `${width}px`;
  const figure = element("figure.gp-plot.gp-histogram");
  figure.append(svg, ends, readout);
  return figure;
}

interface TokenLine {
  token: string;
  probability: number;
  isMarked: boolean;
  /** What is said beside the token, and in a column of its own. */
  note?: string | false;
  more?: HTMLElement;
}

/** A table of tokens with their probabilities. */
export function makeTokenTable(caption: string | null, lines: readonly TokenLine[]): HTMLElement {
  const rows = lines.map(({ token, probability, isMarked, note, more }) =>
    element(
      "tr",
      { class: isMarked ? "gp-lens-target" : null },
      element("td", element("code", visibleToken(token)), note && element("span.gp-muted", note)),
      probabilityCell(probability),
      more && element("td", more),
    ),
  );
  return element("table.gp-lens-list", caption !== null && element("caption", caption), element("tbody", ...rows));
}

/** A table cell with a probability, as a number with a bar behind it. */
export function probabilityCell(probability: number): HTMLElement {
  const bar = element("span.gp-probability-bar", { "aria-hidden": "true" });
  bar.style.width = `${Math.round(100 * probability)}%`;
  return element("td.gp-number.gp-probability", bar, formatPercent(probability));
}

/** A text instead of a heatmap, whose single color would depend on a scale from the value to itself. */
function constantText({ constant, slice }: Heatmap): string | null {
  if (typeof constant !== "number") return null;
  const part = /\d/.test(slice) ? ` of [${slice}]` : "";
  return `All values${part} are ${formatNumber(constant)}.`;
}

/** A small heatmap for each index, all with the same colors. */
function makeFacets(
  { titles, plots, per_row }: Facets,
  buffers: readonly DataView[],
  options: PlotOptions,
): HTMLElement {
  const colorsOf = joined(plots.map((one) => readMatrix(one, buffers).values));
  const pictures = plots.map((one, at) => {
    const caption = titles[at] ?? "";
    const own = { ...options, title: `${options.title}, ${caption}`, isSmall: true, colorsOf };
    return element("div", element("div.gp-caption.gp-number", caption), makeHeatmap(one, buffers, own));
  });
  const grid = element(
    "div.gp-beside.gp-facets",
    { tabindex: 0, role: "group", "aria-label": options.title },
    ...pictures,
  );
  if (per_row !== null) grid.style.gridTemplateColumns = `repeat(${per_row}, max-content)`;
  setAttribute(grid, "data-grid", per_row !== null);
  return grid;
}

export function makePlot(plot: Plot, buffers: readonly DataView[], options: PlotOptions): HTMLElement {
  if (plot.type === "heatmap") {
    const text = constantText(plot);
    return text === null ? makeHeatmap(plot, buffers, options) : element("p.gp-note", text);
  }
  if (plot.type === "histogram") return makeHistogram(plot, options);
  if (plot.type === "facets") return makeFacets(plot, buffers, options);
  return element("p.gp-note", sentence(plot.why));
}

export function statisticsRows(statistics: Statistics): [term: string, value: string, isWarning?: boolean][] {
  const { shape, dtype, device, count, mean, std, min, max, nan, infinite } = statistics;
  const isKnown = mean !== null || min !== null;
  const moments = isKnown ? Object.entries({ mean, std, min, max }) : [];
  // The moments leave these out.
  const odd = Object.entries({ NaN: nan, infinite }).filter(([, many]) => many > 0);
  return [
    ["shape", formatShape(shape)],
    ["dtype", dtype],
    ["device", device],
    ["values", formatNumber(count)],
    ...moments.map(([name, value]): [string, string] => [name, formatNumber(value)]),
    ...odd.map(([name, many]): [string, string, boolean] => [name, formatCount(many, "value"), true]),
  ];
}

/** The statistics of a value, and its plot; `isSmall`: it is one of several in a list. */
export function makeValue(
  { statistics, plot, row_labels: rowTokens, column_labels: columnTokens }: ActivationView,
  buffers: readonly DataView[],
  title: string,
  isSmall = false,
): HTMLElement[] {
  return [makeStatistics(statistics), makePlot(plot, buffers, { title, rowTokens, columnTokens, isSmall })];
}

export function makeStatistics(statistics: Statistics): HTMLElement {
  const pairs = statisticsRows(statistics).map(([term, value, isWarning]) =>
    element(
      "div",
      { class: isWarning ? "gp-statistic gp-warned" : "gp-statistic" },
      element("dt", term),
      element("dd.gp-number", value),
    ),
  );
  return element("dl.gp-line.gp-statistics", ...pairs);
}
