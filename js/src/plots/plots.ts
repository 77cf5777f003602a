/** The plot that the kernel chose for a value. */
import type { Heatmap, Histogram, Plot } from "../kernel/protocol";
import { element, svgElement } from "../page/dom";
import { formatCount, formatNumber, sentence } from "../page/numbers";
import { makeHeatmap, type PlotOptions } from "./heatmap";

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
    return svgElement("rect", { class: "gp-bar", x: x + gap, y: height - high, width: wide - 2 * gap, height: high });
  });
  const axis = svgElement("line", { class: "gp-axis", x1: 0, x2: width, y1: height + 0.5, y2: height + 0.5 });
  if (first < 0 && first + span > 0) {
    const zero = (-first / span) * width;
    return [svgElement("line", { class: "gp-zero", x1: zero, x2: zero, y1: 0, y2: height }), ...rects, axis];
  }
  return [...rects, axis];
}

/** Shows the bin under the mouse, or the one that arrow keys select. */
function listen(svg: SVGElement, histogram: Histogram, readout: HTMLElement, resting: string): void {
  const rects = [...svg.querySelectorAll(".gp-bar")];
  let current = -1;
  const show = (bin: number, isSpoken: boolean) => {
    current = bin;
    rects.forEach((rect, index) => {
      rect.classList.toggle("gp-current", index === bin);
    });
    if (isSpoken) readout.setAttribute("aria-live", "polite");
    else readout.removeAttribute("aria-live");
    readout.textContent = bin < 0 ? resting : describeBin(histogram, bin);
  };
  svg.addEventListener("pointermove", (event) => {
    const { left, width } = svg.getBoundingClientRect();
    const bin = Math.floor(((event.clientX - left) / width) * rects.length);
    show(Math.min(Math.max(bin, 0), rects.length - 1), false);
  });
  svg.addEventListener("pointerleave", () => show(-1, false));
  svg.addEventListener("blur", () => show(-1, false));
  svg.addEventListener("keydown", (event) => {
    const last = rects.length - 1;
    const targets: Record<string, number> = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: last };
    const target = targets[event.key];
    if (target === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    show(Math.min(Math.max(target, 0), last), true);
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
  const readout = element("div", { class: "gp-readout" }, resting);
  listen(svg, histogram, readout, resting);
  const ends = element("div", { class: "gp-histogram-ends gp-number", "aria-hidden": "true" });
  ends.append(element("span", {}, edge(0)), element("span", {}, edge(-1)));
  ends.style.width = `${width}px`;
  const figure = element("figure", { class: "gp-plot gp-histogram" });
  figure.append(svg, ends, readout);
  return figure;
}

/** A text instead of a heatmap, whose single color would depend on a scale from the value to itself. */
function constantText({ constant, slice }: Heatmap): string | null {
  if (typeof constant !== "number") return null;
  const part = /\d/.test(slice) ? ` of [${slice}]` : "";
  return `All values${part} are ${formatNumber(constant)}.`;
}

export function makePlot(plot: Plot, buffers: readonly DataView[], options: PlotOptions): HTMLElement {
  if (plot.type === "heatmap") {
    const text = constantText(plot);
    return text === null ? makeHeatmap(plot, buffers, options) : element("p", { class: "gp-note" }, text);
  }
  if (plot.type === "histogram") return makeHistogram(plot, options);
  return element("p", { class: "gp-note" }, sentence(plot.why));
}
