/** The toolbar above the tree: the search field with its result, toggles, and the legend of the scores. */

import { buttonElement, element, icon, replaceChildren, setAttribute } from "../page/dom";
import { formatCount, formatNumber } from "../page/numbers";
import type { Part, View } from "../view";
import type { SearchBox } from "./keyboard";
import { Legend } from "./legend";
import type { TreeState } from "./tree_state";

/** A pause, so that screen readers do not announce the count after each letter. */
const ANNOUNCE_AFTER_MS = 600;

let count = 0;

export class Toolbar implements Part, SearchBox {
  readonly element: HTMLElement;
  private readonly field: HTMLInputElement;
  private readonly count = element("span", { class: "gp-found-count gp-muted" });
  private readonly error = element("p", {
    class: "gp-error gp-query-error",
    id: `gp-query-error-${++count}`,
    hidden: true,
  });
  private readonly hint = element("p", { class: "gp-muted gp-query-error", hidden: true });
  private readonly steps: HTMLButtonElement[];
  private readonly sizes: HTMLButtonElement;
  private readonly folding: HTMLButtonElement;
  private readonly components: HTMLButtonElement;
  private announceTimer: ReturnType<typeof setTimeout> | undefined;
  private rowWhenTyped: number | null = null;

  constructor(
    private readonly view: View,
    private readonly tree: TreeState,
  ) {
    this.field = this.searchField();
    this.steps = [
      iconButton("up", "Previous match", "Previous match (Shift+F3)", () => this.goToMatch(-1)),
      iconButton("down", "Next match", "Next match (F3)", () => this.goToMatch(1)),
    ];
    this.sizes = toggle("Sizes", "Show what only carries sizes, constants and flags", () =>
      tree.setShowsSizes(!tree.showsSizes),
    );
    this.folding = toggle("Fold repeats", "Fold equal layers into one row, and masks, indices and positions", () =>
      tree.setFolded(!tree.isFolded),
    );
    this.components = toggle("Components", "Show layers and their components in place of modules and nodes", () =>
      tree.setByComponent(!tree.isByComponent),
    );
    this.element = element(
      "div",
      { class: "gp-toolbar" },
      this.bar(),
      this.error,
      this.hint,
      new Legend(view, tree).element,
    );
    view.onRemove(tree.onChange((change) => change === "lines" && this.show()));
    view.onRemove(() => clearTimeout(this.announceTimer));
    this.show();
  }

  focus(): void {
    this.field.focus();
    this.field.select();
  }

  goToMatch(step: 1 | -1): void {
    const number = this.tree.goToMatch(step);
    if (number === null) return;
    const path = this.view.skeleton.path(this.tree.activeRow);
    this.view.notices.announce(`Match ${formatNumber(number)} of ${this.countText()}: ${path}`);
  }

  clearSearch(): void {
    this.tree.search("");
  }

  private bar(): HTMLElement {
    const { tree } = this;
    return element(
      "div",
      { class: "gp-tools" },
      element("span", { class: "gp-search", role: "search" }, icon("search"), this.field, this.count, ...this.steps),
      this.components,
      this.sizes,
      this.folding,
      iconButton("expand", "Expand all", "Expand all below the selected row", () => tree.expandBelow(tree.activeRow)),
      iconButton("collapse", "Collapse all", "Collapse all", () => tree.collapseAll()),
      keysHelp(),
    );
  }

  private searchField(): HTMLInputElement {
    return element("input", {
      // Not type=search: some browsers draw its cross in black on a dark page.
      type: "text",
      role: "searchbox",
      class: "gp-field",
      "aria-label": "Search nodes",
      "aria-describedby": this.error.id,
      placeholder: "Search: attn op:mul shape:64 is:patched",
      title: HELP,
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.search(),
      onkeydown: (event: KeyboardEvent) => this.onKey(event),
    });
  }

  private search(): void {
    this.tree.search(this.field.value);
    this.rowWhenTyped = this.tree.activeRow;
    clearTimeout(this.announceTimer);
    this.announceTimer = setTimeout(() => {
      if (this.field.value.trim()) this.view.notices.announce(this.tree.found.error ?? this.countText());
    }, ANNOUNCE_AFTER_MS);
  }

  /** Focuses the tree, at a match unless the user has selected a row since typing the query. */
  private toTree(): void {
    const { matches } = this.tree.found;
    const { activeRow } = this.tree;
    if (matches?.length && activeRow === this.rowWhenTyped && !matches.includes(activeRow)) this.goToMatch(1);
    this.view.focusTree();
  }

  /** Enter goes through the matches; Esc and the arrow lead to the tree, where another Esc ends the search. */
  private onKey(event: KeyboardEvent): void {
    if (event.isComposing) return;
    if (event.key === "Enter") this.goToMatch(event.shiftKey ? -1 : 1);
    else if (event.key === "ArrowDown" || event.key === "Escape") this.toTree();
    else return;
    event.preventDefault();
  }

  private show(): void {
    const { tree, field } = this;
    // Another view may have changed the query.
    if (field.value !== tree.query) field.value = tree.query;
    setAttribute(field, "aria-invalid", tree.found.error !== null);
    this.error.hidden = tree.found.error === null;
    this.error.textContent = tree.found.error;
    replaceChildren(this.count, this.countText());
    this.hint.hidden = tree.found.matches?.length !== 0 || tree.found.error !== null;
    this.hint.textContent = tree.found.onlySizesCount
      ? `No matches except ${formatNumber(tree.found.onlySizesCount)} that only carry sizes: add is:size.`
      : "No matches. Try fewer or shorter terms.";
    for (const step of this.steps) step.disabled = !tree.found.matches?.length;
    setAttribute(this.sizes, "aria-pressed", tree.showsSizes);
    setAttribute(this.folding, "aria-pressed", tree.isFolded);
    this.folding.disabled = !tree.canFold;
    setAttribute(this.components, "aria-pressed", tree.isByComponent);
    this.components.hidden = tree.components.size === 0;
    this.sizes.disabled = tree.isByComponent;
  }

  private countText(): string {
    const { found } = this.tree;
    const { matches } = found;
    const all = formatCount(this.view.model.get("about").nodes || found.index.size, "node");
    return matches === null ? all : `${formatNumber(matches.length)} of ${all}`;
  }
}

const HELP = `All terms must hold.
attn  text in path, torch function or component
layers[3].attn.q  layers[*].resid_post
h_*.attn  * is any text
op:mul  shape:64  shape:[1,*,64]
is:patched  is:opaque  is:parameter  is:size
-term  without`;

const KEYS = [
  ["↑ ↓ ← →", "move, open, close"],
  ["*", "open all siblings"],
  ["a letter", "next name that starts with it"],
  ["/", "search"],
  ["Enter, F3", "next match, while searching"],
  ["Esc", "back to the tree; there, end the search"],
  ["Enter", "details of a row"],
  ["+", "patch it"],
  ["Delete", "remove its patches"],
  ["Ctrl+C", "copy its path"],
  ["Ctrl+Z, Ctrl+Shift+Z", "undo, redo"],
] as const;

function keysHelp(): HTMLElement {
  const pairs = KEYS.flatMap(([keys, what]) => [element("dt", {}, keys), element("dd", {}, what)]);
  const summary = element("summary", { class: "gp-button gp-quiet", "aria-label": "Keys", title: "Keys" }, "?");
  return element("details", { class: "gp-keys" }, summary, element("dl", {}, ...pairs));
}

function iconButton(name: Parameters<typeof icon>[0], label: string, title: string, onclick: () => void) {
  return buttonElement({ class: "gp-button gp-quiet", "aria-label": label, title, onclick }, icon(name));
}

function toggle(label: string, title: string, onclick: () => void): HTMLButtonElement {
  return buttonElement({ "aria-pressed": false, title, onclick }, label);
}
