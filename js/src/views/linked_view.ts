/** The parts that all views of a graph share: the kernel, notices, the selection, and the chosen patches in one line. */
import { connect } from "../kernel/kernel";
import type { LinkedTraits } from "../kernel/protocol";
import { buttonElement, element, icon, replaceChildren } from "../page/dom";
import { makeNotices } from "../page/notices";
import { formatPercent } from "../page/numbers";
import { describe, tryEdit } from "../patches/edits";
import { type Linked, listen, type Model, type Part } from "../view";
import { Selection } from "./selection";
import { SharedFilter } from "./shared_filter";

/** Creates the context of a view; the caller shows its notices above it. */
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
    filter: new SharedFilter(plain, onRemove),
    onRemove,
  };
}

/** Adds a part to the page, on whose width the size of its figures depends. */
type PlacePart = (part: Part) => void;

/** Adds a view to the page; resolves when it is drawn. */
export type MakeView<T extends LinkedTraits> = (
  view: Linked<T>,
  place: PlacePart,
  onError: (error: unknown) => void,
) => Promise<void>;

/** Reads and shows these traits, now and after each change; of several changes, only the last is shown. */
export async function showTraits<T extends LinkedTraits, Numbers>(
  view: Linked<T>,
  traits: readonly (keyof T & string)[],
  read: () => Promise<Numbers>,
  show: (numbers: Numbers) => void,
  onError: (error: unknown) => void,
): Promise<void> {
  let last = 0;
  const load = async () => {
    last += 1;
    const current = last;
    await Promise.resolve(); // the traits of one message change one after the other
    if (current !== last) return;
    const numbers = await read();
    if (current === last) show(numbers);
  };
  const again = () => void load().catch(onError);
  for (const trait of traits) listen(view, `change:${trait}`, again);
  await load();
}

let labelCount = 0;

/** A select element with its label. */
export function labeled(text: string, select: HTMLSelectElement): HTMLElement {
  select.id = `gp-choice-${labelCount++}`;
  return element("span", { class: "gp-choice" }, element("label", { for: select.id }, text), select);
}

/** A table cell with a probability, as a number with a bar behind it. */
export function probabilityCell(probability: number): HTMLElement {
  const bar = element("span", { class: "gp-probability-bar", "aria-hidden": "true" });
  bar.style.width = `${Math.round(100 * probability)}%`;
  return element("td", { class: "gp-number gp-probability" }, bar, formatPercent(probability));
}

/** Warnings of the runs. */
export class Remarks implements Part {
  readonly element = element("ul", { class: "gp-remarks gp-note", hidden: true });

  show(remarks: readonly string[]): void {
    replaceChildren(this.element, ...remarks.map((remark) => element("li", {}, remark)));
    this.element.hidden = remarks.length === 0;
  }
}

/** The chosen patches as labels, with buttons to remove one and to undo. */
export function makePatchStrip(view: Linked): Part {
  const strip = element("div", { class: "gp-line gp-patch-strip", role: "group", "aria-label": "Patches" });
  const show = () => {
    const { patches, can_undo } = view.model.get("session");
    const isLost = view.kernel.state === "lost";
    strip.hidden = patches.length === 0 && !can_undo;
    const labels = patches.map((patch) => {
      const text = `#${patch.number} ${describe(patch)}`;
      const remove = buttonElement(
        { class: "gp-button gp-quiet", "aria-label": `Remove ${text}`, title: "Remove", hidden: isLost },
        icon("close"),
      );
      remove.addEventListener("click", () => {
        void tryEdit(view, () => ({ action: "remove", numbers: [patch.number] }), `removed ${text}`);
      });
      return element("span", { class: patch.is_enabled ? "gp-chip" : "gp-chip gp-patch-off" }, text, remove);
    });
    const isOff = { disabled: !can_undo, hidden: isLost };
    const undo = buttonElement({ ...isOff }, icon("undo"), "Undo");
    undo.addEventListener("click", () => void tryEdit(view, () => ({ action: "undo" }), "undone"));
    replaceChildren(strip, element("span", { class: "gp-muted" }, "Patches"), ...labels, undo);
  };
  listen(view, "change:session", show);
  view.onRemove(view.kernel.onState(show));
  show();
  return { element: strip };
}
