/** One chosen patch, as a line of the list. */

import type { PatchState } from "../kernel/protocol";
import { type AttributeValue, element, type ICONS, icon } from "../page/dom";
import { visible } from "../page/visible";
import { place, restrictions, shapeText } from "./edits";

export type Action = "enable" | "reveal" | "edit" | "up" | "down" | "remove" | "trust";
export type PatchAction = (action: Action, patch: PatchState, anchor: Element) => void;

interface Context {
  readonly count: number;
  readonly act: PatchAction;
}

/** Returns the line; each thing that can have the keyboard's focus has `data-action`. */
export function patchItem(patch: PatchState, position: number, { count, act }: Context): HTMLLIElement {
  const what = `#${patch.number} ${patch.kind} ${place(patch)}`;
  const button = (action: Action, name: string, picture: keyof typeof ICONS, isOff = false, keys = "") =>
    element(
      "button",
      {
        type: "button",
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
    checkbox(patch, what, act),
    element("span", { class: "gp-patch-number" }, `#${patch.number}`),
    element("span", { class: `gp-kind gp-kind-${patch.kind}` }, patch.kind),
    element("div", { class: "gp-patch-what" }, placeButton(patch, act), ...facts(patch), ...trust(patch, act)),
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
    type: "button",
    class: "gp-node-link gp-patch-place",
    "data-action": "reveal",
    title: "Show it in the tree",
    onclick: (event: MouseEvent) => act("reveal", patch, event.currentTarget as Element),
  };
  return element("button", attributes, path, slice);
}

function facts(patch: PatchState): HTMLElement[] {
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

/** What keeps a value from being evaluated, and the button that trusts it. */
function trust(patch: PatchState, act: PatchAction): HTMLElement[] {
  const { number, untrusted } = patch;
  if (!untrusted) return [];
  const file = visible(untrusted);
  const why = `This value is code from ${file}, which you have not trusted: it is not run. Read it first.`;
  const attributes: Record<string, AttributeValue> = {
    type: "button",
    class: "gp-button",
    "data-action": "trust",
    "aria-label": `Trust file ${file}, which #${number} is from`,
    title: "All values of this file are run from now on, as long as the file stays as it is",
    onclick: (event: MouseEvent) => act("trust", patch, event.currentTarget as Element),
  };
  const button = element("button", attributes, "Trust file");
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
