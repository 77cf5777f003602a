/** The chosen patches, in the order in which they are applied, and their export as Python. */

import { asRequestError } from "../kernel/kernel";
import type { Edit, PatchState, SessionState } from "../kernel/protocol";
import {
  type AttributeValue,
  buttonElement,
  copyText,
  element,
  type ICONS,
  icon,
  replaceChildren,
  setAttribute,
} from "../page/dom";
import { focusedElement } from "../page/floating";
import { visible } from "../page/visible";
import { inputsOf } from "../runs/inputs";
import { listen, type Part, type View } from "../view";
import { describe, restrictions, shapeText, targetText, tryEdit } from "./edits";
import { findCellInserter } from "./new_cell";

const EMPTY = "No patches yet. Choose a node in the tree and press +, or its + button, to patch it.";
const NO_CELLS =
  "This notebook editor does not let widgets insert cells. The code is in the clipboard: paste it into a new cell.";
const TO_COPY = "The browser does not allow copying: copy the selected text by hand.";

export class PatchList implements Part {
  readonly element: HTMLElement;
  private readonly list = element("ol", { class: "gp-patches" });
  private readonly empty = element("p", { class: "gp-muted gp-patches-empty" }, EMPTY);
  private readonly count = element("span", { class: "gp-count" });
  private readonly undo = this.button("Undo", "undo", () => this.edit(() => ({ action: "undo" }), "undone"));
  private readonly redo = this.button("Redo", "redo", () => this.edit(() => ({ action: "redo" }), "redone"));
  private readonly clear = this.button("Clear", "remove", () => this.edit(() => ({ action: "clear" }), "all removed"));
  private readonly copy = this.button("Copy as Python", "copy", () => this.exportCode((code) => this.copyCode(code)));
  private readonly insert = this.button("Insert cell", "insert", () =>
    this.exportCode((code) => this.insertCell(code)),
  );
  private readonly box = element("div", { class: "gp-code-box", hidden: true });

  constructor(private readonly view: View) {
    const group = (name: string, ...buttons: HTMLElement[]) =>
      element("div", { class: "gp-button-group", role: "group", "aria-label": name }, ...buttons);
    this.element = element(
      "section",
      { class: "gp-panel gp-patch-list", role: "region", "aria-label": "Patches" },
      element(
        "div",
        { class: "gp-panel-header" },
        element("h2", { class: "gp-panel-title" }, "Patches", this.count),
        group("Changes of the patches", this.undo, this.redo, this.clear),
        group("Copy the patches as code", this.copy, this.insert),
      ),
      this.empty,
      this.list,
      this.box,
    );
    const show = () => this.show(view.model.get("session"));
    listen(view, "change:session", show);
    this.watchDrags();
    show();
  }

  private show(session: SessionState): void {
    const { patches } = session;
    this.endDrag();
    const focus = this.focusKey();
    const context = { count: patches.length, act: this.act };
    replaceChildren(this.list, ...patches.map((patch, position) => patchItem(patch, position, context)));
    this.list.hidden = patches.length === 0;
    this.empty.hidden = patches.length > 0;
    const enabled = patches.filter((patch) => patch.is_enabled).length;
    this.count.textContent =
      enabled === patches.length ? `${enabled || ""}` : `${enabled} of ${patches.length} applied`;
    setEnabled(this.undo, session.can_undo);
    setEnabled(this.redo, session.can_redo);
    setEnabled(this.clear, patches.length > 0);
    for (const button of [this.copy, this.insert]) setEnabled(button, enabled > 0);
    if (focus !== null) this.restoreFocus(focus, patches);
  }

  // -- focus, which would be lost when a new session replaces the items ----------------------------------------------

  private focusKey(): { number: number; action: string; position: number } | null {
    const focused = focusedElement(this.element);
    if (!(focused instanceof HTMLElement) || !this.list.contains(focused)) return null;
    const item = focused.closest<HTMLElement>("[data-number]");
    const position = item === null ? 0 : [...this.list.children].indexOf(item);
    return { number: Number(item?.dataset.number), action: focused.dataset.action ?? "", position };
  }

  private restoreFocus(focus: { number: number; action: string; position: number }, patches: PatchState[]): void {
    const isThere = patches.some(({ number }) => number === focus.number);
    const next = isThere ? focus.number : patches[Math.min(focus.position, patches.length - 1)]?.number;
    if (next === undefined) this.undo.focus();
    else {
      const item = this.list.querySelector(`[data-number="${next}"]`);
      const same = item?.querySelector<HTMLElement>(`[data-action="${focus.action}"]`);
      (same ?? item?.querySelector<HTMLElement>("[data-action]"))?.focus();
    }
  }

  // -- edits ---------------------------------------------------------------------------------------------------------

  private edit(edit: () => Edit | null, said: string): void {
    void tryEdit(this.view, edit, said).then((isMade) => {
      // Resets the checkbox of a refused edit.
      if (!isMade) this.show(this.view.model.get("session"));
    });
  }

  private readonly act: PatchAction = (action, patch, anchor) => {
    const { number } = patch;
    const what = `#${number} ${describe(patch)}`;
    if (action === "reveal") {
      this.view.reveal(patch.row);
      this.view.focusTree();
    } else if (action === "edit") {
      this.view.editPatch({ number }, anchor);
    } else if (action === "remove") {
      this.edit(() => ({ action: "remove", numbers: [number] }), `removed ${what}`);
    } else if (action === "trust") {
      this.edit(() => ({ action: "trust", number }), `trusted ${patch.untrusted}`);
    } else if (action === "enable") {
      const is_enabled = !patch.is_enabled;
      this.edit(
        () => ({ action: "enable", number, is_enabled }),
        is_enabled ? `${what} is applied` : `${what} is not applied`,
      );
    } else {
      const by = action === "up" ? -1 : 1;
      this.move(number, (own) => own + by, `moved #${number} ${action}`);
    }
  };

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

  // -- dragging ------------------------------------------------------------------------------------------------------

  private dragged: number | null = null;

  private watchDrags(): void {
    const { list } = this;
    list.addEventListener("dragstart", (event) => {
      const item = itemOf(event);
      if (!item || !(event.target as Element).closest(".gp-grip")) return;
      this.dragged = Number(item.dataset.number);
      event.dataTransfer?.setData("text/plain", `#${this.dragged}`);
      event.dataTransfer?.setDragImage(item, 8, 8);
    });
    list.addEventListener("dragover", (event) =>
      this.onDrag(event, (item, side) => item.setAttribute("data-drop", side)),
    );
    list.addEventListener("drop", (event) =>
      this.onDrag(event, (item, side) => this.drop(Number(item.dataset.number), side)),
    );
    list.addEventListener("dragleave", () => this.clearDrop());
    list.addEventListener("dragend", () => this.endDrag());
  }

  /** Calls `act` with the patch under the pointer and its nearer side; the notebook does not get the event. */
  private onDrag(event: DragEvent, act: (item: HTMLElement, side: "before" | "after") => void): void {
    const item = itemOf(event);
    if (this.dragged === null || !item) return;
    event.preventDefault();
    event.stopPropagation();
    this.clearDrop();
    const box = item.getBoundingClientRect();
    act(item, event.clientY < box.top + box.height / 2 ? "before" : "after");
  }

  private drop(target: number, side: "before" | "after"): void {
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

  // -- as Python -----------------------------------------------------------------------------------------------------

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

  private async insertCell(code: string): Promise<void> {
    const { model, root } = this.view;
    const place = findCellInserter(model.widget_manager, model.get("about").model_id, root);
    if (place !== null) {
      place.insert(code.trimEnd());
      this.showDone(this.insert, "Inserted", "a cell with the patches was inserted below");
      return;
    }
    const isCopied = await copyText(code, this.element);
    this.showCode(code, isCopied ? NO_CELLS : `${NO_CELLS.split(":")[0]}. ${TO_COPY}`);
  }

  private showCode(code: string, words: string): void {
    const lines = Math.min(code.split("\n").length + 1, 14);
    const area = element("textarea", {
      class: "gp-field gp-code-field",
      readonly: true,
      rows: lines,
      "aria-label": "Python code",
    });
    area.value = code;
    const close = () => {
      this.box.hidden = true;
      this.copy.focus();
    };
    const button = buttonElement({ onclick: close }, "Close");
    replaceChildren(this.box, element("p", { role: "status" }, words), area, element("div", {}, button));
    this.box.hidden = false;
    area.focus();
    area.select();
    this.view.notices.announce(words);
  }

  /** Shows success on the button for a moment. */
  private showDone(button: HTMLButtonElement, word: string, said: string): void {
    this.view.notices.announce(said);
    const mark = element("span", { class: "gp-done", "aria-hidden": true }, icon("check"), word);
    button.append(mark);
    const timer = setTimeout(() => mark.remove(), 1500);
    this.view.onRemove(() => clearTimeout(timer));
  }

  private button(name: string, picture: keyof typeof ICONS, onclick: () => unknown): HTMLButtonElement {
    const button = buttonElement({}, icon(picture), name);
    button.addEventListener("click", () => {
      if (button.getAttribute("aria-disabled") !== "true") onclick();
    });
    return button;
  }
}

function itemOf(event: Event): HTMLElement | null {
  return (event.target as Element).closest<HTMLElement>("[data-number]");
}

/** Uses `aria-disabled`: a button with `disabled` would lose the focus. */
function setEnabled(button: HTMLButtonElement, isEnabled: boolean): void {
  setAttribute(button, "aria-disabled", isEnabled ? null : "true");
}

type Action = "enable" | "reveal" | "edit" | "up" | "down" | "remove" | "trust";
type PatchAction = (action: Action, patch: PatchState, anchor: Element) => void;

interface ItemContext {
  readonly count: number;
  readonly act: PatchAction;
}

/** Returns the item of a patch; each of its controls has `data-action`. */
function patchItem(patch: PatchState, position: number, { count, act }: ItemContext): HTMLLIElement {
  const what = `#${patch.number} ${patch.kind} ${targetText(patch)}`;
  const button = (action: Action, name: string, picture: keyof typeof ICONS, isOff = false, keys = "") =>
    buttonElement(
      {
        class: "gp-button gp-quiet",
        "data-action": action,
        "aria-label": `${name} ${what}`,
        "aria-disabled": isOff ? "true" : null,
        title: keys ? `${name} (${keys})` : name,
        onclick: (event: MouseEvent) => {
          if (!isOff) act(action, patch, event.currentTarget as Element);
        },
      },
      icon(picture),
    );
  const item = element(
    "li",
    { class: patch.is_enabled ? "gp-patch" : "gp-patch gp-patch-off", "data-number": patch.number },
    element("span", { class: "gp-grip", draggable: "true", title: "Drag to reorder (Alt+↑, Alt+↓)" }),
    checkbox(patch, what, act),
    element("span", { class: "gp-patch-number" }, `#${patch.number}`),
    element("span", { class: `gp-kind gp-kind-${patch.kind}` }, patch.kind),
    element(
      "div",
      { class: "gp-patch-what" },
      placeButton(patch, act),
      ...describeParts(patch),
      ...trustNotice(patch, act),
    ),
    element(
      "div",
      { class: "gp-patch-buttons" },
      button("up", "Move up", "up", position === 0, "Alt+↑"),
      button("down", "Move down", "down", position === count - 1, "Alt+↓"),
      button("edit", "Edit", "edit"),
      button("remove", "Remove", "remove", false, "Delete"),
    ),
  );
  item.addEventListener("keydown", (event) => onKey(event, patch, act));
  return item;
}

function checkbox(patch: PatchState, what: string, act: PatchAction): HTMLElement {
  const box = element("input", {
    type: "checkbox",
    "data-action": "enable",
    "aria-label": `Apply ${what}`,
    title: "Apply it",
  });
  box.checked = patch.is_enabled;
  box.addEventListener("change", () => act("enable", patch, box));
  return box;
}

function placeButton(patch: PatchState, act: PatchAction): HTMLElement {
  const path = element("span", { class: "gp-patch-path" }, visible(patch.path));
  const slice = patch.slice === null ? null : element("span", { class: "gp-patch-slice" }, `[${patch.slice}]`);
  if (patch.row < 0) return element("span", { class: "gp-patch-place" }, path, slice);
  const attributes: Record<string, AttributeValue> = {
    class: "gp-node-link gp-patch-place",
    "data-action": "reveal",
    title: "Show it in the tree",
    onclick: (event: MouseEvent) => act("reveal", patch, event.currentTarget as Element),
  };
  return buttonElement(attributes, path, slice);
}

function describeParts(patch: PatchState): HTMLElement[] {
  const fact = (name: string, text: string) => element("span", { class: `gp-patch-fact gp-patch-${name}` }, text);
  const found: HTMLElement[] = [];
  if (patch.value !== null) found.push(fact("value", visible(patch.value)));
  if (patch.name !== null) found.push(fact("name", `→ ${patch.name}`));
  const shape = patch.sliced ?? patch.shape;
  if (shape !== null) found.push(fact("shape", shapeText(shape)));
  for (const option of restrictions(patch)) found.push(fact("option", option));
  if (patch.row < 0) found.push(fact("gone", "not in the graph any more"));
  if (patch.warning !== null) found.push(element("span", { class: "gp-warning" }, icon("warning"), patch.warning));
  return found;
}

/** A notice that a value is not evaluated, with a button that trusts its file. */
function trustNotice(patch: PatchState, act: PatchAction): HTMLElement[] {
  const { number, untrusted } = patch;
  if (!untrusted) return [];
  const file = visible(untrusted);
  const why = `This value is code from ${file}, which you have not trusted: it is not run. Read it first.`;
  const attributes: Record<string, AttributeValue> = {
    "data-action": "trust",
    "aria-label": `Trust file ${file}, which #${number} is from`,
    title: "Run the code of all values from this file, as long as the file does not change",
    onclick: (event: MouseEvent) => act("trust", patch, event.currentTarget as Element),
  };
  const button = buttonElement(attributes, "Trust file");
  return [element("div", { class: "gp-warning" }, icon("warning"), element("span", {}, why), button)];
}

function onKey(event: KeyboardEvent, patch: PatchState, act: PatchAction): void {
  const anchor = event.currentTarget as Element;
  const isArrow = event.key === "ArrowUp" || event.key === "ArrowDown";
  if (event.altKey && isArrow) act(event.key === "ArrowUp" ? "up" : "down", patch, anchor);
  else if (event.key === "Delete") act("remove", patch, anchor);
  else return;
  event.preventDefault();
  event.stopPropagation();
}
