/** The columns of the tree: a menu that chooses them, and a line of buttons above the rows that sort by them. */
import { buttonElement, checkbox, element, refresh } from "../page/dom";
import { followJob, inputsOf } from "../runs/jobs";
import { follow, type Part, type View } from "../view";
import type { TreeState } from "./tree_state";

/** The menu. The kernel runs the model once for columns that are chosen, on the inputs of *Run*. */
export function makeColumnMenu(view: View, tree: TreeState): Part {
  const boxes = Object.entries(view.model.get("about").measures).map(([name, title]) => {
    const box = checkbox(name, false, () => job.follow(ask()));
    box.title = title;
    return [name, box, box.firstElementChild as HTMLInputElement] as const;
  });
  const ask = () => {
    const names = boxes.filter(([, , input]) => input.checked).map(([name]) => name);
    return view.kernel.ask("columns", { names, inputs: inputsOf(view) });
  };
  const show = () => {
    for (const [name, , input] of boxes) {
      if (!job.isRunning) input.checked = tree.columns.some((column) => column.name === name);
      input.disabled = view.kernel.state === "lost";
    }
  };
  const job = followJob(view, ask, show);
  follow(view, [tree.content, view.kernel], show);
  show();
  const list = element("div.gp-menu-list", ...boxes.map(([, box]) => element("div", box)), job.element);
  const summary = element("summary.gp-button", { title: "Numbers of a run beside the rows" }, "Columns");
  return { element: element("details.gp-menu", summary, list) };
}

/** A button for each column, above its cells: sorts the rows by it. */
export function makeColumnHeads(view: View, tree: TreeState): Part {
  const heads = () =>
    tree.columns.map((column) => {
      const isActive = column === tree.scores;
      const title = view.model.get("about").measures[column.name] ?? column.name;
      const marks = { "aria-pressed": isActive && tree.isSorted, "data-active": isActive };
      const onclick = () => tree.sortBy(column);
      return buttonElement({ class: "gp-column-head gp-cut", title, ...marks, onclick }, column.name);
    });
  const hidden = () => tree.columns.length < 2;
  const line = element("div.gp-column-heads", { hidden }, element("div.gp-row", element("span.gp-cells", heads)));
  follow(view, [tree.content], () => refresh(line));
  return { element: line };
}
