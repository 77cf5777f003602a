import { afterEach, describe, expect, it } from "vitest";
import { page, userEvent } from "vitest/browser";
import { makeActivation } from "../../src/details/activation_view";
import type { Plot } from "../../src/kernel/protocol";
import { color, MISSING } from "../../src/plots/matrix";
import { makePlot } from "../../src/plots/plots";
import { makeRunPanel } from "../../src/runs/run_panel";
import { accessibilityViolations } from "../accessibility";
import { cellColor } from "../canvas";
import { FakeView } from "../fixtures";
import {
  activation,
  activationStatus,
  float32,
  HISTOGRAM,
  heatmap,
  report,
  statistics,
  UNCHANGED,
} from "../job_fixtures";
import "../../src/style.css";

const DONE = { id: 1, state: "done" as const, seconds: 1, fraction: 1, error: null, waits_for: null };

const HOSTILE = `<img src=x onerror="window.hacked = 1">`;
const TOKENS = ["When", " Mary", " and", "\n"];
const views: FakeView[] = [];

function open(): FakeView {
  const view = new FakeView();
  views.push(view);
  return view;
}

function plot(shown: Plot, values: number[] = [], options: Partial<Parameters<typeof makePlot>[2]> = {}): HTMLElement {
  const figure = makePlot(shown, [float32(values)], { title: "Activation of h_0", ...options });
  open().root.append(figure);
  return figure;
}

const canvasOf = (figure: HTMLElement) => figure.querySelector("canvas") as HTMLCanvasElement;
const readout = (figure: HTMLElement) => figure.querySelector(".gp-readout")?.textContent;

afterEach(() => {
  for (const view of views.splice(0)) view.remove();
});

describe("a heatmap", () => {
  it("colors each cell by its value", () => {
    const canvas = canvasOf(plot(heatmap(2, 3), [0, 0.5, 1, 0.25, 0.75, 1]));
    [0, 0.5, 1, 0.25, 0.75, 1].forEach((value, index) => {
      expect(cellColor(canvas, [Math.floor(index / 3), index % 3], [2, 3])).toEqual(color(value, "sequential"));
    });
  });

  it("is symmetric about zero if both signs occur", () => {
    const canvas = canvasOf(plot(heatmap(1, 4), [-1, 0, 1, 2]));
    const expected = [0.25, 0.5, 0.75, 1].map((value) => color(value, "diverging"));
    expect([0, 1, 2, 3].map((column) => cellColor(canvas, [0, column], [1, 4]))).toEqual(expected);
  });

  it("hatches NaN and infinities in colors no value has", () => {
    const figure = plot(heatmap(1, 4), [Number.NaN, 0, 1, Number.NEGATIVE_INFINITY]);
    const canvas = canvasOf(figure);
    const data = canvas.getContext("2d")?.getImageData(0, 0, canvas.width / 4, canvas.height).data ?? [];
    const seen = new Set<string>();
    for (let index = 0; index < data.length; index += 4) seen.add(`${[...data.slice(index, index + 3)]}`);
    expect(seen).toContain(`${MISSING}`);
    expect(seen.size).toBeGreaterThan(1);
    const numbers = ["sequential", "diverging"].flatMap((map) =>
      Array.from({ length: 1001 }, (_, step) => `${color(step / 1000, map as "sequential")}`),
    );
    expect(numbers.filter((rgb) => seen.has(rgb))).toEqual([]);
    expect(figure.textContent).toContain("2 values hatched");
    expect(cellColor(canvas, [0, 2], [1, 4])).toEqual(color(1, "sequential"));
  });

  it("has square cells of whole device pixels for attention", () => {
    const values = Array.from({ length: 100 }, (_, index) => (index % 10 > index / 10 ? 0 : 0.1));
    const canvas = canvasOf(plot(heatmap(10, 10), values));
    const { width, height } = canvas.getBoundingClientRect();
    expect(width).toBeCloseTo(height, 3);
    expect(width * devicePixelRatio).toBeCloseTo(canvas.width, 3);
    expect(canvas.width % 10).toBe(0);
  });

  it("draws 256 x 256 values within a popup's width", () => {
    const values = Array.from({ length: 65536 }, (_, index) => Math.sin(index));
    const canvas = canvasOf(plot(heatmap(256, 256), values));
    expect(canvas.getBoundingClientRect().width).toBeLessThanOrEqual(320);
  });

  it("describes what it shows and how it was reduced", () => {
    const reduced = "each cell is the mean of 2 x 1 values";
    const figure = plot(heatmap(2, 2, { full: [4, 2], reduced }), [1, 2, 3, Number.NaN]);
    const canvas = canvasOf(figure);
    expect(canvas.getAttribute("role")).toBe("img");
    expect(canvas.getAttribute("aria-label")).toBe(
      "Activation of h_0: heatmap of 2 rows by 2 columns; each cell is the mean of 2 x 1 values; from 1 to 3, mean 2; " +
        "1 not finite. Arrow keys read single values.",
    );
    expect(figure.querySelector(".gp-note")?.textContent).toBe("Each cell is the mean of 2 x 1 values.");
  });

  it("reads out values and tokens for the keyboard", async () => {
    const values = Array.from({ length: 16 }, (_, index) => index / 8);
    const figure = plot(heatmap(4, 4), values, { rowTokens: TOKENS, columnTokens: TOKENS });
    canvasOf(figure).focus();
    expect(readout(figure)).toBe("[0, 3, :, :] 4 × 4");
    await userEvent.keyboard("{ArrowDown}");
    expect(readout(figure)).toBe("row 0 (When), column 0 (When): 0");
    await userEvent.keyboard("{ArrowDown}{ArrowRight}{ArrowRight}");
    expect(readout(figure)).toBe("row 1 (␣Mary), column 2 (␣and): 0.75");
    expect(figure.querySelector(".gp-readout")?.getAttribute("aria-live")).toBe("polite");
    const cursor = figure.querySelector(".gp-heatmap-cursor") as HTMLElement;
    const [cell, canvas] = [cursor.getBoundingClientRect(), canvasOf(figure).getBoundingClientRect()];
    expect(cell.left - canvas.left).toBeCloseTo(canvas.width / 2, 1);
    expect(cell.top - canvas.top).toBeCloseTo(canvas.height / 4, 1);
    await userEvent.keyboard("{End}{PageDown}{ArrowRight}");
    expect(readout(figure)).toBe("row 3 (⏎), column 3 (⏎): 1.875");
    await userEvent.keyboard("{Control>}{Home}{/Control}");
    expect(readout(figure)).toBe("row 0 (When), column 0 (When): 0");
    canvasOf(figure).blur();
    expect(readout(figure)).toBe("[0, 3, :, :] 4 × 4");
  });

  it("handles arrow keys and lets other keys through", async () => {
    const figure = plot(heatmap(2, 2), [1, 2, 3, 4]);
    const heard: string[] = [];
    figure.parentElement?.addEventListener("keydown", (event) => heard.push(event.key));
    canvasOf(figure).focus();
    await userEvent.keyboard("{ArrowDown}{Escape}{End}x");
    expect(heard).toEqual(["Escape", "x"]);
  });

  it("reads out the value under the mouse", async () => {
    const figure = plot(heatmap(2, 2, { full: [6, 2], reduced: "Each row is the mean of 3." }), [1, 2, 3, 4]);
    const canvas = canvasOf(figure);
    const { width, height } = canvas.getBoundingClientRect();
    await userEvent.hover(canvas, { position: { x: 0.75 * width, y: 0.75 * height } });
    expect(readout(figure)).toBe("rows 3 to 5, column 1: 4 (several values)");
    await userEvent.unhover(canvas);
    expect(readout(figure)).toBe("[0, 3, :, :] 6 × 2");
  });

  it("names the rows of its last, smaller block", async () => {
    const figure = plot(heatmap(3, 1, { full: [8, 1], reduced: "each cell is the mean of 3 x 1 values" }), [1, 2, 3]);
    canvasOf(figure).focus();
    await userEvent.keyboard("{Home}{PageDown}");
    expect(readout(figure)).toBe("rows 6 to 7, column 0: 3 (several values)");
  });

  it("clips outliers, and shows the full range on request", async () => {
    const values = Array.from({ length: 100 }, (_, index) => Math.sin(index));
    values[0] = 1000;
    const figure = plot(heatmap(10, 10), values);
    const canvas = canvasOf(figure);
    const typical = cellColor(canvas, [1, 1], [10, 10]);
    expect(figure.querySelector(".gp-legend")?.textContent).toBe("≤ -1.00≥ 1.002 values beyond the scale");
    const toggle = figure.querySelector("button") as HTMLButtonElement;
    toggle.focus();
    await userEvent.keyboard("{Enter}");
    expect(figure.querySelector(".gp-legend")?.textContent).toBe("-1,0001,000Outliers included");
    expect(cellColor(canvas, [1, 1], [10, 10])).not.toEqual(typical);
    expect(document.activeElement).toBe(figure.querySelector("button"));
  });
});

describe("a histogram", () => {
  it("has a bar for each bin, with the height of its count", () => {
    const figure = plot(HISTOGRAM);
    const heights = [...figure.querySelectorAll(".gp-bar")].map((bar) => bar.getBoundingClientRect().height);
    expect(heights[0]).toBeGreaterThan(1);
    expect(heights[1]).toBe(0);
    expect((heights[3] ?? 0) / (heights[2] ?? 1)).toBeCloseTo(0.5, 2);
    expect(figure.querySelector(".gp-histogram-ends")?.textContent).toBe("-22");
  });

  it("reads out bins for the keyboard", async () => {
    const figure = plot(HISTOGRAM);
    (figure.querySelector("svg") as SVGElement).focus();
    expect(readout(figure)).toBe("10 values, at most 6 in a bin");
    await userEvent.keyboard("{ArrowRight}");
    expect(readout(figure)).toBe("-2 to -1: 1 value");
    await userEvent.keyboard("{End}{ArrowRight}");
    expect(readout(figure)).toBe("1 to 2: 3 values");
  });

  it("is drawn also for equal values or none", () => {
    const same = plot({ ...HISTOGRAM, counts: [5], edges: [3, 3] });
    expect(same.querySelector(".gp-bar")?.getBoundingClientRect().width).toBeGreaterThan(100);
    expect(same.innerHTML).not.toContain("NaN");
    expect(plot({ ...HISTOGRAM, counts: [], edges: [] }).querySelectorAll(".gp-bar").length).toBe(0);
  });
});

it("says why there is no plot", () => {
  expect(plot({ type: "none", why: "it is no tensor" }).textContent).toBe("It is no tensor.");
});

/** A view with a run that shows everything there is, and an activation. */
async function full(): Promise<FakeView> {
  const view = open();
  const probe = { number: 1, ...UNCHANGED };
  const values = float32(Array.from({ length: 16 }, (_, index) => index - 8));
  const shown = report({
    warnings: [HOSTILE],
    call: HOSTILE,
    predictions: [0, 1].map((row) => ({
      position: 3 + row,
      prompt: `${HOSTILE} ${row}`,
      rows: [
        { text: " the", before: [0, 0.7], after: [1, 0.1] },
        { text: HOSTILE, before: [9, 0], after: [0, 0.6] },
      ],
    })),
    probes: [
      {
        ...probe,
        name: HOSTILE,
        path: HOSTILE,
        view: activation({ plot: heatmap(4, 4), statistics: statistics({ nan: 1 }), row_labels: TOKENS }),
        note: HOSTILE,
      },
      { ...probe, name: "b", path: "h", view: activation({ plot: HISTOGRAM }), note: null },
    ],
  });
  const seen = activation({
    plot: heatmap(4, 4),
    row_labels: TOKENS,
    column_labels: [HOSTILE, "b", "c", "d"],
    path: HOSTILE,
  });
  view.kernel.script = {
    run: () => ({ result: { ...DONE, report: shown }, buffers: [values] }),
    activation: () => activationStatus(1, { state: "done", view: seen }, [values]),
    activation_close: () => ({ result: {}, buffers: [] }),
  };
  view.root.append(makeRunPanel(view).element, makeActivation(view, 3).element);
  for (const name of ["Run", "Show activation"]) {
    [...view.root.querySelectorAll("button")].find((button) => button.textContent === name)?.click();
  }
  await expect.poll(() => view.root.querySelectorAll("canvas").length).toBe(2);
  return view;
}

it.each([1200, 640, 330])(
  "shows a probe before, after and as a difference, inside its card, %d px wide",
  async (width) => {
    const view = open();
    view.root.style.width = `${width}px`;
    const norms = { norm_before: 6.2491234, norm_after: 6.2498765, norm_difference: 0.000123456 };
    const change = { path: "h_1.output", shape: [1, 4, 4], dtype: "float32", largest: [], note: null, ...norms };
    const probe = {
      number: 2,
      name: "a_name_that_is_rather_long",
      path: "transformer.h_1.attn.a_long_name.output|sub_0",
      note: null,
      change,
      view: activation({ plot: heatmap(4, 4, { buffer: 0 }), row_labels: TOKENS }),
      before: heatmap(4, 4, { buffer: 1 }),
      difference: heatmap(4, 4, { buffer: 2 }),
    };
    const buffers = [0, 1, 2].map((which) =>
      float32(Array.from({ length: 16 }, (_, at) => ([2, 8, -6][which] ?? 0) * (at / 15))),
    );
    const other = { ...probe, number: 3, name: "b" };
    const shown = report({ probes: [probe, other] });
    const done = { ...DONE, report: shown };
    view.kernel.script = { run: () => ({ result: done, buffers }) };
    view.root.append(makeRunPanel(view).element);
    view.root.querySelector<HTMLButtonElement>(".gp-run .gp-primary")?.click();
    await expect.poll(() => view.root.querySelectorAll(".gp-probe canvas").length).toBe(6);
    const [card] = view.root.querySelectorAll(".gp-probe");
    const captions = [...(card?.querySelectorAll(".gp-beside .gp-caption:first-child") ?? [])];
    expect(captions.map((caption) => caption.textContent)).toEqual(["Without patches", "With patches", "Difference"]);
    // The first two have one scale, from 0 to 8; the last goes from -6 to 0.
    const [before, after] = [...(card?.querySelectorAll("canvas") ?? [])];
    expect(cellColor(before as HTMLCanvasElement, [3, 3], [4, 4])).toEqual(color(1, "sequential"));
    expect(cellColor(after as HTMLCanvasElement, [3, 3], [4, 4])).toEqual(color(0.25, "sequential"));
    for (const one of view.root.querySelectorAll<HTMLElement>(".gp-probe")) {
      const box = one.getBoundingClientRect();
      for (const inside of one.querySelectorAll("*"))
        expect(inside.getBoundingClientRect().right).toBeLessThanOrEqual(box.right);
    }
  },
);

it("shows the output's numbers beside a long path that wraps", async () => {
  const view = open();
  view.root.style.width = "640px";
  const path = `output|${"a_long_name_of_a_key.".repeat(60)}hidden_states`;
  const [change] = report().changes;
  const shown = report({ changes: change === undefined ? [] : [{ ...change, path }, change] });
  const done = { ...DONE, report: shown };
  view.kernel.script = { run: () => ({ result: done, buffers: [] }) };
  view.root.append(makeRunPanel(view).element);
  view.root.querySelector<HTMLButtonElement>(".gp-run .gp-primary")?.click();
  await expect.poll(() => view.root.querySelector(".gp-changes")).not.toBeNull();
  const scroll = view.root.querySelector(".gp-changes")?.parentElement as HTMLElement;
  expect(scroll.scrollWidth).toBeLessThanOrEqual(scroll.clientWidth);
  const name = scroll.querySelector("tbody code") as HTMLElement;
  expect(name.title).toBe(path);
  expect(name.getBoundingClientRect().height).toBeLessThan(70);
  expect(name.getBoundingClientRect().width).toBeGreaterThan(80);
  for (const cell of scroll.querySelectorAll("tbody td")) {
    expect(cell.getBoundingClientRect().right).toBeLessThanOrEqual(scroll.getBoundingClientRect().right);
  }
});

it("shows markup in texts as text", async () => {
  const view = await full();
  expect(view.root.querySelector("img")).toBeNull();
  expect(view.root.textContent).toContain(HOSTILE);
  expect("hacked" in window).toBe(false);
});

it.each(["light", "dark"])("has no accessibility violations (%s)", async (theme) => {
  const view = await full();
  view.root.dataset.gpTheme = theme;
  for (const details of view.root.querySelectorAll("details")) details.open = true;
  expect(await accessibilityViolations(view.root)).toEqual([]);
  // The old result is paler then.
  view.kernel.script.run = () => Promise.reject(new Error("The kernel has stopped."));
  view.root.querySelector<HTMLButtonElement>(".gp-run .gp-primary")?.click();
  await expect.poll(() => view.root.querySelector(".gp-run .gp-message")?.textContent).toContain("stopped");
  expect(await accessibilityViolations(view.root)).toEqual([]);
});

it("has no accessibility violations when a first run fails", async () => {
  const view = open();
  view.kernel.script = { run: () => Promise.reject(new Error("The kernel has stopped.")) };
  view.root.append(makeRunPanel(view).element);
  view.root.querySelector("button")?.click();
  await expect.poll(() => view.root.querySelector("[role=alert]:not([hidden])")?.textContent).toBeTruthy();
  expect(await accessibilityViolations(view.root)).toEqual([]);
});

it("shows the next tokens of several prompts beside each other, and below each other on a narrow page", async () => {
  await page.viewport(1200, 900);
  const view = await full();
  const boxes = () => [...view.root.querySelectorAll(".gp-predictions")].map((one) => one.getBoundingClientRect());
  const prompts = [...view.root.querySelectorAll(".gp-prompt")].map(({ textContent }) => textContent);
  expect(prompts).toEqual([`${HOSTILE} 0`, `${HOSTILE} 1`]);
  const [left, right] = boxes();
  expect(right?.left).toBeGreaterThan(left?.right ?? 0);
  expect(right?.top).toBe(left?.top);
  await page.viewport(420, 900);
  const [above, below] = boxes();
  expect(below?.top).toBeGreaterThan(above?.bottom ?? 0);
});
