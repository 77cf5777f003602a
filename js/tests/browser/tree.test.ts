import { afterEach, expect, test, vi } from "vitest";
import { page, userEvent } from "vitest/browser";
import type { Columns } from "../../src/kernel/protocol";
import { makeColumnHeads } from "../../src/tree/columns";
import { Skeleton } from "../../src/tree/skeleton";
import { makeToolbar } from "../../src/tree/toolbar";
import { TreeState } from "../../src/tree/tree_state";
import { makeTreeView } from "../../src/tree/tree_view";
import "../../src/style.css";
import { accessibilityViolations } from "../accessibility";
import { ColumnsBuilder, FakeModel, FakeView, tensor, traits, transformer } from "../fixtures";

const views: FakeView[] = [];
afterEach(() => {
  for (const view of views.splice(0)) view.remove();
});

function shown(columns: Columns = transformer()) {
  const view = new FakeView(new FakeModel(traits()), new Skeleton(columns));
  views.push(view);
  const state = new TreeState(view);
  const tree = makeTreeView(view, state, { edit: () => undefined, copy: async () => true });
  const toolbar = makeToolbar(view, state);
  view.root.append(toolbar.element, tree.element);
  tree.show(0);
  view.reveal = (row) => {
    state.reveal(row);
    tree.show(row);
  };
  return { view, state, tree, box: toolbar.element.querySelector("input") as HTMLInputElement };
}

function large(): Columns {
  const tree = new ColumnsBuilder();
  tree.graph("<root>", "Big", () => {
    for (let layer = 0; layer < 500; layer++) {
      tree.graph(`h_${layer}`, `Block${layer % 7}`, () => {
        for (let op = 0; op < 99; op++) tree.row("op", `hidden_states_${op}`, { op: "mul", spec: tensor(1, op) });
      });
    }
  });
  return tree.columns;
}

const rows = (element: Element) => [...element.querySelectorAll<HTMLElement>("[role=treeitem]")];
const frame = () => new Promise(requestAnimationFrame);

test("a badge before the shape says how a sharded value is placed", () => {
  const tree = new ColumnsBuilder();
  tree.graph("<root>", "Model", () => {
    tree.row("op", "x", {
      spec: ["[1, 8] f32 split along dimension 1", [1, 8], "float32", "tensor", "split along dimension 1"],
    });
    tree.row("op", "y", {
      spec: ["[1, 8] f32 refused", [1, 8], "float32", "tensor", "refused: it is one term of a sum"],
    });
  });
  const [, split, refused] = rows(shown(tree.columns).tree.element);
  expect(split?.querySelector(".gp-placement")?.textContent).toBe("split 1");
  expect(split?.querySelector(".gp-label")?.textContent).toBe("split 1 [1, 8] f32");
  expect(split?.getAttribute("aria-label")).toContain("[1, 8] f32 split along dimension 1");
  expect(refused?.querySelector(".gp-placement")?.getAttribute("title")).toContain("it is one term of a sum");
});

test("of 50,000 open rows only the visible ones and ten more have elements", async () => {
  const { view, state, tree } = shown(large());
  state.expandBelow(0);
  expect(state.lines.length).toBe(50_002); // with that of what repeats
  expect(tree.element.scrollHeight).toBeGreaterThan(50_000 * 22);
  for (const top of [0, 500_000, 1_100_000]) {
    tree.element.scrollTop = top;
    await frame();
    await frame();
    const seen = rows(tree.element).filter((row) => isIn(row, tree.element));
    expect(seen.length).toBeGreaterThanOrEqual(18);
    expect(rows(tree.element).length).toBeLessThanOrEqual(32);
    expect(view.root.querySelectorAll("*").length).toBeLessThan(400);
    for (const row of seen) expect(row.getBoundingClientRect().height).toBe(22);
  }
});

function isIn(row: Element, container: Element): boolean {
  const [inner, outer] = [row.getBoundingClientRect(), container.getBoundingClientRect()];
  return inner.bottom > outer.top && inner.top < outer.bottom;
}

test("a name without room for all of it loses its middle, not its end", async () => {
  const columns = new ColumnsBuilder();
  columns.graph("<root>", "Model", () => {
    columns.row("op", "self_attention_output_projection_bias", { op: "scaled_dot_product", spec: tensor(1, 8) });
  });
  const { tree } = shown(columns.columns);
  tree.element.style.width = "260px";
  const name = rows(tree.element)[1]?.querySelector(".gp-name") as HTMLElement;
  const [start, end] = name.querySelectorAll<HTMLElement>("span");
  expect(name.textContent).toBe("self_attention_output_projection_bias");
  expect(start?.scrollWidth).toBeGreaterThan(start?.clientWidth ?? 0);
  expect(end?.textContent).toBe("ion_bias");
  expect(end?.getBoundingClientRect().right).toBeLessThanOrEqual(tree.element.getBoundingClientRect().right);
  expect(end?.getBoundingClientRect().right).toBeLessThanOrEqual(name.getBoundingClientRect().right + 0.5);
  expect(end?.scrollWidth).toBe(end?.clientWidth);
});

test("components have badges with their axes, and can be searched by name", async () => {
  const { state, tree } = shown();
  const index = state.found.index.paths.indexOf("transformer.h_1.attn.attn_weights_1");
  const axes = ["batch", "head", "query", "key"];
  state.search("layers[1].attn.pattern");
  expect(state.found.matches).toEqual([]);
  state.setComponents([{ row: index, name: "layers[1].attn.pattern", axes, shape: [1, 4, 3, 3] }]);
  expect(state.found.matches).toEqual([index]);
  await frame();
  const row = rows(tree.element).at(-1);
  expect(row?.getAttribute("aria-label")).toMatch(/^attn_weights_1 pattern layers\[1\]\.attn\.pattern softmax/);
  const badge = row?.querySelector<HTMLElement>(".gp-component");
  expect(badge?.textContent).toBe("layers[1].attn.pattern");
  expect(row?.querySelector<HTMLElement>(".gp-component-type")?.textContent).toBe("pattern");
  expect(badge?.title).toBe("layers[1].attn.pattern: batch, head, query, key");
});

test("the components view shows the tree's rows layer by layer", async () => {
  const { view, state, tree } = shown();
  const paths = state.found.index.paths;
  const row = (path: string) => paths.indexOf(`transformer.${path}`);
  const named = (path: string, name: string) => ({ row: row(path), name, axes: ["batch"], shape: [2] });
  state.setComponents([
    named("wte.output", "@embed"),
    ...[0, 1].flatMap((layer) => [
      named(`h_${layer}.hidden_states`, `layers[${layer}].resid_pre`),
      named(`h_${layer}.attn.attn_weights_1`, `layers[${layer}].attn.pattern`),
      named(`h_${layer}.output`, `layers[${layer}].resid_post`),
    ]),
    named("ln_f.output", "@final_norm"),
  ]);
  const names = () =>
    [...state.lines.ids].slice(1).map((id) => rows(tree.element).find((each) => each.dataset.id === `${id}`));
  const texts = () => names().map((each) => each?.querySelector(".gp-name")?.textContent);
  const press = (name: string) => page.getByRole("button", { name, exact: true }).click();
  state.reveal(row("h_1.output"));
  await press("Components");
  const layer = ["resid_pre", "attn.pattern", "resid_post"];
  expect(texts()).toEqual(["@embed", "layers[0]", "layers[1]", ...layer, "@final_norm"]);
  expect(state.activeRow).toBe(row("h_1.output"));
  expect(names()[4]?.querySelector(".gp-component")?.textContent).toBe("transformer.h_1.attn.attn_weights_1");
  names()[4]?.querySelector<HTMLElement>("[data-action=add]")?.click();
  expect(view.calls[0]?.slice(0, 2)).toEqual(["editPatch", { row: row("h_1.attn.attn_weights_1") }]);
  await press("Collapse all");
  expect(texts()).toEqual(["@embed", "layers[0]", "layers[1]", "@final_norm"]);
  names()[1]?.click();
  expect(texts()).toEqual(["@embed", "layers[0]", ...layer, "layers[1]", "@final_norm"]);
  state.search("pattern");
  expect(texts()).toEqual(["layers[0]", "attn.pattern", "layers[1]", "attn.pattern"]);
  state.search("");
  state.reveal(row("h_0.attn.query")); // not a component: back to the tree
  expect(state.isByComponent).toBe(false);
  expect(rows(tree.element).find((each) => each.getAttribute("aria-selected") === "true")?.textContent).toMatch(
    /^query/,
  );
});

test("a search among 50,000 rows shows its matches; clearing it restores what was open", async () => {
  const { state, tree, box } = shown(large());
  state.expandBelow(0);
  const type = async (text: string) => {
    box.value = text;
    box.dispatchEvent(new Event("input"));
    await frame();
    await frame();
  };
  await type("hidden_states_98 h_499");
  expect(state.lines.length).toBe(3);
  expect(rows(tree.element).at(-1)?.getAttribute("aria-label")).toMatch(/^hidden_states_98/);
  await type("");
  expect(state.lines.length).toBe(50_002); // with that of what repeats
});

test("the focused row keeps its element while scrolling; keys scroll it into view", async () => {
  const { state, tree } = shown(large());
  state.expandBelow(0);
  tree.element.focus();
  await userEvent.keyboard("{ArrowDown}{ArrowDown}");
  tree.element.scrollTop = 600_000;
  await frame();
  await frame();
  const active = () => document.getElementById(tree.element.getAttribute("aria-activedescendant") ?? "") as HTMLElement;
  expect(active().getAttribute("aria-selected")).toBe("true");
  expect(isIn(active(), tree.element)).toBe(false);
  await userEvent.keyboard("{ArrowDown}");
  expect(isIn(active(), tree.element)).toBe(true);
  await userEvent.keyboard("{End}");
  expect(isIn(active(), tree.element)).toBe(true);
  expect(active().getAttribute("aria-label")).toMatch(/^hidden_states_98/);
  await userEvent.keyboard("{PageUp}");
  expect(isIn(active(), tree.element)).toBe(true);
  expect(document.activeElement).toBe(tree.element);
});

test("a click selects, the chevron opens and closes, Alt opens everything below", async () => {
  const { state, tree, view } = shown();
  state.change({ isFolded: false });
  const layer = page.getByRole("treeitem", { name: /^h_1 / });
  await layer.click();
  expect(view.skeleton.nameOf(state.activeRow)).toBe("h_1");
  expect(document.activeElement).toBe(tree.element);
  const chevron = () => (layer.element() as HTMLElement).querySelector(".gp-chevron") as HTMLElement;
  const lines = state.lines.length;
  chevron().click();
  expect(layer.element().getAttribute("aria-expanded")).toBe("true");
  chevron().click();
  expect(state.lines.length).toBe(lines);
  chevron().dispatchEvent(new MouseEvent("click", { bubbles: true, altKey: true }));
  expect(state.lines.length).toBeGreaterThan(lines + 20);
});

test("the buttons and badges of a row emit actions for that row", async () => {
  const { state, tree, view } = shown();
  const row = rows(tree.element).findIndex((element) => element.getAttribute("aria-label")?.startsWith("input_ids"));
  const id = Number(rows(tree.element)[row]?.dataset.id);
  const patch = { number: 3, row: id, kind: "zero", is_enabled: false } as never;
  view.model.set("session", { version: 2, patches: [patch], can_undo: true, can_redo: false, note: "" });
  const item = rows(tree.element)[row] as HTMLElement;
  expect(item.getAttribute("aria-label")).toContain("#3 is switched off");
  for (const name of ["Details of input_ids", "Patch input_ids", "zero #3"]) {
    ([...item.querySelectorAll("button")].find((b) => (b.ariaLabel ?? b.textContent) === name) as HTMLElement).click();
  }
  expect(view.calls.map((call) => call.slice(0, 2))).toEqual([
    ["showDetails", id],
    ["editPatch", { row: id }],
    ["editPatch", { number: 3 }],
  ]);
  state.select(0);
  await userEvent.keyboard("{Tab}");
  expect(item.contains(document.activeElement)).toBe(false);
});

test("rows have their position and marks in their accessible names", () => {
  const { state, tree, view } = shown();
  view.reveal(view.row("transformer.h_0.drop"));
  const drop = tree.element.querySelector("[aria-selected=true]") as HTMLElement;
  expect(drop.getAttribute("aria-label")).toMatch(/^drop opaque Dropout/);
  expect([drop.ariaLevel, drop.ariaPosInSet, drop.ariaSetSize, drop.ariaExpanded]).toEqual(["5", "6", "7", "false"]);
  view.reveal(view.row("extra_head"));
  const unused = tree.element.querySelector("[aria-selected=true]") as HTMLElement;
  expect(unused.getAttribute("aria-label")).toMatch(/^extra_head unused Linear, never called/);
  expect(unused.hasAttribute("aria-expanded")).toBe(false);
  state.setOpen(~view.row("transformer.h_0"), false);
  expect(tree.element.querySelector("[data-kind=folded]")?.getAttribute("aria-label")).toBe(
    "h_0 … h_3 ×4 Block [1, 8, 64] f32",
  );
});

function withScores(values: number[]) {
  const shownTree = shown();
  const count = shownTree.view.skeleton.length;
  const column = Float32Array.from({ length: count }, (_, row) => values[row] ?? Number.NaN);
  shownTree.view.model.set("scores", new DataView(column.buffer));
  return shownTree;
}

test.each([
  [
    [1, -2, 1.5],
    ["Sort by size of score", "the 10 largest in size", "size at least …"],
  ],
  [
    [-1, -2, -3],
    ["Sort by size of score", "the 10 largest in size", "size at least …"],
  ],
  [
    [1, 2, 3],
    ["Sort by score", "the 10 highest", "at least …"],
  ],
])("the legend's filters for scores such as %j say how they are ranked", (values, expected) => {
  const { view } = withScores(Array.from({ length: 30 }, (_, row) => (values[row % 3] ?? 0) * (row + 1)));
  const texts = [...view.root.querySelectorAll(".gp-scores button, .gp-scores option")].map((one) => one.textContent);
  expect(texts).toEqual(expect.arrayContaining(expected));
});

test("columns of a run are chosen in a menu; their heads stand above the numbers and sort the rows", async () => {
  const { view, tree, state } = shown();
  const heads = makeColumnHeads(view, state).element;
  tree.element.before(heads);
  const [first, second] = ["transformer.h_1", "transformer.h_2"].map((path) => view.row(path));
  const { length } = view.skeleton;
  const send = (names: readonly string[]) => {
    const numbers: Record<string, Record<number, number>> = {
      FLOPs: { [first ?? 0]: 3e9, [second ?? 0]: 1 },
      mean: { [first ?? 0]: 0.5, [second ?? 0]: -2, 0: 1 },
    };
    const columns = names.flatMap((name) => Array.from({ length }, (_, row) => numbers[name]?.[row] ?? Number.NaN));
    view.model.set("score_names", [...names]);
    view.model.set("scores", new DataView(Float32Array.from(columns).buffer));
  };
  let isAnswered = false;
  view.kernel.script.columns = ({ names }) => {
    if (isAnswered) send(names);
    const state = isAnswered ? ("done" as const) : ("running" as const);
    return { result: { id: 0, state, seconds: 0.1, fraction: null, error: null, waits_for: null }, buffers: [] };
  };
  state.change({ isFolded: false });
  state.setAllOpen([0, view.row("transformer")], true);
  await page.getByText("Columns", { exact: true }).click();
  await page.getByLabelText("FLOPs").click();
  await page.getByLabelText("mean").click(); // while the model runs
  await expect.element(page.getByText("The model runs …")).toBeVisible();
  expect(view.kernel.last("columns")).toEqual({ names: ["FLOPs", "mean"], inputs: null });
  isAnswered = true;
  await vi.waitFor(() => expect(state.columns.map(({ name }) => name)).toEqual(["FLOPs", "mean"]));
  await page.getByText("Columns", { exact: true }).click();
  await frame();
  const row = (id: number | undefined) => tree.element.querySelector(`[data-id="${id}"]`) as HTMLElement;
  const cells = [...row(first).querySelectorAll<HTMLElement>(".gp-score")];
  expect(cells.map((cell) => cell.textContent)).toEqual(["3B", "0.5"]);
  expect(row(first).getAttribute("aria-label")).toContain("3B 0.5");
  const buttons = [...heads.querySelectorAll("button")];
  for (const [at, button] of buttons.entries()) {
    const [above, below] = [button, cells[at] as HTMLElement].map((one) => one.getBoundingClientRect());
    expect(above?.right).toBeCloseTo(below?.right ?? 0, 0);
    expect(above?.bottom).toBeLessThanOrEqual(below?.top ?? 0);
  }
  const colors = [first, second].map((id) => getComputedStyle(row(id).querySelectorAll(".gp-score")[1] as Element));
  expect(colors[0]?.backgroundColor).not.toBe(colors[1]?.backgroundColor);
  const order = () => [first, second].map((id) => state.lines.lineOf(id ?? 0));
  expect(order()).toEqual(order().sort((a, b) => a - b));
  buttons[1]?.click(); // by mean: the one of the largest size comes first
  expect(heads.querySelectorAll("button")[1]?.ariaPressed).toBe("true");
  expect(order()).toEqual(order().sort((a, b) => b - a));
  heads.querySelectorAll("button")[1]?.click();
  expect(state.isSorted).toBe(false);
  expect(await accessibilityViolations(view.root)).toEqual([]);
  await page.getByText("Columns", { exact: true }).click();
  await page.getByLabelText("mean").click();
  await vi.waitFor(() => expect(state.columns.map(({ name }) => name)).toEqual(["FLOPs"]));
  expect(heads.hidden).toBe(true);
});

/** Of two colors as browsers compute them. */
function contrast(one: string, other: string): number {
  const canvas = document.createElement("canvas").getContext("2d") as CanvasRenderingContext2D;
  const [first = 0, second = 0] = [one, other].map((color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const channels = [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((value) => value / 255);
    const [red = 0, green = 0, blue = 0] = channels.map((c) =>
      c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4,
    );
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  });
  return (Math.max(first, second) + 0.05) / (Math.min(first, second) + 0.05);
}

test.each(["light", "dark"])("strong scores contrast with the background, and text with them: %s", async (theme) => {
  const { view, tree } = withScores([0, 2, Number.NaN, -2]);
  view.root.dataset.gpTheme = theme;
  await frame();
  const ground = getComputedStyle(tree.element).backgroundColor;
  const strong = rows(tree.element).filter((row) => row.style.getPropertyValue("--gp-heat") === "100%");
  expect(strong.map((row) => row.dataset.heat)).toEqual(["hot", "cold"]);
  for (const row of strong) {
    const color = getComputedStyle(row).backgroundColor;
    expect(contrast(color, ground)).toBeGreaterThan(theme === "dark" ? 2 : 1.5);
    for (const part of row.querySelectorAll(".gp-name, .gp-op, .gp-label, .gp-score")) {
      expect(contrast(getComputedStyle(part).color, color)).toBeGreaterThan(4.5);
    }
  }
});
