/** The fields of the patch editor, with their errors and hints. */

import type { PatchKind } from "../kernel/protocol";
import { element, replaceChildren, setAttribute } from "../page/dom";
import { type Draft, type FieldError, type FieldName, FLAGS, type Flag, hasField, kindNamed } from "./draft";

type Input = HTMLInputElement | HTMLSelectElement;

interface Field {
  readonly row: HTMLElement;
  readonly input: Input;
  readonly error: HTMLElement;
}

const LABELS: Record<FieldName, string> = {
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
const HINTS: Partial<Record<FieldName, string>> = {
  steps: "of a generation: prefill, decoding, or numbers as in a slice: 0 or 2, 4 or 1:",
  positions: "in the sequence: 3 or 2, 40 or 1:5; of each row: [3], [5]",
  position_dim: "the dimension that runs along the sequence, if it cannot be inferred",
  any_shape: "also values of other sizes than at capture",
  allow_empty: "the slice may select nothing",
};
const PLACEHOLDERS: Partial<Record<FieldName, string>> = { slice: "the whole value, or a part: :, -1, 3:5" };
const MORE: readonly FieldName[] = ["steps", "positions", "position_dim", ...FLAGS];
const TEXTS = ["slice", "value", "name", "steps", "positions", "position_dim"] as const;

let forms = 0;

export class PatchForm {
  readonly element: HTMLElement;
  private readonly fields = new Map<FieldName, Field>();
  private readonly more: HTMLDetailsElement;
  private readonly id: string;
  private kinds: readonly PatchKind[] = [];
  private kindHint = element("div", { class: "gp-hint" });

  /** @param onInput Called when a field changes. */
  constructor(private readonly onInput: () => void) {
    forms += 1;
    this.id = `gp-form-${forms}`;
    const rows = (names: readonly FieldName[]) => names.map((name) => this.add(name).row);
    const first = rows(["kind", "slice", "value", "name"]);
    this.more = element("details", { class: "gp-more" }, element("summary", {}, "More"), ...rows(MORE));
    this.element = element("div", { class: "gp-form" }, ...first, this.more);
  }

  /** Shows these kinds in the list. */
  showKinds(kinds: readonly PatchKind[]): void {
    this.kinds = kinds;
    replaceChildren(this.input("kind"), ...kinds.map(({ name }) => element("option", { value: name }, name)));
  }

  /** Writes a draft into the fields, and replaces their content. */
  write(draft: Draft): void {
    for (const name of TEXTS) this.input(name).value = draft[name];
    this.input("kind").value = draft.kind.name;
    for (const name of FLAGS) this.flag(name).checked = draft[name];
    this.more.open = MORE.some((name) => draft[name as keyof Draft] !== "" && draft[name as keyof Draft] !== false);
    this.suggestName(null);
    this.showError(null);
    this.showFields(draft.kind);
  }

  read(path: string): Draft {
    const texts = Object.fromEntries(TEXTS.map((name) => [name, this.input(name).value]));
    return {
      ...(texts as Record<(typeof TEXTS)[number], string>),
      path,
      kind: this.kind(),
      any_shape: this.flag("any_shape").checked,
      allow_empty: this.flag("allow_empty").checked,
    };
  }

  /** Makes the fields read-only while an edit is sent. */
  lock(isLocked: boolean): void {
    for (const { input } of this.fields.values()) {
      if (input instanceof HTMLInputElement && input.type === "text") input.readOnly = isLocked;
      else input.disabled = isLocked;
    }
  }

  /** Focuses the first field. */
  focus(): void {
    this.input("kind").focus({ preventScroll: true });
  }

  focusField(field: FieldName): void {
    if (MORE.includes(field)) this.more.open = true;
    this.input(field).focus();
  }

  /** Shows the variable that the kernel chooses if none is typed. */
  suggestName(name: string | null): void {
    setAttribute(this.input("name"), "placeholder", name);
  }

  /** Shows an error below its field; returns whether the form has that field. */
  showError(error: FieldError | null): boolean {
    let isShown = false;
    for (const [name, field] of this.fields) {
      const isHere = error?.field === name && hasField(this.kind(), name);
      isShown ||= isHere;
      field.error.textContent = isHere ? (error?.message ?? "") : "";
      field.error.hidden = !isHere;
      setAttribute(field.input, "aria-invalid", isHere ? "true" : null);
      const hint = name in HINTS || name === "kind" ? `${this.id}-${name}-hint` : "";
      const described = [isHere ? field.error.id : "", hint].filter(Boolean).join(" ");
      setAttribute(field.input, "aria-describedby", described || null);
      if (isHere && MORE.includes(name)) this.more.open = true;
    }
    return isShown;
  }

  private kind(): PatchKind {
    return kindNamed(this.input("kind").value, this.kinds);
  }

  private input(name: FieldName): Input {
    const field = this.fields.get(name);
    if (field === undefined) throw new Error(`no field ${name}`);
    return field.input;
  }

  private flag(name: Flag): HTMLInputElement {
    return this.input(name) as HTMLInputElement;
  }

  private showFields(kind: PatchKind): void {
    for (const [name, { row }] of this.fields) row.hidden = !hasField(kind, name);
    this.kindHint.textContent = kind.summary;
    setAttribute(this.input("value"), "placeholder", kind.value === null ? null : `e.g. ${kind.value.example}`);
  }

  private add(name: FieldName): Field {
    const id = `${this.id}-${name}`;
    const input = name === "kind" ? element("select", { id, class: "gp-field" }) : textInput(id, name);
    const error = element("div", { class: "gp-field-error", id: `${id}-error`, hidden: true });
    const hint = HINTS[name];
    if (name === "kind") this.kindHint.id = `${id}-hint`;
    const row = element(
      "div",
      { class: `gp-form-row gp-form-${name}` },
      element("label", { for: id }, LABELS[name]),
      name === "slice" ? element("div", { class: "gp-brackets" }, "[", input, "]") : input,
      name === "kind" ? this.kindHint : null,
      hint === undefined ? null : element("div", { class: "gp-hint", id: `${id}-hint` }, hint),
      error,
    );
    input.addEventListener(name === "kind" || isFlag(name) ? "change" : "input", () => {
      if (name === "kind") this.showFields(this.kind());
      this.onInput();
    });
    const field = { row, input, error };
    this.fields.set(name, field);
    return field;
  }
}

function isFlag(name: FieldName): name is Flag {
  return (FLAGS as readonly FieldName[]).includes(name);
}

function textInput(id: string, name: FieldName): HTMLInputElement {
  if (isFlag(name)) return element("input", { id, type: "checkbox" });
  return element("input", {
    id,
    type: "text",
    class: "gp-field gp-code-field",
    placeholder: PLACEHOLDERS[name],
    spellcheck: "false",
    autocomplete: "off",
    autocapitalize: "off",
    autocorrect: "off",
  });
}
