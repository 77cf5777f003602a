/** The patch editor: a form for one patch, which the kernel checks while the user types. */

import { closeButton } from "../details/popup";
import { asRequestError } from "../kernel/kernel";
import type { Checked, PatchKind, PatchState, RequestError } from "../kernel/protocol";
import { buttonElement, element, replaceChildren, setAttribute } from "../page/dom";
import { Dialog } from "../page/floating";
import { listen, type Part, type PatchTarget, type View } from "../view";
import { Checker } from "./checker";
import {
  areEqual,
  type Draft,
  draftOf,
  type FieldError,
  type FieldName,
  fields,
  hasField,
  localError,
  missingValue,
  newDraft,
} from "./draft";
import { describe, describeAll, fieldsOf, makeEdit, shapeText } from "./edits";
import { PatchForm } from "./patch_form";
import { whyUnpatchable } from "./patchable";

let editors = 0;

export class PatchEditor implements Part {
  readonly element: HTMLElement;
  private readonly dialog: Dialog;
  private readonly form = new PatchForm(() => this.onInput());
  private readonly preview = new Preview();
  private readonly failure = element("div", { class: "gp-form-failure", role: "alert" });
  private readonly reason = element("span", { class: "gp-reason" });
  private readonly apply = element("button", { type: "submit", class: "gp-button gp-primary" }, "Apply");
  private path = "";
  private row = -1;
  /** The latest state of the patch that is edited; `null` for a new patch. */
  private edited: PatchState | null = null;
  private readonly checker: Checker;
  private isApplying = false;
  /** Counts how often the editor was opened or closed, to ignore replies for an earlier patch. */
  private turn = 0;

  constructor(private readonly view: View) {
    this.checker = new Checker(view.kernel, () => this.show());
    this.dialog = new Dialog(view, {
      class: "gp-editor",
      height: 320,
      closesOnOutsideClick: false,
      onEscape: () => this.close(),
    });
    this.element = this.dialog.element;
    this.form.showKinds(this.kinds());
    listen(view, "change:session", () => this.onSession());
    view.onRemove(view.kernel.onState(() => this.show()));
    view.onRemove(() => this.checker.reset());
    editors += 1;
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
    this.row = "row" in target ? target.row : (chosen?.row ?? -1);
    const { component, positions = "" } = "row" in target ? target : {};
    this.path = chosen?.path ?? component ?? this.view.skeleton.path(this.row);
    const unpatchable = chosen === null ? whyUnpatchable(this.view.skeleton, this.row) : null;
    if (unpatchable !== null) {
      this.showUnpatchable(unpatchable.why, unpatchable.instead, anchor);
      return;
    }
    this.form.lock(false);
    this.preview.clear();
    this.form.showKinds(this.kinds());
    const draft = chosen === null ? newDraft(this.path, this.kinds()) : draftOf(chosen, this.kinds());
    this.form.write(chosen === null ? { ...draft, positions } : draft);
    this.failure.textContent = "";
    this.fill(this.content());
    this.dialog.open(anchor, this.title());
    this.form.focus();
    this.check();
  }

  /** Closes the editor and drops the texts. */
  close(): void {
    this.reset();
    this.dialog.close();
  }

  private reset(): void {
    this.checker.reset();
    this.turn += 1;
    this.isApplying = false;
  }

  private title(): string {
    return this.edited === null ? `Patch ${this.path}` : `Change patch #${this.edited.number}: ${this.path}`;
  }

  private patch(number: number): PatchState | null {
    return this.view.model.get("session").patches.find((patch) => patch.number === number) ?? null;
  }

  private kinds(): readonly PatchKind[] {
    return this.view.model.get("about").patch_kinds;
  }

  private draft(): Draft {
    return this.form.read(this.path);
  }

  // -- display -------------------------------------------------------------------------------------------------------

  private fill(body: HTMLElement): void {
    const heading = element("div", { class: "gp-floating-title" }, this.title());
    const header = element(
      "div",
      { class: "gp-floating-header" },
      heading,
      closeButton(() => this.close()),
    );
    replaceChildren(this.element, header, body);
  }

  private showUnpatchable(why: string, instead: number | null, anchor: Element): void {
    const go = () => {
      this.close();
      if (instead !== null) this.open({ row: instead }, anchor);
    };
    const other = instead === null ? "" : this.view.skeleton.path(instead);
    const button = buttonElement({ class: "gp-button gp-primary", onclick: go }, `Patch ${other}`);
    this.fill(
      element(
        "div",
        { class: "gp-floating-body" },
        element("p", {}, why),
        instead === null ? null : element("div", {}, button),
      ),
    );
    this.dialog.open(anchor, this.title());
    (instead === null ? this.element : button).focus({ preventScroll: true });
  }

  private content(): HTMLElement {
    const cancel = buttonElement({ onclick: () => this.close() }, "Cancel");
    const form = element(
      "form",
      { class: "gp-floating-body", novalidate: true },
      this.form.element,
      this.preview.element,
      this.failure,
      element("div", { class: "gp-form-actions" }, this.reason, cancel, this.apply),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.submit();
    });
    form.addEventListener("keydown", (event) => {
      // Browsers submit a form on Enter only in text fields.
      const isChoice =
        event.target instanceof HTMLSelectElement || (event.target as HTMLInputElement).type === "checkbox";
      if (event.key !== "Enter" || event.isComposing || !isChoice) return;
      event.preventDefault();
      void this.submit();
    });
    return form;
  }

  private show(): void {
    const draft = this.draft();
    this.showErrors(draft);
    this.showPreview(draft);
    const reason = this.disabledReason(draft);
    this.reason.textContent = reason ?? this.hint();
    setAttribute(this.apply, "aria-disabled", reason === null ? null : "true");
    this.apply.textContent = this.isApplying ? "Applying …" : "Apply";
  }

  private showErrors(draft: Draft): void {
    const local = localError(draft);
    // If the kernel is lost, the reason beside Apply is enough.
    const { state } = this.checker;
    const isHeard = state.state === "wrong" && this.view.kernel.state !== "lost";
    const error = local ?? (isHeard ? (state.error as FieldError) : null);
    const isBesideField = this.form.showError(error);
    this.failure.hidden = this.failure.textContent === "";
    if (error !== null && !isBesideField) {
      this.failure.textContent = error.message;
      this.failure.hidden = false;
    }
  }

  private showPreview(draft: Draft): void {
    const { state } = this.checker;
    if (state.state === "asked") this.preview.markOutdated();
    if (state.state === "wrong") this.preview.clear();
    if (state.state !== "fine") return;
    this.preview.show(state.checked, hasField(draft.kind, "name"));
    this.form.suggestName(state.checked.name);
  }

  /** Returns why the patch cannot be applied now; `null` if it can. */
  private disabledReason(draft: Draft): string | null {
    if (this.isApplying) return this.view.kernel.state === "busy" ? "It is applied when the kernel is free." : "";
    if (this.view.kernel.state === "lost") return this.view.kernel.lostReason ?? "The kernel has stopped.";
    if (localError(draft) !== null) return "Correct the marked field first.";
    const toType = missingValue(draft);
    if (toType !== null) return toType;
    return this.checker.state.state === "wrong" ? "Correct the error above first." : null;
  }

  private hint(): string {
    const isWaiting = this.checker.state.state === "asked" && this.view.kernel.state === "busy";
    return isWaiting ? "The kernel is busy: the patch is checked, and applied, when it is free." : "";
  }

  // -- requests ------------------------------------------------------------------------------------------------------

  private onInput(): void {
    this.failure.textContent = "";
    this.checker.askAfterPause(() => this.draft(), this.edited?.number ?? null);
    this.show();
  }

  private check(): void {
    void this.checker.ask(this.draft(), this.edited?.number ?? null);
  }

  private async submit(): Promise<void> {
    const draft = this.draft();
    if (this.isApplying) return;
    if (this.disabledReason(draft) !== null) {
      this.focusError(draft);
      return;
    }
    this.checker.reset();
    const patch = fields(draft);
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

  private focusError(draft: Draft): void {
    const local = localError(draft);
    const said = this.checker.state.state === "wrong" ? (this.checker.state.error.field as FieldName | null) : null;
    const field = local?.field ?? (missingValue(draft) === null ? said : "value");
    if (field !== null && field in draft) this.form.focusField(field);
  }

  private onRefused(error: RequestError): void {
    this.isApplying = false;
    this.form.lock(false);
    if (error.field === "version") {
      const now = describeAll(this.view.model.get("session").patches);
      this.failure.textContent = `The patches were changed meanwhile. ${now} Apply again to add yours.`;
      this.check();
      return;
    }
    this.checker.showRefusal(error);
    if (error.field !== null && error.field in this.draft()) this.form.focusField(error.field as FieldName);
  }

  /** The patches have changed elsewhere: the texts stay, and a message describes the change. */
  private onSession(): void {
    if (!this.dialog.isOpen || this.edited === null || this.isApplying) return;
    const now = this.patch(this.edited.number);
    const before = this.edited;
    if (now === null) {
      this.edited = null;
      this.failure.textContent = `Patch #${before.number} was removed meanwhile: Apply adds it as a new one.`;
      this.check();
      return;
    }
    this.edited = now;
    if (!areEqual(fieldsOf(now), fieldsOf(before))) {
      const what = `Patch #${now.number} was changed meanwhile, to: ${describe(now)}.`;
      this.failure.textContent = `${what} Apply replaces that with the fields here.`;
    }
    this.show();
  }
}

/** The value that a patch would be applied to: recorded shape, shape of the slice, warnings. */
class Preview {
  readonly element = element("div", { class: "gp-outcome", role: "status" });

  /** Fades the preview until the next reply, instead of clearing it, so that nothing jumps during typing. */
  markOutdated(): void {
    this.element.classList.add("gp-stale");
  }

  clear(): void {
    this.element.classList.remove("gp-stale");
    replaceChildren(this.element);
  }

  /** @param isKept Whether the value is stored in a variable, not patched. */
  show({ shape, sliced, warning }: Checked, isKept: boolean): void {
    this.element.classList.remove("gp-stale");
    replaceChildren(
      this.element,
      element("div", { class: "gp-shapes" }, ...shapes(shape, sliced, isKept ? "kept" : "patched")),
      warning === null ? null : element("div", { class: "gp-warning" }, warning),
    );
  }
}

function shapes(shape: number[] | null, sliced: number[] | null, what: string): (string | HTMLElement)[] {
  const code = (sizes: number[]) => element("code", {}, shapeText(sizes));
  if (shape === null) return sliced === null ? [] : [code(sliced), ` ${what}`];
  if (sliced === null) return ["Recorded ", code(shape)];
  if (shapeText(sliced) === shapeText(shape)) return ["Recorded ", code(shape), `, all of it ${what}`];
  return ["Recorded ", code(shape), " → ", code(sliced), ` ${what}`];
}
