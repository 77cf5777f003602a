import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { RunStatus } from "../../src/kernel/protocol";
import { makeRunPanel } from "../../src/runs/run_panel";
import { RequestFailed } from "../../src/view";
import { ABOUT, FakeModel, FakeView, patch, traits } from "../fixtures";
import { activation, HISTOGRAM, heatmap, report, runStatus, UNCHANGED } from "../job_fixtures";

let view: FakeView;
let panel: HTMLElement;

function open(changes: Parameters<typeof traits>[0] = {}, script: FakeView["kernel"]["script"] = {}): void {
  view = new FakeView(new FakeModel(traits(changes)));
  view.kernel.script = script;
  panel = makeRunPanel(view).element;
  view.root.append(panel);
}

function button(name: string): HTMLButtonElement {
  const found = [...panel.querySelectorAll("button")].find((one) => one.textContent === name);
  if (found === undefined) throw new Error(`no button ${name}`);
  return found;
}

const inputs = () => panel.querySelector("input") as HTMLInputElement;
const alerts = () =>
  [...panel.querySelectorAll<HTMLElement>("[role=alert]")].filter((one) => !one.hidden).map((one) => one.textContent);
const stale = () => panel.querySelector<HTMLElement>(".gp-outdated")?.hidden === false;
const progress = () => panel.querySelector<HTMLElement>(".gp-progress");
const dimmed = () => panel.querySelector(".gp-run-result")?.classList.contains("gp-dimmed");
const settle = () => vi.advanceTimersByTimeAsync(0);
const session = (...patches: ReturnType<typeof patch>[]) => ({
  version: 1,
  patches,
  can_undo: false,
  can_redo: false,
  note: "",
});
const done = (id: number, changes = {}) => runStatus(id, { state: "done", report: report(changes) });

async function run(): Promise<void> {
  button("Run").click();
  await settle();
}

beforeEach(() => void vi.useFakeTimers());
afterEach(() => {
  view.remove();
  vi.useRealTimers();
});

describe("a run", () => {
  it("is requested once, polled less and less often, and shown when done", async () => {
    const delays: number[] = [];
    let last = 0;
    let status = runStatus(7, { fraction: 0.5 });
    const run_status = () => {
      delays.push(Date.now() - last);
      last = Date.now();
      return status;
    };
    open({ session: session(patch(1)) }, { run: () => runStatus(7), run_status });
    last = Date.now();
    await run();
    button("Run").click();
    expect(view.kernel.count("run")).toBe(1);
    expect(view.kernel.last("run")).toEqual({ inputs: null });
    expect(button("Run").getAttribute("aria-disabled")).toBe("true");

    await vi.advanceTimersByTimeAsync(1500);
    expect(delays.slice(0, 6)).toEqual([30, 36, 43, 51, 62, 74]);
    expect(progress()?.hidden).toBe(false);
    expect(progress()?.textContent).toContain("50% · 250 ms");
    expect(panel.querySelector("progress")?.value).toBe(0.5);

    status = done(7);
    await vi.advanceTimersByTimeAsync(300);
    expect(progress()?.hidden).toBe(true);
    expect(panel.textContent).toContain("pg(ids) ran with patch #1 in 250 ms.");
    expect(panel.textContent).toContain("logits[1, 8, 100] float3289225%");
    expect(panel.textContent).toContain("[0, 7, 42] 1.5 → -2.5");
    expect(view.said).toEqual(["The run finished in 250 ms."]);

    const asked = view.kernel.asked.length;
    await vi.advanceTimersByTimeAsync(2000);
    expect(view.kernel.asked.length).toBe(asked);
  });

  it("uses the typed inputs; Enter runs", async () => {
    open({}, { run: () => runStatus(1), run_status: () => runStatus(1) });
    expect(inputs().placeholder).toBe("ids");
    inputs().value = "  ids2, labels=y ";
    inputs().dispatchEvent(new Event("input"));
    inputs().dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    await settle();
    expect(view.kernel.last("run")).toEqual({ inputs: "ids2, labels=y" });
    // A view that is filled anew keeps them.
    expect(makeRunPanel(view).element.querySelector("input")?.value).toBe("ids2, labels=y");
  });

  it("shows an input error next to the field until the inputs are changed", async () => {
    const wrong = new RequestFailed({ message: "There is no variable idz.", field: "inputs" });
    open({}, { run: () => Promise.reject(wrong) });
    await run();
    expect(alerts()).toEqual(["There is no variable idz."]);
    expect(inputs().getAttribute("aria-invalid")).toBe("true");
    const described = inputs().getAttribute("aria-describedby");
    expect(panel.querySelector(`#${described}`)?.textContent).toBe("There is no variable idz.");
    expect(document.activeElement).toBe(inputs());
    inputs().dispatchEvent(new Event("input"));
    expect(alerts()).toEqual([]);
    expect(inputs().hasAttribute("aria-invalid")).toBe(false);
  });

  it("shows why it failed until the patches change", async () => {
    open({ session: session(patch(1)) }, { run: () => runStatus(2, { state: "failed", error: "IndexError: no." }) });
    await run();
    expect(alerts().join()).toContain("IndexError: no.");
    view.model.set("session", { ...session(patch(1)), version: 8 });
    expect(alerts().join()).toContain("IndexError: no.");
    view.model.set("session", session());
    expect(alerts()).toEqual([]);
  });

  it("says what an interrupt waits for", async () => {
    let status = runStatus(7);
    open({}, { run: () => status, run_status: () => status });
    await run();
    expect(progress()?.textContent).not.toContain("waits");
    status = runStatus(7, { waits_for: "cell:9, in forward: time.sleep(9)" });
    await vi.advanceTimersByTimeAsync(300);
    expect(progress()?.textContent).toContain("The interrupt waits for cell:9, in forward: time.sleep(9)");
  });

  it("keeps the old result, dimmed, during a new run and if it fails", async () => {
    let status = done(1);
    open({ session: session(patch(1)) }, { run: () => status, run_status: () => status });
    await run();
    expect(dimmed()).toBe(false);
    status = runStatus(2);
    await run();
    expect(dimmed()).toBe(true);
    expect(panel.textContent).toContain("pg(ids) ran");
    status = runStatus(2, { state: "failed", error: "RuntimeError at h_0: no." });
    await vi.advanceTimersByTimeAsync(30);
    expect(alerts()).toEqual([
      "RuntimeError at h_0: no.\nChange the inputs or the patches, and try again.\nBelow is the result of the run before.",
    ]);
    expect(dimmed()).toBe(true);
    expect(button("Run").hasAttribute("aria-disabled")).toBe(false);
    status = done(3);
    await run();
    expect(alerts()).toEqual([]);
    expect(dimmed()).toBe(false);
  });

  it("can be interrupted; the focus returns to Run", async () => {
    const interrupted = () => runStatus(5, { state: "interrupted", seconds: 3 });
    open({}, { run: () => runStatus(5), run_status: () => runStatus(5), run_interrupt: interrupted });
    await run();
    button("Interrupt").focus();
    button("Interrupt").click();
    await settle();
    expect(view.kernel.last("run_interrupt")).toEqual({ id: 5 });
    expect(alerts()).toEqual(["Interrupted after 3.0 s. Press “Run” to start again."]);
    expect(document.activeElement).toBe(button("Run"));
  });

  it("says why it could not be requested", async () => {
    open({}, { run: () => Promise.reject(new RequestFailed({ message: "The kernel has stopped.", field: null })) });
    await run();
    expect(alerts()).toEqual(["The kernel has stopped."]);
  });

  it("is forgotten when the view is removed", async () => {
    open({}, { run: () => runStatus(1), run_status: () => runStatus(1) });
    await run();
    view.remove();
    const asked = view.kernel.asked.length;
    await vi.advanceTimersByTimeAsync(1000);
    expect(view.kernel.asked.length).toBe(asked);
    expect(view.model.listening).toBe(0);
  });
});

describe("staleness", () => {
  it("is shown if the patches differ from those of the run, and removed if they match again", async () => {
    open({ session: session(patch(1)) }, { run: () => done(1) });
    await run();
    expect(stale()).toBe(false);
    view.model.set("session", session(patch(1, { value: "2" })));
    expect(stale()).toBe(true);
    view.model.set("session", session(patch(1), patch(2, { is_enabled: false })));
    expect(stale()).toBe(false);
  });

  it("compares with the run shown, not with a later one that failed", async () => {
    let status = done(1);
    open({ session: session(patch(1)) }, { run: () => status });
    await run();
    view.model.set("session", session(patch(1), patch(2)));
    status = runStatus(2, { state: "failed", error: "no" });
    await run();
    view.model.set("session", session(patch(1), patch(2), patch(3, { is_enabled: false })));
    expect(stale()).toBe(true);
  });
});

describe("a run of another view", () => {
  it("is followed", async () => {
    let status = runStatus(4);
    open({ session: session(patch(1)) }, { run_status: () => status });
    view.model.set("run", { id: 4, state: "running" });
    await settle();
    expect(progress()?.hidden).toBe(false);
    status = done(4);
    view.model.set("run", { id: 4, state: "done" });
    await vi.advanceTimersByTimeAsync(100);
    expect(panel.textContent).toContain("pg(ids) ran");
    expect(view.said).toEqual([]);
  });

  it("that was already finished is shown at once", async () => {
    open({ run: { id: 3, state: "done" }, session: session(patch(1), patch(2)) }, { run_status: () => done(3) });
    await settle();
    expect(panel.textContent).toContain("pg(ids) ran");
    expect(stale()).toBe(true);
  });

  it("that the kernel has forgotten is not an error", async () => {
    const gone: Promise<ReturnType<typeof done>> = Promise.reject(new Error("no run 3"));
    open({ run: { id: 3, state: "done" } }, { run_status: () => gone });
    await settle();
    expect(alerts()).toEqual([]);
  });

  it("that is older than this view's own run is not shown instead", async () => {
    open({ run: { id: 1, state: "done" } }, { run: () => done(2), run_status: () => done(1, { call: "old()" }) });
    await settle();
    await run();
    expect(panel.textContent).toContain("pg(ids) ran");
  });
});

describe("a report", () => {
  const show = async (changes: Parameters<typeof report>[0], state: Partial<RunStatus> = {}) => {
    open(
      { session: session(patch(1)) },
      { run: () => runStatus(1, { state: "done", report: report(changes), ...state }) },
    );
    await run();
  };

  const cells = () =>
    [...panel.querySelectorAll(".gp-predictions tr")].map((row) => [...row.children].map((cell) => cell.textContent));

  it("follows tokens through the patch: their rank and probability in both runs, and the change in color", async () => {
    await show({
      predictions: [
        {
          position: 7,
          prompt: null,
          rows: [
            { text: " the", before: [0, 0.993], after: [12, 0.0001] },
            { text: "\n", before: [40, 0], after: [0, 0.6] },
            { text: "<b>x</b>", before: [1, 0.001], after: [1, 0.001] },
          ],
        },
      ],
    });
    expect(panel.textContent).toContain("Next token after position 7");
    expect(cells()).toEqual([
      ["Token", "Rank", "Without patches", "Rank", "With patches", "Change"],
      ["␣the", "0", "99.3%", "12", "<0.1%", "−99.3"],
      ["⏎", "40", "0%", "0", "60%", "+60.0"],
      ["<b>x</b>", "1", "0.1%", "1", "0.1%", "0.0"],
    ]);
    const signs = [...panel.querySelectorAll<HTMLElement>("td.gp-change")].map(({ dataset }) => dataset.sign);
    expect(signs).toEqual(["negative", "positive", undefined]);
  });

  it("has one rank and probability if no patch was applied, and classes for a classifier", async () => {
    const rows = [{ text: "tabby cat", before: [0, 0.5] as [number, number], after: [0, 0.5] as [number, number] }];
    await show({ patches: [], predictions: [{ position: null, prompt: null, rows }] });
    expect(cells()).toEqual([
      ["Class", "Rank", "Probability"],
      ["tabby cat", "0", "50%"],
    ]);
    expect(panel.textContent).toContain("Most probable classes");
    expect(panel.textContent).toContain("ran without patches");
  });

  it("shows no relative change of zero, and no difference without a comparison", async () => {
    const kind = { shape: [2], dtype: "float32", largest: [] };
    const norms = { norm_before: 0, norm_after: 3, norm_difference: 3 };
    const note = "only in the output without the patches";
    const other = { norm_before: 2, norm_after: null, norm_difference: null, note };
    const partial = "differences count only entries that are finite in both";
    const odd = { norm_before: 2, norm_after: 4, norm_difference: 2, note: partial };
    await show({
      changes: [
        { path: "a", ...kind, ...norms, note: null },
        { path: "b", ...kind, ...other },
        { path: "c", ...kind, ...odd },
      ],
    });
    const rows = [...panel.querySelectorAll(".gp-changes tbody tr")].map((row) => row.textContent);
    expect(rows).toEqual([
      "a[2] float32033from zero",
      "b[2] float322–––",
      "Only in the output without the patches.",
      "c[2] float32242100%",
      "Differences count only entries that are finite in both.",
    ]);
    expect(panel.textContent).not.toContain("change nothing");
  });

  it("shows control characters and changes of the text direction as escapes", async () => {
    const [change] = report().changes;
    const odd = "a\u202eb\u0007c\nd";
    const seen = "a\\u202eb\\x07c\\nd";
    if (change === undefined) throw new Error("no change");
    const probe = { view: null, note: odd, ...UNCHANGED };
    await show({
      call: odd,
      warnings: [odd],
      changes: [{ ...change, path: odd, note: odd }],
      probes: [{ ...probe, number: 1, name: odd, path: odd }],
    });
    const text = panel.querySelector(".gp-report")?.textContent ?? "";
    for (const unseen of ["\u202e", "\u0007"]) expect(text).not.toContain(unseen);
    expect(panel.querySelector(".gp-report-head")?.textContent).toContain(`${seen} ran`);
    expect(panel.querySelector(".gp-changes tbody code")?.textContent).toBe(seen);
    expect(panel.querySelector(".gp-probe-name")?.textContent).toBe(seen);
    expect(panel.querySelector(".gp-warnings li")?.textContent).toBe("a\\u202eb\\x07c\nd.");
  });

  it("says that nothing changed", async () => {
    const change = {
      path: "a",
      shape: [2],
      dtype: "float32",
      norm_before: 1,
      norm_after: 1,
      norm_difference: 0,
      largest: [],
    };
    await show({ changes: [{ ...change, note: null }] });
    expect(panel.textContent).toContain("The patches change nothing at the output.");
  });

  it("shows warnings and probes, with links to the probes' nodes", async () => {
    const probe = { view: activation({ plot: HISTOGRAM }), note: null, ...UNCHANGED };
    const silent = { ...probe, view: null, note: "It did not fire." };
    await show({
      warnings: ["#2 did not fire."],
      probes: [
        { ...probe, number: 1, name: "seen", path: "h_0.attn.output" },
        { ...silent, number: 9, name: "unseen", path: "h_9.output" },
      ],
    });
    expect(panel.querySelector(".gp-warnings")?.textContent).toBe("1 warning#2 did not fire.");
    const [first, second] = panel.querySelectorAll(".gp-probe");
    expect(first?.querySelector("svg")?.getAttribute("aria-label")).toContain(
      "seen, h_0.attn.output: histogram of 10 values",
    );
    first?.querySelector("button")?.click();
    expect(view.calls).toEqual([["reveal", 10]]);
    expect(second?.textContent).toBe("unseen #9 h_9.outputIt did not fire.");
    expect(second?.querySelector("button")).toBeNull();
  });

  it("says how much the patches changed a probe's value", async () => {
    const plain = { view: activation({ plot: { ...heatmap(8, 8), slice: "0, :, :", constant: 0 } }), note: null };
    const what = { path: "h_9.output", shape: [8, 8], dtype: "float32", largest: [] };
    const change = { ...what, norm_before: 3.2, norm_after: 2.9, norm_difference: 0.7, note: null };
    const changes = [
      change,
      { ...change, norm_difference: 0 },
      { ...change, norm_before: 0 },
      { ...change, norm_difference: null, note: "not compared: other shapes" },
      { ...change, norm_before: null, norm_difference: null, note: "not compared: it fired only with the patches" },
      null,
    ];
    await show({
      probes: changes.map((one, index) => ({
        ...plain,
        number: index,
        name: `h${index}`,
        path: "h_9.output",
        ...UNCHANGED,
        change: one,
      })),
    });
    const found = [...panel.querySelectorAll(".gp-probe")];
    expect(found.map((one) => one.querySelector(".gp-probe-change")?.textContent)).toEqual([
      "norm 3.2 → 2.9, changed by 0.7 (21.9%)",
      "norm 2.9, unchanged",
      "norm 0 → 2.9, changed by 0.7",
      "norm 3.2 → 2.9Not compared: other shapes.",
      "Not compared: it fired only with the patches.",
      undefined,
    ]);
    expect(found[0]?.querySelector("canvas")).toBeNull();
    expect(found[0]?.lastElementChild?.textContent).toBe("All values of [0, :, :] are 0.");
  });
});

it("says why there are no example inputs", () => {
  open({ about: { ...ABOUT, arguments: null, no_inputs: "The example inputs were not kept." } });
  expect(panel.textContent).toContain("The example inputs were not kept.");
  expect(inputs().placeholder).toBe("arguments, as in a call");
});
