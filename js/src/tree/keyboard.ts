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

/** Returns what handles the keys of the tree. */
export function makeTreeKeys(
  view: View,
  tree: TreeState,
  drawn: Pick<TreeView, "show" | "elementOf">,
  actions: TreeActions,
): (event: KeyboardEvent) => void {
  const { announce } = view.notices;
  let typed = "";
  let typedAt = 0;

  const edit = (change: Edit) => {
    const { can_undo, can_redo } = view.model.get("session");
    if (change.action === "undo" && !can_undo) announce("There is nothing to undo.");
    else if (change.action === "redo" && !can_redo) announce("There is nothing to redo.");
    else actions.edit(change);
  };
  const onCommandKey = (event: KeyboardEvent): boolean => {
    const key = event.key.toLowerCase();
    if (key === "c") void copyPath();
    else if (key === "z" || key === "y") edit({ action: key === "y" || event.shiftKey ? "redo" : "undo" });
    else return (key === "home" || key === "end") && onMoveKey(event);
    return true;
  };
  const onMoveKey = (event: KeyboardEvent): boolean => {
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
    const [id = 0, parent = -1, state] = [lines.ids[activeLine], lines.parents[activeLine], lines.states[activeLine]];
    if (line !== undefined) tree.selectLine(line);
    else if (event.key === "ArrowRight") {
      if (state === CLOSED) tree.setOpen(id, true);
      else if (state === OPEN) tree.selectLine(activeLine + 1);
    } else if (event.key === "ArrowLeft") {
      if (state === OPEN) tree.setOpen(id, false);
      else if (parent >= 0) tree.selectLine(parent);
    } else return false;
    typed = "";
    drawn.show(tree.active);
    return true;
  };
  const onActionKey = (event: KeyboardEvent): boolean => {
    const id = tree.lines.ids[tree.activeLine] ?? 0;
    const act: Record<string, () => void> = {
      Enter: () =>
        id < 0
          ? tree.setOpen(id, tree.lines.states[tree.activeLine] === CLOSED)
          : view.showDetails(id, drawn.elementOf(id)),
      " ": () => selectRow(id),
      "+": () =>
        id >= 0
          ? view.editPatch({ row: id }, drawn.elementOf(id))
          : announce("This row represents several rows: expand it, and patch one of them."),
      "*": openSiblings,
      Delete: () => removePatches(id),
      Backspace: () => removePatches(id),
    };
    const found = act[event.key];
    found?.();
    return found !== undefined || onLetter(event);
  };
  const selectRow = (id: number) => {
    tree.select(id);
    drawn.show(id);
    const name = drawn.elementOf(id).getAttribute("aria-label") ?? "";
    announce(id > 0 ? `${view.skeleton.path(id)} selected; ${name}` : `${name} selected`);
  };
  const openSiblings = () => {
    const { lines, activeLine } = tree;
    const parent = lines.parents[activeLine] ?? -1;
    const closed = [...lines.ids].filter((_, line) => lines.parents[line] === parent && lines.states[line] === CLOSED);
    if (closed.length) tree.setAllOpen(closed, true);
    drawn.show(tree.active);
  };
  const removePatches = (id: number) => {
    const row = patchedRow(view.skeleton, id) ?? id;
    const numbers = tree.patched.at(row).map((patch) => patch.number);
    if (numbers.length) edit({ action: "remove", numbers });
    else announce("There is no patch on this row.");
  };
  const copyPath = async () => {
    const path = view.skeleton.path(tree.activeRow);
    if (!path) announce("The whole model has an empty path.");
    else if (await actions.copy(path)) announce(`Copied ${path}`);
    else view.notices.error(`The browser does not allow copying. The path is ${path}`);
  };
  /** Goes to the next row whose name starts with the typed letters; the same letter again goes to the next such row. */
  const onLetter = (event: KeyboardEvent): boolean => {
    if (!isPrintable(event) || "/?".includes(event.key)) return false;
    const isPaused = event.timeStamp - typedAt > TYPING_PAUSE_MS;
    typed = isPaused || typed === event.key ? event.key : typed + event.key;
    typedAt = event.timeStamp;
    const { lines, activeLine } = tree;
    const from = activeLine + (typed.length === 1 ? 1 : 0);
    const after = Array.from({ length: lines.length }, (_, step) => (from + step) % lines.length);
    const line = after.find((one) => nameOf(lines.ids[one] ?? 0).startsWith(typed.toLowerCase()));
    if (line !== undefined) tree.selectLine(line);
    if (line !== undefined) drawn.show(tree.active);
    return true;
  };
  const nameOf = (id: number) => {
    const name = id === 0 ? view.model.get("about").name : tree.nameOf(id);
    return name.toLowerCase().replace(/^"/, "");
  };
  return (event) => {
    if (event.defaultPrevented || event.isComposing) return;
    const isDone = hasCommandKey(event)
      ? onCommandKey(event)
      : !event.altKey && (onMoveKey(event) || onActionKey(event));
    if (isDone) event.preventDefault();
  };
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
