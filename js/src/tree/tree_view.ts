/** The tree: a scroll container in which only the rows that are seen exist, and ten more. */

import { element, setAttribute } from "../page/dom";
import type { Part, View } from "../view";
import { type TreeActions, TreeKeys } from "./keyboard";
import { ROW, RowView, rowId } from "./row_view";
import { CLOSED, LEAF } from "./rows";
import type { TreeState } from "./tree_state";

const MORE = 5;
const HIGHEST = 420;

let made = 0;

export class TreeView implements Part {
  readonly element: HTMLDivElement;
  private readonly space = element("div", { role: "none", class: "gp-space" });
  private readonly rows = new Map<number, RowView>();
  private readonly prefix = `gp-tree-${++made}`;
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

  /** Scrolls a row into sight; one far away into the middle. */
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

  /** The element of a line, brought into sight. */
  elementOf(id: number): HTMLElement {
    this.show(id);
    return this.rows.get(id)?.element ?? this.element;
  }

  private listen(actions: TreeActions): void {
    const { element: tree, view } = this;
    const keys = new TreeKeys(view, this.tree, this, actions);
    tree.addEventListener("keydown", (event) => keys.handle(event));
    tree.addEventListener("mousedown", (event) => this.press(event));
    tree.addEventListener("click", (event) => this.click(event));
    tree.addEventListener("dblclick", (event) => this.doubleClick(event));
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

  /** As high as its rows need, up to a limit; it does not shrink, so that nothing below jumps. Who drags it decides. */
  private layOut(): void {
    const { lines } = this.tree;
    this.space.style.height = `${lines.length * ROW}px`;
    const wanted = Math.max(this.height, Math.min(lines.length * ROW + 2, HIGHEST));
    const isOurs = this.element.style.height === (this.height ? `${this.height}px` : "");
    if (isOurs && wanted !== this.height) this.element.style.height = `${wanted}px`;
    if (isOurs) this.height = wanted;
    for (const [id, row] of this.rows) {
      if (!lines.has(id) || id < 0 || this.isByComponent !== this.tree.isByComponent) this.drop(id, row);
    }
    this.isByComponent = this.tree.isByComponent;
  }

  private drop(id: number, row: RowView): void {
    row.element.remove();
    this.rows.delete(id);
  }

  private draw(): void {
    const { lines, activeLine } = this.tree;
    const { scrollTop } = this.element;
    const seen = Math.ceil((this.element.clientHeight || this.height) / ROW);
    const first = Math.max(0, Math.min(Math.floor(scrollTop / ROW), lines.length - seen) - MORE);
    const wanted = new Set(lines.ids.slice(first, first + seen + 2 * MORE));
    // What the tree says has the focus must exist, wherever it is.
    wanted.add(lines.ids[activeLine] ?? 0);
    for (const [id, row] of this.rows) if (!wanted.has(id)) this.drop(id, row);
    const fresh: HTMLElement[] = [];
    for (const id of wanted) {
      let row = this.rows.get(id);
      if (!row) {
        row = new RowView(this.tree, this.view.skeleton, id, this.prefix, this.rootName);
        this.rows.set(id, row);
        fresh.push(row.element);
      }
      const line = lines.lineOf(id);
      row.fill(line, line === activeLine);
    }
    this.space.append(...fresh);
    setAttribute(this.element, "aria-activedescendant", rowId(this.prefix, lines.ids[activeLine] ?? 0));
    setAttribute(this.element, "data-scored", this.tree.scores !== null);
    setAttribute(this.element, "data-searched", this.tree.found.matches !== null);
  }

  // -- mouse -----------------------------------------------------------------------------------------------------------

  private press(event: MouseEvent): void {
    const id = idOf(event.target);
    if (id === null || event.button !== 0) return;
    event.preventDefault(); // the focus stays on the tree, also where a button is pressed
    this.focus();
    const isOnControl = (event.target as Element).closest("button, .gp-chevron, [data-action], [data-number]");
    if (isOnControl) this.tree.select(id);
    else this.tree.click(id, event.shiftKey);
  }

  private click(event: MouseEvent): void {
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

  private doubleClick(event: MouseEvent): void {
    const target = event.target as Element;
    const id = idOf(target);
    if (id === null || id < 0 || target.closest("button, .gp-chevron")) return;
    if (this.tree.lines.states[this.tree.lines.lineOf(id)] !== LEAF) this.toggle(id, event.altKey);
    else this.view.showDetails(id, this.elementOf(id));
  }

  private toggle(id: number, isDeep: boolean): void {
    const state = this.tree.lines.states[this.tree.lines.lineOf(id)];
    if (state === LEAF) return;
    // The row stays under the pointer, also where others above it open alike.
    const before = this.tree.lines.lineOf(id);
    if (isDeep && id >= 0 && state === CLOSED) this.tree.expandBelow(id);
    else this.tree.setOpen(id, state === CLOSED);
    this.element.scrollTop += (this.tree.lines.lineOf(id) - before) * ROW;
  }
}

function idOf(target: EventTarget | null): number | null {
  const id = (target as Element | null)?.closest<HTMLElement>("[data-id]")?.dataset.id;
  return id === undefined ? null : Number(id);
}
