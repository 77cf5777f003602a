import { describe, expect, it } from "vitest";
import { findCellInserter } from "../../src/patches/patch_list";

const VIEW = "application/vnd.jupyter.widget-view+json";

/** A cell as JupyterLab shares it: `getOutputs` in newer versions, `outputs` in older ones. */
function showing(...ids: string[]): object {
  return { getOutputs: () => ids.map((model_id) => ({ output_type: "display_data", data: { [VIEW]: { model_id } } })) };
}
function older(id: string): object {
  return { outputs: [{ output_type: "stream", text: "x" }, { data: { [VIEW]: { model_id: id } } }] };
}
const TEXT = { cell_type: "markdown" };

function notebook(cells: object[], more: object = {}) {
  const inserted: number[] = [];
  const sharedModel = { cells, insertCell: (index: number) => inserted.push(index) };
  return { manager: { context: { model: { sharedModel, ...more } } }, inserted };
}

function inCell(index: number | null): Element {
  const cell = document.createElement("div");
  if (index !== null) cell.dataset.windowedListIndex = String(index);
  const root = document.createElement("div");
  cell.append(root);
  return root;
}

describe("the position of a new cell", () => {
  it.each([
    ["after the cell that shows the model", [TEXT, showing("other"), showing("mine"), TEXT], null, 3],
    ["after such a cell of an older host", [TEXT, older("mine"), TEXT], null, 2],
    ["after the first of several", [TEXT, showing("mine"), showing("mine")], null, 2],
    ["after the one that contains the view", [TEXT, showing("mine"), showing("mine")], 2, 3],
    ["after the first cell that shows it, if the view's cell does not", [TEXT, showing("mine"), TEXT], 0, 2],
    ["after the view's cell, if no cell shows it (it is inside another widget)", [TEXT, showing("box"), TEXT], 1, 2],
    ["at the end, if nothing is known", [TEXT, TEXT], null, 2],
    ["at the end, if the index is not of a cell", [TEXT, TEXT], 7, 2],
    ["at the start of an empty notebook", [], null, 0],
  ])("is %s", (_, cells, index, expected) => {
    const { manager, inserted } = notebook(cells);
    findCellInserter(manager, "mine", inCell(index))?.insert("x = 1");
    expect(inserted).toEqual([expected]);
  });

  const throwing = {
    get context(): never {
      throw new Error("disposed");
    },
  };
  it.each([
    ["without a manager", undefined],
    ["with a manager of its own (VS Code, Colab)", { get_model: () => null }],
    ["with a disposed context", { context: null }],
    ["that throws", throwing],
    ["of a file that is not a notebook", { context: { model: { sharedModel: { source: "x" } } } }],
    ["with cells that cannot be inserted", { context: { model: { sharedModel: { cells: [] } } } }],
  ])("is not available in a host %s", (_, manager) => {
    expect(findCellInserter(manager, "mine", inCell(0))).toBeNull();
  });

  it("is not available in a read-only notebook", () => {
    const { manager } = notebook([showing("mine")], { readOnly: true });
    expect(findCellInserter(manager, "mine", inCell(0))).toBeNull();
  });
});
