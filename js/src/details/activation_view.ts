/** Shows the value of a node on request: statistics, a plot of a 2-D slice, and steps to the other slices. */
import type { ActivationStatus } from "../kernel/protocol";
import { buttonElement, checkbox, element, refresh, replaceChildren, setOptions, showFieldError } from "../page/dom";
import { makeValue } from "../plots/plots";
import { describeInputs, inputsOf, type JobReply, makeJobView, patchesKey } from "../runs/jobs";
import { type Part, RequestFailed, type View } from "../view";

let sliceFields = 0;

/** The activation section of a popup. It does not send requests before the user presses its button. */
export function makeActivation(view: View, row: number): Part & { close(): void } {
  const { kernel, model } = view;
  /** The jobs whose values the kernel keeps. */
  const ids = new Set<number>();
  let shape: number[] = [];
  /** The dimensions of rows and columns; `null`: the last two that the slice leaves. */
  let axes: [rows: number, columns: number] | null = null;
  /** The patches of the shown value; `null`: no value is shown, or it is without patches. */
  let shownKey: string | null = null;
  let isClosed = false;
  let hasEnded = false;

  const button = buttonElement({ onclick: () => show() }, () => (hasEnded ? "Show again" : "Show activation"));
  const isPatched = checkbox("With the chosen patches", true, () => job.id !== null && show());
  const inputs = element("p.gp-note");
  const slice = element("input.gp-field.gp-mono", {
    id: `gp-activation-slice-${sliceFields++}`,
    type: "text",
    spellcheck: "false",
    onchange: () => {
      axes = null;
      show();
    },
  });
  const sliceError = element("p.gp-small-error.gp-error", { id: `${slice.id}-error`, role: "alert", hidden: true });
  const dimensions = element("div.gp-line.gp-tight");
  const label = element("label.gp-muted", { for: slice.id }, "Activation slice");
  const sliceRow = element(
    "div.gp-line.gp-activation-slice",
    { hidden: () => shape.length < 2 },
    element("div.gp-labeled", label, slice, sliceError),
    dimensions,
  );
  /** Closes a job in the kernel, unless the kernel is lost. */
  const release = (id: number) => {
    ids.delete(id);
    kernel.ask("activation_close", { id }).catch(() => undefined);
  };
  /** Stores the id of a job, even if its reply is not needed any more. */
  const track = async (asked: Promise<JobReply<ActivationStatus>>): Promise<JobReply<ActivationStatus>> => {
    const answer = await asked;
    if (isClosed) release(answer.result.id);
    else ids.add(answer.result.id);
    return answer;
  };
  const job = makeJobView<ActivationStatus>(view, element("div.gp-stack.gp-activation-result"), {
    name: "Progress of the activation",
    button,
    again: "Show again",
    status: (id) => track(kernel.ask("activation_status", { id })),
    interrupt: (id) => track(kernel.ask("activation_interrupt", { id })),
    onEnd: (reply) => {
      hasEnded = true;
      refresh(button);
      for (const id of reply === null ? [] : ids) if (id !== reply?.result.id) release(id);
    },
    onDone: (reply) => fill(reply),
    onError: (reason) => {
      if (!(reason instanceof RequestFailed && reason.error.field === "plane")) return false;
      showFieldError(slice, sliceError, reason.message);
      return true;
    },
  });
  const show = () => {
    const withPatches = isPatched.querySelector("input")?.checked === true;
    showFieldError(slice, sliceError, null);
    job.begin();
    replaceChildren(inputs, "Inputs: ", element("code", describeInputs(view)));
    shownKey = withPatches ? patchesKey(model.get("session")) : null;
    const payload = { row, plane: slice.value.trim() || null, axes, is_patched: withPatches, inputs: inputsOf(view) };
    job.follow(track(kernel.ask("activation", payload)));
  };
  const onSession = () => {
    const isStale = shownKey !== null && shownKey !== patchesKey(model.get("session"));
    job.showOutdated(isStale, "press “Show again”");
  };
  const fill = ({ result: { view: shown }, buffers }: JobReply<ActivationStatus>) => {
    if (shown === null) return;
    const { statistics, plot, path } = shown;
    shape = statistics.shape;
    const own = plot.type === "none" ? null : plot.slice;
    if (own !== null && !slice.matches(":focus")) slice.value = own;
    refresh(sliceRow);
    fillDimensions(own);
    job.result.replaceChildren(...makeValue(shown, buffers, `Activation of ${path}`));
    onSession();
  };
  /** A choice of what each dimension is, and a slider for those of which one index is shown. */
  const fillDimensions = (own: string | null) => {
    const roles = (own === null ? null : rolesOf(own, shape, axes)) ?? [];
    const key = roles.map(({ role }) => role).join();
    if (key !== dimensions.dataset.roles)
      replaceChildren(dimensions, ...roles.filter(({ size }) => size > 1).map(dimensionChoice));
    dimensions.dataset.roles = key;
    for (const { dimension, index } of roles) showIndex(dimension, index);
  };
  const showIndex = (dimension: number, index: number) => {
    const slider = dimensions.querySelector<HTMLInputElement>(`input[name="${dimension}"]`);
    if (slider === null) return;
    slider.value = String(index);
    if (slider.nextSibling) slider.nextSibling.textContent = String(index);
  };
  const dimensionChoice = ({ dimension, role, size }: Dimension) => {
    const onchange = () => choose(dimension, choice.value as Role);
    const choice = element("select.gp-field", { "aria-label": `Dimension ${dimension}`, onchange });
    setOptions(choice, Object.entries(ROLES), role);
    const slider = element("input", {
      type: "range",
      name: dimension,
      max: size - 1,
      "aria-label": `Index of dimension ${dimension}`,
      oninput: () => {
        const moved = withIndex(slice.value, shape, dimension, Number(slider.value));
        if (moved === null) return;
        slice.value = moved;
        showIndex(dimension, Number(slider.value));
        show();
      },
    });
    const text = element("span.gp-muted", `dim ${dimension} (${size})`);
    const at = role === "index" ? [slider, element("span.gp-number.gp-slider-index")] : [];
    return element("span.gp-pair.gp-dimension", text, choice, ...at);
  };
  /** Gives a dimension a role; the one that had it, of rows and columns, gets the other's. */
  const choose = (dimension: number, role: Role) => {
    const roles = rolesOf(slice.value, shape, axes);
    const own = roles?.[dimension];
    const parts = expandSlice(slice.value, shape.length);
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
    axes = [roles.findIndex((one) => one.role === "rows"), roles.findIndex((one) => one.role === "columns")];
    const isWhole = (part: string) => part.includes(":");
    slice.value = parts
      .map((part, at) => (isWhole(part) === (roles[at]?.role !== "index") ? part : isWhole(part) ? "0" : ":"))
      .join(", ");
    show();
  };
  /** Interrupts the run, and drops the value in the kernel. */
  const close = () => {
    if (isClosed) return;
    isClosed = true;
    job.close();
    model.off("change:session", onSession);
    for (const id of ids) release(id);
  };
  model.on("change:session", onSession);
  view.onRemove(close);
  const section = element(
    "section.gp-stack.gp-activation",
    { "aria-label": "Activation" },
    element("h3.gp-heading.gp-muted", "Activation"),
    element("div.gp-line", button, isPatched),
    inputs,
    job.progress,
    job.message,
    sliceRow,
    job.outdated,
    job.result,
  );
  return { element: section, close };
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
