/** The parts that all views of a graph share: the kernel, notices, the selection, and the chosen patches in one line. */

import { connect } from "../kernel/kernel";
import type { Act, Item, JobStatus, LinkedTraits, RunState } from "../kernel/protocol";
import {
  buttonElement,
  copyText,
  element,
  icon,
  iconButton,
  oncePerClick,
  refresh,
  replaceChildren,
  textField,
} from "../page/dom";
import { makeNotices } from "../page/notices";
import { describe, tryEdit } from "../patches/edits";
import { followJob, type JobLine, type JobReply } from "../runs/jobs";
import { follow, type Linked, listen, type Model, type Part } from "../view";
import { Selection, SharedFilter } from "./selection";

/** Creates the context of a view; the caller shows its notices above it. */
export function link<T extends LinkedTraits>(
  root: HTMLElement,
  model: Model<T>,
  onRemove: (undo: () => void) => void,
): Linked<T> & { notices: Part } {
  const plain = model as unknown as Model<LinkedTraits>;
  const kernel = connect(plain, onRemove);
  const notices = makeNotices(kernel, onRemove);
  const selection = new Selection(plain, onRemove);
  // An error goes with its cause: it is about what was selected or chosen then.
  follow({ model: plain, onRemove }, [selection, "session"], () => notices.clear());
  return { root, model, kernel, notices, selection, filter: new SharedFilter(plain, onRemove), onRemove };
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

export function labeled(text: string, select: HTMLSelectElement): HTMLElement {
  select.id = `gp-choice-${labelCount++}`;
  return element("span.gp-pair", element("label", { for: select.id }, text), select);
}

/** Shows warnings of the runs in a list. */
export function showRemarks(list: HTMLElement, remarks: readonly string[]): void {
  replaceChildren(list, ...remarks.map((remark) => element("li", remark)));
  list.hidden = remarks.length === 0;
}

/** The chosen patches as labels, with buttons to remove one and to undo. */
export function makePatchStrip(view: Linked): Part {
  const strip = element("div.gp-line.gp-tight.gp-patch-strip", { role: "group", "aria-label": "Patches" });
  const show = () => {
    const { patches, can_undo } = view.model.get("session");
    const isLost = view.kernel.state === "lost";
    strip.hidden = patches.length === 0 && !can_undo;
    const labels = patches.map((patch) => {
      const text = `#${patch.number} ${describe(patch)}`;
      const onclick = () => tryEdit(view, () => ({ action: "remove", numbers: [patch.number] }), `removed ${text}`);
      const remove = iconButton("close", `Remove ${text}`, { title: "Remove", hidden: isLost, onclick });
      return element("span", { class: `gp-chip gp-mono ${patch.is_enabled ? "" : "gp-patch-off"}` }, text, remove);
    });
    const onclick = () => tryEdit(view, () => ({ action: "undo" }), "undone");
    const undo = buttonElement({ disabled: !can_undo, hidden: isLost, onclick }, icon("undo"), "Undo");
    replaceChildren(strip, element("span.gp-muted", "Patches"), ...labels, undo);
  };
  follow(view, ["session", view.kernel], show);
  show();
  return { element: strip };
}

// -- Requests new numbers from the kernel when the patches have changed, and shows the status of the request -------------

/** The minimum time between two requests: a burst of edits causes two runs. */
const MIN_INTERVAL_MS = 80;

interface Numbers {
  /** The version of the patches that the numbers are for. */
  version(): number;
  /** Requests numbers for the current patches; called again until they are computed. */
  ask(): Promise<JobReply<JobStatus>>;
}

/** `shown`: the element of the numbers, which are faint if they cannot be computed. */
export function makeUpdates<T extends LinkedTraits>(
  view: Linked<T>,
  shown: HTMLElement,
  { version, ask }: Numbers,
): JobLine {
  const showState = (state: RunState) => shown.classList.toggle("gp-dimmed", state === "failed");
  const job = followJob(view, ask, showState, "Computing …");
  let timer: ReturnType<typeof setTimeout> | undefined;
  let last = Number.NEGATIVE_INFINITY;
  const askNow = () => {
    last = performance.now();
    job.follow(ask());
  };
  const check = () => {
    clearTimeout(timer);
    if (view.model.get("session").version === version()) return;
    if (view.kernel.state === "lost") return job.say("The patches have changed since these numbers were computed.");
    timer = setTimeout(askNow, Math.max(0, last + MIN_INTERVAL_MS - performance.now()));
  };
  follow(view, ["session"], check);
  view.onRemove(() => clearTimeout(timer));
  check();
  return job;
}

// -- The actions on the selection: each click adds patches to the chosen patches of the graph ----------------------------

interface SelectionAction {
  act: Act;
  name: string;
  title: string;
  /** The value that the user must type, with an example. */
  field?: { label: string; example: string };
}

const ACTIONS: readonly SelectionAction[] = [
  { act: "zero", name: "Zero", title: "Set what is selected to zero" },
  { act: "mean", name: "Mean", title: "Replace it by its mean over the batch and the positions" },
  {
    act: "other_run",
    name: "Replace …",
    title: "Replace it by its value in another run",
    field: { label: "Inputs of the other run, as Python", example: "corrupted_ids" },
  },
  {
    act: "steer",
    name: "Steer …",
    title: "Add a vector to it",
    field: { label: "What to add, as Python", example: "4.0 * direction" },
  },
  { act: "probe", name: "Probe", title: "Put its value into a variable at the next run" },
];

const NO_KERNEL = "The kernel is not running: patches need it.";

export function makeActions(view: Linked): Part {
  const form = element("form.gp-line.gp-tight.gp-action-form", { hidden: true });
  const items = () => view.selection.items.filter((item) => pathOf(item) !== null);
  const text = () => items().map(pathOf).join(", ");
  const isLost = () => view.kernel.state === "lost";
  const isEmpty = () => items().length === 0;
  const act = (act: Act, value: string | null) => {
    const chosen = [...items()];
    void tryEdit(view, () => ({ action: "act", act, items: chosen, value, steps: null }), `${act}: ${text()}`);
  };
  const ask = (name: Act, { label, example }: { label: string; example: string }, button: HTMLElement) => {
    const input = textField(label, { placeholder: example });
    const close = () => {
      form.hidden = true;
      button.focus();
    };
    const apply = element("button", { type: "submit", class: "gp-button gp-primary" }, "Apply");
    const cancel = buttonElement({ onclick: close }, "Cancel");
    replaceChildren(form, element("span.gp-muted", `${label}:`), input, apply, cancel);
    form.onsubmit = (event) => {
      event.preventDefault();
      if (input.value.trim() === "") return input.focus();
      act(name, input.value);
      close();
    };
    form.onkeydown = ({ key }) => {
      if (key === "Escape") close(); // what returns `false` would keep all other keys from the field
    };
    form.hidden = false;
    input.focus();
  };
  const buttons = ACTIONS.map(({ act: name, name: label, title, field }) => {
    const take = () => (field === undefined ? act(name, null) : ask(name, field, button));
    const disabled = () => isEmpty() || isLost();
    const computed = { disabled, title: () => (isLost() ? NO_KERNEL : title) };
    const button = buttonElement({ ...computed, onclick: oncePerClick(take) }, label);
    return button;
  });
  const copyPath = async () => {
    const isCopied = await copyText(text(), view.root);
    view.notices.announce(isCopied ? `copied ${text()}` : "the browser does not allow copying");
  };
  const copy = buttonElement({ disabled: isEmpty, onclick: copyPath }, icon("copy"), "Copy path");
  const bar = element(
    "div.gp-line.gp-actions",
    { role: "toolbar", "aria-label": "Selection" },
    element("span.gp-selected-text.gp-mono.gp-muted", () => text() || "Nothing is selected."),
    element("div.gp-line.gp-tight.gp-action-buttons", ...buttons, copy),
  );
  follow(view, [view.selection, view.kernel], () => {
    refresh(bar);
    if (isEmpty()) form.hidden = true;
  });
  return { element: element("div.gp-action-bar", bar, form) };
}

/**
 * The path of an item with its slice, which *Copy path* copies. `null`: the item has no value.
 * The position is the dimension after the batch, also for a head.
 */
function pathOf({ name, position, key }: Item): string | null {
  if (name === null || (position === null && key === null)) return name;
  return `${name}[:, ${position ?? ":"}${key === null ? "" : `, ${key}`}]`;
}
