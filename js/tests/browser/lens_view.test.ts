import { expect, test, vi } from "vitest";
import { userEvent } from "vitest/browser";
import type { Lens, LensTraits } from "../../src/kernel/protocol";
import { itemOf } from "../../src/views/selection";
import { accessibilityViolations } from "../accessibility";
import { cellCenter } from "../canvas";
import { deflatedParts, FakeModel } from "../fixtures";
import { linkedTraits, rendered } from "../rendered";

const [ROWS, COLUMNS, TOP] = [3, 4, 2];
const HOSTILE = "<img src=x onerror=window.wasRun=1>";

function lens(changes: Partial<Lens> = {}): Lens {
  const rows = [null, 0, 1].map((layer) => ({
    name: layer === null ? "layers[0].resid_pre" : `layers[${layer}].resid_post`,
    layer,
    label: layer === null ? "embed" : String(layer),
  }));
  return {
    streams: [{ name: "residual", rows }],
    available: ["residual", "mlp"],
    row: 0,
    rows: 1,
    positions: ["The", " cat", "\n", HOSTILE],
    vocabulary: [" a", " b", HOSTILE],
    target: [0, 0, 0, 1],
    has_target: true,
    top: TOP,
    runs: 1,
    version: 0,
    remarks: [],
    ...changes,
  };
}

/** Numbers of one run: the most probable token of a cell is the last one of the vocabulary, then the first. */
function run(probability: (row: number, column: number) => number): ArrayBuffer[] {
  const cells = Array.from({ length: ROWS * COLUMNS }, (_, cell) => [Math.floor(cell / COLUMNS), cell % COLUMNS]);
  return [
    new Uint32Array(cells.flatMap(() => [2, 0])).buffer,
    new Float32Array(cells.flatMap(([row = 0, column = 0]) => [0.5, probability(row, column)])).buffer,
    new Float32Array(cells.map(([row = 0, column = 0]) => probability(row, column))).buffer,
    new Uint32Array(cells.map(([row = 0]) => 9 * row)).buffer,
  ];
}

async function shown(changes: Partial<Lens> = {}, ...more: ArrayBuffer[][]) {
  const cells = await deflatedParts([...run((row, column) => (row + column) / 10), ...more.flat()]);
  const model = new FakeModel<LensTraits>({
    ...linkedTraits("lens"),
    lens: lens(changes),
    cells,
    stream: "residual",
  });
  const { el, remove } = await rendered(model);
  return { model, el, remove, text: () => el.textContent ?? "", canvases: () => [...el.querySelectorAll("canvas")] };
}

test("the row of a batch is named; a layer of another stack does not select a row of the lens", async () => {
  const rows = [0, 1].map((layer) => ({ name: `decoder.layers[${layer}].resid_post`, layer, label: `${layer}` }));
  const lens = { row: 1, rows: 3, streams: [{ name: "residual", rows: [rows[0], ...rows] as typeof rows }] };
  const { el, model } = await shown(lens);
  expect(el.querySelector(".gp-line > span.gp-muted")?.textContent).toBe("row 1 of the batch (3 rows)");
  model.set("selection", [itemOf("encoder.layers[1].attn.heads[0].z")]);
  expect(el.querySelectorAll(".gp-heatmap-mark").length).toBe(0);
  model.set("selection", [itemOf("decoder.layers[1].attn.heads[0].z")]);
  expect(el.querySelectorAll(".gp-heatmap-mark").length).toBe(1);
});

test("pointing at a cell shows its tokens; a click selects its component and position", async () => {
  const { model, el, text, canvases } = await shown();
  const [canvas] = canvases() as [HTMLCanvasElement];
  await userEvent.hover(canvas, cellCenter(canvas, [0, 3], [ROWS, COLUMNS]));
  expect(text()).toContain(`layer 1, position 3 (${HOSTILE.replaceAll(" ", "␣")})`);
  expect(el.querySelector(".gp-readout")?.textContent).toContain("50%");
  const rows = [...el.querySelectorAll(".gp-lens-list tr")].map((row) => row.textContent);
  // The target of this position is not among the probable tokens: it follows them.
  expect(rows.map((row) => row?.replace(/\s/g, ""))).toEqual([
    `${HOSTILE.replaceAll(" ", "␣")}50%`,
    "␣a50%",
    "␣b(target,rank18)50%",
  ]);
  await userEvent.click(canvas, cellCenter(canvas, [1, 2], [ROWS, COLUMNS]));
  expect(model.get("selection")).toEqual([itemOf("layers[0].resid_post", { layer: 0, position: 2 })]);
  canvas.focus();
  await userEvent.keyboard("{ArrowDown}{ArrowDown}{Shift>}{Enter}{/Shift}");
  expect(model.get("selection").at(-1)).toEqual(itemOf("layers[0].resid_pre", { layer: null, position: 2 }));
  expect(el.querySelectorAll(".gp-heatmap-mark")).toHaveLength(2);
  expect(text()).toContain("layers[0].resid_post[:, 2]");
  expect("wasRun" in window).toBe(false);
});

test("a selection in another view is marked: a whole row for a head, a column for a position", async () => {
  const { model, el } = await shown();
  const size = () => {
    const mark = el.querySelector(".gp-heatmap-mark")?.getBoundingClientRect();
    const cells = el.querySelector("canvas")?.getBoundingClientRect();
    return [(cells?.width ?? 0) / (mark?.width ?? 1), (cells?.height ?? 0) / (mark?.height ?? 1)].map(Math.round);
  };
  model.set("selection", [itemOf("layers[1].attn.heads[0].z")]);
  expect(size()).toEqual([1, ROWS]);
  model.set("selection", [itemOf(null, { position: 1 })]);
  expect(size()).toEqual([COLUMNS, 1]);
  model.set("selection", [itemOf("elsewhere", { position: 99 })]);
  expect(el.querySelectorAll(".gp-heatmap-mark")).toHaveLength(0);
});

test("with patches, both runs and their difference are shown, without accessibility violations", async () => {
  const { el, text, canvases } = await shown(
    { runs: 2, remarks: ["a patch had no effect"] },
    run(() => 0.25),
  );
  expect(canvases()).toHaveLength(3);
  const [, , difference] = canvases() as [HTMLCanvasElement, HTMLCanvasElement, HTMLCanvasElement];
  await userEvent.hover(difference, cellCenter(difference, [2, 1], [ROWS, COLUMNS]));
  expect(el.querySelectorAll(".gp-readout")[2]?.textContent).toMatch(/: 10\.0% → 25%$/);
  expect(text()).toContain("a patch had no effect");
  const color = el.querySelectorAll("select")[1] as HTMLSelectElement;
  await userEvent.selectOptions(color, "rank");
  const [first] = canvases() as [HTMLCanvasElement];
  await userEvent.hover(first, cellCenter(first, [0, 0], [ROWS, COLUMNS]));
  expect(el.querySelector(".gp-readout")?.textContent).toContain("rank 18");
  expect(el.querySelector(".gp-legend")?.textContent).toContain("rank 18");
  expect(await accessibilityViolations(el)).toEqual([]);
});

test("changing the patches or the stream requests new numbers", async () => {
  const { model, el, text } = await shown();
  const asked = () => model.sent.filter((sent) => (sent as { request: string }).request === "lens");
  model.set("session", { ...model.get("session"), version: 1 });
  await vi.waitFor(() => expect(asked()).toHaveLength(1));
  const { id } = asked()[0] as { id: number };
  const status = { id: 1, state: "failed", seconds: 0, fraction: null, error: "no memory" };
  model.trigger("msg:custom", { id, result: status }, []);
  await vi.waitFor(() => expect(text()).toContain("The run failed: no memory"));
  expect(el.querySelector(".gp-beside")?.classList.contains("gp-dimmed")).toBe(true);
  const stream = el.querySelector("select") as HTMLSelectElement;
  await userEvent.selectOptions(stream, "mlp");
  expect(asked().at(-1)).toMatchObject({ payload: { stream: "mlp" } });
  const streams = [...lens().streams, { name: "mlp", rows: lens().streams[0]?.rows ?? [] }];
  const cells = await deflatedParts([...run(() => 0.1), ...run(() => 0.75)]);
  model.set("lens", lens({ streams, version: 1 }));
  model.set("cells", cells);
  await vi.waitFor(() => expect(model.get("stream")).toBe("mlp"));
  const canvas = el.querySelector("canvas") as HTMLCanvasElement;
  await userEvent.hover(canvas, cellCenter(canvas, [0, 0], [ROWS, COLUMNS]));
  expect(el.querySelector(".gp-readout")?.textContent).toContain("75%");
});

test("without a kernel, the sent numbers can be browsed and the others cannot be chosen", async () => {
  const { model, el, remove, text } = await shown();
  model.trigger("comm:close");
  const [first, other] = [...el.querySelectorAll("option")];
  expect([first?.disabled, other?.disabled]).toEqual([false, true]);
  const canvas = el.querySelector("canvas") as HTMLCanvasElement;
  await userEvent.click(canvas, cellCenter(canvas, [1, 1], [ROWS, COLUMNS]));
  expect(text()).toContain("layers[0].resid_post[:, 1]");
  remove();
  expect(model.listening).toBe(0);
});

test("a long text opens at its last position, whose token is next, and stays where it is scrolled to", async () => {
  const columns = 60;
  const cells = ROWS * columns;
  const numbers = await deflatedParts([
    new Uint32Array(2 * cells),
    new Float32Array(2 * cells),
    new Float32Array(cells),
    new Uint32Array(cells),
  ]);
  const many = lens({ positions: null, target: Array.from({ length: columns }, () => 0) });
  const traits = { ...linkedTraits("lens"), lens: many, cells: numbers, stream: "residual" };
  const { el } = await rendered(new FakeModel<LensTraits>(traits), "700px");
  const frame = () => el.querySelector(".gp-heatmap-frame") as HTMLElement;
  expect(frame().scrollWidth).toBeGreaterThan(1500);
  expect(frame().scrollLeft).toBe(frame().scrollWidth - frame().clientWidth);
  frame().scrollLeft = 300;
  await userEvent.selectOptions(el.querySelectorAll("select")[1] as HTMLSelectElement, "rank");
  expect(frame().scrollLeft).toBe(300);
});
