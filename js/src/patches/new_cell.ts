/**
 * Puts code in a new cell, if the host supports it. Each feature of a host is checked before it is used.
 *
 * JupyterLab and Notebook 7: the model's `widget_manager` has the `context` of the notebook, whose
 * `model.sharedModel` has the cells. In VS Code, Colab, marimo and Voila, widgets cannot insert cells.
 */
import { property } from "../kernel/kernel_status";

const VIEW = "application/vnd.jupyter.widget-view+json";

/** The used part of JupyterLab's shared notebook model (`YNotebook`). */
interface SharedNotebook {
  readonly cells: ArrayLike<unknown>;
  insertCell(index: number, cell: { cell_type: "code"; source: string; metadata: Record<string, unknown> }): unknown;
}

export interface CellInserter {
  /** Inserts a code cell after the cell of the view. */
  insert(source: string): void;
}

/** Returns where cells can be inserted; `null` if widgets cannot do so, or if the notebook is read-only. */
export function findCellInserter(manager: unknown, modelId: string, root: Element): CellInserter | null {
  const notebookModel = property(property(manager, "context"), "model");
  const shared = property(notebookModel, "sharedModel");
  if (!isNotebook(shared) || property(notebookModel, "readOnly") === true) return null;
  return {
    insert: (source) => {
      shared.insertCell(positionAfter(shared, modelId, root), {
        cell_type: "code",
        source,
        // The user has asked for this cell, so its outputs may be shown.
        metadata: { trusted: true },
      });
    },
  };
}

function isNotebook(shared: unknown): shared is SharedNotebook {
  const length = property(property(shared, "cells"), "length");
  return typeof length === "number" && typeof property(shared, "insertCell") === "function";
}

/** The position after the cell of this view; else after the first cell that shows its model; else the end. */
function positionAfter(notebook: SharedNotebook, modelId: string, root: Element): number {
  const here = cellOf(root, notebook.cells.length);
  const showing = Array.from(notebook.cells).flatMap((cell, index) => (showsModel(cell, modelId) ? [index] : []));
  if (here !== null && (showing.length === 0 || showing.includes(here))) return here + 1;
  return showing[0] === undefined ? notebook.cells.length : showing[0] + 1;
}

/** The position of the view's cell, if known: JupyterLab 4 and Notebook 7 number their cells. */
function cellOf(root: Element, count: number): number | null {
  const numbered = root.closest<HTMLElement>("[data-windowed-list-index]");
  const index = Number(numbered?.dataset.windowedListIndex ?? Number.NaN);
  return Number.isInteger(index) && index >= 0 && index < count ? index : null;
}

function showsModel(cell: unknown, modelId: string): boolean {
  const read = property(cell, "getOutputs");
  const outputs = typeof read === "function" ? read.call(cell) : property(cell, "outputs");
  if (!Array.isArray(outputs)) return false;
  return outputs.some((output) => property(property(property(output, "data"), VIEW), "model_id") === modelId);
}
