import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { makeActivation } from "../../src/details/activation_view";
import { setInputs } from "../../src/runs/jobs";
import { RequestFailed } from "../../src/view";
import { FakeView, patch } from "../fixtures";
import { activation, activationStatus, HISTOGRAM, heatmap, statistics } from "../job_fixtures";
import { choose } from "../panel_rig";

let view: FakeView;
let part: ReturnType<typeof makeActivation>;

function open(script: FakeView["kernel"]["script"]): void {
  view = new FakeView();
  view.kernel.script = { activation_close: () => ({ result: {}, buffers: [] }), ...script };
  part = makeActivation(view, 12);
  view.root.append(part.element);
}

const query = <E extends HTMLElement>(selector: string) => part.element.querySelector(selector) as E;
const settle = () => vi.advanceTimersByTimeAsync(0);
const slice = () => query<HTMLInputElement>("input[type=text]");
const alerts = () =>
  [...part.element.querySelectorAll<HTMLElement>("[role=alert]")]
    .filter((one) => !one.hidden)
    .map((one) => one.textContent);
const role = (dimension: number) => query<HTMLSelectElement>(`[aria-label="Dimension ${dimension}"]`);
const slider = (dimension: number) => query<HTMLInputElement>(`[aria-label="Index of dimension ${dimension}"]`);
/** A value of which the histogram is shown, as of whatever slice is asked for. */
const shown = (plane: string) => activation({ plot: { ...HISTOGRAM, slice: plane } });
const done = (id: number, plane: string | null) =>
  activationStatus(id, { state: "done", view: shown(plane ?? "0, 0, :, :") });

async function show(): Promise<void> {
  query<HTMLButtonElement>("button").click();
  await settle();
}

async function type(text: string): Promise<void> {
  slice().value = text;
  slice().dispatchEvent(new Event("change"));
  await settle();
}

beforeEach(() => void vi.useFakeTimers());
afterEach(() => {
  view.remove();
  vi.useRealTimers();
});

it("requests nothing before it is opened", async () => {
  open({});
  await vi.advanceTimersByTimeAsync(1000);
  expect(view.kernel.asked).toEqual([]);
  part.close();
  expect(view.kernel.asked).toEqual([]);
});

it("follows the run, then shows statistics and a plot", async () => {
  let status = activationStatus(3, { fraction: 0.25 });
  open({ activation: () => status, activation_status: () => status });
  setInputs(view, "ids2");
  await show();
  expect(view.kernel.last("activation")).toEqual({
    row: 12,
    plane: null,
    axes: null,
    is_patched: true,
    inputs: "ids2",
  });
  expect(query(".gp-progress").textContent).toContain("25% · 250 ms");
  expect(part.element.textContent).toContain("Inputs: ids2");
  status = done(3, null);
  await vi.advanceTimersByTimeAsync(30);
  expect(query(".gp-progress").hidden).toBe(true);
  expect(query(".gp-statistics").textContent).toContain("shape[1, 4, 8, 8]dtypefloat32");
  expect(query("svg").getAttribute("aria-label")).toContain("Activation of h_0.attn.weights: histogram of 10 values");
  expect(slice().value).toBe("0, 0, :, :");
});

it("has a slider for each dimension of which one index is shown; it stays while it is dragged", async () => {
  open({ activation: ({ plane }) => done(1, plane) });
  await show();
  expect(part.element.querySelectorAll("select").length).toBe(3); // the first dimension has one index only
  expect([slider(1).value, slider(1).max, role(1).value]).toEqual(["0", "3", "index"]);
  const [own] = [slider(1)];
  own.value = "2";
  own.dispatchEvent(new Event("input"));
  await settle();
  expect(view.kernel.last("activation")).toMatchObject({ plane: "0, 2, :, :", axes: null });
  expect(slider(1)).toBe(own);
  expect(own.nextSibling?.textContent).toBe("2");
});

it("chooses rows, columns and facets; what had the place gets the other's", async () => {
  open({ activation: ({ plane }) => done(1, plane) });
  await show();
  const chosen = async (dimension: number, value: string) => {
    choose(role(dimension), value);
    await settle();
    const { plane, axes } = view.kernel.last("activation");
    return [plane, axes];
  };
  expect(await chosen(1, "facets")).toEqual(["0, :, :, :", [2, 3]]);
  expect(await chosen(3, "rows")).toEqual(["0, :, :, :", [3, 2]]);
  expect([1, 2, 3].map((one) => role(one).value)).toEqual(["facets", "columns", "rows"]);
  expect(await chosen(1, "columns")).toEqual(["0, :, :, :", [3, 1]]);
  expect(await chosen(2, "index")).toEqual(["0, :, 0, :", [3, 1]]);
  expect(await chosen(3, "index")).toEqual(["0, :, :, 0", [2, 1]]);
  await type("0, 1, :, :");
  expect(view.kernel.last("activation")).toMatchObject({ plane: "0, 1, :, :", axes: null });
});

it("ignores a late reply to an earlier request", async () => {
  let answer: (status: ReturnType<typeof done>) => void = () => undefined;
  const slow = new Promise<ReturnType<typeof done>>((resolve) => {
    answer = resolve;
  });
  open({ activation: ({ plane }) => (plane === "0, 1, :, :" ? slow : done(1, plane)) });
  await show();
  await type("0, 1, :, :");
  await type("0, 2, :, :");
  answer(done(1, "0, 1, :, :"));
  await settle();
  expect(slice().value).toBe("0, 2, :, :");
});

it("shows a slice's error next to the field, and keeps the plot", async () => {
  const wrong = new RequestFailed({ message: "Index 9 is out of range: dimension 1 has size 4.", field: "plane" });
  open({ activation: ({ plane }) => (plane === "0, 9" ? Promise.reject(wrong) : done(1, plane)) });
  await show();
  await type("0, 9");
  expect(alerts()).toEqual(["Index 9 is out of range: dimension 1 has size 4."]);
  expect(slice().getAttribute("aria-invalid")).toBe("true");
  expect(query(`#${slice().getAttribute("aria-describedby")}`).textContent).toContain("Index 9");
  expect(query(".gp-activation-result").classList.contains("gp-dimmed")).toBe(false);
  await type("0, 1, :, :");
  expect(alerts()).toEqual([]);
  expect(slice().hasAttribute("aria-invalid")).toBe(false);
});

it("describes failures, interruptions and wrong inputs", async () => {
  let status = activationStatus(1, { state: "failed", error: "ValueError at h_0: no." });
  open({ activation: () => status, activation_status: () => status, activation_interrupt: () => status });
  await show();
  expect(alerts()).toEqual(["ValueError at h_0: no.\nChange the inputs or the patches, and try again."]);
  status = activationStatus(2);
  await show();
  expect(alerts()).toEqual([]);
  status = activationStatus(2, { state: "interrupted" });
  [...part.element.querySelectorAll("button")].find((one) => one.textContent === "Interrupt")?.click();
  await settle();
  expect(view.kernel.last("activation_interrupt")).toEqual({ id: 2 });
  expect(alerts()).toEqual(["Interrupted after 250 ms. Press “Show again” to start again."]);
  const wrong = new RequestFailed({ message: "There is no variable idz.", field: "inputs" });
  view.kernel.script.activation = () => Promise.reject(wrong);
  await show();
  expect(alerts()).toEqual(["The inputs, as typed under “Run”: There is no variable idz."]);
});

it("says that a heatmap came without its values", async () => {
  open({ activation: () => activationStatus(1, { state: "done", view: activation({ plot: heatmap(8, 8) }) }) });
  await show();
  expect(alerts()).toEqual(["The kernel sent 0 bytes for a heatmap of 8 x 8 values."]);
});

it("can be shown without the patches, and says if they have changed since", async () => {
  open({ activation: ({ plane }) => done(1, plane) });
  await show();
  const stale = () => !query(".gp-outdated").hidden;
  view.model.set("session", { version: 2, patches: [patch(1)], can_undo: true, can_redo: false, note: "" });
  expect(stale()).toBe(true);
  query("input[type=checkbox]").click();
  await settle();
  expect(view.kernel.last("activation")).toMatchObject({ is_patched: false });
  expect(stale()).toBe(false);
  view.model.set("session", { version: 3, patches: [], can_undo: true, can_redo: false, note: "" });
  expect(stale()).toBe(false);
});

it("has no slice field for a value of one dimension", async () => {
  const flat = activation({ statistics: statistics({ shape: [64] }), plot: HISTOGRAM });
  open({ activation: () => activationStatus(1, { state: "done", view: flat }) });
  await show();
  expect(query(".gp-activation-slice").hidden).toBe(true);
});

it("keeps the slice field for an empty slice", async () => {
  const empty = activation({ plot: { type: "none", why: "there is nothing in it" } });
  open({ activation: ({ plane }) => (plane ? activationStatus(1, { state: "done", view: empty }) : done(1, null)) });
  await show();
  await type("0, 0, 3:3");
  expect(part.element.textContent).toContain("There is nothing in it.");
  expect(query(".gp-activation-slice").hidden).toBe(false);
  expect(slice().value).toBe("0, 0, 3:3");
});

it("makes the kernel forget every run that is no longer shown", async () => {
  let id = 1;
  open({ activation: ({ plane }) => done(id++, plane) });
  const listening = view.model.listening;
  await show();
  await show();
  expect(view.kernel.asked.filter(([name]) => name === "activation_close")).toEqual([["activation_close", { id: 1 }]]);
  query<HTMLButtonElement>("button").click();
  part.close();
  await settle();
  const closed = view.kernel.asked.filter(([name]) => name === "activation_close").map(([, payload]) => payload);
  expect(closed).toEqual([{ id: 1 }, { id: 2 }, { id: 3 }]);
  expect(view.model.listening).toBeLessThanOrEqual(listening);
  part.close();
  view.remove();
  expect(view.model.listening).toBe(0);
  expect(view.kernel.count("activation_close")).toBe(3);
});
