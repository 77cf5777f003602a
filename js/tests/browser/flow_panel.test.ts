import { afterEach, expect, test, vi } from "vitest";
import { userEvent } from "vitest/browser";
import { makeFlowPanel } from "../../src/flow/flow_panel";
import { standaloneSvg } from "../../src/flow/flow_picture";
import { TreeState } from "../../src/tree/tree_state";
import "../../src/style.css";
import { accessibilityViolations } from "../accessibility";
import { deflated, patch } from "../fixtures";
import { Rig, settled } from "../panel_rig";
import { setTheme } from "../rendered";

const rigs: Rig[] = [];
afterEach(() => {
  for (const { view } of rigs.splice(0)) view.remove();
});

const BLOCK = "transformer.h_0";
const EDGES: [string, string][] = [
  ["ln_1", "hidden_states"],
  ["attn", "ln_1.output"],
  ["hidden_states_1", "attn.output"],
  ["hidden_states_1", "hidden_states"],
  ["mlp", "hidden_states_1"],
  ["drop", "mlp.output"],
  ["output", "drop.output"],
  ["attn.c_attn.linear", "attn.c_attn.input"],
  ["attn.c_attn.linear", "attn.c_attn.weight"],
  ["attn.c_attn.output", "attn.c_attn.linear"],
];

async function shown(hasEdges = true) {
  const rig = new Rig({ shows_graph: true });
  rigs.push(rig);
  const rows = EDGES.map((edge) => edge.map((path) => rig.row(`${BLOCK}.${path}`)) as [number, number]);
  rows.sort(([one], [other]) => one - other);
  const users = rows.map(([user], at) => user - (rows[at - 1]?.[0] ?? 0));
  const edges = await deflated({ users, values: rows.map(([user, value]) => user - value) } as never);
  if (hasEdges) rig.model.set("edges", edges);
  rig.model.set("selected", rig.row(BLOCK));
  const state = new TreeState(rig.view);
  rig.view.reveal = (row) => {
    rig.view.calls.push(["reveal", row]);
    state.reveal(row);
  };
  const panel = makeFlowPanel(rig.view, state);
  rig.view.root.append(panel.element);
  const node = (name: string) =>
    [...panel.element.querySelectorAll<SVGGElement>(".gp-flow-node")].find(
      (one) => one.querySelector(".gp-flow-name")?.textContent === name,
    ) as SVGGElement;
  const here = () => panel.element.querySelector("[aria-current]")?.textContent;
  if (hasEdges) await vi.waitFor(() => expect(node("attn")).toBeDefined());
  return { ...rig, rig, state, panel, node, here, edges };
}

test("a click selects a node and enters a module; the path leads back; the keys do the same", async () => {
  const { rig, node, here, panel } = await shown();
  await userEvent.click(node("hidden_states_1"));
  expect(rig.view.calls.at(-1)).toEqual(["reveal", rig.row(`${BLOCK}.hidden_states_1`)]);
  expect(node("hidden_states_1").classList).toContain("gp-in-tree");
  expect(here()).toBe("h_0");
  await userEvent.click(node("attn"));
  expect(here()).toBe("attn");
  await userEvent.click(panel.element.querySelector("nav button:last-of-type") as HTMLElement);
  expect(here()).toBe("h_0");
  expect(node("attn").getAttribute("tabindex")).toBe("0");
  node("ln_1").focus();
  await userEvent.keyboard("{ArrowDown}");
  expect(document.activeElement).toBe(node("attn"));
  await userEvent.keyboard("{Enter}");
  expect(here()).toBe("attn");
  await userEvent.keyboard("{Alt>}{ArrowUp}{/Alt}{ArrowDown}");
  expect(document.activeElement).toBe(node("hidden_states_1"));
  await userEvent.keyboard("+");
  expect(rig.view.calls.at(-1)?.slice(0, 2)).toEqual(["editPatch", { row: rig.row(`${BLOCK}.hidden_states_1`) }]);
  await userEvent.keyboard("{Enter}");
  expect(rig.view.calls.at(-1)?.slice(0, 2)).toEqual(["showDetails", rig.row(`${BLOCK}.hidden_states_1`)]);
});

test("what the kernel adds leaves the place that is seen as it is; another module begins at its top", async () => {
  const { rig, node, state, panel } = await shown();
  const window = panel.element.querySelector(".gp-zoom-window") as HTMLElement;
  for (let times = 0; times < 5; times++) panel.element.querySelector<HTMLElement>('[aria-label="Zoom in"]')?.click();
  node("mlp").focus({ preventScroll: true });
  window.scrollTo(30, 200);
  state.setComponents([{ row: rig.row(`${BLOCK}.hidden_states_1`), name: "layers[0].resid_mid", axes: [], shape: [] }]);
  expect(node("hidden_states_1").textContent).toContain("add stream");
  expect([window.scrollLeft, window.scrollTop]).toEqual([30, 200]);
  expect(document.activeElement).toBe(node("mlp"));
  state.reveal(rig.row(`${BLOCK}.attn`));
  expect(window.scrollTop).toBe(0);
});

test("patches, matches and the selection of other views are marked; pointing offers a patch", async () => {
  const { rig, node, state, panel } = await shown();
  const row = rig.row(`${BLOCK}.hidden_states_1`);
  rig.session([patch(1, { row, path: `${BLOCK}.hidden_states_1` }), patch(2, { row: rig.row(`${BLOCK}.attn.query`) })]);
  expect(node("hidden_states_1").textContent).toContain("zero");
  expect(node("attn").textContent).toContain("1 patch");
  state.search("op:softmax");
  expect(node("attn").textContent).toContain("1 found");
  expect([node("attn"), node("mlp")].map(({ classList }) => classList.contains("gp-faint"))).toEqual([false, true]);
  state.search("");
  await userEvent.hover(node("mlp"));
  const near = [...panel.element.querySelectorAll(".gp-flow-node.gp-near .gp-flow-name")].map((one) => one.textContent);
  expect(near.sort()).toEqual(["drop", "hidden_states_1", "mlp"]);
  await userEvent.click(panel.element.querySelector(".gp-flow-add circle") as Element);
  expect(rig.view.calls.at(-1)?.slice(0, 2)).toEqual(["editPatch", { row: rig.row(`${BLOCK}.mlp`) }]);
  state.reveal(rig.row(`${BLOCK}.attn.c_attn.linear`));
  expect(node("linear").textContent).toContain("weight [192, 64]");
  expect(node("linear").classList).toContain("gp-in-tree");
  await userEvent.click(node("linear").querySelector("[data-held]") as Element);
  expect(rig.view.calls.at(-1)).toEqual(["reveal", rig.row(`${BLOCK}.attn.c_attn.weight`)]);
  expect(node("linear").classList).toContain("gp-in-tree");
});

test("without edges it waits, or says that it needs the kernel; hidden, it draws nothing", async () => {
  const { rig, panel, edges, node } = await shown(false);
  expect(panel.element.textContent).toContain("Reading the dataflow");
  rig.model.set("edges", edges);
  await vi.waitFor(() => expect(node("attn")).toBeDefined());
  rig.model.trigger("comm:close");
  const patches = [...panel.element.querySelectorAll("button")].filter(({ textContent }) => textContent === "Patch …");
  expect(patches.map(({ hidden }) => hidden)).toEqual([true]);
  rig.model.set("shows_graph", false);
  await settled();
  expect(panel.element.hidden).toBe(true);
});

test.each(["light", "dark"])(
  "no accessibility violations, and texts fit into their boxes, on a %s page",
  async (theme) => {
    setTheme(theme === "light");
    const { node, panel } = await shown();
    await userEvent.click(node("hidden_states_1"));
    expect(await accessibilityViolations(panel.element)).toEqual([]);
    for (const group of panel.element.querySelectorAll(".gp-flow-node")) {
      const width = (group.querySelector("rect") as SVGRectElement).width.baseVal.value;
      for (const text of group.querySelectorAll<SVGTextElement>(":scope > text"))
        expect(text.getComputedTextLength()).toBeLessThan(width);
    }
  },
);

test("the saved picture has its colors in it, and is that of a light page without marks", async () => {
  setTheme(false);
  const { node, panel, rig } = await shown();
  await userEvent.click(node("hidden_states_1"));
  const svg = panel.element.querySelector("svg[role=group]") as SVGSVGElement;
  const saved = new DOMParser().parseFromString(standaloneSvg(svg, rig.view.root), "image/svg+xml").documentElement;
  expect(saved.querySelectorAll("[class]")).toHaveLength(0);
  expect(saved.querySelector("text")?.getAttribute("style")).toContain("fill: rgb(31, 35, 40)");
  expect(saved.textContent).toContain("Attention");
  expect(saved.querySelector("g:last-of-type > text")?.getAttribute("style")).toContain("paint-order: stroke");
  expect(rig.view.root.querySelectorAll("svg[role=group]")).toHaveLength(1);
});
