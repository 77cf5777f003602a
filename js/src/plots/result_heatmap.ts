/** The heatmap of a result: what `show_heatmap` of the kernel shows. A click on a cell goes back as the trait `cell`. */

import { GONE, SAVED, watchLife } from "../kernel/kernel_life";
import type { Heatmap, HeatmapTraits, ResultHeatmap, ResultSide } from "../kernel/protocol";
import { element } from "../page/dom";
import { formatNumber } from "../page/numbers";
import type { Model } from "../view";
import { HeatmapFigure, type ResultOptions } from "./heatmap";
import type { AxisLabels } from "./heatmap_frame";
import { readPlane } from "./plane";

/** `position 5 (␣the)`, `path transformer.h_3.mlp.output`. */
function describeSide({ name, values, tokens }: ResultSide, index: number): string {
  const value = values[index] ?? "";
  const token = tokens?.[index];
  return token === undefined ? `${name} ${value}` : `${name} ${value} (${token})`;
}

function labelsOf(side: ResultSide): AxisLabels | null {
  return side.labels && { texts: side.labels, whole: (index) => describeSide(side, index) };
}

function describeCell(result: ResultHeatmap, row: number, column: number): string {
  return `${describeSide(result.rows, row)}, ${describeSide(result.columns, column)}`;
}

export function makeResultHeatmap(model: Model<HeatmapTraits>, onRemove: (undo: () => void) => void): HTMLElement {
  const [result, values] = [model.get("heatmap"), model.get("values")];
  const { title, rows, columns } = result;
  const selection = element("p", { class: "gp-note", "aria-live": "polite" });

  const showCell = () => {
    const cell = model.get("cell");
    figure.show(cell === null ? [] : [cell]);
    selection.hidden = cell === null;
    if (cell === null) return;
    const value = values.getFloat32(4 * (cell[0] * columns.values.length + cell[1]), true);
    const number = element("strong", { class: "gp-number" }, formatNumber(value, 5));
    selection.replaceChildren(`Selected: ${describeCell(result, ...cell)}: `, number);
  };
  const choose = (row: number, column: number) => {
    const before = model.get("cell");
    const isSame = before !== null && before[0] === row && before[1] === column;
    model.set("cell", isSame ? null : [row, column]);
    try {
      model.save_changes();
    } catch {
      lost(GONE); // hosts throw without a connection
    }
  };
  const warning = element("p", { class: "gp-note gp-error", role: "status", hidden: true });
  const lost = (why: string) => {
    if (why === SAVED) return;
    warning.textContent = `${why} Selections are not sent to the kernel.`;
    warning.hidden = false;
  };
  const found = () => {
    warning.hidden = true;
  };
  watchLife(model, result.model_id, { lost, found }, onRemove);
  const options: ResultOptions = {
    scale: { map: result.map, low: result.low, high: result.high },
    name: result.center === null ? result.name : `${result.name} (no colour: ${result.center})`,
    missing: result.missing,
    rowTitle: rows.title,
    columnTitle: columns.title,
    rowLabels: labelsOf(rows),
    columnLabels: labelsOf(columns),
    describe: (row, column) => describeCell(result, row, column),
    choose,
  };
  const heatmap = asHeatmap(result);
  const figure = new HeatmapFigure(heatmap, readPlane(heatmap, [values]), {
    title: title ?? result.name,
    result: options,
  });
  model.on("change:cell", showCell);
  onRemove(() => model.off("change:cell", showCell));
  showCell();
  const heading = title !== null && element("h3", { class: "gp-heading" }, title);
  return element(
    "section",
    { class: "gp-result", "aria-label": "Heatmap" },
    heading,
    figure.element,
    selection,
    warning,
  );
}

function asHeatmap({ rows, columns, full, reduced }: ResultHeatmap): Heatmap {
  const size = { rows: rows.values.length, columns: columns.values.length };
  return { type: "heatmap", buffer: 0, ...size, full, reduced, slice: "", minimum: 0, maximum: 0, constant: null };
}
