/** Shows the value of a node on request: statistics, a plot of a 2-D slice, and steps to the other slices. */
import type { ActivationStatus } from "../kernel/protocol";
import { buttonElement, element, showFieldError } from "../page/dom";
import { makeValue } from "../plots/plots";
import { describeInputs, inputsOf, type JobReply, JobView, patchesKey } from "../runs/jobs";
import { type Part, RequestFailed, type View } from "../view";

let sliceFields = 0;

/** The activation section of a popup. It does not send requests before the user presses its button. */
export class ActivationSection implements Part {
  readonly element: HTMLElement;
  private readonly button = buttonElement({ onclick: () => this.show(this.plane) }, "Show activation");
  private readonly isPatched = element("input", { type: "checkbox", checked: true });
  private readonly inputs = element("p.gp-note");
  private readonly slice = element("input", { type: "text", class: "gp-field gp-mono", spellcheck: "false" });
  private readonly sliceError = element("p.gp-small-error.gp-error", { role: "alert", hidden: true });
  private readonly steppers = element("div.gp-line");
  private readonly sliceRow: HTMLElement;
  private readonly job: JobView<ActivationStatus>;
  /** The jobs whose values the kernel keeps. */
  private readonly ids = new Set<number>();
  private shape: number[] = [];
  /** The patches of the shown value; `null`: no value is shown, or it is without patches. */
  private patchesKey: string | null = null;
  private isClosed = false;

  constructor(
    private readonly view: View,
    private readonly row: number,
  ) {
    const { kernel } = view;
    const result = element("div.gp-stack.gp-activation-result");
    this.job = new JobView<ActivationStatus>(view, result, {
      name: "Progress of the activation",
      button: this.button,
      again: "Show again",
      status: (id) => this.trackJob(kernel.ask("activation_status", { id })),
      interrupt: (id) => this.trackJob(kernel.ask("activation_interrupt", { id })),
      onEnd: (reply) => {
        this.button.textContent = "Show again";
        for (const id of reply === null ? [] : this.ids) if (id !== reply?.result.id) this.release(id);
      },
      onDone: (reply) => this.fill(reply),
      onError: (reason) => {
        if (!(reason instanceof RequestFailed && reason.error.field === "plane")) return false;
        showFieldError(this.slice, this.sliceError, reason.message);
        return true;
      },
    });
    this.slice.id = `gp-activation-slice-${sliceFields++}`;
    this.sliceError.id = `${this.slice.id}-error`;
    const label = element("label.gp-muted", { for: this.slice.id }, "Activation slice");
    const field = element("div.gp-labeled", label, this.slice, this.sliceError);
    this.sliceRow = element("div.gp-line.gp-activation-slice", { hidden: true }, field, this.steppers);
    const patched = element("label.gp-pair.gp-check", this.isPatched, "With the chosen patches");
    this.element = element(
      "section.gp-stack.gp-activation",
      { "aria-label": "Activation" },
      element("h3.gp-heading.gp-muted", "Activation"),
      element("div.gp-line", this.button, patched),
      this.inputs,
      this.job.progress,
      this.job.message,
      this.sliceRow,
      this.job.outdated,
      result,
    );
    this.slice.addEventListener("change", () => this.show(this.plane));
    this.isPatched.addEventListener("change", () => {
      if (this.job.id !== null) this.show(this.plane);
    });
    view.model.on("change:session", this.onSession);
    view.onRemove(() => this.close());
  }

  /** Interrupts the run, and drops the value in the kernel. */
  close(): void {
    if (this.isClosed) return;
    this.isClosed = true;
    this.job.close();
    this.view.model.off("change:session", this.onSession);
    for (const id of this.ids) this.release(id);
  }

  private readonly onSession = (): void => {
    const isStale = this.patchesKey !== null && this.patchesKey !== patchesKey(this.view.model.get("session"));
    this.job.showOutdated(isStale, "press “Show again”");
  };

  private get plane(): string | null {
    return this.slice.value.trim() || null;
  }

  private show(plane: string | null): void {
    const { view, row } = this;
    showFieldError(this.slice, this.sliceError, null);
    this.job.begin();
    this.inputs.replaceChildren("Inputs: ", element("code", describeInputs(view)));
    const isPatched = this.isPatched.checked;
    this.patchesKey = isPatched ? patchesKey(view.model.get("session")) : null;
    const payload = { row, plane, is_patched: isPatched, inputs: inputsOf(view) };
    this.job.follow(this.trackJob(view.kernel.ask("activation", payload)));
  }

  /** Stores the id of a job, even if its reply is not needed any more. */
  private async trackJob(asked: Promise<JobReply<ActivationStatus>>): Promise<JobReply<ActivationStatus>> {
    const answer = await asked;
    const { id } = answer.result;
    if (this.isClosed) this.release(id);
    else this.ids.add(id);
    return answer;
  }

  /** Closes a job in the kernel, unless the kernel is lost. */
  private release(id: number): void {
    this.ids.delete(id);
    this.view.kernel.ask("activation_close", { id }).catch(() => undefined);
  }

  private fill({ result: { view: shown }, buffers }: JobReply<ActivationStatus>): void {
    if (shown === null) return;
    const { statistics, plot, path } = shown;
    this.shape = statistics.shape;
    const slice = plot.type === "none" ? null : plot.slice;
    if (slice !== null && !this.slice.matches(":focus")) this.slice.value = slice;
    this.sliceRow.hidden = this.shape.length < 2;
    this.fillSteppers(steppedDimensions(slice, this.shape));
    this.job.result.replaceChildren(...makeValue(shown, buffers, `Activation of ${path}`));
    this.onSession();
  }

  /** Replaces the buttons, and restores the focus. */
  private fillSteppers(leading: SteppedDimension[]): void {
    const name = this.steppers.querySelector(":focus")?.getAttribute("aria-label");
    this.steppers.replaceChildren(...leading.map((one) => this.stepper(one)));
    for (const button of this.steppers.querySelectorAll("button")) {
      if (button.getAttribute("aria-label") === name) button.focus();
    }
  }

  private stepper({ dimension, index, size }: SteppedDimension): HTMLElement {
    const name = `Dimension ${dimension}`;
    const step = (by: number, text: string, word: string) => {
      const isOff = index + by < 0 || index + by >= size;
      const attributes = { class: "gp-button gp-step", "aria-label": `${name}: ${word}`, "aria-disabled": isOff };
      return buttonElement({ ...attributes, onclick: () => this.step(dimension, by) }, text);
    };
    const all = element("span.gp-muted", ` of 0–${size - 1}`);
    return element(
      "div.gp-pair.gp-stepper",
      { role: "group", "aria-label": name },
      element("span.gp-muted", `dim ${dimension}`),
      step(-1, "‹", "previous"),
      element("span.gp-number", `${index}`, all),
      step(1, "›", "next"),
    );
  }

  /** Steps from the requested slice, not from the shown one, so that quick clicks add up. */
  private step(dimension: number, by: number): void {
    const asked = steppedDimensions(this.plane, this.shape).find((one) => one.dimension === dimension);
    const moved = asked && withIndex(this.slice.value, this.shape, dimension, asked.index + by);
    if (!moved) return;
    this.slice.value = moved;
    this.show(moved);
  }
}

/** A dimension of which the slice takes one index. */
interface SteppedDimension {
  dimension: number;
  index: number;
  size: number;
}

function expandSlice(slice: string, dimensions: number): string[] | null {
  const parts = slice.split(",").map((part) => part.trim());
  if (parts[parts.length - 1] === "") parts.pop();
  const ellipsis = parts.indexOf("...");
  if (ellipsis >= 0) {
    const missing = dimensions - (parts.length - 1);
    if (missing < 0 || parts.indexOf("...", ellipsis + 1) >= 0) return null;
    parts.splice(ellipsis, 1, ...Array<string>(missing).fill(":"));
  }
  while (parts.length < dimensions) parts.push(":");
  const isPlain = parts.every((part) => /^-?\d+$/.test(part) || part.includes(":"));
  return parts.length === dimensions && isPlain ? parts : null;
}

/** Empty for a slice without single indices, or with parts that cannot be parsed (`None`, names). */
export function steppedDimensions(slice: string | null, shape: readonly number[]): SteppedDimension[] {
  const parts = slice === null ? null : expandSlice(slice, shape.length);
  return (parts ?? []).flatMap((part, dimension) => {
    const size = shape[dimension] ?? 1;
    if (part.includes(":") || size < 2) return [];
    const typed = Number(part);
    const index = typed < 0 ? typed + size : typed;
    return index >= 0 && index < size ? [{ dimension, index, size }] : [];
  });
}

/** The slice with another index of one dimension; `null` if it cannot be parsed or the index is out of range. */
export function withIndex(slice: string, shape: readonly number[], dimension: number, index: number): string | null {
  const parts = expandSlice(slice, shape.length);
  const size = shape[dimension] ?? 0;
  if (parts === null || index < 0 || index >= size) return null;
  parts[dimension] = String(index);
  return parts.join(", ");
}
