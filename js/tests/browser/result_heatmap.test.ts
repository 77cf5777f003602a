import { expect, test, vi } from "vitest";
import { userEvent } from "vitest/browser";
import widget from "../../src/index";
import type { HeatmapTraits, Item, LinkedTraits, ResultHeatmap } from "../../src/kernel/protocol";
import { color } from "../../src/plots/matrix";
import { itemOf } from "../../src/views/selection";
import { accessibilityViolations } from "../accessibility";
import { cellCenter, cellColor } from "../canvas";
import { FakeModel } from "../fixtures";
import { float32 } from "../job_fixtures";
import { linkedTraits, rendered, setTheme, undos } from "../rendered";

const ROWS = 3;
const COLUMNS = 4;
const SIZE = [ROWS, COLUMNS] as const;
const VALUES = Array.from({ length: ROWS * COLUMNS }, (_, index) => index / 4 - 1);
const HOSTILE = "<img src=x onerror=window.wasRun=1>";

function result(changes: Partial<ResultHeatmap> = {}): ResultHeatmap {
  const paths = [2, 1, 0].map((layer) => `transformer.h_${layer}.mlp.output`);
  return {
    title: "Restored",
    name: "score",
    rows: {
      name: "path",
      title: "path: transformer.*.mlp.output",
      values: paths,
      labels: ["h_2", "h_1", "h_0"],
      tokens: null,
    },
    columns: {
      name: "position",
      title: "position",
      values: ["0", "1", "2", "3"],
      labels: ["The", "␣cat", "⏎", HOSTILE],
      tokens: ["The", "␣cat", "⏎", `${HOSTILE} to its end`],
    },
    full: [ROWS, COLUMNS],
    map: "diverging",
    low: -2,
    high: 2,
    center: "corrupted 0",
    missing: null,
    reduced: null,
    model_id: "abc",
    ...changes,
  };
}

const frame = () => new Promise(requestAnimationFrame);

async function shown(changes: Partial<ResultHeatmap> = {}, values = VALUES, cell: HeatmapTraits["cell"] = null) {
  const model = new FakeModel<HeatmapTraits>({ heatmap: result(changes), values: float32(values), cell });
  const { el, remove } = await rendered(model);
  await frame();
  await frame(); // until it fills the width
  const query = <E extends HTMLElement>(selector: string) => el.querySelector(selector) as E;
  return { model, el, remove, query, canvas: query<HTMLCanvasElement>("canvas") };
}

function alpha(canvas: HTMLCanvasElement, row: number, column: number): number {
  const [x, y] = [((column + 0.25) / COLUMNS) * canvas.width, ((row + 0.25) / ROWS) * canvas.height];
  return canvas.getContext("2d")?.getImageData(Math.floor(x), Math.floor(y), 1, 1).data[3] ?? -1;
}

test("cells use the kernel's color scale, not the range of the values", async () => {
  const { canvas } = await shown();
  VALUES.forEach((value, index) => {
    expect(cellColor(canvas, [Math.floor(index / COLUMNS), index % COLUMNS], SIZE)).toEqual(
      color((value + 2) / 4, "diverging"),
    );
  });
});

test("axes have titles and labels; the legend explains cells without a color", async () => {
  const { el, query } = await shown();
  expect(query("h3").textContent).toBe("Restored");
  expect(query(".gp-heatmap-row-title").textContent).toBe("path: transformer.*.mlp.output");
  expect(query(".gp-heatmap-column-title").textContent).toBe("position");
  const labels = (axis: string) => [...el.querySelectorAll(`.gp-heatmap-${axis} span`)].map((one) => one.textContent);
  expect(labels("rows")).toEqual(["h_2", "h_1", "h_0"]);
  expect(labels("columns")).toEqual(["The", "␣cat", "⏎", HOSTILE]);
  expect(query(".gp-legend").textContent).toBe("score (no color: corrupted 0)-22−+");
  expect(el.querySelector("img")).toBeNull();
  expect("wasRun" in window).toBe(false);
});

test("titles and labels are beside the cells", async () => {
  const { query, canvas } = await shown();
  const cells = canvas.getBoundingClientRect();
  const rows = query(".gp-heatmap-rows").getBoundingClientRect();
  expect(query(".gp-heatmap-row-title").getBoundingClientRect().bottom).toBeLessThanOrEqual(rows.top);
  expect(cells.left - rows.right).toBeGreaterThanOrEqual(0);
  expect(cells.left - rows.right).toBeLessThan(8);
  expect(query(".gp-heatmap-columns").getBoundingClientRect().top).toBeGreaterThanOrEqual(cells.bottom);
});

test("the legend mentions values beyond the limits", async () => {
  const { query } = await shown({ low: -1, high: 1, center: null });
  expect(query(".gp-legend").textContent).toContain("score-1≥ 1");
});

test("a float32 rounded past a limit does not count as beyond it", async () => {
  const { query } = await shown(
    { low: -0.1, high: 0.1 },
    Array.from({ length: 12 }, (_, at) => (at % 2 ? 0.1 : -0.1)),
  );
  expect(query(".gp-legend").textContent).toContain("-0.10.1");
});

test("the cell under the mouse is read out with its full path and token", async () => {
  const { query, canvas } = await shown();
  await userEvent.hover(canvas, cellCenter(canvas, [1, 1], SIZE));
  expect(query(".gp-readout").textContent).toBe("path transformer.h_1.mlp.output, position 1 (␣cat): 0.25");
  await userEvent.unhover(canvas);
  expect(query(".gp-readout").textContent).toContain("3 × 4");
});

test("a click selects a cell, a second one deselects it; both reach the kernel", async () => {
  const { model, query, canvas } = await shown();
  await userEvent.click(canvas, cellCenter(canvas, [2, 0], SIZE));
  expect([model.traits.cell, model.saved]).toEqual([[2, 0], 1]);
  expect(query(".gp-result > .gp-note").textContent).toBe(
    "Selected: path transformer.h_0.mlp.output, position 0 (The): 1",
  );
  const mark = query(".gp-heatmap-mark").getBoundingClientRect();
  expect(mark.left).toBeCloseTo(canvas.getBoundingClientRect().left, 0);
  expect(mark.bottom).toBeCloseTo(canvas.getBoundingClientRect().bottom, 0);
  await userEvent.click(canvas, cellCenter(canvas, [2, 0], SIZE));
  expect([model.traits.cell, model.saved]).toEqual([null, 2]);
  expect(query(".gp-heatmap-mark")).toBeNull();
  expect(query(".gp-result > .gp-note").hidden).toBe(true);
});

test("the keyboard reads out and selects cells", async () => {
  const { model, query, canvas } = await shown();
  canvas.focus();
  await userEvent.keyboard("{Enter}");
  expect(model.traits.cell).toBeNull();
  await userEvent.keyboard("{ArrowDown}{ArrowDown}{ArrowRight}{Enter}");
  expect(model.traits.cell).toEqual([1, 1]);
  await userEvent.keyboard("{ArrowRight} ");
  expect(model.traits.cell).toEqual([1, 2]);
  expect(query(".gp-result > .gp-note").getAttribute("aria-live")).toBe("polite");
});

test("a selection made by the kernel is shown in all views", async () => {
  const { model, query } = await shown({}, VALUES, [0, 3]);
  expect(query(".gp-result > .gp-note").textContent).toContain("transformer.h_2.mlp.output, position 3");
  model.set("cell", [0, 0]);
  expect(query(".gp-result > .gp-note").textContent).toContain("position 0 (The): -1");
});

/** A side of so many rows or columns, and what a label of it is. */
function side(name: string, count: number, label = (index: number) => `label ${index}`): ResultHeatmap["rows"] {
  const values = Array.from({ length: count }, (_, index) => `${name}_${index}`);
  return { name, title: name, values, labels: values.map((_, index) => label(index)), tokens: null };
}

async function square(count: number, changes: Partial<ResultHeatmap> = {}) {
  document.body.style.width = "1100px";
  const many = Array.from({ length: count * count }, (_, index) => Math.sin(index));
  return shown({ rows: side("path", count), columns: side("position", count), full: [count, count], ...changes }, many);
}

test("zooming resizes cells, labels and mark; the button keeps the focus", async () => {
  const rows = 80;
  const { el, model, query, canvas } = await square(rows);
  model.set("cell", [40, 40]);
  expect(el.querySelector(".gp-heatmap-rows")).toBeNull();
  const before = canvas.getBoundingClientRect().width;
  const larger = query<HTMLButtonElement>("[aria-label='Larger cells']");
  const smaller = query<HTMLButtonElement>("[aria-label='Smaller cells']");
  expect(smaller.getAttribute("aria-disabled")).toBe("true");
  larger.focus();
  for (let step = 0; step < 30; step++) larger.click();
  expect(document.activeElement).toBe(larger);
  expect(larger.getAttribute("aria-disabled")).toBe("true");
  const cell = canvas.getBoundingClientRect().width / rows;
  expect(cell).toBeGreaterThan(20);
  expect(cell).toBeLessThanOrEqual(36);
  expect(query(".gp-heatmap-mark").getBoundingClientRect().width).toBeCloseTo(cell, 1);
  expect(el.querySelectorAll(".gp-heatmap-rows span").length).toBe(rows);
  expect(query(".gp-heatmap-frame").getBoundingClientRect().width).toBeLessThanOrEqual(el.clientWidth);
  for (let step = 0; step < 30; step++) smaller.click();
  expect(canvas.getBoundingClientRect().width).toBe(before);
});

test("no label shows through in the corner of an enlarged, scrolled heatmap", async () => {
  const { query } = await square(80);
  for (let step = 0; step < 30; step++) query("[aria-label='Larger cells']").click();
  const scroller = query(".gp-heatmap-frame");
  for (const [left, top] of [
    [0, 0],
    [213, 307],
    [9999, 9999],
  ]) {
    scroller.scrollTo(left ?? 0, top ?? 0);
    await frame();
    const corner = query(".gp-heatmap-corner").getBoundingClientRect();
    const cells = query(".gp-heatmap-rows").getBoundingClientRect();
    const below = query(".gp-heatmap-columns").getBoundingClientRect();
    const box = scroller.getBoundingClientRect();
    expect(corner.left).toBeLessThanOrEqual(box.left);
    expect(corner.right).toBeGreaterThanOrEqual(cells.right - 0.5);
    expect(corner.bottom).toBeGreaterThanOrEqual(box.top + scroller.clientHeight - 0.5);
    expect(Math.abs(corner.top - below.top)).toBeLessThan(0.5);
    for (const [x, y] of [
      [corner.left + 2, corner.top + 2],
      [corner.right - 2, corner.top + 2],
      [corner.left + 2, box.top + scroller.clientHeight - 1],
    ]) {
      expect(document.elementFromPoint(x ?? 0, y ?? 0)?.className).toBe("gp-heatmap-corner");
    }
    expect(getComputedStyle(query(".gp-heatmap-corner")).backgroundColor).toMatch(/^rgb\(/); // opaque
  }
});

test("arrows and words point to cells out of view", async () => {
  const { el, query, canvas } = await square(80);
  const sides = () =>
    [...el.querySelectorAll<HTMLElement>(".gp-heatmap-edge:not([hidden])")].map((edge) => edge.dataset.side);
  const scroller = query(".gp-heatmap-frame");
  await frame();
  expect(sides()).toEqual([]);
  expect(query(".gp-readout").textContent).toBe("80 × 80: point at a cell, click to select it");
  for (let step = 0; step < 30; step++) query("[aria-label='Larger cells']").click();
  await frame();
  expect(sides()).toEqual(["left", "right", "top", "bottom"]);
  expect(query(".gp-readout").textContent).toContain("scroll to see the others");
  scroller.scrollTo(0, 0);
  await frame();
  await frame();
  expect(sides()).toEqual(["right", "bottom"]);
  scroller.scrollTo(9999, 9999);
  await frame();
  await frame();
  expect(sides()).toEqual(["left", "top"]);
  const edge = query(".gp-heatmap-edge[data-side=left]").getBoundingClientRect();
  expect(Math.abs(edge.left - query(".gp-heatmap-rows").getBoundingClientRect().right)).toBeLessThan(1.5);
  expect(getComputedStyle(query(".gp-heatmap-edge")).pointerEvents).toBe("none");
  canvas.focus();
});

test("zooming keeps the center in place and the selected cell in view", async () => {
  const { model, query, canvas } = await square(80);
  const middle = () => {
    const [cells, box] = [canvas.getBoundingClientRect(), query(".gp-heatmap-frame").getBoundingClientRect()];
    const rows = query(".gp-heatmap-rows").getBoundingClientRect();
    return ((rows.right + box.right) / 2 - cells.left) / cells.width;
  };
  for (let step = 0; step < 4; step++) query("[aria-label='Larger cells']").click();
  expect(middle()).toBeCloseTo(0.5, 1);
  model.set("cell", [79, 2]);
  query("[aria-label='Smaller cells']").click();
  query("[aria-label='Larger cells']").click();
  const [mark, box] = [query(".gp-heatmap-mark"), query(".gp-heatmap-frame")].map((one) => one.getBoundingClientRect());
  expect(mark?.left).toBeGreaterThanOrEqual((box?.left ?? 0) - 1);
  expect(mark?.bottom).toBeLessThanOrEqual(query(".gp-heatmap-columns").getBoundingClientRect().top + 1);
});

test.each([1000, 500])(
  "in a page of %d px, a result fills the width, with a label at each row and column",
  async (width) => {
    document.body.style.width = `${width}px`;
    const [rows, columns] = [side("layer", 2, String), side("position", 16, (at) => `token${at}`)];
    const { el, query, canvas } = await shown({ rows, columns, full: [2, 16] }, Array.from({ length: 32 }, Math.sin));
    const { left, right } = canvas.getBoundingClientRect();
    expect(right - left).toBeGreaterThan(width - 60);
    expect(right).toBeLessThanOrEqual(el.getBoundingClientRect().right);
    expect(el.querySelectorAll(":is(.gp-heatmap-rows, .gp-heatmap-columns) span").length).toBe(18);
    canvas.focus();
    await userEvent.keyboard("{ArrowDown}");
    document.body.style.width = `${width - 100}px`;
    await vi.waitFor(() => expect(canvas.getBoundingClientRect().width).toBeLessThan(width - 100));
    expect(document.activeElement).toBe(canvas);
    expect(query(".gp-heatmap-cursor").hidden).toBe(false);
  },
);

test("column labels are horizontal if they fit, close below the cells", async () => {
  const { query, canvas } = await shown({ rows: side("a_dimension_with_a_very_long_name", ROWS) });
  const labels = query(".gp-heatmap-columns");
  expect(labels.hasAttribute("data-level")).toBe(false); // one is too long
  const few = await shown({ columns: side("position", COLUMNS, (index) => `tok ${index}`) });
  const level = few.query(".gp-heatmap-columns");
  expect(level.hasAttribute("data-level")).toBe(true);
  for (const [axis, cells] of [
    [labels, canvas],
    [level, few.canvas],
  ]) {
    const first = axis?.querySelector("span")?.getBoundingClientRect();
    const gap = (first?.top ?? 0) - (cells?.getBoundingClientRect().bottom ?? 0);
    expect(gap).toBeGreaterThanOrEqual(1);
    expect(gap).toBeLessThan(8);
  }
  const boxes = [...level.querySelectorAll("span")].map((one) => one.getBoundingClientRect());
  expect(boxes.every((box) => box.width > box.height)).toBe(true);
  for (const one of level.querySelectorAll("span")) expect(one.scrollWidth).toBeLessThanOrEqual(one.clientWidth);
});

test("shortened labels have the full text as tooltip", async () => {
  const { el } = await shown();
  const titles = (axis: string) =>
    [...el.querySelectorAll<HTMLElement>(`.gp-heatmap-${axis} span`)].map((one) => one.title);
  expect(titles("rows")[1]).toBe("path transformer.h_1.mlp.output");
  expect(titles("columns")[3]).toBe(`position 3 (${HOSTILE} to its end)`);
});

test("a heatmap that cannot be enlarged has no zoom buttons", async () => {
  const { query } = await shown();
  expect(query(".gp-zoom").hidden).toBe(true);
});

test("the cell with the keyboard focus is scrolled into view", async () => {
  const { query, canvas } = await square(120);
  for (let step = 0; step < 30; step++) query("[aria-label='Larger cells']").click();
  const frame = query(".gp-heatmap-frame").getBoundingClientRect();
  canvas.focus({ preventScroll: true });
  const isSeen = () => {
    const cell = query(".gp-heatmap-cursor").getBoundingClientRect();
    const rowLabels = query(".gp-heatmap-rows").getBoundingClientRect();
    const columnLabels = query(".gp-heatmap-columns").getBoundingClientRect();
    expect(cell.left).toBeGreaterThanOrEqual(rowLabels.right - 1);
    expect(cell.top).toBeGreaterThanOrEqual(frame.top - 1);
    expect(cell.right).toBeLessThanOrEqual(frame.right + 1);
    expect(cell.bottom).toBeLessThanOrEqual(columnLabels.top + 1);
  };
  await userEvent.keyboard("{ArrowDown}{Control>}{End}{/Control}");
  isSeen();
  await userEvent.keyboard("{Control>}{Home}{/Control}");
  isSeen();
});

test("without a kernel, a click says that nothing receives it", async () => {
  const { model, query, canvas } = await shown();
  const warning = query(".gp-result > [role=status]");
  expect(warning.hidden).toBe(true);
  model.trigger("comm:close");
  expect(warning.textContent).toContain("run the cell again. Selections are not sent to the kernel.");
  expect(warning.hidden).toBe(false);
  model.save_changes = () => {
    throw "Syncing error: no comm channel defined"; // as ipywidgets does
  };
  await userEvent.click(canvas, cellCenter(canvas, [0, 0], SIZE));
  expect(warning.textContent).toContain("The kernel has stopped");
  expect(query(".gp-result > .gp-note").textContent).toContain("Selected: path transformer.h_2");
});

test("cells without a number are hatched, with a reason", async () => {
  const values = VALUES.map((value, index) => (index === 5 ? Number.NaN : value));
  const { query } = await shown({ missing: "failed" }, values);
  expect(query("figure .gp-note").textContent).toBe("1 value hatched: failed.");
});

test.each(["true", "false"])("no accessibility violations, also with enlarged cells; light: %s", async (isLight) => {
  setTheme(isLight === "true");
  const views = [await shown({}, VALUES, [1, 1]), await square(60)];
  for (let step = 0; step < 4; step++) views[1]?.query("[aria-label='Larger cells']").click();
  await frame();
  expect(views[1]?.el.querySelectorAll(".gp-heatmap-edge:not([hidden])").length).toBe(4);
  for (const { el } of views) {
    expect(await accessibilityViolations(el)).toEqual([]);
  }
});

test("a removed view leaves nothing behind and shows the static table again", async () => {
  const table = document.createElement("div");
  table.className = "gp-static gp-static-abc";
  table.textContent = "table";
  document.body.append(table);
  undos.push(() => table.remove());
  const { el, model, remove } = await shown();
  expect(getComputedStyle(table).display).toBe("none");
  remove();
  expect(getComputedStyle(table).display).toBe("block");
  expect(el.childElementCount).toBe(0);
  model.set("cell", [0, 0]);
});

test("values of the wrong size show an error", async () => {
  vi.spyOn(console, "error").mockImplementation(() => undefined);
  const { el } = await shown({}, [1, 2]);
  expect(el.querySelector("[role=alert]")?.textContent).toContain("8 bytes for a heatmap of 3 x 4");
});

type Traits = HeatmapTraits & LinkedTraits;

/** A heatmap of a graph; its columns are positions. */
async function linkedTo(items: { rows: Item[]; all?: Item }) {
  const first = await shown();
  const columns = [0, 1, 2, 3].map((position) => itemOf(null, { position }));
  const cell_items = { columns, all: itemOf(null), ...items };
  return { model: new FakeModel<Traits>({ ...linkedTraits("result"), ...first.model.traits, cell_items }) };
}

/** What a click in another view of the graph does. */
function selectElsewhere(...items: Item[]) {
  const { group } = linkedTraits("result");
  document.dispatchEvent(new CustomEvent("graphpatch:selection", { detail: { group, value: items } }));
}

test("the cell of a component in each layer is named after it, and can be patched", async () => {
  const rows = [2, 1, 0].map((layer) => itemOf(null, { layer }));
  const { model } = await linkedTo({ rows, all: itemOf("encoder.layers[*].resid_post") });
  const { el } = await rendered(model);
  await frame();
  await frame();
  await frame();
  await frame();
  const canvas = el.querySelector("canvas") as HTMLCanvasElement;
  const zero = [...el.querySelectorAll("button")].find(({ textContent }) => textContent === "Zero");
  expect(zero?.disabled).toBe(true);
  await userEvent.click(canvas, cellCenter(canvas, [1, 2], SIZE));
  const item = itemOf("encoder.layers[1].resid_post", { position: 2 });
  expect(model.get("selection")).toEqual([item]);
  expect(el.querySelector(".gp-selected-text")?.textContent).toBe("encoder.layers[1].resid_post[:, 2]");
  await userEvent.click(zero as HTMLElement);
  for (const isLight of [true, false]) {
    setTheme(isLight);
    await vi.waitFor(async () => expect(await accessibilityViolations(el)).toEqual([]));
  }
  const sent = model.sent.map((message) => message as { request: string; payload: unknown });
  expect(sent.at(-1)).toMatchObject({ request: "edit", payload: { edit: { act: "zero", items: [item] } } });
  await vi.waitFor(() => expect(model.saved).toBe(2)); // the cell, and the selection
  // A layer of another stack is none of its rows.
  selectElsewhere(itemOf("decoder.layers[1].resid_post"));
  expect(el.querySelectorAll(".gp-heatmap-mark").length).toBe(0);
  selectElsewhere(itemOf("encoder.layers[0].attn_out"));
  expect(el.querySelectorAll(".gp-heatmap-mark").length).toBe(1);
});

test("each row is named after its own component; an unknown head has no name", async () => {
  const rows = ["attn_out", "attn.heads[*].z", "mlp_out"].map((part) => itemOf(`layers[*].${part}`));
  const { model } = await linkedTo({ rows, all: itemOf(null, { layer: 3 }) });
  const { el } = await rendered(model);
  await frame();
  await frame();
  await frame();
  await frame();
  const canvas = el.querySelector("canvas") as HTMLCanvasElement;
  await userEvent.click(canvas, cellCenter(canvas, [0, 1], SIZE));
  expect(model.get("selection")).toEqual([itemOf("layers[3].attn_out", { position: 1 })]);
  await vi.waitFor(() => expect(model.saved).toBe(2)); // for each click the cell, and the selection
  await userEvent.click(canvas, cellCenter(canvas, [1, 1], SIZE));
  expect(model.get("selection")).toEqual([itemOf(null, { layer: 3, position: 1 })]);
  await vi.waitFor(() => expect(model.saved).toBe(4));
  selectElsewhere(itemOf("layers[3].mlp_out"));
  const mark = el.querySelector(".gp-heatmap-mark")?.getBoundingClientRect();
  expect(mark?.top).toBeGreaterThan(canvas.getBoundingClientRect().top + canvas.getBoundingClientRect().height / 2);
});

test("a heatmap of a graph shares the graph's selection", async () => {
  const { model } = await linkedTo({ rows: [2, 1, 0].map((layer) => itemOf(`layers[${layer}].mlp_out`)) });
  const el = document.createElement("div");
  document.body.append(el);
  const remove = await widget.render({ model, el });
  await frame();
  await frame();
  const canvas = el.querySelector("canvas") as HTMLCanvasElement;
  await userEvent.click(canvas, cellCenter(canvas, [1, 2], SIZE));
  expect(model.get("selection")).toEqual([itemOf("layers[1].mlp_out", { position: 2 })]);
  expect(model.get("cell")).toEqual([1, 2]);
  await vi.waitFor(() => expect(model.saved).toBe(2)); // the cell, and the selection
  // What another view selects: a head of a layer marks the row of the layer.
  selectElsewhere(itemOf("layers[2].attn.heads[0].z"));
  expect(model.get("cell")).toBe(null);
  expect(el.querySelector(".gp-heatmap-mark")?.getBoundingClientRect().width).toBe(
    canvas.getBoundingClientRect().width,
  );
  // Only the last row and cell are as strong as 1.5: the others are faint, here and by the filter of another view.
  const alphas = () => [0, 1, 2].map((row) => alpha(canvas, row, COLUMNS - 1));
  expect(alphas()).toEqual([255, 255, 255]);
  await userEvent.fill(el.querySelector("[aria-label='Minimum size of score']") as HTMLInputElement, "1.5");
  await userEvent.keyboard("{Enter}");
  expect(alphas()).toEqual([40, 40, 255]);
  const value = { items: [itemOf(null, { layer: 1 })], words: "layer 1" };
  document.dispatchEvent(new CustomEvent("graphpatch:filter", { detail: { group: model.get("group"), value } }));
  expect(alphas()).toEqual([40, 255, 40]);
  expect(el.querySelector(".gp-offer")?.textContent).toBe("Only layer 1Show all");
  await userEvent.click(el.querySelector(".gp-offer button") as HTMLButtonElement);
  expect(alphas()).toEqual([255, 255, 255]);
  remove();
  el.remove();
  expect(model.listening).toBe(0);
});
