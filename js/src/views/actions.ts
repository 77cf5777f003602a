/** The actions on the selection: each click adds patches to the chosen patches of the graph. */
import type { Act, Item } from "../kernel/protocol";
import { buttonElement, copyText, element, type ICONS, icon, replaceChildren } from "../page/dom";
import { tryEdit } from "../patches/edits";
import type { Linked, Part } from "../view";

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
  const form = element("form", { class: "gp-line gp-action-form", hidden: true });
  const buttons = ACTIONS.map((choice) => {
    const button = buttonElement({ title: choice.title }, choice.name);
    button.addEventListener("click", () => {
      if (choice.field === undefined) act(choice.act, null);
      else ask(choice, button);
    });
    return button;
  });
  const copy = textButton("copy", "Copy path");
  const what = element("span", { class: "gp-selected-text gp-muted" });
  const items = () => view.selection.items.filter((item) => pathOf(item) !== null);
  const act = (act: Act, value: string | null) => {
    const chosen = [...items()];
    void tryEdit(view, () => ({ action: "act", act, items: chosen, value, steps: null }), `${act}: ${text()}`);
  };
  const ask = ({ act: name, field }: SelectionAction, button: HTMLElement) => {
    const input = element("input", {
      class: "gp-field",
      type: "text",
      "aria-label": field?.label,
      placeholder: field?.example,
      spellcheck: "false",
    });
    const close = () => {
      form.hidden = true;
      button.focus();
    };
    const apply = element("button", { type: "submit", class: "gp-button gp-primary" }, "Apply");
    const cancel = buttonElement({ onclick: close }, "Cancel");
    replaceChildren(form, element("span", { class: "gp-muted" }, `${field?.label}:`), input, apply, cancel);
    form.onsubmit = (event) => {
      event.preventDefault();
      if (input.value.trim() === "") return input.focus();
      act(name, input.value);
      close();
    };
    form.onkeydown = (event) => {
      if (event.key === "Escape") close();
    };
    form.hidden = false;
    input.focus();
  };
  const text = () => items().map(pathOf).join(", ");
  copy.addEventListener("click", async () => {
    const isCopied = await copyText(text(), view.root);
    view.notices.announce(isCopied ? `copied ${text()}` : "the browser does not allow copying");
  });
  const show = () => {
    const isEmpty = items().length === 0;
    const isLost = view.kernel.state === "lost";
    for (const [place, button] of buttons.entries()) {
      button.disabled = isEmpty || isLost;
      button.title = isLost ? NO_KERNEL : (ACTIONS[place]?.title ?? "");
    }
    copy.disabled = isEmpty;
    if (isEmpty) form.hidden = true;
    what.textContent = isEmpty ? "Nothing is selected." : text();
  };
  view.onRemove(view.selection.onChange(show));
  view.onRemove(view.kernel.onState(show));
  show();
  const bar = element(
    "div",
    { class: "gp-line gp-actions", role: "toolbar", "aria-label": "Selection" },
    what,
    element("div", { class: "gp-line gp-action-buttons" }, ...buttons, copy),
  );
  return { element: element("div", { class: "gp-action-bar" }, bar, form) };
}

/**
 * The path of an item with its slice, which *Copy path* copies. `null`: the item has no value.
 * The position is the dimension after the batch, also for a head.
 */
function pathOf({ name, position, key }: Item): string | null {
  if (name === null || (position === null && key === null)) return name;
  return `${name}[:, ${position ?? ":"}${key === null ? "" : `, ${key}`}]`;
}

function textButton(picture: keyof typeof ICONS, name: string): HTMLButtonElement {
  return buttonElement({}, icon(picture), name);
}
