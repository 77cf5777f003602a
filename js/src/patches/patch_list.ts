/** The chosen patches, in the order in which they are applied, and their export as Python. */
import { asRequestError, property } from "../kernel/kernel";
import type { Edit, PatchState, SessionState } from "../kernel/protocol";
import {
  buttonElement,
  consume,
  copyText,
  element,
  focusedElement,
  type ICONS,
  icon,
  iconButton,
  oncePerClick,
  refresh,
  replaceChildren,
} from "../page/dom";
import { makeOffer } from "../page/notices";
import { visible } from "../page/text";
import { inputsOf } from "../runs/jobs";
import { follow, type Part, type View } from "../view";
import { describe, restrictions, shapeText, targetText, tryEdit } from "./edits";

const EMPTY = "No patches yet. Choose a node in the tree and press +, or its + button, to patch it.";
const NO_CELLS = "This notebook editor does not let widgets insert cells";
const TO_PASTE = "The code is in the clipboard: paste it into a new cell.";
const TO_COPY = "The browser does not allow copying: copy the selected text by hand.";

type Side = "before" | "after";
type Action = "enable" | "reveal" | "edit" | "up" | "down" | "remove";

export function makePatchList(view: View): Part {
  const { kernel, model, notices, root } = view;
  const session = () => model.get("session");
  let dragged: number | null = null;

  const edit = (change: () => Edit | null, said: string) => {
    void tryEdit(view, change, said).then((isMade) => {
      // Resets the checkbox of a refused edit.
      if (!isMade) show();
    });
  };
  const act = (action: Action, patch: PatchState, anchor: Element) => {
    const { number, is_enabled } = patch;
    const what = `#${number} ${describe(patch)}`;
    if (action === "reveal") {
      view.reveal(patch.row);
      view.focusTree();
    } else if (action === "edit") {
      view.editPatch({ number }, anchor);
    } else if (action === "remove") {
      edit(() => ({ action: "remove", numbers: [number] }), `removed ${what}`);
    } else if (action === "enable") {
      const said = `${what} ${is_enabled ? "is not applied" : "is applied"}`;
      edit(() => ({ action: "enable", number, is_enabled: !is_enabled }), said);
    } else move(number, (own) => own + (action === "up" ? -1 : 1), `moved #${number} ${action}`);
  };
  /** `to`: returns the new position, from the old one and the order of the other patches. */
  const move = (number: number, to: (own: number, others: number[]) => number, said: string) =>
    edit(() => {
      const order = session().patches.map((patch) => patch.number);
      const own = order.indexOf(number);
      const others = order.filter((other) => other !== number);
      const position = to(own, others);
      const isMove = own >= 0 && position !== own && position >= 0 && position <= others.length;
      return isMove ? { action: "move", number, position } : null;
    }, said);

  // -- Drags of patches to other places ----------------------------------------------------------------------------------

  const clearDrop = () => {
    for (const item of list.children) item.removeAttribute("data-drop");
  };
  const endDrag = () => {
    dragged = null;
    clearDrop();
  };
  /** Calls `act` with the patch under the pointer and its nearer side; the notebook does not get the event. */
  const onDrag = (act: (item: HTMLElement, side: Side, dragged: number) => void) => (event: DragEvent) => {
    const item = itemOf(event);
    if (dragged === null || !item) return;
    consume(event);
    clearDrop();
    const box = item.getBoundingClientRect();
    act(item, event.clientY < box.top + box.height / 2 ? "before" : "after", dragged);
  };
  const drop = (item: HTMLElement, side: Side, moved: number) => {
    const target = Number(item.dataset.number);
    endDrag();
    const to = (_: number, others: number[]) => others.indexOf(target) + Number(side === "after");
    if (moved !== target) move(moved, to, `moved #${moved} ${side} #${target}`);
  };
  const list = element("ol.gp-list.gp-patches", {
    ondragstart: (event: DragEvent) => {
      const item = itemOf(event);
      if (!item || !(event.target as Element).closest(".gp-grip")) return;
      dragged = Number(item.dataset.number);
      event.dataTransfer?.setData("text/plain", `#${dragged}`);
      event.dataTransfer?.setDragImage(item, 8, 8);
    },
    ondragover: onDrag((item, side) => item.setAttribute("data-drop", side)),
    ondrop: onDrag(drop),
    ondragleave: clearDrop,
    ondragend: endDrag,
  });

  // -- The patches as Python ---------------------------------------------------------------------------------------------

  const exportCode = async (take: (code: string) => Promise<void>) => {
    box.hidden = true;
    try {
      const { result } = await kernel.ask("export", { inputs: inputsOf(view) });
      await take(result.code);
    } catch (reason) {
      notices.error(asRequestError(reason).message);
    }
  };
  const copyCode = async (code: string) => {
    if (await copyText(code, main)) showDone(copy, "Copied", "the patches are in the clipboard, as Python");
    else showCode(code, TO_COPY);
  };
  const insertCell = async (code: string) => {
    const place = findCellInserter(model.widget_manager, model.get("about").model_id, root);
    if (place !== null) {
      void focusCell(root, place.insert(code.trimEnd()));
      return showDone(insert, "Inserted", "a cell with the patches was inserted below");
    }
    const isCopied = await copyText(code, main);
    showCode(code, `${NO_CELLS}. ${isCopied ? TO_PASTE : TO_COPY}`);
  };
  const box = element("div.gp-stack.gp-code-box", { hidden: true });
  const showCode = (code: string, words: string) => {
    const rows = Math.min(code.split("\n").length + 1, 14);
    const attributes = { class: "gp-field gp-code-field gp-mono", readonly: true, rows, "aria-label": "Python code" };
    const area = element("textarea", attributes);
    area.value = code;
    const onclick = () => {
      box.hidden = true;
      copy.focus();
    };
    const close = element("div", buttonElement({ onclick }, "Close"));
    replaceChildren(box, element("p", { role: "status" }, words), area, close);
    box.hidden = false;
    area.focus();
    area.select();
    notices.announce(words);
  };
  /** Shows success on the button for a moment. */
  const showDone = (button: HTMLButtonElement, word: string, said: string) => {
    notices.announce(said);
    const mark = element("span.gp-done", { "aria-hidden": true }, icon("check"), word);
    button.append(mark);
    const timer = setTimeout(() => mark.remove(), 1500);
    view.onRemove(() => clearTimeout(timer));
  };

  // -- The list ----------------------------------------------------------------------------------------------------------

  const makeItem = (patch: PatchState, position: number, count: number) => {
    const { number, kind, is_enabled } = patch;
    const what = `#${number} ${kind} ${targetText(patch)}`;
    const button = (action: Action, name: string, picture: keyof typeof ICONS, isOff = false, keys = "") => {
      const onclick = (event: MouseEvent) => isOff || act(action, patch, event.currentTarget as Element);
      const title = keys ? `${name} (${keys})` : name;
      return iconButton(picture, `${name} ${what}`, { "aria-disabled": isOff ? "true" : null, title, onclick });
    };
    const onkeydown = (event: KeyboardEvent) => {
      const moves: Record<string, Action> = { ArrowUp: "up", ArrowDown: "down" };
      const action = event.altKey ? moves[event.key] : event.key === "Delete" ? "remove" : undefined;
      if (action === undefined) return;
      act(action, patch, event.currentTarget as Element);
      consume(event);
    };
    const onchange = () => act("enable", patch, list);
    const check = { type: "checkbox", "aria-label": `Apply ${what}`, title: "Apply it", checked: is_enabled, onchange };
    return element(
      "li",
      { class: is_enabled ? "gp-patch" : "gp-patch gp-patch-off", "data-number": number, onkeydown },
      element("span.gp-grip", { draggable: "true", title: "Drag to reorder (Alt+↑, Alt+↓)" }),
      element("input", check),
      element("span.gp-patch-number.gp-muted", `#${number}`),
      element("span", { class: `gp-kind gp-kind-${kind}` }, kind),
      element("div.gp-patch-what", makePlace(patch), ...facts(patch)),
      element(
        "div.gp-patch-buttons",
        button("up", "Move up", "up", position === 0, "Alt+↑"),
        button("down", "Move down", "down", position === count - 1, "Alt+↓"),
        button("edit", "Edit", "edit"),
        button("remove", "Remove", "remove", false, "Delete"),
      ),
    );
  };
  const makePlace = (patch: PatchState) => {
    const path = element("span.gp-patch-path", visible(patch.path));
    const slice = patch.slice === null ? null : element("span.gp-patch-slice", `[${patch.slice}]`);
    if (patch.row < 0) return element("span.gp-patch-place.gp-mono", path, slice);
    const onclick = () => act("reveal", patch, path);
    return buttonElement({ class: "gp-node-link gp-patch-place", title: "Show it in the tree", onclick }, path, slice);
  };
  const isEmpty = () => session().patches.length === 0;
  const change = (name: string, action: "undo" | "redo" | "clear", said: string, isOff: () => boolean) => {
    const press = () => edit(() => ({ action }), said);
    const isClear = action === "clear";
    return makeButton(name, isClear ? "remove" : action, isOff, isClear ? oncePerClick(press) : press);
  };
  const take = (name: string, picture: "copy" | "insert", use: (code: string) => Promise<void>) => {
    const isOff = () => session().patches.every(({ is_enabled }) => !is_enabled);
    return makeButton(
      name,
      picture,
      isOff,
      oncePerClick(() => exportCode(use)),
    );
  };
  const undo = change("Undo", "undo", "undone", () => !session().can_undo);
  const redo = change("Redo", "redo", "redone", () => !session().can_redo);
  const copy = take("Copy as Python", "copy", copyCode);
  const insert = take("Insert cell", "insert", insertCell);
  const group = (name: string, ...buttons: HTMLElement[]) =>
    element("div.gp-line.gp-tight.gp-button-group", { role: "group", "aria-label": name }, ...buttons);
  const carried = makeOffer("Undo", () => edit(() => ({ action: "undo" }), "undone"));
  const main = element(
    "section.gp-stack.gp-box.gp-patch-list",
    { role: "region", "aria-label": "Patches" },
    element(
      "div.gp-line",
      element(
        "h2.gp-panel-title",
        "Patches",
        element("span.gp-count.gp-muted", () => countText(session())),
      ),
      group("Changes of the patches", undo, redo, change("Clear", "clear", "all removed", isEmpty)),
      group("Copy the patches as code", copy, insert),
    ),
    carried.element,
    element("p.gp-muted.gp-patches-empty", { hidden: () => !isEmpty() }, EMPTY),
    list,
    box,
  );
  const show = () => {
    const { patches, note, can_undo } = session();
    endDrag();
    refresh(main);
    const hadFocus = list.contains(focusedElement(list));
    replaceChildren(list, ...patches.map((patch, at) => makeItem(patch, at, patches.length)));
    list.hidden = isEmpty();
    if (hadFocus && isEmpty()) undo.focus();
    carried.say(note, can_undo);
  };
  follow(view, ["session"], show);
  show();
  return { element: main };
}

function itemOf(event: Event): HTMLElement | null {
  return (event.target as Element).closest<HTMLElement>("[data-number]");
}

/** Uses `aria-disabled`: a button with `disabled` would lose the focus. */
function makeButton(
  name: string,
  picture: keyof typeof ICONS,
  isOff: () => boolean,
  press: (event: MouseEvent) => void,
) {
  const onclick = (event: MouseEvent) => isOff() || press(event);
  return buttonElement({ onclick, "aria-disabled": () => isOff() || null }, icon(picture), name);
}

function countText({ patches }: SessionState): string {
  const enabled = patches.filter((patch) => patch.is_enabled).length;
  return enabled === patches.length ? `${enabled || ""}` : `${enabled} of ${patches.length} applied`;
}

function facts(patch: PatchState): HTMLElement[] {
  const shape = patch.sliced ?? patch.shape;
  const texts: [name: string, text: string | null][] = [
    ["value", patch.value && visible(patch.value)],
    ["name", patch.name && `→ ${patch.name}`],
    ["shape", shape && shapeText(shape)],
    ...restrictions(patch).map((option): [string, string] => ["option", option]),
    ["gone", patch.row < 0 ? "not in the graph any more" : null],
  ];
  const found = texts.flatMap(([name, text]) =>
    text === null ? [] : [element("span", { class: `gp-patch-fact gp-muted gp-patch-${name}` }, text)],
  );
  if (patch.warning !== null) found.push(element("span.gp-warning", icon("warning"), patch.warning));
  return found;
}

// -- Puts code in a new cell, if the host supports it --------------------------------------------------------------------

const VIEW = "application/vnd.jupyter.widget-view+json";

/** The used part of JupyterLab's shared notebook model (`YNotebook`). */
interface SharedNotebook {
  readonly cells: ArrayLike<unknown>;
  insertCell(index: number, cell: { cell_type: "code"; source: string; metadata: Record<string, unknown> }): unknown;
}

export interface CellInserter {
  /** Inserts a code cell after the cell of the view; returns its position. */
  insert(source: string): number;
}

/** Returns where cells can be inserted; `null` if widgets cannot do so, or if the notebook is read-only. */
export function findCellInserter(manager: unknown, modelId: string, root: Element): CellInserter | null {
  const notebookModel = property(property(manager, "context"), "model");
  const shared = property(notebookModel, "sharedModel");
  if (!isNotebook(shared) || property(notebookModel, "readOnly") === true) return null;
  return {
    insert: (source) => {
      const position = positionAfter(shared, modelId, root);
      // The user has asked for this cell, so its outputs may be shown.
      shared.insertCell(position, { cell_type: "code", source, metadata: { trusted: true } });
      return position;
    },
  };
}

/** Puts the focus into the editor of a cell that was inserted, once JupyterLab or Notebook 7 has drawn it. */
async function focusCell(root: Element, position: number): Promise<void> {
  const notebook = root.closest(".jp-Notebook");
  const cell = () => notebook?.querySelector(`[${CELL}="${position}"]`);
  const before = cell();
  for (let frames = 0; frames < 120 && (!cell() || cell() === before); frames++) {
    await new Promise(requestAnimationFrame);
  }
  cell()?.querySelector<HTMLElement>(".cm-content")?.focus();
}

function isNotebook(shared: unknown): shared is SharedNotebook {
  const length = property(property(shared, "cells"), "length");
  return typeof length === "number" && typeof property(shared, "insertCell") === "function";
}

/** The position after the cell of this view; else after the first cell that shows its model; else the end. */
function positionAfter(notebook: SharedNotebook, modelId: string, root: Element): number {
  const here = cellOf(root, notebook.cells.length);
  const showing = Array.from(notebook.cells).flatMap((cell, index) => (showsModel(cell, modelId) ? [index] : []));
  if (here !== null && (showing.length === 0 || showing.includes(here))) return here + 1;
  return showing[0] === undefined ? notebook.cells.length : showing[0] + 1;
}

/** JupyterLab 4 and Notebook 7 number their cells. */
const CELL = "data-windowed-list-index";

/** The position of the view's cell, if known. */
function cellOf(root: Element, count: number): number | null {
  const index = Number(root.closest(`[${CELL}]`)?.getAttribute(CELL) ?? Number.NaN);
  return Number.isInteger(index) && index >= 0 && index < count ? index : null;
}

function showsModel(cell: unknown, modelId: string): boolean {
  const read = property(cell, "getOutputs");
  const outputs = typeof read === "function" ? read.call(cell) : property(cell, "outputs");
  if (!Array.isArray(outputs)) return false;
  return outputs.some((output) => property(property(property(output, "data"), VIEW), "model_id") === modelId);
}
