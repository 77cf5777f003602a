/** The picture of a circuit, alone, as `show_circuit` shows it, or above the tree of its model. */
import type { CircuitNode, CircuitTraits } from "../kernel/protocol";
import { buttonElement, element } from "../page/dom";
import type { TreeState } from "../tree/tree_state";
import { listen, type Model, type Part, saveChanges, type View } from "../view";
import { itemOf } from "../views/selection";
import { CircuitFigure } from "./circuit_figure";

export function makeCircuitView(model: Model<CircuitTraits>, onRemove: (undo: () => void) => void): HTMLElement {
  const figure = new CircuitFigure(model.get("circuit"), {
    onPin: (pinned) => {
      model.set("pinned", pinned);
      saveChanges(model);
    },
    actions: null,
  });
  const follow = () => figure.pin(model.get("pinned"));
  listen({ model, onRemove }, "change:pinned", follow);
  follow();
  return figure.element;
}

/** The picture above the tree. A pinned node selects its row in the tree, and can be patched. */
export function makeCircuitPanel(view: View, state: TreeState): Part {
  const panel = element("div", { class: "gp-circuit-panel" });
  let figure: CircuitFigure | null = null;
  const actions = (node: CircuitNode) => {
    if (node.row < 0) return [];
    const patch = buttonElement({ class: "gp-button gp-primary" }, "Patch …");
    const positions = node.position === null ? "" : String(node.position);
    patch.addEventListener("click", () => view.editPatch({ row: node.row, component: node.name, positions }, patch));
    return [patch];
  };
  const mark = () => {
    const patched = view.model.get("session").patches.map(({ path }) => path);
    figure?.mark(state.activeRow, new Set(patched));
    figure?.fade((name) => !view.filter.keeps(itemOf(name)));
  };
  const show = () => {
    const circuit = view.model.get("circuit") ?? null;
    panel.hidden = circuit === null;
    figure = null;
    panel.replaceChildren();
    if (circuit === null) return;
    figure = new CircuitFigure(circuit, {
      onPin: (pinned) => {
        const node = pinned?.[0] === "node" ? circuit.nodes[pinned[1]] : undefined;
        if (node === undefined || node.row < 0) return;
        view.reveal(node.row);
        if (node.position !== null) view.selection.set([itemOf(node.name, { position: node.position })]);
      },
      actions,
    });
    panel.append(figure.element);
    mark();
  };
  listen(view, "change:circuit", show);
  listen(view, "change:session", mark);
  view.onRemove(state.onChange(mark));
  view.onRemove(view.filter.onChange(mark));
  show();
  return { element: panel };
}
