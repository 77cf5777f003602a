/** Whichever plot the kernel chose for a value. */

import type { Heatmap, Plot } from "../kernel/protocol";
import { element } from "../page/dom";
import { formatNumber, sentence } from "../page/numbers";
import { makeHeatmap, type PlotOptions } from "./heatmap";
import { makeHistogram } from "./histogram";

/** One colour all over says nothing: which one it is depends on the scale, which goes from the value to itself. */
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
