/** Whichever plot the kernel chose for a value. */
import { element } from "./dom";
import { makeHeatmap, type PlotOptions } from "./heatmap";
import { makeHistogram } from "./histogram";
import { sentence } from "./numbers";
import type { Plot } from "./protocol";

export function makePlot(plot: Plot, buffers: readonly DataView[], options: PlotOptions): HTMLElement {
  if (plot.type === "heatmap") return makeHeatmap(plot, buffers, options);
  if (plot.type === "histogram") return makeHistogram(plot, options);
  return element("p", { class: "gp-note" }, sentence(plot.why));
}
