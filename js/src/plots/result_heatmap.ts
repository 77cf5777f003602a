/** The heatmap of a result: what `show_heatmap` of the kernel shows. A click on a cell goes back as the trait `cell`. */

import { SAVED_MESSAGE, STOPPED_MESSAGE, watchKernel } from "../kernel/kernel";
import type { HeatmapTraits, Item, LinkedTraits, ResultHeatmap, ResultSide } from "../kernel/protocol";
import { element, setAttribute } from "../page/dom";
import { formatNumber, isolated } from "../page/text";
import { type Linked, listen, type Model, saveChanges } from "../view";
import { type MakeView, makeActions, makePatchStrip } from "../views/linked_view";
import { isOfOneStack, makeFilterNote } from "../views/selection";
import { type AxisLabels, type CellSelection, makeFigure, type ResultOptions } from "./heatmap";
import { type Matrix, readMatrix } from "./matrix";

/** `position 5 (␣the)`, `path transformer.h_3.mlp.output`. */
function describeSide({ name, values, tokens }: ResultSide, index: number): string {
  const value = values[index] ?? "";
  const token = tokens?.[index];
  return token === undefined ? `${name} ${value}` : `${name} ${value} (${isolated(token)})`;
}

function labelsOf(side: ResultSide): AxisLabels | null {
  return side.labels && { texts: side.labels, describe: (index) => describeSide(side, index) };
}

function describeCell(result: ResultHeatmap, row: number, column: number): string {
  return `${describeSide(result.rows, row)}, ${describeSide(result.columns, column)}`;
}

type ResultView = Linked<HeatmapTraits & LinkedTraits>;

/** The heatmap of a result of a graph: its cells are selected in all views of that, and can be patched. */
export const makeResultView: MakeView<HeatmapTraits & LinkedTraits> = async (view, place) => {
  place({ element: makeResultHeatmap(view.model as unknown as Model<HeatmapTraits>, view.onRemove, view) });
};

export function makeResultHeatmap(
  model: Model<HeatmapTraits>,
  onRemove: (undo: () => void) => void,
  view: ResultView | null = null,
): HTMLElement {
  const result = model.get("heatmap");
  const { title, rows, columns } = result;
  const size = { rows: rows.values.length, columns: columns.values.length };
  const matrix = readMatrix({ ...size, buffer: 0 }, [model.get("values")]);
  const selection = element("p.gp-note", { "aria-live": "polite" });

  const linked = view && linkCells(view);
  const showCell = () => {
    const cell = model.get("cell");
    const own: CellSelection[] = cell === null ? [] : [cell];
    const others = linked?.places() ?? [];
    figure.markSelected(others.length > 0 ? others : own);
    selection.hidden = cell === null;
    if (cell === null) return;
    const value = matrix.values[cell[0] * matrix.columns + cell[1]] ?? Number.NaN;
    const number = element("strong.gp-number", formatNumber(value, 5));
    selection.replaceChildren(`Selected: ${describeCell(result, ...cell)}: `, number);
  };
  const choose = (row: number, column: number, isMore: boolean) => {
    const before = model.get("cell");
    const isSame = before !== null && before[0] === row && before[1] === column;
    model.set("cell", isSame ? null : [row, column]);
    linked?.click(row, column, isMore);
    if (!saveChanges(model) && view === null) lost(STOPPED_MESSAGE);
  };
  const warning = element("p.gp-note.gp-error", { role: "status", hidden: true });
  const lost = (why: string) => {
    if (why === SAVED_MESSAGE) return;
    warning.textContent = `${why} Selections are not sent to the kernel.`;
    warning.hidden = false;
  };
  const found = () => {
    warning.hidden = true;
  };
  if (view === null) watchKernel(model, result.model_id, { onLost: lost, onReconnected: found }, onRemove);
  const options: ResultOptions = {
    scale: { map: result.map, low: result.low, high: result.high },
    name: result.center === null ? result.name : `${result.name} (no color: ${result.center})`,
    missing: result.missing,
    rowTitle: rows.title,
    columnTitle: columns.title,
    rowLabels: labelsOf(rows),
    columnLabels: labelsOf(columns),
    describe: (row, column) => describeCell(result, row, column),
    onSelect: choose,
    ...(linked && { isKept: linked.isKept }),
  };
  const figure = makeFigure(result, matrix, { title: title ?? result.name, result: options });
  const follow = () => {
    const [row, column] = linked?.places().find((place) => !place.includes(null)) ?? [null, null];
    const cell: HeatmapTraits["cell"] = row === null || column === null ? null : [row, column];
    if (String(cell) !== String(model.get("cell"))) model.set("cell", cell);
    showCell();
  };
  if (linked !== null) {
    onRemove(linked.selection.onChange(follow));
    onRemove(linked.filter.onChange(() => figure.draw()));
  }
  listen({ model, onRemove }, "change:cell", showCell);
  showCell();
  const heading = title !== null && element("h3.gp-heading.gp-muted", title);
  return element(
    "section.gp-result.gp-stack",
    { "aria-label": "Heatmap" },
    heading,
    linked && makeThreshold(linked, result.name, matrix),
    linked && makeFilterNote(linked.filter, onRemove),
    figure.element,
    selection,
    warning,
    linked && view && makeActions(view).element,
    linked && view && makePatchStrip(view).element,
  );
}

/** Connects the cells to the selection of a graph; `null` if cells are not items of it. */
function linkCells({ filter, model, selection }: ResultView) {
  const items = model.get("cell_items");
  if (items === undefined || (items.rows === null && items.columns === null)) return null;
  const itemOf = (row: number, column: number): Item => {
    const parts = [items.rows?.[row], items.columns?.[column], items.all].filter((part) => part !== undefined);
    const of = <K extends keyof Item>(key: K) => parts.find((part) => part[key] !== null)?.[key] ?? null;
    const item = { name: of("name"), layer: of("layer"), head: of("head"), position: of("position"), key: of("key") };
    return { ...item, name: nameOf(item.name, item) };
  };
  const placeOf = (parts: readonly Item[] | null, item: Item) =>
    isOfOneStack(items.all.name, item.name) ? indexOfItem(parts, item) : null;
  const places = () =>
    selection.items.flatMap((item): CellSelection[] => {
      const [row, column] = [placeOf(items.rows, item), placeOf(items.columns, item)];
      return row === null && column === null ? [] : [[row, column]];
    });
  return {
    selection,
    filter,
    itemOf,
    isKept: (row: number, column: number) => filter.keeps(itemOf(row, column)),
    places,
    click: (row: number, column: number, isMore: boolean) => selection.click(itemOf(row, column), isMore),
  };
}

/** A field for a minimum magnitude: smaller scores are faint here, and in all views of the graph. */
function makeThreshold(
  { filter, itemOf }: NonNullable<ReturnType<typeof linkCells>>,
  name: string,
  { columns, values }: Matrix,
): HTMLElement {
  const field = element("input.gp-field.gp-minimum", {
    inputmode: "decimal",
    placeholder: "all",
    "aria-label": `Minimum size of ${name}`,
  });
  const choose = () => {
    const typed = field.value.trim();
    const least = Number(typed);
    setAttribute(field, "aria-invalid", Number.isNaN(least));
    if (typed === "" || Number.isNaN(least)) return filter.set(null);
    const kept = [...values.keys()].filter((at) => Math.abs(values[at] ?? Number.NaN) >= least);
    const items = kept.map((at) => itemOf(Math.floor(at / columns), at % columns));
    filter.set({ items, words: `|${name}| ≥ ${formatNumber(least)}` });
  };
  field.addEventListener("input", choose); // some hosts keep Enter, and with it the event `change`
  filter.onChange(() => {
    if (filter.isFromOtherView) field.value = "";
  });
  return element("label.gp-pair.gp-check", `Only |${name}| ≥`, field);
}

/** The name of a component of a layer and a head, for one with `*`; `null` if one of them is not known. */
function nameOf(name: string | null, { layer, head }: Item): string | null {
  const found = name?.replace("layers[*]", `layers[${layer ?? "*"}]`).replace("heads[*]", `heads[${head ?? "*"}]`);
  return found === undefined || found.includes("[*]") ? null : found;
}

/** The row or column of an item: by its name, else by its layer and head, or its position. */
function indexOfItem(parts: readonly Item[] | null, item: Item): number | null {
  if (parts === null) return null;
  const isSame = (part: Item) => {
    const keys = (["layer", "head", "position", "key"] as const).filter((key) => part[key] !== null);
    return keys.length > 0 && keys.every((key) => part[key] === item[key]);
  };
  const own = parts.findIndex(({ name }) => name !== null && nameOf(name, item) === item.name);
  const found = own >= 0 ? own : parts.findIndex(isSame);
  return found >= 0 ? found : null;
}
