/** The columns of the tree: a menu that chooses them, and a line of buttons above the rows that sort by them. */
import { asRequestError } from "../kernel/kernel";
import type { JobStatus } from "../kernel/protocol";
import { buttonElement, checkbox, element, replaceChildren } from "../page/dom";
import { inputsOf, Poller } from "../runs/jobs";
import type { Part, View } from "../view";
import type { TreeState } from "./tree_state";

/** The menu. The kernel runs the model once for columns that are chosen, on the inputs of *Run*. */
export function makeColumnMenu(view: View, tree: TreeState): Part {
  const status = element("p.gp-note", { role: "status" });
  let isRunning = false;
  const boxes = Object.entries(view.model.get("about").measures).map(([name, title]) => {
    const box = checkbox(name, false, () => {
      show("The model runs …", "running");
      void poller.follow(ask());
    });
    box.title = title;
    return [name, box, box.firstElementChild as HTMLInputElement] as const;
  });
  const ask = () => {
    const names = boxes.filter(([, , input]) => input.checked).map(([name]) => name);
    return view.kernel.ask("columns", { names, inputs: inputsOf(view) });
  };
  const show = (text: string, state: string) => {
    status.textContent = text;
    status.classList.toggle("gp-error", state === "failed");
    isRunning = state === "running";
    if (!isRunning) follow();
  };
  const poller = new Poller<JobStatus>(ask, {
    onStatus: ({ result: { state, error } }) => show(state === "running" ? "The model runs …" : (error ?? ""), state),
    onError: (reason) => show(asRequestError(reason).message, "failed"),
  });
  const follow = () => {
    for (const [name, , input] of boxes) {
      if (!isRunning) input.checked = tree.columns.some((column) => column.name === name);
      input.disabled = view.kernel.state === "lost";
    }
  };
  view.onRemove(tree.onChange((change) => change === "lines" && follow()));
  view.onRemove(view.kernel.onState(follow));
  view.onRemove(() => poller.stop());
  follow();
  const list = element("div.gp-menu-list", ...boxes.map(([, box]) => element("div", box)), status);
  const summary = element("summary.gp-button", { title: "Numbers of a run beside the rows" }, "Columns");
  return { element: element("details.gp-menu", summary, list) };
}

/** A button for each column, above its cells: sorts the rows by it. */
export function makeColumnHeads(view: View, tree: TreeState): Part {
  const line = element("span.gp-cells");
  const heads = element("div.gp-column-heads", { hidden: true }, element("div.gp-row", line));
  const show = () => {
    const { columns, isSorted, scores } = tree;
    heads.hidden = columns.length < 2;
    const buttons = columns.map((column) => {
      const isActive = column === scores;
      const title = view.model.get("about").measures[column.name] ?? column.name;
      const onclick = () => tree.sortBy(column);
      const attributes = { class: "gp-column-head gp-cut", title, "aria-pressed": isActive && isSorted, onclick };
      return buttonElement({ ...attributes, "data-active": isActive }, column.name);
    });
    const hadFocus = [...line.children].findIndex((button) => button.matches(":focus"));
    replaceChildren(line, ...buttons);
    buttons[hadFocus]?.focus();
  };
  view.onRemove(tree.onChange((change) => change === "lines" && show()));
  show();
  return { element: heads };
}
