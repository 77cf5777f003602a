/** What all views of a graph have: the kernel, notices, the selection, and the list of chosen patches in one line. */
import { connect } from "../kernel/kernel";
import type { LinkedTraits } from "../kernel/protocol";
import { element, icon, replaceChildren } from "../page/dom";
import { makeNotices } from "../page/notices";
import { describe, tryEdit } from "../patches/edits";
import type { Linked, Model, Part } from "../view";
import { Selection } from "./selection";

/** Connects a view; its notices are a part of it, to be put above it. */
export function link<T extends LinkedTraits>(
  root: HTMLElement,
  model: Model<T>,
  onRemove: (undo: () => void) => void,
): Linked<T> & { notices: Part } {
  const plain = model as unknown as Model<LinkedTraits>;
  const kernel = connect(plain, onRemove);
  return {
    root,
    model,
    kernel,
    notices: makeNotices(kernel, onRemove),
    selection: new Selection(plain, onRemove),
    onRemove,
  };
}

/** The chosen patches as small labels, with buttons to take one away and to undo. */
export function makePatchStrip(view: Linked): Part {
  const strip = element("div", { class: "gp-patch-strip", role: "group", "aria-label": "Patches" });
  const show = () => {
    const { patches, can_undo } = view.model.get("session");
    strip.hidden = patches.length === 0 && !can_undo;
    const labels = patches.map((patch) => {
      const text = `#${patch.number} ${describe(patch)}`;
      const remove = element(
        "button",
        { type: "button", class: "gp-button gp-quiet", "aria-label": `Remove ${text}`, title: "Remove" },
        icon("close"),
      );
      remove.addEventListener("click", () => {
        void tryEdit(view, () => ({ action: "remove", numbers: [patch.number] }), `removed ${text}`);
      });
      return element("span", { class: patch.is_enabled ? "gp-chip" : "gp-chip gp-patch-off" }, text, remove);
    });
    const undo = element("button", { type: "button", class: "gp-button", disabled: !can_undo }, icon("undo"), "Undo");
    undo.addEventListener("click", () => void tryEdit(view, () => ({ action: "undo" }), "undone"));
    replaceChildren(strip, element("span", { class: "gp-muted" }, "Patches"), ...labels, undo);
  };
  view.model.on("change:session", show);
  view.onRemove(() => view.model.off("change:session", show));
  show();
  return { element: strip };
}
