import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { SharedTraits } from "../../src/kernel/shared_traits";
import { FakeModel, FakeView, traits } from "../fixtures";

let model: FakeModel;
let shared: SharedTraits;
const heard: string[] = [];

beforeEach(() => {
  vi.useFakeTimers();
  model = new FakeModel(traits());
  shared = new SharedTraits(new FakeView(model));
  heard.length = 0;
  shared.listen("query", () => heard.push(model.get("query")));
});
afterEach(() => vi.useRealTimers());

test("the host's echo of a sent value does not undo later changes", () => {
  shared.set("query", "h");
  vi.advanceTimersByTime(100);
  expect(model.saved).toBe(1);
  shared.set("query", "h_3");
  model.set("query", "h"); // the echo of the first
  expect(model.get("query")).toBe("h_3");
  expect(heard.at(-1)).toBe("h_3");
  vi.advanceTimersByTime(100);
  expect(model.saved).toBe(2);
});

test("another view's value is taken over if nothing is waiting to be sent", () => {
  shared.set("query", "h");
  vi.advanceTimersByTime(100);
  model.set("query", "of another view");
  expect([model.get("query"), heard.at(-1)]).toEqual(["of another view", "of another view"]);
});
