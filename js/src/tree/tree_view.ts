/** The tree: a scroll container that has elements only for the visible rows and a few more. */

import { element, setAttribute } from "../page/dom";
import { makeOffer } from "../page/notices";
import { formatCount } from "../page/text";
import type { Part, View } from "../view";
import { type TreeActions, TreeKeys } from "./keyboard";
import { ROW, RowView, rowId } from "./row_view";
import { CLOSED, LEAF } from "./rows";
import type { TreeState } from "./tree_state";

const OVERSCAN = 5;
const MAX_HEIGHT = 420;

let count = 0;

export class TreeView implements Part {
  readonly element: HTMLDivElement;
  private readonly space = element("div", { role: "none", class: "gp-space" });
  private readonly rows = new Map<number, RowView>();
  private readonly prefix = `gp-tree-${++count}`;
  private readonly rootName: string;
  private height = 0;
  private isByComponent = false;

  constructor(
    private readonly view: View,
    private readonly tree: TreeState,
    actions: TreeActions,
  ) {
    this.rootName = view.model.get("about").name || "model";
    this.element = element(
      "div",
      { role: "tree", class: "gp-tree", tabindex: 0, "aria-label": "Graph", onscroll: () => this.draw() },
      this.space,
    );
    this.listen(actions);
    this.layOut();
    this.draw();
  }

  focus(): void {
    this.element.focus({ preventScroll: true });
  }

  /** Scrolls a row into view; one far away into the middle. */
  show(id: number): void {
    const top = this.tree.lines.lineOf(id) * ROW;
    const { scrollTop, clientHeight } = this.element;
    const isNear = top > scrollTop - 3 * ROW && top < scrollTop + clientHeight + 2 * ROW;
    if (top < scrollTop) this.element.scrollTop = isNear ? top : top - clientHeight / 2;
    else if (top + ROW > scrollTop + clientHeight) {
      this.element.scrollTop = isNear ? top + ROW - clientHeight : top - clientHeight / 2;
    }
    this.draw();
  }

  /** The element of a line, which is scrolled into view. */
  elementOf(id: number): HTMLElement {
    this.show(id);
    return this.rows.get(id)?.element ?? this.element;
  }

  private listen(actions: TreeActions): void {
    const { element: tree, view } = this;
    const keys = new TreeKeys(view, this.tree, this, actions);
    tree.addEventListener("keydown", (event) => keys.handle(event));
    tree.addEventListener("mousedown", (event) => this.onMouseDown(event));
    tree.addEventListener("click", (event) => this.onClick(event));
    tree.addEventListener("dblclick", (event) => this.onDoubleClick(event));
    view.onRemove(
      this.tree.onChange((change) => {
        if (change === "lines") this.layOut();
        if (change === "followed") this.show(this.tree.active);
        else this.draw();
      }),
    );
    const observer = new ResizeObserver(() => this.draw());
    observer.observe(tree);
    view.onRemove(() => observer.disconnect());
  }

  /** Sets the height to that of the rows, up to a limit, unless the user resized it. It never shrinks: nothing below jumps. */
  private layOut(): void {
    const { lines } = this.tree;
    this.space.style.height = `${lines.length * ROW}px`;
    const wanted = Math.max(this.height, Math.min(lines.length * ROW + 2, MAX_HEIGHT));
    const isOurs = this.element.style.height === (this.height ? `${this.height}px` : "");
    if (isOurs && wanted !== this.height) this.element.style.height = `${wanted}px`;
    if (isOurs) this.height = wanted;
    for (const [id, row] of this.rows) {
      if (!lines.has(id) || id < 0 || this.isByComponent !== this.tree.isByComponent) this.removeRow(id, row);
    }
    this.isByComponent = this.tree.isByComponent;
  }

  private removeRow(id: number, row: RowView): void {
    row.element.remove();
    this.rows.delete(id);
  }

  private draw(): void {
    const { lines, activeLine } = this.tree;
    const { scrollTop } = this.element;
    const seen = Math.ceil((this.element.clientHeight || this.height) / ROW);
    const first = Math.max(0, Math.min(Math.floor(scrollTop / ROW), lines.length - seen) - OVERSCAN);
    // The element of `aria-activedescendant` must exist, even if it is out of view.
    const shown = new Set([activeLine]);
    for (let line = first; line < Math.min(first + seen + 2 * OVERSCAN, lines.length); line++) shown.add(line);
    const wanted = new Map([...shown].sort((a, b) => a - b).map((line) => [lines.ids[line] ?? 0, line]));
    for (const [id, row] of this.rows) if (!wanted.has(id)) this.removeRow(id, row);
    // In the order of the lines, which is that of screen readers.
    let next = this.space.firstElementChild;
    for (const [id, line] of wanted) {
      let row = this.rows.get(id);
      if (!row) {
        row = new RowView(this.tree, this.view.skeleton, id, this.prefix, this.rootName);
        this.rows.set(id, row);
      }
      row.fill(line, line === activeLine, line === activeLine && this.tree.isSelected);
      if (row.element === next) next = next.nextElementSibling;
      else this.space.insertBefore(row.element, next);
    }
    setAttribute(this.element, "aria-activedescendant", rowId(this.prefix, lines.ids[activeLine] ?? 0));
    const { columns } = this.tree;
    setAttribute(this.element, "data-scored", columns.length > 0);
    this.element.parentElement?.style.setProperty("--gp-columns", String(columns.length));
    setAttribute(this.element, "data-searched", this.tree.found.matches !== null);
  }

  private onMouseDown(event: MouseEvent): void {
    const id = idOf(event.target);
    if (id === null || event.button !== 0) return;
    event.preventDefault(); // the focus stays on the tree, also where a button is pressed
    this.focus();
    const isOnControl = (event.target as Element).closest("button, .gp-chevron, [data-action], [data-number]");
    if (isOnControl) this.tree.select(id);
    else this.tree.click(id, event.shiftKey);
    this.act(event);
  }

  /** A click without a pointer, as of screen readers: with one, the row may have moved since the button went down. */
  private onClick(event: MouseEvent): void {
    if (event.detail === 0) this.act(event);
  }

  private act(event: MouseEvent): void {
    const target = event.target as Element;
    const id = idOf(target);
    if (id === null) return;
    const badge = target.closest<HTMLElement>("[data-number]");
    const action = target.closest<HTMLElement>("[data-action]");
    if (badge) this.view.editPatch({ number: Number(badge.dataset.number) }, badge);
    else if (action?.dataset.action === "info") this.view.showDetails(id, action);
    else if (action?.dataset.action === "add") this.view.editPatch({ row: id }, action);
    else if (target.closest(".gp-chevron") || id < 0) this.toggle(id, event.altKey);
  }

  private onDoubleClick(event: MouseEvent): void {
    const target = event.target as Element;
    const id = idOf(target);
    if (id === null || id < 0 || target.closest("button, .gp-chevron")) return;
    if (this.tree.lines.states[this.tree.lines.lineOf(id)] !== LEAF) this.toggle(id, event.altKey);
    else this.view.showDetails(id, this.elementOf(id));
  }

  private toggle(id: number, isDeep: boolean): void {
    const state = this.tree.lines.states[this.tree.lines.lineOf(id)];
    if (state === LEAF) return;
    // The row stays under the pointer, even if rows above it open too.
    const before = this.tree.lines.lineOf(id);
    if (isDeep && id >= 0 && state === CLOSED) this.tree.expandBelow(id);
    else this.tree.setOpen(id, state === CLOSED);
    this.element.scrollTop += (this.tree.lines.lineOf(id) - before) * ROW;
  }
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
