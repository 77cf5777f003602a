import { afterEach, expect, test, vi } from "vitest";
import type { Component } from "../../src/kernel/protocol";
import { connectFilter, connectSelection, TreeState } from "../../src/tree/tree_state";
import { itemOf, SharedFilter } from "../../src/views/selection";
import { FakeView } from "../fixtures";

afterEach(() => {
  vi.useRealTimers();
});

function joined() {
  const view = new FakeView();
  const state = new TreeState(view);
  connectSelection(view, state);
  return { view, state, row: (path: string) => view.skeleton.find(path) ?? -1 };
}

test("the host's echo of an earlier selection does not undo a later one; later selections are followed", () => {
  vi.useFakeTimers();
  const { view, state, row } = joined();
  state.select(row("input_ids"));
  const echo = view.model.get("selection");
  vi.advanceTimersByTime(100);
  state.select(row("lm_head"));
  view.model.set("selection", echo);
  expect(view.selection.items).toEqual([itemOf("lm_head")]);
  expect(view.calls).toEqual([]);
  vi.advanceTimersByTime(100);
  view.model.set("selection", [itemOf("transformer.ln_f")]);
  expect(view.calls).toEqual([["reveal", row("transformer.ln_f")]]);
});

test("a row of folded layers selects none of them", () => {
  const { view, state, row } = joined();
  state.select(row("lm_head"));
  state.select(~row("transformer.h_0"));
  expect(view.selection.items).toEqual([]);
});

function ofComponents() {
  const { view, state, row: rowOf } = joined();
  view.reveal = (row) => state.reveal(row);
  const row = rowOf("transformer.h_1.attn.attn_output");
  const axes = ["batch", "head", "query", "channel"];
  const z: Component = { row, name: "layers[1].attn.z", axes, shape: [1, 4, 8, 16] };
  return { view, state, row, z };
}

test("a selected component's row is revealed, and its head and positions stay selected", () => {
  const { row, state, view, z } = ofComponents();
  state.setComponents([z]);
  const item = itemOf("layers[1].attn.heads[2].z", { position: 3 });
  view.selection.set([item]);
  expect(state.activeRow).toBe(row);
  expect(view.selection.items).toEqual([item]);
});

test("a selected component's row is revealed also if the components arrive later", () => {
  const { row, state, view, z } = ofComponents();
  view.selection.set([itemOf("layers[1].attn.heads[2].z")]);
  expect(state.activeRow).toBe(0);
  state.setComponents([z]);
  expect(state.activeRow).toBe(row);
});

test("the row of a component selects the component by name", () => {
  const { row, state, view, z } = ofComponents();
  state.setComponents([z]);
  state.select(row);
  expect(view.selection.items).toEqual([itemOf("layers[1].attn.z")]);
});

test("Shift-click adds a row; a click on the active row selects it again", () => {
  const { state, view, row } = joined();
  state.click(row("input_ids"), false);
  state.click(row("lm_head"), true);
  expect(view.selection.items).toEqual([itemOf("input_ids"), itemOf("lm_head")]);
  view.selection.set([itemOf(null, { position: 3 })]); // a token of another view
  state.click(row("lm_head"), false);
  expect(view.selection.items).toEqual([itemOf("lm_head")]);
});

test("the score filter is shared by all views; another view's filter keeps the rows", () => {
  const view = new FakeView();
  const rows = view.skeleton.length;
  const [first, second] = ["transformer.h_0", "transformer.h_1"].map(
    (path) => view.skeleton.find(`${path}.attn`) ?? -1,
  );
  const components = [first, second].map((row = -1, layer) => {
    return { row: row + 1, name: `layers[${layer}].attn.z`, axes: [], shape: [] };
  });
  const values = new Float32Array(rows).fill(Number.NaN);
  values[components[0]?.row ?? 0] = -2;
  values[components[1]?.row ?? 0] = 1;
  view.model.set("scores", new DataView(values.buffer));
  const state = new TreeState(view);
  connectFilter(view, state);
  state.setComponents(components);
  const later = () => new SharedFilter(view.model, () => undefined);
  const before = later();
  state.change({ filter: { minimum: 1.5 } });
  for (const other of [before, later()]) {
    expect(other.result?.words).toBe("|score| ≥ 1.5");
    expect([0, 1].map((layer) => other.keeps(itemOf(`layers[${layer}].attn.heads[3].z`)))).toEqual([true, false]);
    expect(other.keeps(itemOf("layers[0].mlp_out"))).toBe(false);
    expect(other.keeps(itemOf("layers[0].attn_out"))).toBe(true);
    expect(other.keeps(itemOf(null, { layer: 0, position: 2 }))).toBe(true);
  }
  const isThere = () => components.map(({ row }) => state.lines.has(row));
  before.set({ items: [itemOf(null, { layer: 1, head: 2 })], words: "the head" });
  expect(state.filter).toBeNull();
  expect(isThere()).toEqual([false, true]);
  before.set({ items: [itemOf("layers[1].resid_post", { position: 2 })], words: "the stream" });
  const heads = [0, 1].map((layer) => itemOf(`layers[${layer}].attn.heads[3].z`));
  expect(heads.map((item) => before.keeps(item))).toEqual([false, true]);
  expect(before.keeps(itemOf("layers[1].mlp_out"))).toBe(false);
  before.set(null);
  expect(view.filter.result).toBeNull();
  state.change({ filter: { count: 1 } });
  expect(before.result?.words).toBe("the 1 largest of score");
  view.remove();
  expect(before.result).toBeNull();
});
