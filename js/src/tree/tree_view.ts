/** The tree: a scroll container that has elements only for the visible rows and a few more. */

import { element, setAttribute } from "../page/dom";
import { makeOffer } from "../page/notices";
import { formatCount } from "../page/text";
import type { Part, View } from "../view";
import { makeTreeKeys, type TreeActions } from "./keyboard";
import { ROW, RowView, rowId } from "./row_view";
import { CLOSED, LEAF } from "./rows";
import type { TreeState } from "./tree_state";

const OVERSCAN = 5;
const MAX_HEIGHT = 420;

let count = 0;

export type TreeView = ReturnType<typeof makeTreeView>;

export function makeTreeView(view: View, tree: TreeState, actions: TreeActions) {
  const rootName = view.model.get("about").name || "model";
  const prefix = `gp-tree-${++count}`;
  const rows = new Map<number, RowView>();
  let height = 0;
  let isByComponent = false;

  const onMouseDown = (event: MouseEvent) => {
    const id = idOf(event.target);
    if (id === null || event.button !== 0) return;
    event.preventDefault(); // the focus stays on the tree, also where a button is pressed
    focus();
    const isOnControl = (event.target as Element).closest("button, .gp-chevron, [data-action], [data-number]");
    if (isOnControl) tree.select(id);
    else tree.click(id, event.shiftKey);
    act(event);
  };
  const act = (event: MouseEvent) => {
    const target = event.target as Element;
    const id = idOf(target);
    if (id === null) return;
    const badge = target.closest<HTMLElement>("[data-number]");
    const action = target.closest<HTMLElement>("[data-action]");
    if (badge) view.editPatch({ number: Number(badge.dataset.number) }, badge);
    else if (action?.dataset.action === "info") view.showDetails(id, action);
    else if (action?.dataset.action === "add") view.editPatch({ row: id }, action);
    else if (target.closest(".gp-chevron") || id < 0) toggle(id, event.altKey);
  };
  const onDoubleClick = (event: MouseEvent) => {
    const target = event.target as Element;
    const id = idOf(target);
    if (id === null || id < 0 || target.closest("button, .gp-chevron")) return;
    if (tree.lines.states[tree.lines.lineOf(id)] !== LEAF) toggle(id, event.altKey);
    else view.showDetails(id, elementOf(id));
  };
  const toggle = (id: number, isDeep: boolean) => {
    const state = tree.lines.states[tree.lines.lineOf(id)];
    if (state === LEAF) return;
    // The row stays under the pointer, even if rows above it open too.
    const before = tree.lines.lineOf(id);
    if (isDeep && id >= 0 && state === CLOSED) tree.expandBelow(id);
    else tree.setOpen(id, state === CLOSED);
    box.scrollTop += (tree.lines.lineOf(id) - before) * ROW;
  };
  const space = element("div", { role: "none", class: "gp-space" });
  const box = element(
    "div.gp-tree",
    {
      role: "tree",
      tabindex: 0,
      "aria-label": "Graph",
      onscroll: () => draw(),
      onmousedown: onMouseDown,
      // A click without a pointer, as of screen readers: with one, the row may have moved since the button went down.
      onclick: (event: MouseEvent) => event.detail === 0 && act(event),
      ondblclick: onDoubleClick,
    },
    space,
  );
  const focus = () => box.focus({ preventScroll: true });
  /** Scrolls a row into view; one far away into the middle. */
  const show = (id: number) => {
    const top = tree.lines.lineOf(id) * ROW;
    const { scrollTop, clientHeight } = box;
    const isNear = top > scrollTop - 3 * ROW && top < scrollTop + clientHeight + 2 * ROW;
    if (top < scrollTop) box.scrollTop = isNear ? top : top - clientHeight / 2;
    else if (top + ROW > scrollTop + clientHeight) {
      box.scrollTop = isNear ? top + ROW - clientHeight : top - clientHeight / 2;
    }
    draw();
  };
  /** The element of a line, which is scrolled into view. */
  const elementOf = (id: number): HTMLElement => {
    show(id);
    return rows.get(id)?.element ?? box;
  };
  /** Sets the height to that of the rows, up to a limit, unless the user resized it. It never shrinks: nothing below jumps. */
  const layOut = () => {
    const { lines } = tree;
    space.style.height = `${lines.length * ROW}px`;
    const wanted = Math.max(height, Math.min(lines.length * ROW + 2, MAX_HEIGHT));
    const isOurs = box.style.height === (height ? `${height}px` : "");
    if (isOurs && wanted !== height) box.style.height = `${wanted}px`;
    if (isOurs) height = wanted;
    removeRows((id) => lines.has(id) && id >= 0 && isByComponent === tree.isByComponent);
    isByComponent = tree.isByComponent;
  };
  const removeRows = (isKept: (id: number) => boolean) => {
    for (const [id, row] of rows) {
      if (isKept(id)) continue;
      row.element.remove();
      rows.delete(id);
    }
  };
  const draw = () => {
    const { lines, activeLine, columns } = tree;
    const seen = Math.ceil((box.clientHeight || height) / ROW);
    const first = Math.max(0, Math.min(Math.floor(box.scrollTop / ROW), lines.length - seen) - OVERSCAN);
    // The element of `aria-activedescendant` must exist, even if it is out of view.
    const shown = new Set([activeLine]);
    for (let line = first; line < Math.min(first + seen + 2 * OVERSCAN, lines.length); line++) shown.add(line);
    const wanted = new Map([...shown].sort((a, b) => a - b).map((line) => [lines.ids[line] ?? 0, line]));
    removeRows((id) => wanted.has(id));
    // In the order of the lines, which is that of screen readers.
    let next = space.firstElementChild;
    for (const [id, line] of wanted) {
      const row = rows.get(id) ?? new RowView(tree, view.skeleton, id, prefix, rootName);
      rows.set(id, row);
      row.fill(line, line === activeLine, line === activeLine && tree.isSelected);
      if (row.element === next) next = next.nextElementSibling;
      else space.insertBefore(row.element, next);
    }
    setAttribute(box, "aria-activedescendant", rowId(prefix, lines.ids[activeLine] ?? 0));
    setAttribute(box, "data-scored", columns.length > 0);
    setAttribute(box, "data-searched", tree.found.matches !== null);
    box.parentElement?.style.setProperty("--gp-columns", String(columns.length));
  };
  const drawn = { element: box, focus, show, elementOf };
  box.addEventListener("keydown", makeTreeKeys(view, tree, drawn, actions));
  view.onRemove(
    tree.onChange((change) => {
      if (change === "lines") layOut();
      if (change === "followed") show(tree.active);
      else draw();
    }),
  );
  const observer = new ResizeObserver(draw);
  observer.observe(box);
  view.onRemove(() => observer.disconnect());
  layOut();
  draw();
  return drawn;
}

/** Says that equal rows were opened together, and offers to open one alone. Below the tree, where it moves no row. */
export function makeOpenedNote({ onRemove }: View, tree: TreeState): Part {
  const note = makeOffer("Only this one", () => tree.closeOthers());
  const show = () => {
    const { length } = tree.openedToo;
    note.say(length === 0 ? "" : `Opened too: ${formatCount(length, "equal module")}.`);
  };
  onRemove(tree.onChange((change) => change === "lines" && show()));
  return note;
}

function idOf(target: EventTarget | null): number | null {
  const id = (target as Element | null)?.closest<HTMLElement>("[data-id]")?.dataset.id;
  return id === undefined ? null : Number(id);
}
