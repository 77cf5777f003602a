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

export class PatchList implements Part {
  readonly element: HTMLElement;
  private readonly list = element("ol.gp-list.gp-patches");
  private readonly undo: HTMLElement;
  private readonly copy: HTMLButtonElement;
  private readonly carried = makeOffer("Undo", () => this.edit(() => ({ action: "undo" }), "undone"));
  private readonly box = element("div.gp-stack.gp-code-box", { hidden: true });
  private dragged: number | null = null;

  constructor(private readonly view: View) {
    const group = (name: string, ...buttons: HTMLElement[]) =>
      element("div.gp-line.gp-tight.gp-button-group", { role: "group", "aria-label": name }, ...buttons);
    const { session } = this;
    const change = (name: string, action: "undo" | "redo" | "clear", said: string, isOff: () => boolean) => {
      const picture = action === "clear" ? "remove" : action;
      const press = () => this.edit(() => ({ action }), said);
      return makeButton(name, picture, isOff, action === "clear" ? oncePerClick(press) : press);
    };
    this.undo = change("Undo", "undo", "undone", () => !session().can_undo);
    const take = (name: string, picture: "copy" | "insert", use: (code: string) => Promise<void>) => {
      const press = oncePerClick(() => this.exportCode(use));
      return makeButton(name, picture, () => !session().patches.some(({ is_enabled }) => is_enabled), press);
    };
    this.copy = take("Copy as Python", "copy", (code) => this.copyCode(code));
    const insert = take("Insert cell", "insert", (code) => this.insertCell(code, insert));
    const isEmpty = () => session().patches.length === 0;
    const header = element(
      "div.gp-line",
      element(
        "h2.gp-panel-title",
        "Patches",
        element("span.gp-count.gp-muted", () => countText(session())),
      ),
      group(
        "Changes of the patches",
        this.undo,
        change("Redo", "redo", "redone", () => !session().can_redo),
        change("Clear", "clear", "all removed", isEmpty),
      ),
      group("Copy the patches as code", this.copy, insert),
    );
    const empty = element("p.gp-muted.gp-patches-empty", { hidden: () => !isEmpty() }, EMPTY);
    const attributes = { class: "gp-stack gp-box gp-patch-list", role: "region", "aria-label": "Patches" };
    this.element = element("section", attributes, header, this.carried.element, empty, this.list, this.box);
    follow(view, ["session"], () => this.show());
    this.watchDrags();
    this.show();
  }

  private readonly session = () => this.view.model.get("session");

  private show(): void {
    const { patches, note, can_undo } = this.session();
    this.endDrag();
    refresh(this.element);
    const hadFocus = this.list.contains(focusedElement(this.element));
    replaceChildren(this.list, ...patches.map((patch, at) => this.item(patch, at, patches.length)));
    this.list.hidden = patches.length === 0;
    if (hadFocus && patches.length === 0) this.undo.focus();
    this.carried.say(note, can_undo);
  }

  private edit(edit: () => Edit | null, said: string): void {
    void tryEdit(this.view, edit, said).then((isMade) => {
      // Resets the checkbox of a refused edit.
      if (!isMade) this.show();
    });
  }

  private act(action: Action, patch: PatchState, anchor: Element): void {
    const { number, is_enabled } = patch;
    const what = `#${number} ${describe(patch)}`;
    if (action === "reveal") {
      this.view.reveal(patch.row);
      this.view.focusTree();
    } else if (action === "edit") {
      this.view.editPatch({ number }, anchor);
    } else if (action === "remove") {
      this.edit(() => ({ action: "remove", numbers: [number] }), `removed ${what}`);
    } else if (action === "enable") {
      const said = `${what} ${is_enabled ? "is not applied" : "is applied"}`;
      this.edit(() => ({ action: "enable", number, is_enabled: !is_enabled }), said);
    } else {
      this.move(number, (own) => own + (action === "up" ? -1 : 1), `moved #${number} ${action}`);
    }
  }

  /** `to`: returns the new position, from the old one and the order of the other patches. */
  private move(number: number, to: (own: number, others: number[]) => number, said: string): void {
    this.edit(() => {
      const order = this.view.model.get("session").patches.map((patch) => patch.number);
      const own = order.indexOf(number);
      const others = order.filter((other) => other !== number);
      const position = to(own, others);
      const isMove = own >= 0 && position !== own && position >= 0 && position <= others.length;
      return isMove ? { action: "move", number, position } : null;
    }, said);
  }

  private watchDrags(): void {
    const { list } = this;
    list.addEventListener("dragstart", (event) => {
      const item = itemOf(event);
      if (!item || !(event.target as Element).closest(".gp-grip")) return;
      this.dragged = Number(item.dataset.number);
      event.dataTransfer?.setData("text/plain", `#${this.dragged}`);
      event.dataTransfer?.setDragImage(item, 8, 8);
    });
    /** Calls `act` with the patch under the pointer and its nearer side; the notebook does not get the event. */
    const on = (name: "dragover" | "drop", act: (item: HTMLElement, side: Side) => void) =>
      list.addEventListener(name, (event) => {
        const item = itemOf(event);
        if (this.dragged === null || !item) return;
        consume(event);
        this.clearDrop();
        const box = item.getBoundingClientRect();
        act(item, event.clientY < box.top + box.height / 2 ? "before" : "after");
      });
    on("dragover", (item, side) => item.setAttribute("data-drop", side));
    on("drop", (item, side) => this.drop(Number(item.dataset.number), side));
    list.addEventListener("dragleave", () => this.clearDrop());
    list.addEventListener("dragend", () => this.endDrag());
  }

  private drop(target: number, side: Side): void {
    const { dragged } = this;
    this.endDrag();
    if (dragged === null || dragged === target) return;
    const to = (_: number, others: number[]) => others.indexOf(target) + Number(side === "after");
    this.move(dragged, to, `moved #${dragged} ${side} #${target}`);
  }

  private clearDrop(): void {
    for (const item of this.list.children) item.removeAttribute("data-drop");
  }

  private endDrag(): void {
    this.dragged = null;
    this.clearDrop();
  }

  private async exportCode(take: (code: string) => Promise<void>): Promise<void> {
    this.box.hidden = true;
    try {
      const { result } = await this.view.kernel.ask("export", { inputs: inputsOf(this.view) });
      await take(result.code);
    } catch (reason) {
      this.view.notices.error(asRequestError(reason).message);
    }
  }

  private async copyCode(code: string): Promise<void> {
    if (await copyText(code, this.element))
      this.showDone(this.copy, "Copied", "the patches are in the clipboard, as Python");
    else this.showCode(code, TO_COPY);
  }

  private async insertCell(code: string, button: HTMLButtonElement): Promise<void> {
    const { model, root } = this.view;
    const place = findCellInserter(model.widget_manager, model.get("about").model_id, root);
    if (place !== null) {
      void focusCell(root, place.insert(code.trimEnd()));
      return this.showDone(button, "Inserted", "a cell with the patches was inserted below");
    }
    const isCopied = await copyText(code, this.element);
    this.showCode(code, `${NO_CELLS}. ${isCopied ? TO_PASTE : TO_COPY}`);
  }

  private showCode(code: string, words: string): void {
    const rows = Math.min(code.split("\n").length + 1, 14);
    const attributes = { class: "gp-field gp-code-field gp-mono", readonly: true, rows, "aria-label": "Python code" };
    const area = element("textarea", attributes);
    area.value = code;
    const close = () => {
      this.box.hidden = true;
      this.copy.focus();
    };
    const button = buttonElement({ onclick: close }, "Close");
    replaceChildren(this.box, element("p", { role: "status" }, words), area, element("div", button));
    this.box.hidden = false;
    area.focus();
    area.select();
    this.view.notices.announce(words);
  }

  /** Shows success on the button for a moment. */
  private showDone(button: HTMLButtonElement, word: string, said: string): void {
    this.view.notices.announce(said);
    const mark = element("span.gp-done", { "aria-hidden": true }, icon("check"), word);
    button.append(mark);
    const timer = setTimeout(() => mark.remove(), 1500);
    this.view.onRemove(() => clearTimeout(timer));
  }

  /** Returns the item of a patch. */
  private item(patch: PatchState, position: number, count: number): HTMLLIElement {
    const what = `#${patch.number} ${patch.kind} ${targetText(patch)}`;
    const button = (action: Action, name: string, picture: keyof typeof ICONS, isOff = false, keys = "") =>
      buttonElement(
        {
          class: "gp-button gp-quiet",
          "aria-label": `${name} ${what}`,
          "aria-disabled": isOff ? "true" : null,
          title: keys ? `${name} (${keys})` : name,
          onclick: (event: MouseEvent) => {
            if (!isOff) this.act(action, patch, event.currentTarget as Element);
          },
        },
        icon(picture),
      );
    const box = element("input", {
      type: "checkbox",
      "aria-label": `Apply ${what}`,
      title: "Apply it",
      checked: patch.is_enabled,
      onchange: () => this.act("enable", patch, box),
    });
    return element(
      "li",
      {
        class: patch.is_enabled ? "gp-patch" : "gp-patch gp-patch-off",
        "data-number": patch.number,
        onkeydown: (event: KeyboardEvent) => this.onKey(event, patch),
      },
      element("span.gp-grip", { draggable: "true", title: "Drag to reorder (Alt+↑, Alt+↓)" }),
      box,
      element("span.gp-patch-number.gp-muted", `#${patch.number}`),
      element("span", { class: `gp-kind gp-kind-${patch.kind}` }, patch.kind),
      element("div.gp-patch-what", this.place(patch), ...facts(patch)),
      element(
        "div.gp-patch-buttons",
        button("up", "Move up", "up", position === 0, "Alt+↑"),
        button("down", "Move down", "down", position === count - 1, "Alt+↓"),
        button("edit", "Edit", "edit"),
        button("remove", "Remove", "remove", false, "Delete"),
      ),
    );
  }

  private place(patch: PatchState): HTMLElement {
    const path = element("span.gp-patch-path", visible(patch.path));
    const slice = patch.slice === null ? null : element("span.gp-patch-slice", `[${patch.slice}]`);
    if (patch.row < 0) return element("span.gp-patch-place.gp-mono", path, slice);
    const onclick = () => this.act("reveal", patch, path);
    return buttonElement({ class: "gp-node-link gp-patch-place", title: "Show it in the tree", onclick }, path, slice);
  }

  private onKey(event: KeyboardEvent, patch: PatchState): void {
    const moves: Record<string, Action> = { ArrowUp: "up", ArrowDown: "down" };
    const action = event.altKey ? moves[event.key] : event.key === "Delete" ? "remove" : undefined;
    if (action === undefined) return;
    this.act(action, patch, event.currentTarget as Element);
    consume(event);
  }
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
