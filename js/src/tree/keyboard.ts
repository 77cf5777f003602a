/** The keys of the tree (WAI-ARIA tree view), and those of the whole widget. */

import type { Edit } from "../kernel/protocol";
import type { View } from "../view";
import { ROW } from "./row_view";
import { CLOSED, OPEN } from "./rows";
import { patchedRow } from "./skeleton";
import type { Toolbar } from "./toolbar";
import type { TreeState } from "./tree_state";
import type { TreeView } from "./tree_view";

/** What `?` shows. */
export const KEYS: readonly (readonly [keys: string, what: string])[] = [
  ["↑ ↓ Home End PageUp PageDown", "go to another row"],
  ["→ ←", "open, then go in; close, then go out"],
  ["*", "open all siblings"],
  ["a letter", "next name that starts with it"],
  ["/", "search"],
  ["Enter, F3, Shift+F3", "next match while searching, the one before"],
  ["Esc", "back to the tree; there, end the search"],
  ["Enter", "details of a row"],
  ["Space", "select it and read it out"],
  ["+", "patch it"],
  ["Delete, Backspace", "remove its patches"],
  ["Ctrl+C", "copy its path"],
  ["Ctrl+Z; Ctrl+Shift+Z, Ctrl+Y", "undo; redo"],
  ["arrows, Enter, Alt+↑", "in the graph: along edges, into a module, out of it"],
  ["?", "these keys"],
];

const TYPING_PAUSE_MS = 700;

/** Actions of the keys outside the tree. */
export interface TreeActions {
  /** Edits the chosen patches; shows an error if that fails. */
  edit(change: Edit): void;
  /** Copies text; resolves to whether that succeeded. */
  copy(text: string): Promise<boolean>;
}

export class TreeKeys {
  private typed = "";
  private typedAt = 0;

  constructor(
    private readonly view: View,
    private readonly tree: TreeState,
    private readonly drawn: Pick<TreeView, "show" | "elementOf">,
    private readonly actions: TreeActions,
  ) {}

  handle(event: KeyboardEvent): void {
    if (event.defaultPrevented || event.isComposing) return;
    const isDone = hasCommandKey(event)
      ? this.onCommandKey(event)
      : !event.altKey && (this.onMoveKey(event) || this.onActionKey(event));
    if (isDone) event.preventDefault();
  }

  private onCommandKey(event: KeyboardEvent): boolean {
    switch (event.key.toLowerCase()) {
      case "c":
        void this.copyPath();
        return true;
      case "z":
        this.edit({ action: event.shiftKey ? "redo" : "undo" });
        return true;
      case "y":
        this.edit({ action: "redo" });
        return true;
      case "home":
      case "end":
        return this.onMoveKey(event);
      default:
        return false;
    }
  }

  private onMoveKey(event: KeyboardEvent): boolean {
    const { tree } = this;
    const { lines, activeLine } = tree;
    const page = Math.max(1, Math.floor((event.currentTarget as HTMLElement).clientHeight / ROW) - 1);
    const steps: Record<string, number> = {
      ArrowDown: activeLine + 1,
      ArrowUp: activeLine - 1,
      Home: 0,
      End: lines.length - 1,
      PageDown: activeLine + page,
      PageUp: activeLine - page,
    };
    const line = steps[event.key];
    if (line !== undefined) tree.selectLine(line);
    else if (event.key === "ArrowRight") this.expandOrEnter();
    else if (event.key === "ArrowLeft") this.collapseOrLeave();
    else return false;
    this.typed = "";
    this.drawn.show(tree.active);
    return true;
  }

  private expandOrEnter(): void {
    const { lines, activeLine } = this.tree;
    if (lines.states[activeLine] === CLOSED) this.tree.setOpen(lines.ids[activeLine] ?? 0, true);
    else if (lines.states[activeLine] === OPEN) this.tree.selectLine(activeLine + 1);
  }

  private collapseOrLeave(): void {
    const { lines, activeLine } = this.tree;
    if (lines.states[activeLine] === OPEN) this.tree.setOpen(lines.ids[activeLine] ?? 0, false);
    else if ((lines.parents[activeLine] ?? -1) >= 0) this.tree.selectLine(lines.parents[activeLine] ?? 0);
  }

  private onActionKey(event: KeyboardEvent): boolean {
    const { view, tree } = this;
    const id = tree.lines.ids[tree.activeLine] ?? 0;
    switch (event.key) {
      case "Enter":
        if (id < 0) tree.setOpen(id, tree.lines.states[tree.activeLine] === CLOSED);
        else view.showDetails(id, this.drawn.elementOf(id));
        return true;
      case " ":
        this.selectRow(id);
        return true;
      case "+":
        this.patch(id);
        return true;
      case "*":
        this.openSiblings();
        return true;
      case "Delete":
      case "Backspace":
        this.removePatches(id);
        return true;
      default:
        return this.onLetter(event);
    }
  }

  private selectRow(id: number): void {
    this.tree.select(id);
    this.drawn.show(id);
    const name = this.drawn.elementOf(id).getAttribute("aria-label") ?? "";
    this.view.notices.announce(id > 0 ? `${this.view.skeleton.path(id)} selected; ${name}` : `${name} selected`);
  }

  private patch(id: number): void {
    if (id >= 0) this.view.editPatch({ row: id }, this.drawn.elementOf(id));
    else this.view.notices.announce("This row represents several rows: expand it, and patch one of them.");
  }

  private openSiblings(): void {
    const { lines, activeLine } = this.tree;
    const parent = lines.parents[activeLine] ?? -1;
    const closed = [...lines.ids].filter((_, line) => lines.parents[line] === parent && lines.states[line] === CLOSED);
    if (closed.length) this.tree.setAllOpen(closed, true);
    this.drawn.show(this.tree.active);
  }

  private removePatches(id: number): void {
    const row = patchedRow(this.view.skeleton, id) ?? id;
    const numbers = this.tree.patched.at(row).map((patch) => patch.number);
    if (numbers.length) this.edit({ action: "remove", numbers });
    else this.view.notices.announce("There is no patch on this row.");
  }

  private async copyPath(): Promise<void> {
    const row = this.tree.activeRow;
    const path = this.view.skeleton.path(row);
    if (!path) this.view.notices.announce("The whole model has an empty path.");
    else if (await this.actions.copy(path)) this.view.notices.announce(`Copied ${path}`);
    else this.view.notices.error(`The browser does not allow copying. The path is ${path}`);
  }

  private edit(change: Edit): void {
    const { can_undo, can_redo } = this.view.model.get("session");
    if (change.action === "undo" && !can_undo) this.view.notices.announce("There is nothing to undo.");
    else if (change.action === "redo" && !can_redo) this.view.notices.announce("There is nothing to redo.");
    else this.actions.edit(change);
  }

  /** Goes to the next row whose name starts with the typed letters; the same letter again goes to the next such row. */
  private onLetter(event: KeyboardEvent): boolean {
    if (!isPrintable(event) || "/?".includes(event.key)) return false;
    const isPaused = event.timeStamp - this.typedAt > TYPING_PAUSE_MS;
    this.typed = isPaused || this.typed === event.key ? event.key : this.typed + event.key;
    this.typedAt = event.timeStamp;
    const { lines, activeLine } = this.tree;
    const from = activeLine + (this.typed.length === 1 ? 1 : 0);
    for (let step = 0; step < lines.length; step++) {
      const line = (from + step) % lines.length;
      if (!this.nameOf(lines.ids[line] ?? 0).startsWith(this.typed.toLowerCase())) continue;
      this.tree.selectLine(line);
      this.drawn.show(this.tree.active);
      break;
    }
    return true;
  }

  private nameOf(id: number): string {
    const name = id === 0 ? this.view.model.get("about").name : this.tree.nameOf(id);
    return name.toLowerCase().replace(/^"/, "");
  }
}

/** Handles the keys that work everywhere in the tree's widget. */
export function watchKeys(
  view: View,
  toolbar: Pick<Toolbar, "focus" | "goToMatch" | "clearSearch" | "showKeys">,
): void {
  const { root } = view;
  const onKey = (event: KeyboardEvent) => {
    const isTyping = isEditable(event.composedPath()[0]);
    const isPlain = !hasCommandKey(event) && !event.altKey;
    if (event.defaultPrevented || event.isComposing) return;
    if (event.key === "F3" && isPlain) toolbar.goToMatch(event.shiftKey ? -1 : 1);
    else if (event.key === "/" && isPlain && !isTyping) toolbar.focus();
    else if (event.key === "?" && isPlain && !isTyping) toolbar.showKeys();
    else if (event.key === "Escape") {
      if (isInTree(event)) toolbar.clearSearch();
      view.focusTree();
    } else return;
    event.preventDefault();
  };
  root.addEventListener("keydown", onKey);
  view.onRemove(() => root.removeEventListener("keydown", onKey));
  stopKeyPropagation(root, (undo) => view.onRemove(undo));
}

/**
 * Keeps the keys that a widget uses from the notebook around it, which gets all others: Ctrl+S saves. JupyterLab also
 * handles Enter in text fields of its cells (by `beforeinput`): their forms would not be submitted.
 */
export function stopKeyPropagation(root: HTMLElement, onRemove: (undo: () => void) => void): void {
  const onKey = (event: KeyboardEvent) => {
    const isTyping = isEditable(event.composedPath()[0]);
    const isOurs = hasCommandKey(event)
      ? isTyping && (EDITING_KEYS.includes(event.key.toLowerCase()) || WIDGET_KEYS.has(event.key))
      : isTyping || isPrintable(event) || WIDGET_KEYS.has(event.key);
    if (event.defaultPrevented || isOurs) event.stopPropagation();
  };
  root.addEventListener("keydown", onKey);
  onRemove(() => root.removeEventListener("keydown", onKey));
}

/** Keys of the widget, which would change cells in the notebook. */
const WIDGET_KEYS = new Set(
  "ArrowUp ArrowDown ArrowLeft ArrowRight Home End PageUp PageDown Enter Delete Backspace Escape F3".split(" "),
);

/** With Ctrl, in a text field: select all, copy, cut, paste, undo, redo. */
const EDITING_KEYS = [..."acxvzy"];

function isInTree(event: Event): boolean {
  return event.composedPath().some((node) => node instanceof Element && node.getAttribute("role") === "tree");
}

/** Ctrl, on macOS Cmd. */
function hasCommandKey(event: KeyboardEvent): boolean {
  const isMac = /mac|iphone|ipad/i.test(navigator.userAgent);
  return isMac ? event.metaKey : event.ctrlKey || event.metaKey;
}

function isPrintable(event: KeyboardEvent): boolean {
  return [...event.key].length === 1 && !event.ctrlKey && !event.metaKey;
}

function isEditable(target: EventTarget | undefined): boolean {
  const node = target as HTMLElement | undefined;
  return Boolean(node?.isContentEditable || node?.matches?.("input, textarea, select"));
}
