/** Shows the value of a node on request: statistics, a plot of a 2-D slice, and steps to the other slices. */
import type { ActivationStatus } from "../kernel/protocol";
import { buttonElement, element, replaceChildren, setOptions, showFieldError } from "../page/dom";
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
  private readonly dimensions = element("div.gp-line.gp-tight");
  private readonly sliceRow: HTMLElement;
  private readonly job: JobView<ActivationStatus>;
  /** The jobs whose values the kernel keeps. */
  private readonly ids = new Set<number>();
  private shape: number[] = [];
  /** The dimensions of rows and columns; `null`: the last two that the slice leaves. */
  private axes: [rows: number, columns: number] | null = null;
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
    this.sliceRow = element("div.gp-line.gp-activation-slice", { hidden: true }, field, this.dimensions);
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
    this.slice.addEventListener("change", () => {
      this.axes = null;
      this.show(this.plane);
    });
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
    const payload = { row, plane, axes: this.axes, is_patched: isPatched, inputs: inputsOf(view) };
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
    this.fillDimensions(slice);
    this.job.result.replaceChildren(...makeValue(shown, buffers, `Activation of ${path}`));
    this.onSession();
  }

  /** A choice of what each dimension is, and a slider for those of which one index is shown. */
  private fillDimensions(slice: string | null): void {
    const roles = slice === null ? null : rolesOf(slice, this.shape, this.axes);
    const shown = roles?.map(({ role }) => role).join() ?? "";
    if (shown !== this.dimensions.dataset.roles) {
      const name = this.dimensions.querySelector(":focus")?.getAttribute("aria-label");
      const used = (roles ?? []).filter(({ size }) => size > 1);
      replaceChildren(this.dimensions, ...used.map((one) => this.dimension(one)));
      for (const field of this.dimensions.querySelectorAll<HTMLElement>("select, input"))
        if (field.getAttribute("aria-label") === name) field.focus();
    }
    this.dimensions.dataset.roles = shown;
    for (const { dimension, index } of roles ?? []) this.showIndex(dimension, index);
  }

  private showIndex(dimension: number, index: number): void {
    const slider = this.dimensions.querySelector<HTMLInputElement>(`input[name="${dimension}"]`);
    if (slider === null) return;
    slider.value = String(index);
    if (slider.nextSibling) slider.nextSibling.textContent = String(index);
  }

  private dimension({ dimension, role, size }: Dimension): HTMLElement {
    const choice = element("select.gp-field", { "aria-label": `Dimension ${dimension}` });
    setOptions(choice, Object.entries(ROLES), role);
    choice.addEventListener("change", () => this.choose(dimension, choice.value as Role));
    const slider = element("input", {
      type: "range",
      name: dimension,
      max: size - 1,
      "aria-label": `Index of dimension ${dimension}`,
      oninput: () => this.step(dimension, Number(slider.value)),
    });
    const text = element("span.gp-muted", `dim ${dimension} (${size})`);
    const at = role === "index" && [slider, element("span.gp-number.gp-slider-index")];
    return element("span.gp-pair.gp-dimension", text, choice, ...(at || []));
  }

  private step(dimension: number, index: number): void {
    const moved = withIndex(this.slice.value, this.shape, dimension, index);
    if (moved === null) return;
    this.slice.value = moved;
    this.showIndex(dimension, index);
    this.show(moved);
  }

  /** Gives a dimension a role; the one that had it, of rows and columns, gets the other's. */
  private choose(dimension: number, role: Role): void {
    const roles = rolesOf(this.slice.value, this.shape, this.axes);
    const own = roles?.[dimension];
    const parts = expandSlice(this.slice.value, this.shape.length);
    if (!roles || !own || !parts) return;
    const isAxis = (one: Role) => one === "rows" || one === "columns";
    const free = roles.filter((one) => one !== own && one.size > 1);
    const other = isAxis(role)
      ? free.find((one) => one.role === role)
      : isAxis(own.role)
        ? free.find((one) => !isAxis(one.role))
        : undefined;
    if (other) other.role = own.role;
    if (other || !isAxis(own.role)) own.role = role;
    this.axes = [roles.findIndex((one) => one.role === "rows"), roles.findIndex((one) => one.role === "columns")];
    this.slice.value = parts
      .map((part, at) =>
        roles[at]?.role === "index" ? (part.includes(":") ? "0" : part) : part.includes(":") ? part : ":",
      )
      .join(", ");
    this.show(this.slice.value);
  }
}

/** What a dimension is in the picture. */
type Role = "rows" | "columns" | "facets" | "index";
const ROLES: Record<Role, string> = {
  rows: "rows ↓",
  columns: "columns →",
  facets: "a picture each",
  index: "one index",
};

interface Dimension {
  dimension: number;
  size: number;
  role: Role;
  index: number;
}

/** What each dimension is; `null` for a slice that does not say so, or without rows and columns. */
export function rolesOf(
  slice: string,
  shape: readonly number[],
  axes: readonly [number, number] | null,
): Dimension[] | null {
  const parts = expandSlice(slice, shape.length);
  const kept = parts?.flatMap((part, at) => (part.includes(":") ? [at] : [])) ?? [];
  const [rows, columns] = axes ?? kept.slice(-2);
  if (parts === null || rows === undefined || columns === undefined) return null;
  return parts.map((part, dimension) => {
    const size = shape[dimension] ?? 1;
    const typed = Number(part);
    const role =
      dimension === rows ? "rows" : dimension === columns ? "columns" : kept.includes(dimension) ? "facets" : "index";
    return { dimension, size, role, index: role === "index" ? (typed < 0 ? typed + size : typed) : 0 };
  });
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

/** The slice with another index of one dimension; `null` if it cannot be parsed or the index is out of range. */
export function withIndex(slice: string, shape: readonly number[], dimension: number, index: number): string | null {
  const parts = expandSlice(slice, shape.length);
  const size = shape[dimension] ?? 0;
  if (parts === null || index < 0 || index >= size) return null;
  parts[dimension] = String(index);
  return parts.join(", ");
}
