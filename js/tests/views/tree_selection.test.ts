import { afterEach, expect, test, vi } from "vitest";
import { TreeState } from "../../src/tree/tree_state";
import { itemOf } from "../../src/views/selection";
import { joinSelection } from "../../src/views/tree_selection";
import { FakeView } from "../fixtures";

afterEach(() => {
  vi.useRealTimers();
});

function joined() {
  const view = new FakeView();
  const state = new TreeState(view);
  joinSelection(view, state);
  return { view, state, row: (path: string) => view.skeleton.find(path) ?? -1 };
}

test("the host's echo of an earlier selection takes back no step; what comes later is followed", () => {
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

test("the row of folded layers selects none of them", () => {
  const { view, state, row } = joined();
  state.select(row("lm_head"));
  state.select(~row("transformer.h_0"));
  expect(view.selection.items).toEqual([]);
});
