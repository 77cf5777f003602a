import { afterEach, expect, it } from "vitest";
import type { Component } from "../../src/kernel/protocol";
import { TreeState } from "../../src/tree/tree_state";
import { itemOf } from "../../src/views/selection";
import { joinSelection } from "../../src/views/tree_selection";
import { FakeView } from "../fixtures";

const views: FakeView[] = [];

afterEach(() => {
  for (const view of views.splice(0)) view.remove();
});

function joined() {
  const view = new FakeView();
  views.push(view);
  const state = new TreeState(view);
  view.reveal = (row) => state.reveal(row);
  joinSelection(view, state);
  const row = view.skeleton.find("transformer.h_1.attn.attn_output") ?? -1;
  const z: Component = {
    row,
    name: "layers[1].attn.z",
    axes: ["batch", "head", "query", "channel"],
    shape: [1, 4, 8, 16],
  };
  return { view, state, row, z };
}

it("reveals the row of a component, and keeps what is selected of it", () => {
  const { row, state, view, z } = joined();
  state.setComponents([z]);
  const item = itemOf("layers[1].attn.heads[2].z", { position: 3 });
  view.selection.set([item]);
  expect(state.activeRow).toBe(row);
  expect(view.selection.items).toEqual([item]);
});

it("reveals it also if the components become known later", () => {
  const { row, state, view, z } = joined();
  view.selection.set([itemOf("layers[1].attn.heads[2].z")]);
  expect(state.activeRow).toBe(0);
  state.setComponents([z]);
  expect(state.activeRow).toBe(row);
});

it("selects the component of a row, or its path", () => {
  const { row, state, view, z } = joined();
  state.setComponents([z]);
  state.reveal(row);
  expect(view.selection.items).toEqual([itemOf("layers[1].attn.z")]);
  const path = "transformer.h_2.mlp.output";
  state.reveal(view.skeleton.find(path) ?? -1);
  expect(view.selection.items).toEqual([itemOf(path)]);
  view.selection.set([itemOf('output|sub_1."a.b"')]);
  expect(view.skeleton.path(state.activeRow)).toBe('output|sub_1."a.b"');
});
