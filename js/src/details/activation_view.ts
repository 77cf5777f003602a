/** Shows the value of a node on request: statistics, a plot of a 2-D slice, and steps to the other slices. */
import { type JobReply, Poller } from "../kernel/polling";
import type { ActivationStatus, ActivationView } from "../kernel/protocol";
import { buttonElement, element, showFieldError } from "../page/dom";
import { makePlot } from "../plots/plots";
import { makeStatistics } from "../plots/statistics";
import { describeInputs, inputsOf, patchesKey } from "../runs/inputs";
import { Progress } from "../runs/progress";
import { type Part, RequestFailed, type View } from "../view";

let sliceFields = 0;

/** The activation section of a popup. It does not send requests before the user presses its button. */
export class ActivationSection implements Part {
  readonly element: HTMLElement;
  private readonly button: HTMLButtonElement;
  private readonly isPatched = element("input", { type: "checkbox", checked: true });
  private readonly inputs = element("p", { class: "gp-note" });
  private readonly outdated = element("p", { class: "gp-message gp-outdated", hidden: true });
  private readonly error = element("p", { class: "gp-message gp-error", role: "alert", hidden: true });
  private readonly progress: Progress;
  private readonly slice = element("input", { type: "text", class: "gp-field gp-typed", spellcheck: "false" });
  private readonly sliceError = element("p", { class: "gp-small-error gp-error", role: "alert", hidden: true });
  private readonly steppers = element("div", { class: "gp-line" });
  private readonly sliceRow: HTMLElement;
  private readonly result = element("div", { class: "gp-stack gp-activation-result" });
  private readonly poller: Poller<ActivationStatus>;
  /** The jobs whose values the kernel keeps. */
  private readonly ids = new Set<number>();
  private current: number | null = null;
  private shape: number[] = [];
  /** The patches of the shown value; `null`: no value is shown, or it is without patches. */
  private patchesKey: string | null = null;
  private isClosed = false;

  constructor(
    private readonly view: View,
    private readonly row: number,
  ) {
    this.button = buttonElement({ onclick: () => this.show(this.plane) }, "Show activation");
    this.progress = new Progress("Progress of the activation", view.kernel, () => this.interrupt());
    this.sliceRow = this.makeSliceRow();
    const ask = (id: number) => this.trackJob(view.kernel.ask("activation_status", { id }));
    this.poller = new Poller<ActivationStatus>(ask, {
      onStatus: (answer) => this.onStatus(answer),
      onError: (reason) => this.onError(reason),
    });
    const patched = element("label", { class: "gp-check" }, this.isPatched, "With the chosen patches");
    const head = element("div", { class: "gp-line" }, this.button, patched);
    const title = element("h3", { class: "gp-heading" }, "Activation");
    const parts = [
      title,
      head,
      this.inputs,
      this.progress.element,
      this.error,
      this.sliceRow,
      this.outdated,
      this.result,
    ];
    this.element = element("section", { class: "gp-stack gp-activation", "aria-label": "Activation" }, ...parts);
    this.listen();
  }

  /** Interrupts the run, and drops the value in the kernel. */
  close(): void {
    if (this.isClosed) return;
    this.isClosed = true;
    this.poller.stop();
    this.progress.hide();
    this.view.model.off("change:session", this.onSession);
    for (const id of this.ids) this.release(id);
  }

  private makeSliceRow(): HTMLElement {
    const id = `gp-activation-slice-${sliceFields++}`;
    this.slice.id = id;
    this.sliceError.id = `${id}-error`;
    const field = element(
      "div",
      { class: "gp-labeled" },
      element("label", { for: id }, "Activation slice"),
      this.slice,
      this.sliceError,
    );
    return element("div", { class: "gp-activation-slice", hidden: true }, field, this.steppers);
  }

  private listen(): void {
    this.slice.addEventListener("change", () => this.show(this.plane));
    this.isPatched.addEventListener("change", () => {
      if (this.current !== null) this.show(this.plane);
    });
    this.view.model.on("change:session", this.onSession);
    this.view.onRemove(() => this.close());
  }

  private readonly onSession = (): void => {
    const isStale = this.patchesKey !== null && this.patchesKey !== patchesKey(this.view.model.get("session"));
    this.outdated.hidden = !isStale;
    this.outdated.textContent = isStale ? "The chosen patches have changed since: press “Show again”." : "";
  };

  private get plane(): string | null {
    return this.slice.value.trim() || null;
  }

  private show(plane: string | null): void {
    const { view, row } = this;
    this.clearErrors();
    this.result.classList.add("gp-dimmed");
    this.progress.showWaiting();
    this.inputs.replaceChildren("Inputs: ", element("code", {}, describeInputs(view)));
    const isPatched = this.isPatched.checked;
    this.patchesKey = isPatched ? patchesKey(view.model.get("session")) : null;
    const payload = { row, plane, is_patched: isPatched, inputs: inputsOf(view) };
    this.poller.follow(this.trackJob(view.kernel.ask("activation", payload)));
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

  private interrupt(): void {
    if (this.current === null) return;
    this.progress.showInterrupting();
    this.poller.follow(this.trackJob(this.view.kernel.ask("activation_interrupt", { id: this.current })));
  }

  private onStatus({ result, buffers }: JobReply<ActivationStatus>): void {
    this.current = result.id;
    if (result.state === "running") {
      this.progress.show(result);
      return;
    }
    this.finish();
    for (const id of this.ids) if (id !== result.id) this.release(id);
    if (result.state === "done" && result.view !== null) this.fill(result.view, buffers);
    else if (result.state === "interrupted") this.fail("Interrupted. Press “Show again” to start again.");
    else this.fail(`${result.error ?? "The run failed."}\nChange the inputs or the patches, then press “Show again”.`);
  }

  private onError(reason: Error): void {
    this.finish();
    const field = reason instanceof RequestFailed ? reason.error.field : null;
    if (field === "plane") {
      showFieldError(this.slice, this.sliceError, reason.message);
      this.result.classList.remove("gp-dimmed");
    } else this.fail(field === "inputs" ? `The inputs, as typed under “Run”: ${reason.message}` : reason.message);
  }

  private finish(): void {
    if (this.progress.hasFocus) this.button.focus();
    this.progress.hide();
    this.button.textContent = "Show again";
  }

  private fail(message: string): void {
    this.error.textContent = message;
    this.error.hidden = false;
  }

  private clearErrors(): void {
    this.error.hidden = true;
    showFieldError(this.slice, this.sliceError, null);
  }

  private fill(shown: ActivationView, buffers: DataView[]): void {
    const { statistics, plot, path } = shown;
    this.shape = statistics.shape;
    const slice = plot.type === "none" ? null : plot.slice;
    if (slice !== null && !this.slice.matches(":focus")) this.slice.value = slice;
    this.sliceRow.hidden = this.shape.length < 2;
    this.fillSteppers(steppedDimensions(slice, this.shape));
    const options = { title: `Activation of ${path}`, rowTokens: shown.row_labels, columnTokens: shown.column_labels };
    this.result.replaceChildren(makeStatistics(statistics), makePlot(plot, buffers, options));
    this.result.classList.remove("gp-dimmed");
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
    const step = (by: number, text: string, word: string) =>
      buttonElement(
        {
          class: "gp-step",
          "aria-label": `${name}: ${word}`,
          "aria-disabled": index + by < 0 || index + by >= size,
          onclick: () => this.step(dimension, by),
        },
        text,
      );
    const place = element(
      "span",
      { class: "gp-number" },
      `${index}`,
      element("span", { class: "gp-muted" }, ` of 0–${size - 1}`),
    );
    return element(
      "div",
      { class: "gp-stepper", role: "group", "aria-label": name },
      element("span", { class: "gp-muted" }, `dim ${dimension}`),
      step(-1, "‹", "previous"),
      place,
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
