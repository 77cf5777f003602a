import { expect, test, vi } from "vitest";
import widget from "../../src/index";
import type { Columns } from "../../src/kernel/protocol";
import { accessibilityViolations } from "../accessibility";
import { ABOUT, ColumnsBuilder, deflated, FakeModel, tensor, traits, transformer } from "../fixtures";
import { rendered, setTheme, undos } from "../rendered";

async function shown(columns: Columns = transformer(), changes: Parameters<typeof traits>[0] = {}) {
  const model = new FakeModel(traits({ skeleton: await deflated(columns), ...changes }));
  const { el, remove } = await rendered(model);
  return { model, el, remove };
}

test("all parts of the widget are there, with their accessible names", async () => {
  const { el } = await shown();
  expect(el.querySelector("[role=tree]")?.getAttribute("aria-label")).toBe("Graph");
  expect(el.querySelector("[role=searchbox]")?.getAttribute("aria-label")).toBe("Search nodes");
  expect(el.querySelectorAll("[role=treeitem]").length).toBeGreaterThan(10);
  expect(el.querySelector("[aria-label=Patches]")).not.toBeNull();
  expect(el.querySelector("[aria-label=Run]")).not.toBeNull();
});

test.each(["true", "false"])("no accessibility violations; light: %s", async (isLight) => {
  setTheme(isLight === "true");
  const columns = transformer();
  const scores = new Float32Array(columns.name.length).map((_, row) => (row % 3 ? Number.NaN : Math.sin(row)));
  const row = columns.name.findIndex((name) => columns.names[name] === "lm_head");
  const patch = {
    path: "x",
    kind: "zero",
    slice: null,
    value: null,
    name: null,
    steps: null,
    positions: null,
  } as const;
  const rest = {
    position_dim: null,
    any_shape: false,
    allow_empty: false,
    shape: null,
    sliced: null,
    warning: null,
    row: row + 1,
  };
  const { el, model } = await shown(columns, {
    scores: new DataView(scores.buffer),
    score_names: ["effect"],
    session: {
      version: 1,
      can_undo: true,
      can_redo: false,
      note: "",
      patches: [
        { ...patch, ...rest, number: 1, is_enabled: true },
        { ...patch, ...rest, number: 2, is_enabled: false },
      ],
    },
  });
  expect(getComputedStyle(el.querySelector(".gp-root") as Element).colorScheme).toBe(
    isLight === "true" ? "light" : "dark",
  );
  // Once the tree is shown, the view asks for the components.
  await vi.waitFor(() => expect(model.sent).toEqual([expect.objectContaining({ request: "components" })]));
  const components = [row + 1, row + 2, 1].map((row) => ({
    row,
    name: `layers[0].mlp${row}`,
    axes: ["batch"],
    shape: [2],
  }));
  model.set("components", await deflated(components));
  await vi.waitFor(() => expect(el.querySelector(".gp-component")).not.toBeNull());
  (el.querySelector("[role=tree]") as HTMLElement).focus();
  expect(await accessibilityViolations(el)).toEqual([]);
});

test("names are shown as text, never as markup", async () => {
  const name = '"<img src=x onerror=window.wasRun=1>"';
  const tree = new ColumnsBuilder();
  tree.graph("", "<b>Model</b>", () => tree.row("op", name, { op: "<i>", spec: tensor(1) }));
  const { el } = await shown(tree.columns, { about: { ...ABOUT, name: "<u>pg" } });
  await new Promise((done) => setTimeout(done, 50));
  expect(el.querySelector("img, b, i, u")).toBeNull();
  expect(el.querySelector(".gp-row[data-kind=op] .gp-name")?.textContent).toBe(name);
  expect("wasRun" in window).toBe(false);
});

test("a skeleton that cannot be decoded shows an error and what to do", async () => {
  vi.spyOn(console, "error").mockImplementation(() => undefined);
  const { el, model } = await shown(transformer(), { skeleton: new DataView(new ArrayBuffer(5)) });
  expect(el.querySelector("[role=alert]")?.textContent).toMatch(/cannot be shown.*Run the cell again/);
  model.set("skeleton", await deflated(transformer(2)));
  await vi.waitFor(() => expect(el.querySelector("[role=tree]")).not.toBeNull());
});

test("an uncaught error is shown", async () => {
  const { el } = await shown();
  const filename = new URL("../../src/index.ts", import.meta.url).href;
  const source = performance.getEntriesByType("resource").find((entry) => entry.name.startsWith(filename))?.name;
  window.dispatchEvent(
    new ErrorEvent("error", { filename: source ?? filename, error: new Error("broken"), cancelable: true }),
  );
  expect(el.querySelector(".gp-notices [role=alert]")?.textContent).toContain("broken");
});

test("the static tree is hidden while the view is open; a removed view leaves nothing behind", async () => {
  const output = document.createElement("div");
  output.className = "jp-OutputArea-child";
  output.innerHTML = '<div><details class="gp-static gp-static-fake">static</details></div>';
  document.body.append(output);
  undos.push(() => output.remove());
  const styles = document.head.querySelectorAll("style").length;
  const { model, el, remove } = await shown();
  expect(output.getBoundingClientRect().height).toBe(0);
  remove();
  expect(output.getBoundingClientRect().height).toBeGreaterThan(0);
  expect(document.head.querySelectorAll("style").length).toBe(styles);
  expect(model.listening).toBe(0);
  expect(el.childElementCount).toBe(0);
});

test("the page's theme also applies in a shadow root", async () => {
  const host = document.createElement("div");
  document.body.append(host);
  undos.push(() => host.remove());
  const el = document.createElement("div");
  host.attachShadow({ mode: "open" }).append(el);
  document.documentElement.classList.add("dark");
  const model = new FakeModel(traits({ skeleton: await deflated(transformer()) }));
  undos.push(await widget.render({ model, el }), () => document.documentElement.classList.remove("dark"));
  expect(el.querySelector<HTMLElement>(".gp-root")?.dataset.gpTheme).toBe("dark");
});
