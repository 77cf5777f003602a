/** The patch editor: a form for one patch, which the kernel checks while the user types. */

import { asRequestError } from "../kernel/kernel";
import type { Checked, PatchFields, PatchKind, PatchState, RequestError } from "../kernel/protocol";
import { buttonElement, element, refresh, replaceChildren, setAttributes } from "../page/dom";
import { makeDialog } from "../page/floating";
import { patchedRow, whyUnpatchable } from "../tree/skeleton";
import { follow, type PatchTarget, type View } from "../view";
import { areEqual, describe, describeAll, makeEdit, shapeText } from "./edits";

/** The pause before the kernel is asked. */
export const DEBOUNCE_MS = 150;

const LABELS = {
  kind: "Kind",
  slice: "Slice",
  value: "Value",
  name: "Variable",
  steps: "Steps",
  positions: "Positions",
  position_dim: "Position dimension",
  any_shape: "Any shape",
  allow_empty: "Allow empty",
};
export type FieldName = keyof typeof LABELS;
const HINTS: Partial<Record<FieldName, string>> = {
  steps: "of a generation: prefill, decoding, or numbers as in a slice: 0 or 2, 4 or 1:",
  positions: "in the sequence: 3 or 2, 40 or 1:5; of each row: [3], [5]",
  position_dim: "the dimension that runs along the sequence, if it cannot be inferred",
  any_shape: "also values of other sizes than at capture",
  allow_empty: "the slice may select nothing",
};
const FLAGS: readonly FieldName[] = ["any_shape", "allow_empty"];
const MORE: readonly FieldName[] = ["steps", "positions", "position_dim", ...FLAGS];

export interface FieldError {
  field: string | null;
  message: string;
}

export type PatchEditor = ReturnType<typeof makePatchEditor>;

export function makePatchEditor(view: View) {
  const { kernel, model, notices, skeleton } = view;
  const form = makeForm(model.get("about").patch_kinds, () => onInput());
  const dialog = makeDialog(view, {
    class: "gp-editor",
    height: 320,
    closesOnOutsideClick: false,
    onEscape: () => close(),
  });
  let path = "";
  /** The latest state of the patch that is edited; `null` for a new patch. */
  let edited: PatchState | null = null;
  /** What the kernel said of the fields; `null` until it has answered. */
  let said: Checked | FieldError | null = null;
  let failure = "";
  let timer: ReturnType<typeof setTimeout> | undefined;
  let isApplying = false;
  /** Counts changes of the fields, to ignore replies about earlier ones. */
  let turn = 0;

  const wrong = () => (said !== null && "message" in said ? said : null);
  const title = () => (edited === null ? `Patch ${path}` : `Change patch #${edited.number}: ${path}`);
  const patchOf = (number: number) => model.get("session").patches.find((patch) => patch.number === number) ?? null;
  const reset = () => {
    clearTimeout(timer);
    turn += 1;
    said = null;
    isApplying = false;
  };
  /** Closes the editor and drops the texts. */
  const close = () => {
    reset();
    dialog.close();
  };
  /** Returns why the patch cannot be applied now; `null` if it can. */
  const disabledReason = (): string | null => {
    if (isApplying) return kernel.state === "busy" ? "It is applied when the kernel is free." : "";
    if (kernel.state === "lost") return kernel.lostReason ?? "The kernel has stopped.";
    if (form.localError() !== null) return "Correct the marked field first.";
    return form.missingValue() ?? (wrong() === null ? null : "Correct the error above first.");
  };

  /** The value that a patch would be applied to: recorded shape, shape of the slice, warnings. */
  const preview = element("div.gp-outcome", { role: "status" });
  const failed = element("div.gp-form-failure", { role: "alert", hidden: () => failure === "" }, () => failure);
  const reason = element("span.gp-caption.gp-reason", { id: `${form.id}-reason` }, () => {
    const isWaiting = said === null && kernel.state === "busy";
    const hint = isWaiting ? "The kernel is busy: the patch is checked, and applied, when it is free." : "";
    return disabledReason() ?? hint;
  });
  const apply = element(
    "button",
    {
      type: "submit",
      class: "gp-button gp-primary",
      "aria-describedby": reason.id,
      "aria-disabled": () => (disabledReason() === null ? null : "true"),
    },
    () => (isApplying ? "Applying …" : "Apply"),
  );
  const show = () => {
    // If the kernel is lost, the reason beside Apply is enough.
    const error = form.localError() ?? (kernel.state === "lost" ? null : wrong());
    if (!form.showError(error) && error !== null) failure = error.message;
    // Faded until the next reply, instead of cleared, so that nothing jumps during typing.
    preview.classList.toggle("gp-stale", said === null);
    if (wrong() !== null) replaceChildren(preview);
    else if (said !== null) showPreview(said as Checked);
    for (const part of [failed, reason, apply]) refresh(part);
  };
  const showPreview = ({ shape, sliced, warning, name }: Checked) => {
    // Whether the value is stored in a variable, not patched.
    const what = form.kind().fields.includes("name") ? "kept" : "patched";
    const warned = warning === null ? null : element("div.gp-warning", warning);
    replaceChildren(preview, element("div.gp-shapes", ...shapes(shape, sliced, what)), warned);
    form.suggestName(name);
  };

  const open = (target: PatchTarget, anchor: Element) => {
    reset();
    edited = "number" in target ? patchOf(target.number) : null;
    if ("number" in target && edited === null) {
      notices.error(`There is no patch #${target.number} any more.`);
      return;
    }
    const row = "row" in target ? (patchedRow(skeleton, target.row) ?? target.row) : (edited?.row ?? -1);
    const { component, positions = "" } = "row" in target ? target : {};
    path = edited?.path ?? component ?? skeleton.path(row);
    const unpatchable = edited === null ? whyUnpatchable(skeleton, row) : null;
    if (unpatchable !== null) return showUnpatchable(unpatchable.why, unpatchable.instead, anchor);
    form.lock(false);
    replaceChildren(preview);
    form.write(model.get("about").patch_kinds, edited ?? { positions });
    failure = "";
    dialog.fill(title(), content());
    dialog.open(anchor, title());
    form.focus("kind");
    void check();
  };
  const showUnpatchable = (why: string, instead: number | null, anchor: Element) => {
    const go = () => {
      close();
      if (instead !== null) open({ row: instead }, anchor);
    };
    const other = instead === null ? "" : skeleton.path(instead);
    const button = buttonElement({ class: "gp-button gp-primary", onclick: go }, `Patch ${other}`);
    const more = instead === null ? null : element("div", button);
    dialog.fill(title(), element("div.gp-floating-body", element("p", why), more));
    dialog.open(anchor, title());
    (instead === null ? dialog.element : button).focus({ preventScroll: true });
  };
  const content = () => {
    const onsubmit = (event: Event) => {
      event.preventDefault();
      void submit();
    };
    const onkeydown = (event: KeyboardEvent) => {
      // Browsers submit a form on Enter only in text fields.
      const target = event.target as HTMLInputElement;
      const isChoice = target instanceof HTMLSelectElement || target.type === "checkbox";
      if (event.key === "Enter" && !event.isComposing && isChoice) onsubmit(event);
    };
    const cancel = buttonElement({ onclick: close }, "Cancel");
    const buttons = element("div.gp-line.gp-tight.gp-form-actions", reason, cancel, apply);
    const attributes = { novalidate: true, onsubmit, onkeydown };
    return element("form.gp-floating-body", attributes, form.element, preview, failed, buttons);
  };

  /** Checks the fields after a pause without typing. */
  const onInput = () => {
    failure = "";
    reset();
    timer = setTimeout(() => void check(), DEBOUNCE_MS);
    show();
  };
  const check = async () => {
    reset();
    const current = turn;
    show();
    if (form.localError() !== null) return;
    const payload = { patch: form.read(path), number: edited?.number ?? null };
    const answer = await kernel.ask("check", payload).then(({ result }) => result, asRequestError);
    if (current !== turn) return;
    said = answer;
    show();
  };
  const submit = async () => {
    if (isApplying) return;
    if (disabledReason() !== null) {
      const field = form.localError()?.field ?? (form.missingValue() === null ? wrong()?.field : "value");
      return form.focus(field ?? null);
    }
    reset();
    const patch = form.read(path);
    const number = edited?.number ?? null;
    const current = turn;
    isApplying = true;
    failure = "";
    apply.focus({ preventScroll: true });
    form.lock(true);
    show();
    try {
      await makeEdit(view, () => (number === null ? { action: "add", patch } : { action: "change", number, patch }));
    } catch (error) {
      if (current === turn) onRefused(asRequestError(error));
      else notices.error(asRequestError(error).message);
      return;
    }
    notices.announce(`${number === null ? "added" : `changed #${number} to`} ${describe(patch)}`);
    if (current === turn) close();
  };
  const onRefused = (error: RequestError) => {
    reset();
    form.lock(false);
    if (error.field === "version") {
      const now = describeAll(model.get("session").patches);
      failure = `The patches were changed meanwhile. ${now} Apply again to add yours.`;
      void check();
      return;
    }
    said = error;
    show();
    form.focus(error.field);
  };
  /** The patches have changed elsewhere: the texts stay, and a message describes the change. */
  const onSession = () => {
    if (!dialog.isOpen || edited === null || isApplying) return;
    const before = edited;
    edited = patchOf(before.number);
    if (edited === null) {
      failure = `Patch #${before.number} was removed meanwhile: Apply adds it as a new one.`;
      void check();
      return;
    }
    if (!areEqual(edited, before)) {
      const what = `Patch #${edited.number} was changed meanwhile, to: ${describe(edited)}.`;
      failure = `${what} Apply replaces that with the fields here.`;
    }
    show();
  };
  follow(view, ["session"], onSession);
  follow(view, [kernel], show);
  view.onRemove(reset);
  return { element: dialog.element, open, close };
}

function shapes(shape: number[] | null, sliced: number[] | null, what: string): (string | HTMLElement)[] {
  const code = (sizes: number[]) => element("code", shapeText(sizes));
  if (shape === null) return sliced === null ? [] : [code(sliced), ` ${what}`];
  if (sliced === null) return ["Recorded ", code(shape)];
  if (shapeText(sliced) === shapeText(shape)) return ["Recorded ", code(shape), `, all of it ${what}`];
  return ["Recorded ", code(shape), " → ", code(sliced), ` ${what}`];
}

let forms = 0;

/** The fields, with their errors and hints. A field that the kind does not have is hidden, and keeps its text. */
function makeForm(allKinds: readonly PatchKind[], onInput: () => void) {
  const id = `gp-form-${++forms}`;
  let kinds = allKinds;
  let error: FieldError | null = null;
  let isLocked = false;
  /** The variable that the kernel chooses if none is typed. */
  let suggested: string | null = null;
  const inputs = {} as Record<FieldName, HTMLInputElement | HTMLSelectElement>;

  const kind = (): PatchKind => {
    const found = kinds.find(({ name }) => name === inputs.kind.value);
    if (found === undefined) throw new Error(`the kernel has sent no kind of patch ${inputs.kind.value}`);
    return found;
  };
  const has = (field: string) => field === "kind" || kind().fields.includes(field);
  const errorOf = (name: FieldName) => (error?.field === name && has(name) ? error.message : "");
  const placeholders: Partial<Record<FieldName, () => string | null>> = {
    slice: () => "the whole value, or a part: :, -1, 3:5",
    value: () => kind().value && `e.g. ${kind().value?.example}`,
    name: () => suggested,
  };
  const makeRow = (name: FieldName): HTMLElement => {
    const own = `${id}-${name}`;
    const isFlag = FLAGS.includes(name);
    const isText = name !== "kind" && !isFlag;
    const hint = name === "kind" ? () => kind().summary : (HINTS[name] ?? null);
    const change = () => {
      refresh(root);
      onInput();
    };
    const attributes = {
      id: own,
      "aria-invalid": () => (errorOf(name) === "" ? null : "true"),
      "aria-describedby": () =>
        [errorOf(name) && `${own}-error`, hint && `${own}-hint`].filter(Boolean).join(" ") || null,
      [isText ? "readonly" : "disabled"]: () => isLocked,
      [isText ? "oninput" : "onchange"]: change,
    };
    const text = { type: "text", class: "gp-field gp-code-field gp-mono", placeholder: placeholders[name] };
    const plain = { spellcheck: "false", autocomplete: "off", autocapitalize: "off", autocorrect: "off" };
    const input =
      name === "kind" ? inputs.kind : element("input", isFlag ? { type: "checkbox" } : { ...text, ...plain });
    setAttributes(input, attributes);
    inputs[name] = input;
    return element(
      "div",
      { class: `gp-form-row gp-form-${name}`, hidden: () => !has(name) },
      element("label.gp-muted", { for: own }, LABELS[name]),
      name === "slice" ? element("div.gp-brackets.gp-muted.gp-mono", "[", input, "]") : input,
      hint && element("div.gp-hint.gp-muted", { id: `${own}-hint` }, hint),
      element("div.gp-field-error", { id: `${own}-error`, hidden: () => errorOf(name) === "" }, () => errorOf(name)),
    );
  };
  inputs.kind = element("select.gp-field");
  const setKinds = () =>
    replaceChildren(inputs.kind, ...kinds.map(({ name }) => element("option", { value: name }, name)));
  setKinds();
  const first = (["kind", "slice", "value", "name"] as const).map(makeRow);
  const more = element("details.gp-more", element("summary", "More"), ...MORE.map(makeRow));
  const root = element("div.gp-stack.gp-form", ...first, more);

  return {
    id,
    element: root,
    kind,
    /** Fills the fields, for a new patch of the first kind unless the kind is given. */
    write(all: readonly PatchKind[], patch: Partial<PatchFields>): void {
      kinds = all;
      setKinds();
      const given: Partial<Record<string, unknown>> = { kind: kinds[0]?.name, ...patch };
      for (const name of Object.keys(LABELS) as FieldName[]) {
        if (FLAGS.includes(name)) (inputs[name] as HTMLInputElement).checked = given[name] === true;
        else inputs[name].value = String(given[name] ?? "");
      }
      more.open = MORE.some((name) => (given[name] ?? "") !== "" && given[name] !== false);
      suggested = error = null;
      refresh(root);
    },
    /** Returns the patch for the kernel: only the fields of its kind, with `null` for empty texts. */
    read(path: string): PatchFields {
      const text = (name: FieldName) => (has(name) && inputs[name].value.trim()) || null;
      const flag = (name: FieldName) => (inputs[name] as HTMLInputElement).checked;
      const dimension = inputs.position_dim.value.trim();
      return {
        path,
        kind: kind().name,
        slice: text("slice"),
        value: text("value"),
        name: text("name"),
        steps: text("steps"),
        positions: text("positions"),
        position_dim: dimension === "" ? null : Number(dimension),
        any_shape: flag("any_shape"),
        allow_empty: flag("allow_empty"),
      };
    },
    /** An error that needs no kernel; `null` if there is none. */
    localError(): FieldError | null {
      if (/^\s*([+-]?\d+)?\s*$/.test(inputs.position_dim.value)) return null;
      return { field: "position_dim", message: "a whole number: 1, or -2 counted from the end" };
    },
    /** A prompt for the value if it is missing; `null` if it is not. */
    missingValue(): string | null {
      const { value } = kind();
      if (value === null || inputs.value.value.trim() !== "") return null;
      return `Type ${value.noun}: a variable or a Python expression.`;
    },
    /** Makes the fields read-only while an edit is sent. */
    lock(now: boolean): void {
      isLocked = now;
      refresh(root);
    },
    focus(field: string | null): void {
      if (field === null || !(field in inputs)) return;
      if (MORE.includes(field as FieldName)) more.open = true;
      inputs[field as FieldName].focus({ preventScroll: field === "kind" });
    },
    suggestName(name: string | null): void {
      suggested = name;
      refresh(root);
    },
    /** Shows an error below its field; returns whether the form has that field. */
    showError(now: FieldError | null): boolean {
      error = now;
      refresh(root);
      if (MORE.some((name) => errorOf(name) !== "")) more.open = true;
      return Object.keys(LABELS).some((name) => errorOf(name as FieldName) !== "");
    },
  };
}
