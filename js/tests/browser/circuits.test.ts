import { expect, test, vi } from "vitest";
import { userEvent } from "vitest/browser";
import { makeCircuitPanel } from "../../src/circuits/circuit_figure";
import type { CircuitPicture, CircuitTraits } from "../../src/kernel/protocol";
import { TreeState } from "../../src/tree/tree_state";
import { itemOf } from "../../src/views/selection";
import { accessibilityViolations } from "../accessibility";
import { FakeModel, patch } from "../fixtures";
import { Rig } from "../panel_rig";
import { rendered, setTheme, undos } from "../rendered";

const OTHER_HEAD = "layers[0].attn.heads[1].z";
const HOSTILE = "<img src=x onerror=window.wasRun=1>";

/** embed -> head 0.0 (q and v) -> logits, and past it -> logits. */
function picture(changes: Partial<CircuitPicture> = {}): CircuitPicture {
  const node = (name: string, label: string, x: number, y: number, row = -1) => {
    return { name, label, x, y, width: 70, height: 36, ports: [] as [string, number][], row, position: null };
  };
  const edge = (from: number, to: number, sender: string, receiver: string, score: number, line: string) => {
    return { from, to: [to], sender, receiver, score, thickness: 3, line, position: null };
  };
  const head = node("layers[0].attn.heads[0].z", "head 0.0", 100, 110);
  head.ports = [
    ["q", 80],
    ["v", 120],
  ];
  return {
    width: 260,
    height: 220,
    bands: [{ label: HOSTILE, y: 80, height: 60 }],
    nodes: [node("@embed", "embed", 150, 190), head, node("@logits", "logits", 150, 30)],
    edges: [
      edge(1, 2, "layers[0].attn.heads[0].z", "@logits", 2, "M100 92C100 70 140 70 140 48"),
      edge(0, 2, "@embed", "@logits", -1.5, "M160 172C160 110 200 110 160 48"),
      edge(0, 1, "@embed", "layers[0].attn.heads[0].q", 1, "M140 172C140 150 80 150 80 128"),
      edge(0, 1, "@embed", "layers[0].attn.heads[0].v", 0.25, "M150 172C150 150 120 150 120 128"),
    ],
    columns: [],
    links: [],
    first: 4,
    summary: "4 of 9 edges, faithfulness 0.9",
    python: "circuit = 1",
    json: "{}",
    ...changes,
  };
}

async function shown(changes: Partial<CircuitPicture> = {}, pinned: CircuitTraits["pinned"] = null) {
  const model = new FakeModel<CircuitTraits>({ circuit: picture(changes), pinned, model_id: "abc" });
  const { el, remove } = await rendered(model);
  return { model, el, remove, ...parts(el) };
}

function parts(el: HTMLElement) {
  const node = (name: string) =>
    [...el.querySelectorAll<SVGGElement>(".gp-circuit-node")].find((one) =>
      one.getAttribute("aria-label")?.startsWith(`${name}:`),
    ) as SVGGElement;
  const visible = (selector: string) =>
    [...el.querySelectorAll(selector)].filter((one) => getComputedStyle(one).display !== "none").length;
  const query = <E extends Element>(selector: string) => el.querySelector(selector) as E;
  return { node, visible, query };
}

test("nodes, inputs and edges are drawn at the kernel's positions, with their signs", async () => {
  const { el, node, visible } = await shown();
  expect(visible(".gp-circuit-node")).toBe(3);
  expect(visible(".gp-circuit-edge.gp-positive[d^=M]")).toBe(3 + 1); // one of the legend
  expect(visible(".gp-circuit-edge.gp-negative")).toBe(1 + 1);
  expect(node("head 0.0").textContent).toBe("head 0.0qv");
  expect(node("head 0.0").getAttribute("aria-label")).toContain("layers[0].attn.heads[0].z, 2 edges in, 1 edge out");
  const boxOf = (one: Element | null) => (one as Element).getBoundingClientRect();
  const { left, top } = boxOf(el.querySelector("svg[role=group]"));
  const box = boxOf(node("embed").querySelector("rect"));
  expect(box.top - top).toBeCloseTo(190 - 18, 0);
  expect(box.left - left).toBeGreaterThanOrEqual(150 - 35);
  expect(document.querySelector("img")).toBeNull();
  expect(el.querySelector(".gp-circuit-layer")?.textContent).toBe(HOSTILE);
});

test("the slider hides weak edges, and nodes without edges", async () => {
  const { visible, query, node } = await shown({ first: 3 });
  const slider = query<HTMLInputElement>("input[type=range]");
  expect(slider.value).toBe("3");
  expect(slider.getAttribute("aria-valuetext")).toBe("3 of 4, |score| ≥ 1");
  expect(visible(".gp-circuit-target")).toBe(3);
  slider.focus();
  await userEvent.keyboard("{Home}");
  expect(visible(".gp-circuit-target")).toBe(1);
  expect(visible(".gp-circuit-node")).toBe(2);
  expect(getComputedStyle(node("embed")).display).toBe("none");
  await userEvent.keyboard("{End}");
  expect(slider.getAttribute("aria-valuetext")).toBe("all 4, |score| ≥ 0.25");
});

test("an attribution graph is ordered by influence, with errors grey", async () => {
  const { edges, nodes } = picture();
  const reversed = { edges: [...edges].reverse(), first: 2, is_by_influence: true };
  const { el, node, query } = await shown({
    ...reversed,
    nodes: nodes.map((one, n) => ({ ...one, is_error: n === 1 })),
  });
  expect(query("input[type=range]").getAttribute("aria-valuetext")).toBe("2 of 4, most influence first");
  expect(query(".gp-circuit-legend").textContent).toContain("score +2");
  const fills = ["embed", "head 0.0"].map((name) => getComputedStyle(node(name).querySelector("rect") as Element).fill);
  expect(fills[0]).not.toBe(fills[1]);
  expect(el.querySelectorAll(".gp-circuit-error")).toHaveLength(1);
});

test("nodes selected with Shift become a group with a name, and leave it again", async () => {
  const members = [[4], [7, 8], [9]];
  const nodes = picture().nodes.map((one, n) => ({ ...one, ports: [], members: members[n] ?? [] }));
  const { el, model, node, query } = await shown({ nodes });
  model.set("groups", { old: [7, 8], other: [9, 2] });
  await userEvent.click(node("embed"), { modifiers: ["Shift"] });
  node("logits").focus();
  await userEvent.keyboard("{Shift>}{Enter}{/Shift}");
  expect(model.get("pinned")).toBeNull();
  expect(query(".gp-circuit-grouping").textContent).toContain("2 nodes selected");
  expect(el.querySelectorAll(".gp-circuit-chosen")).toHaveLength(2);
  expect(await accessibilityViolations(el)).toEqual([]);
  await userEvent.type(query<HTMLInputElement>('[aria-label="Name of the group"]'), "ends{Enter}");
  expect(model.get("groups")).toEqual({ old: [7, 8], other: [2], ends: [4, 9] });
  model.set("circuit", picture({ nodes })); // as the kernel answers
  expect(query<HTMLElement>(".gp-circuit-grouping").hidden).toBe(true);
  await userEvent.click(node("head 0.0"), { modifiers: ["Shift"] });
  [...el.querySelectorAll("button")].find((one) => one.textContent === "Ungroup")?.click();
  expect(model.get("groups")).toEqual({ other: [2], ends: [4, 9] });
});

test("nodes are found by words, and Enter pins one after the other", async () => {
  const nodes = picture().nodes.map((one) => ({ ...one, ports: [] }));
  const { el, model, node, query } = await shown({ nodes });
  const field = query<HTMLInputElement>('[aria-label="Find nodes"]');
  const found = () => [...el.querySelectorAll(".gp-circuit-found")];
  await userEvent.type(field, "@");
  expect(found()).toEqual([node("embed"), node("logits")]);
  expect(query(".gp-muted[role=status]").textContent).toBe("2 nodes");
  for (const number of [0, 2, 0]) {
    await userEvent.type(field, "{Enter}");
    expect(model.get("pinned")).toEqual(["node", number]);
  }
  await userEvent.type(field, " EMB{Enter}");
  expect(found()).toEqual([node("embed")]);
  expect(model.get("pinned")).toEqual(["node", 0]);
  expect(await accessibilityViolations(el)).toEqual([]);
  const slider = query<HTMLInputElement>("input[type=range]");
  slider.focus();
  await userEvent.keyboard("{Home}"); // the first edge only, from head to logits
  expect(found()).toEqual([]);
  await userEvent.type(field, "{Escape}");
  expect(field.value).toBe("");
  expect(query(".gp-muted[role=status]").textContent).toBe("");
});

test("a pinned node shows the page of its feature, of which nothing runs", async () => {
  const page = '<div class="page"><p>the <b>cat</b></p><script>window.ran = 1</script></div>';
  const nodes = picture().nodes.map((one, number) => (number === 0 ? { ...one, page } : one));
  const { el, node, query } = await shown({ nodes });
  expect(el.querySelector(".gp-circuit-page")).toBeNull();
  await userEvent.click(node(nodes[0]?.label ?? ""));
  expect(query(".gp-circuit-page p").textContent).toBe("the cat");
  expect("ran" in window).toBe(false);
  await userEvent.click(node(nodes[1]?.label ?? ""));
  expect(el.querySelector(".gp-circuit-page")).toBeNull();
});

test("a small picture says what is seen of one that does not fit, and a click there goes to that place", async () => {
  const { el, query } = await shown({ width: 4000 });
  const [scroll, map] = [query<HTMLElement>(".gp-zoom-window"), query<SVGSVGElement>(".gp-zoom-map")];
  const seen = () => (query(".gp-zoom-seen") as Element).getBoundingClientRect();
  await vi.waitFor(() => expect(map.getBoundingClientRect().width).toBeCloseTo(242, 0));
  const box = map.getBoundingClientRect();
  expect(seen().left - box.left).toBeLessThan(4);
  await userEvent.click(map, { position: { x: box.width / 2, y: box.height / 2 } });
  await vi.waitFor(() => expect(scroll.scrollLeft).toBeGreaterThan(1000));
  await vi.waitFor(() => expect((seen().left + seen().right) / 2).toBeCloseTo(box.left + box.width / 2, -1));
  el.querySelector<HTMLElement>("[aria-label='Fit to width']")?.click();
  expect(getComputedStyle(map).display).toBe("none");
});

test("a wide picture fits by a button, and is zoomed by buttons and by the wheel with Ctrl", async () => {
  const { el, query } = await shown({ width: 4000 });
  const svg = query<SVGSVGElement>("svg[role=group]");
  const scroll = query<HTMLElement>(".gp-zoom-window");
  const click = (name: string) => el.querySelector<HTMLElement>(`[aria-label="${name}"]`)?.click();
  expect(scroll.scrollWidth).toBeGreaterThan(3900);
  click("Fit to width");
  expect(svg.getBoundingClientRect().width).toBeCloseTo(scroll.clientWidth, 0);
  click("Zoom in");
  expect(svg.getBoundingClientRect().width).toBeCloseTo(scroll.clientWidth * 1.25, 0);
  const wheel = (ctrlKey: boolean) =>
    scroll.dispatchEvent(new WheelEvent("wheel", { deltaY: -400, ctrlKey, cancelable: true, bubbles: true }));
  const before = svg.getBoundingClientRect().width;
  expect(wheel(false)).toBe(true); // scrolls
  expect(svg.getBoundingClientRect().width).toBe(before);
  expect(wheel(true)).toBe(false);
  expect(svg.getBoundingClientRect().width / before).toBeCloseTo(Math.E, 1);
  const drag = (type: string, clientX: number, target: Element = svg) =>
    target.dispatchEvent(new PointerEvent(type, { clientX, pointerId: 1, pointerType: "mouse", bubbles: true }));
  scroll.setPointerCapture = () => undefined; // of a pointer that does not exist
  scroll.scrollTo(100, 0);
  drag("pointerdown", 300);
  drag("pointermove", 250, scroll);
  expect(scroll.scrollLeft).toBe(150);
  drag("pointerup", 250, scroll);
  drag("pointermove", 200, scroll);
  expect(scroll.scrollLeft).toBe(150);
  await userEvent.keyboard("{Tab}");
  expect(await accessibilityViolations(el)).toEqual([]);
});

test("pointing at a node shows its path, score and neighbors; a click pins, a second one unpins", async () => {
  const { model, el, node, query } = await shown();
  const target = el.querySelectorAll(".gp-circuit-target");
  target[0]?.dispatchEvent(new PointerEvent("pointerenter")); // weak edges are drawn first
  expect(query(".gp-readout").textContent).toBe("@embed → layers[0].attn.heads[0].v: +0.25");
  expect(el.querySelectorAll(".gp-circuit-node.gp-near")).toHaveLength(2);
  target[0]?.dispatchEvent(new PointerEvent("pointerleave"));

  await userEvent.click(node("head 0.0"));
  expect(model.get("pinned")).toEqual(["node", 1]);
  expect(model.saved).toBe(1);
  expect(node("head 0.0").getAttribute("aria-pressed")).toBe("true");
  const cells = [...el.querySelectorAll(".gp-circuit-table td")].map((cell) => cell.textContent);
  expect(cells).toEqual(["@embed → q", "+1", "@embed → v", "+0.25", "@logits", "+2"]);
  await userEvent.click(node("head 0.0"));
  expect(model.get("pinned")).toBeNull();
  expect(query<HTMLElement>(".gp-circuit-pinned").hidden).toBe(true);

  model.set("pinned", ["edge", 1]);
  expect(query(".gp-circuit-pinned").textContent).toContain("@embed → @logits: −1.5");
});

test("arrow keys move between nodes, Enter pins, Escape unpins", async () => {
  const { model, el, node } = await shown();
  expect(el.querySelectorAll(".gp-circuit-node[tabindex='0']")).toHaveLength(1);
  node("embed").focus();
  await userEvent.keyboard("{ArrowUp}");
  expect(document.activeElement).toBe(node("head 0.0"));
  await userEvent.keyboard("{Enter}");
  expect(model.get("pinned")).toEqual(["node", 1]);
  await userEvent.keyboard("{ArrowUp}{ArrowUp}");
  expect(document.activeElement).toBe(node("logits"));
  await userEvent.keyboard("{Escape}");
  expect(model.get("pinned")).toBeNull();
});

test.each(["light", "dark"])("no accessibility violations and no clipped text on a %s page", async (theme) => {
  setTheme(theme === "light");
  const { el, node } = await shown({ bands: [{ label: "layer 0", y: 80, height: 60 }] });
  await userEvent.click(node("head 0.0"));
  const rules = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"];
  expect(await accessibilityViolations(el, { runOnly: rules })).toEqual([]);
  for (const one of el.querySelectorAll<SVGGElement>(".gp-circuit-node")) {
    const label = one.querySelector("text") as SVGTextElement;
    expect(label.getComputedTextLength()).toBeLessThan(70);
  }
});

test("with a tree, a pinned node is the selected row, and can be patched by its component", async () => {
  const rig = new Rig({ circuit: picture() });
  const row = rig.row("transformer.h_0.attn.output");
  const circuit = picture();
  const [, head] = circuit.nodes;
  if (head) Object.assign(head, { row, position: 5 });
  circuit.columns = [{ label: "<b>token</b>", x: 100 }];
  circuit.links = [{ ends: [0, 1], line: "M0 0H9" }];
  rig.model.set("circuit", circuit);
  const state = new TreeState(rig.view);
  const panel = makeCircuitPanel(rig.view, state);
  document.body.append(panel.element);
  undos.push(() => panel.element.remove());
  const { query } = parts(panel.element);
  const node = () => parts(panel.element).node("head 0.0 at 5");
  expect(query(".gp-circuit-token").textContent).toBe("<b>token</b>");
  expect(query(".gp-circuit-link").getAttribute("d")).toBe("M0 0H9");
  await userEvent.click(node());
  expect(query(".gp-circuit-link").classList.contains("gp-near")).toBe(true);
  expect(rig.view.calls.at(-1)).toEqual(["reveal", row]);
  expect(rig.view.selection.items).toMatchObject([{ name: "layers[0].attn.heads[0].z", head: 0, position: 5 }]);
  await userEvent.click(panel.element.querySelector("button.gp-primary") as HTMLElement);
  expect(rig.view.calls.at(-1)?.slice(0, 2)).toEqual([
    "editPatch",
    { row, component: "layers[0].attn.heads[0].z", positions: "5" },
  ]);

  rig.session([patch(1, { path: "layers[0].attn.heads[0].z", row })]);
  expect(node().classList).toContain("gp-patched-node");
  state.reveal(row);
  expect(node().classList).toContain("gp-in-tree");
  // Another head of the same row is a neighbor, which is not meant.
  const nodes = circuit.nodes.map((one) => (one.name === "@logits" ? { ...one, name: OTHER_HEAD, row } : one));
  rig.model.set("circuit", { ...circuit, nodes });
  const other = () => parts(panel.element).node("logits");
  expect([node(), other()].map(({ classList }) => classList.contains("gp-in-tree"))).toEqual([true, false]);
  rig.view.selection.set([itemOf("layers[0].attn.z")]);
  expect([node(), other()].map(({ classList }) => classList.contains("gp-in-tree"))).toEqual([true, true]);
  rig.model.set("circuit", null);
  expect(panel.element.hidden).toBe(true);
});
