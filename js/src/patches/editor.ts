/** The patch editor: a form for one patch, which the kernel checks while the user types. */

import { asRequestError } from "../kernel/kernel";
import type { Checked, PatchFields, PatchKind, PatchState, RequestError } from "../kernel/protocol";
import { buttonElement, element, replaceChildren, setAttribute } from "../page/dom";
import { Dialog } from "../page/floating";
import { patchedRow, whyUnpatchable } from "../tree/skeleton";
import { listen, type Part, type PatchTarget, type View } from "../view";
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

let editors = 0;

export class PatchEditor implements Part {
  readonly element: HTMLElement;
  private readonly dialog: Dialog;
  private readonly form: PatchForm;
  /** The value that a patch would be applied to: recorded shape, shape of the slice, warnings. */
  private readonly preview = element("div.gp-outcome", { role: "status" });
  private readonly failure = element("div.gp-form-failure", { role: "alert" });
  private readonly reason = element("span.gp-caption.gp-reason");
  private readonly apply = element("button", { type: "submit", class: "gp-button gp-primary" }, "Apply");
  private path = "";
  private row = -1;
  /** The latest state of the patch that is edited; `null` for a new patch. */
  private edited: PatchState | null = null;
  /** What the kernel said of the fields; `null` until it has answered. */
  private said: Checked | FieldError | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private isApplying = false;
  /** Counts changes of the fields, to ignore replies about earlier ones. */
  private turn = 0;

  constructor(private readonly view: View) {
    this.form = new PatchForm(++editors, () => this.onInput());
    this.dialog = new Dialog(view, {
      class: "gp-editor",
      height: 320,
      closesOnOutsideClick: false,
      onEscape: () => this.close(),
    });
    this.element = this.dialog.element;
    listen(view, "change:session", () => this.onSession());
    this.form.write(view.model.get("about").patch_kinds, {});
    view.onRemove(view.kernel.onChange(() => this.show()));
    view.onRemove(() => this.reset());
    this.reason.id = `gp-editor-${editors}-reason`;
    setAttribute(this.apply, "aria-describedby", this.reason.id);
  }

  open(target: PatchTarget, anchor: Element): void {
    this.reset();
    const chosen = "number" in target ? this.patch(target.number) : null;
    if ("number" in target && chosen === null) {
      this.view.notices.error(`There is no patch #${target.number} any more.`);
      return;
    }
    this.edited = chosen;
    this.row = "row" in target ? (patchedRow(this.view.skeleton, target.row) ?? target.row) : (chosen?.row ?? -1);
    const { component, positions = "" } = "row" in target ? target : {};
    this.path = chosen?.path ?? component ?? this.view.skeleton.path(this.row);
    const unpatchable = chosen === null ? whyUnpatchable(this.view.skeleton, this.row) : null;
    if (unpatchable !== null) {
      this.showUnpatchable(unpatchable.why, unpatchable.instead, anchor);
      return;
    }
    this.form.lock(false);
    replaceChildren(this.preview);
    this.form.write(this.view.model.get("about").patch_kinds, chosen ?? { positions });
    this.failure.textContent = "";
    this.dialog.fill(this.title(), this.content());
    this.dialog.open(anchor, this.title());
    this.form.focus("kind");
    void this.check();
  }

  /** Closes the editor and drops the texts. */
  close(): void {
    this.reset();
    this.dialog.close();
  }

  private reset(): void {
    clearTimeout(this.timer);
    this.turn += 1;
    this.said = null;
    this.isApplying = false;
  }

  private get wrong(): FieldError | null {
    return this.said !== null && "message" in this.said ? this.said : null;
  }

  private title(): string {
    return this.edited === null ? `Patch ${this.path}` : `Change patch #${this.edited.number}: ${this.path}`;
  }

  private patch(number: number): PatchState | null {
    return this.view.model.get("session").patches.find((patch) => patch.number === number) ?? null;
  }

  private showUnpatchable(why: string, instead: number | null, anchor: Element): void {
    const go = () => {
      this.close();
      if (instead !== null) this.open({ row: instead }, anchor);
    };
    const other = instead === null ? "" : this.view.skeleton.path(instead);
    const button = buttonElement({ class: "gp-button gp-primary", onclick: go }, `Patch ${other}`);
    const more = instead === null ? null : element("div", button);
    this.dialog.fill(this.title(), element("div.gp-floating-body", element("p", why), more));
    this.dialog.open(anchor, this.title());
    (instead === null ? this.element : button).focus({ preventScroll: true });
  }

  private content(): HTMLElement {
    const cancel = buttonElement({ onclick: () => this.close() }, "Cancel");
    const submit = (event: Event) => {
      event.preventDefault();
      void this.submit();
    };
    const onkeydown = (event: KeyboardEvent) => {
      // Browsers submit a form on Enter only in text fields.
      const target = event.target as HTMLInputElement;
      const isChoice = target instanceof HTMLSelectElement || target.type === "checkbox";
      if (event.key === "Enter" && !event.isComposing && isChoice) submit(event);
    };
    return element(
      "form.gp-floating-body",
      { novalidate: true, onsubmit: submit, onkeydown },
      this.form.element,
      this.preview,
      this.failure,
      element("div.gp-line.gp-tight.gp-form-actions", this.reason, cancel, this.apply),
    );
  }

  private show(): void {
    const { form, said, view, wrong } = this;
    // If the kernel is lost, the reason beside Apply is enough.
    const error = form.localError() ?? (view.kernel.state === "lost" ? null : wrong);
    if (!form.showError(error) && error !== null) this.failure.textContent = error.message;
    this.failure.hidden = this.failure.textContent === "";
    // Faded until the next reply, instead of cleared, so that nothing jumps during typing.
    this.preview.classList.toggle("gp-stale", said === null);
    if (wrong !== null) replaceChildren(this.preview);
    else if (said !== null) this.showPreview(said as Checked);
    const reason = this.disabledReason();
    const isWaiting = said === null && view.kernel.state === "busy";
    const hint = isWaiting ? "The kernel is busy: the patch is checked, and applied, when it is free." : "";
    this.reason.textContent = reason ?? hint;
    setAttribute(this.apply, "aria-disabled", reason === null ? null : "true");
    this.apply.textContent = this.isApplying ? "Applying …" : "Apply";
  }

  private showPreview({ shape, sliced, warning, name }: Checked): void {
    // Whether the value is stored in a variable, not patched.
    const what = this.form.kind.fields.includes("name") ? "kept" : "patched";
    const warned = warning === null ? null : element("div.gp-warning", warning);
    replaceChildren(this.preview, element("div.gp-shapes", ...shapes(shape, sliced, what)), warned);
    this.form.suggestName(name);
  }

  /** Returns why the patch cannot be applied now; `null` if it can. */
  private disabledReason(): string | null {
    const { kernel } = this.view;
    if (this.isApplying) return kernel.state === "busy" ? "It is applied when the kernel is free." : "";
    if (kernel.state === "lost") return kernel.lostReason ?? "The kernel has stopped.";
    if (this.form.localError() !== null) return "Correct the marked field first.";
    return this.form.missingValue() ?? (this.wrong === null ? null : "Correct the error above first.");
  }

  /** Checks the fields after a pause without typing. */
  private onInput(): void {
    this.failure.textContent = "";
    this.reset();
    this.timer = setTimeout(() => void this.check(), DEBOUNCE_MS);
    this.show();
  }

  private async check(): Promise<void> {
    this.reset();
    const { turn } = this;
    this.show();
    if (this.form.localError() !== null) return;
    let said: Checked | RequestError;
    try {
      const payload = { patch: this.form.read(this.path), number: this.edited?.number ?? null };
      said = (await this.view.kernel.ask("check", payload)).result;
    } catch (reason) {
      said = asRequestError(reason);
    }
    if (turn !== this.turn) return;
    this.said = said;
    this.show();
  }

  private async submit(): Promise<void> {
    if (this.isApplying) return;
    if (this.disabledReason() !== null) {
      const field = this.form.localError()?.field ?? (this.form.missingValue() === null ? this.wrong?.field : "value");
      return this.form.focus(field ?? null);
    }
    this.reset();
    const patch = this.form.read(this.path);
    const number = this.edited?.number ?? null;
    const { turn } = this;
    this.isApplying = true;
    this.failure.textContent = "";
    this.apply.focus({ preventScroll: true });
    this.form.lock(true);
    this.show();
    try {
      await makeEdit(this.view, () =>
        number === null ? { action: "add", patch } : { action: "change", number, patch },
      );
    } catch (reason) {
      if (turn === this.turn) this.onRefused(asRequestError(reason));
      else this.view.notices.error(asRequestError(reason).message);
      return;
    }
    this.view.notices.announce(`${number === null ? "added" : `changed #${number} to`} ${describe(patch)}`);
    if (turn === this.turn) this.close();
  }

  private onRefused(error: RequestError): void {
    this.reset();
    this.form.lock(false);
    if (error.field === "version") {
      const now = describeAll(this.view.model.get("session").patches);
      this.failure.textContent = `The patches were changed meanwhile. ${now} Apply again to add yours.`;
      void this.check();
      return;
    }
    this.said = error;
    this.show();
    this.form.focus(error.field);
  }

  /** The patches have changed elsewhere: the texts stay, and a message describes the change. */
  private onSession(): void {
    if (!this.dialog.isOpen || this.edited === null || this.isApplying) return;
    const now = this.patch(this.edited.number);
    const before = this.edited;
    this.edited = now;
    if (now === null) {
      this.failure.textContent = `Patch #${before.number} was removed meanwhile: Apply adds it as a new one.`;
      void this.check();
      return;
    }
    if (!areEqual(now, before)) {
      const what = `Patch #${now.number} was changed meanwhile, to: ${describe(now)}.`;
      this.failure.textContent = `${what} Apply replaces that with the fields here.`;
    }
    this.show();
  }
}

function shapes(shape: number[] | null, sliced: number[] | null, what: string): (string | HTMLElement)[] {
  const code = (sizes: number[]) => element("code", shapeText(sizes));
  if (shape === null) return sliced === null ? [] : [code(sliced), ` ${what}`];
  if (sliced === null) return ["Recorded ", code(shape)];
  if (shapeText(sliced) === shapeText(shape)) return ["Recorded ", code(shape), `, all of it ${what}`];
  return ["Recorded ", code(shape), " → ", code(sliced), ` ${what}`];
}

interface Field {
  readonly row: HTMLElement;
  readonly input: HTMLInputElement | HTMLSelectElement;
  readonly error: HTMLElement;
}

/** The fields, with their errors and hints. A field that the kind does not have is hidden, and keeps its text. */
class PatchForm {
  readonly element: HTMLElement;
  private readonly fields: Record<string, Field> = {};
  private readonly more: HTMLDetailsElement;
  private readonly id: string;
  private kinds: readonly PatchKind[] = [];
  private readonly kindHint = element("div.gp-hint.gp-muted");

  constructor(number: number, onInput: () => void) {
    this.id = `gp-form-${number}`;
    const rows = (names: readonly FieldName[]) => names.map((name) => this.add(name, onInput));
    const first = rows(["kind", "slice", "value", "name"]);
    this.more = element("details.gp-more", element("summary", "More"), ...rows(MORE));
    this.element = element("div.gp-stack.gp-form", ...first, this.more);
  }

  private add(name: FieldName, onInput: () => void): HTMLElement {
    const id = `${this.id}-${name}`;
    const isFlag = FLAGS.includes(name);
    const text = { type: "text", class: "gp-field gp-code-field gp-mono", spellcheck: "false", autocomplete: "off" };
    const input =
      name === "kind"
        ? element("select", { id, class: "gp-field" })
        : element("input", {
            id,
            ...(isFlag ? { type: "checkbox" } : { ...text, autocapitalize: "off", autocorrect: "off" }),
            placeholder: name === "slice" ? "the whole value, or a part: :, -1, 3:5" : null,
          });
    const error = element("div.gp-field-error", { id: `${id}-error`, hidden: true });
    const hint = name === "kind" ? this.kindHint : HINTS[name] && element("div.gp-hint.gp-muted", HINTS[name]);
    if (hint) hint.id = `${id}-hint`;
    const row = element(
      "div",
      { class: `gp-form-row gp-form-${name}` },
      element("label.gp-muted", { for: id }, LABELS[name]),
      name === "slice" ? element("div.gp-brackets.gp-muted.gp-mono", "[", input, "]") : input,
      hint,
      error,
    );
    input.addEventListener(name === "kind" || isFlag ? "change" : "input", () => {
      if (name === "kind") this.showFields();
      onInput();
    });
    this.fields[name] = { row, input, error };
    return row;
  }

  /** Fills the fields, for a new patch of the first kind unless the kind is given. */
  write(kinds: readonly PatchKind[], patch: Partial<PatchFields>): void {
    this.kinds = kinds;
    replaceChildren(this.input("kind"), ...kinds.map(({ name }) => element("option", { value: name }, name)));
    const given: Partial<Record<string, unknown>> = { kind: kinds[0]?.name, ...patch };
    for (const name of Object.keys(LABELS) as FieldName[]) {
      const input = this.input(name);
      if (FLAGS.includes(name)) (input as HTMLInputElement).checked = given[name] === true;
      else input.value = String(given[name] ?? "");
    }
    this.more.open = MORE.some((name) => (given[name] ?? "") !== "" && given[name] !== false);
    this.suggestName(null);
    this.showFields();
    this.showError(null);
  }

  /** Returns the patch for the kernel: only the fields of its kind, with `null` for empty texts. */
  read(path: string): PatchFields {
    const text = (name: FieldName) => (this.has(name) && this.input(name).value.trim()) || null;
    const flag = (name: FieldName) => (this.input(name) as HTMLInputElement).checked;
    const dimension = this.input("position_dim").value.trim();
    return {
      path,
      kind: this.kind.name,
      slice: text("slice"),
      value: text("value"),
      name: text("name"),
      steps: text("steps"),
      positions: text("positions"),
      position_dim: dimension === "" ? null : Number(dimension),
      any_shape: flag("any_shape"),
      allow_empty: flag("allow_empty"),
    };
  }

  get kind(): PatchKind {
    const kind = this.kinds.find(({ name }) => name === this.input("kind").value);
    if (kind === undefined) throw new Error(`the kernel has sent no kind of patch ${this.input("kind").value}`);
    return kind;
  }

  private has(field: string): boolean {
    return field === "kind" || this.kind.fields.includes(field);
  }

  /** An error that needs no kernel; `null` if there is none. */
  localError(): FieldError | null {
    if (/^\s*([+-]?\d+)?\s*$/.test(this.input("position_dim").value)) return null;
    return { field: "position_dim", message: "a whole number: 1, or -2 counted from the end" };
  }

  /** A prompt for the value if it is missing; `null` if it is not. */
  missingValue(): string | null {
    const { value } = this.kind;
    if (value === null || this.input("value").value.trim() !== "") return null;
    return `Type ${value.noun}: a variable or a Python expression.`;
  }

  /** Makes the fields read-only while an edit is sent. */
  lock(isLocked: boolean): void {
    for (const { input } of Object.values(this.fields)) {
      if (input instanceof HTMLInputElement && input.type === "text") input.readOnly = isLocked;
      else input.disabled = isLocked;
    }
  }

  focus(field: string | null): void {
    if (field === null || !(field in this.fields)) return;
    if (MORE.includes(field as FieldName)) this.more.open = true;
    this.input(field).focus({ preventScroll: field === "kind" });
  }

  /** Shows the variable that the kernel chooses if none is typed. */
  suggestName(name: string | null): void {
    setAttribute(this.input("name"), "placeholder", name);
  }

  /** Shows an error below its field; returns whether the form has that field. */
  showError(error: FieldError | null): boolean {
    let isShown = false;
    for (const [name, field] of Object.entries(this.fields)) {
      const isHere = error?.field === name && this.has(name);
      isShown ||= isHere;
      field.error.textContent = isHere ? error.message : "";
      field.error.hidden = !isHere;
      setAttribute(field.input, "aria-invalid", isHere ? "true" : null);
      const hint = name in HINTS || name === "kind" ? `${this.id}-${name}-hint` : "";
      const described = [isHere ? field.error.id : "", hint].filter(Boolean).join(" ");
      setAttribute(field.input, "aria-describedby", described || null);
      if (isHere && MORE.includes(name as FieldName)) this.more.open = true;
    }
    return isShown;
  }

  private input(name: string): Field["input"] {
    const field = this.fields[name];
    if (field === undefined) throw new Error(`no field ${name}`);
    return field.input;
  }

  private showFields(): void {
    for (const [name, { row }] of Object.entries(this.fields)) row.hidden = !this.has(name);
    const { summary, value } = this.kind;
    this.kindHint.textContent = summary;
    setAttribute(this.input("value"), "placeholder", value === null ? null : `e.g. ${value.example}`);
  }
}
