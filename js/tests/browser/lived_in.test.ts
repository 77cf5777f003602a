/** The widget as people live with it: quick clicks, equal layers, one selection, errors that go, screen readers. */
import { expect, test, vi } from "vitest";
import { userEvent } from "vitest/browser";
import type { PatchState } from "../../src/kernel/protocol";
import { itemOf } from "../../src/views/selection";
import { ColumnsBuilder, deflated, FakeModel, tensor, traits, transformer } from "../fixtures";
import { named } from "../panel_rig";
import { rendered } from "../rendered";

async function shown(changes: Parameters<typeof traits>[0] = {}, columns = transformer()) {
  const model = new FakeModel(traits({ skeleton: await deflated(columns), ...changes }));
  const { el } = await rendered(model);
  const row = (name: string) => {
    const found = [...el.querySelectorAll<HTMLElement>(".gp-row")].find((one) => nameOf(one) === name);
    if (found === undefined) throw new Error(`no row ${name}`);
    return found;
  };
  const names = () => [...el.querySelectorAll(".gp-row")].map(nameOf);
  const selected = () => [...el.querySelectorAll(".gp-row[aria-selected=true]")].map(nameOf);
  const box = el.querySelector("[role=searchbox]") as HTMLInputElement;
  return { model, el, row, names, selected, box };
}

function nameOf(row: Element): string {
  return row.querySelector(".gp-name")?.textContent ?? "";
}

function press(target: Element, type: string, more: MouseEventInit = {}): void {
  target.dispatchEvent(new MouseEvent(type, { bubbles: true, cancelable: true, composed: true, detail: 1, ...more }));
}

const dialogs = (el: Element) => [...el.querySelectorAll("[role=dialog][aria-label]:popover-open")];

test("a button of a row acts when it is pressed: the row may move before it is released", async () => {
  const { el, row, box } = await shown();
  await userEvent.fill(box, "query");
  const add = named(row("query"), "Patch query");
  press(add, "mousedown");
  await userEvent.fill(box, "wte"); // the row is gone
  press(el.querySelector("[role=tree]") as Element, "click");
  expect(dialogs(el).map((one) => one.getAttribute("aria-label"))).toEqual(["Patch transformer.h_0.attn.query"]);
});

test("rows are in the page in the order in which they are seen", async () => {
  const { el, row, names } = await shown();
  named(el, "Fold repeats").click();
  for (const name of ["h_2", "h_0", "mlp", "h_1"]) row(name).querySelector<HTMLElement>(".gp-chevron")?.click();
  const rows = [...el.querySelectorAll(".gp-row")];
  const tops = rows.map((one) => one.getBoundingClientRect().top);
  expect(tops).toEqual([...tops].sort((a, b) => a - b));
  expect(names().indexOf("h_0")).toBeLessThan(names().indexOf("h_1"));
});

test("a module has the shape of its output and is patched there; a module without a value is not", async () => {
  const tree = new ColumnsBuilder();
  tree.graph("<root>", "Model", () => {
    tree.graph("attn", "Attention", () => {
      tree.row("output", "output", { spec: ["tuple of 2", null, null, "container"] });
      tree.inside(() => {
        tree.row("item", "sub_0", { spec: tensor(1, 8, 64) });
        tree.row("item", "sub_1", { spec: tensor(1, 4, 8, 8) });
      });
    });
    tree.graph("empty", "Nothing", () => tree.row("output", "output", { spec: ["NoneType", null, null, "object"] }));
    tree.row("output", "output", { spec: tensor(1, 8, 64) });
  });
  const { el, row, model } = await shown({}, tree.columns);
  expect(row("attn").querySelector(".gp-label")?.textContent).toBe("[1, 8, 64] f32");
  named(row("attn"), "Patch attn").click();
  expect(dialogs(el)[0]?.getAttribute("aria-label")).toBe("Patch attn.output|sub_0");
  expect(row("empty").querySelector("[data-action=add]")).toBeNull();
  expect(row("pg").querySelector(".gp-label")?.textContent).toBe("[1, 8, 64] f32");
  press(row("pg"), "mousedown");
  expect(model.get("selection")).toEqual([itemOf("<root>")]);
});

test("equal layers open together, which is said, with a way to open one only", async () => {
  const { el, row, names } = await shown();
  row("h_0 … h_3").click();
  row("h_2").querySelector<HTMLElement>(".gp-chevron")?.click();
  const said = () => el.querySelector(".gp-offer:not([hidden])")?.textContent ?? "";
  expect(said()).toBe("Opened too: 3 equal modules.Only this one");
  named(el, "Only this one").click();
  expect(said()).toBe("");
  expect(names().filter((name) => name === "attn")).toEqual(["attn"]);
  expect(row("h_2").getAttribute("aria-expanded")).toBe("true");
  row("h_2").querySelector<HTMLElement>(".gp-chevron")?.click();
  row("lm_head").querySelector<HTMLElement>(".gp-chevron")?.click();
  expect(said()).toBe("");
});

test("what is selected is one row, which is seen: after Esc, after closing a row, after another view", async () => {
  const { el, model, row, selected, box } = await shown();
  expect(selected()).toEqual([]);
  await userEvent.fill(box, "h_1.attn.query");
  await userEvent.keyboard("{Enter}");
  expect(selected()).toEqual(["query"]);
  await userEvent.keyboard("{Escape}{Escape}");
  expect(box.value).toBe("");
  expect(selected()).toEqual(["query"]);
  expect(model.get("selection")).toEqual([itemOf("transformer.h_1.attn.query")]);
  row("transformer").querySelector<HTMLElement>(".gp-chevron")?.click();
  expect(selected()).toEqual(["transformer"]);
  expect(model.get("selection")).toEqual([itemOf("transformer")]);
  await new Promise((done) => setTimeout(done, 100)); // until what was set here is sent
  model.set("selection", []);
  expect(selected()).toEqual([]);
  expect((el.querySelector("[role=tree]") as HTMLElement).getAttribute("aria-activedescendant")).toBe(
    row("transformer").id,
  );
  press(row("transformer"), "mousedown");
  expect(selected()).toEqual(["transformer"]);
});

test("an error goes when the selection or the patches change", async () => {
  const { el, model } = await shown();
  const error = el.querySelector(".gp-notice-error") as HTMLElement;
  const causes = [
    () => model.set("selection", [itemOf("lm_head")]),
    () => model.set("session", { ...model.get("session"), version: 1 }),
  ];
  for (const goOn of causes) {
    const filename = performance.getEntriesByType("resource").find(({ name }) => name.includes("/src/index.ts"))?.name;
    window.dispatchEvent(
      new ErrorEvent("error", { filename: filename ?? "", error: new Error("no"), cancelable: true }),
    );
    expect(error.hidden).toBe(false);
    goOn();
    expect(error.hidden).toBe(true);
  }
});

test("? lists the keys, and Esc closes the list", async () => {
  const { el, row } = await shown();
  press(row("lm_head"), "mousedown");
  await userEvent.keyboard("?");
  const keys = el.querySelector("details:has(.gp-keys)") as HTMLDetailsElement;
  expect(keys.open).toBe(true);
  expect(getComputedStyle(keys.querySelector("dl") as HTMLElement).borderTopWidth).toBe("1px");
  await userEvent.keyboard("{Escape}");
  expect(keys.open).toBe(false);
  expect(document.activeElement).toBe(el.querySelector("[role=tree]"));
});

test("the host gets the keys that the widget does not use", async () => {
  const { el, box } = await shown();
  const heard = vi.fn();
  el.addEventListener("keydown", (event) => heard(event.key));
  const keyTo = (target: Element, key: string, ctrlKey: boolean) =>
    target.dispatchEvent(new KeyboardEvent("keydown", { key, ctrlKey, bubbles: true, cancelable: true }));
  const tree = el.querySelector("[role=tree]") as HTMLElement;
  for (const key of ["s", "S", "b"]) for (const target of [tree, box]) keyTo(target, key, true);
  expect(heard.mock.calls.flat()).toEqual(["s", "s", "S", "S", "b", "b"]);
  heard.mockClear();
  for (const key of ["z", "a", "x", "Enter", "Backspace"]) keyTo(box, key, true);
  for (const key of ["c", "z"]) keyTo(tree, key, true);
  for (const key of ["d", "x", "0", "Enter", "ArrowDown"]) for (const target of [tree, box]) keyTo(target, key, false);
  expect(heard).not.toHaveBeenCalled();
  expect(el.querySelector("[data-lm-suppress-shortcuts]")).toBeNull();
});

test("the origin of patches is said until they are edited, with a way back", async () => {
  const patch = { path: "lm_head.output", kind: "zero", number: 1, is_enabled: true, row: 1 } as PatchState;
  const note = "1 patch carried over from the previous graph in pg";
  const { el, model } = await shown({
    session: { version: 1, patches: [patch], can_undo: true, can_redo: false, note },
  });
  const said = el.querySelector(".gp-patch-list .gp-offer") as HTMLElement;
  expect(said.textContent).toBe(`${note}Undo`);
  named(said, "Undo").click();
  await vi.waitFor(() => expect(model.sent).toContainEqual(expect.objectContaining({ request: "edit" })));
  model.set("session", { version: 2, patches: [], can_undo: false, can_redo: true, note: "" });
  expect(said.hidden).toBe(true);
});

test("the second click of a double click does not insert another cell", async () => {
  const patch = { path: "lm_head.output", kind: "zero", number: 1, is_enabled: true, row: 1 } as PatchState;
  const { el, model } = await shown({
    session: { version: 1, patches: [patch], can_undo: true, can_redo: false, note: "" },
  });
  await userEvent.dblClick(named(el, "Insert cell"));
  expect(model.sent.filter((sent) => (sent as { request: string }).request === "export")).toHaveLength(1);
});
