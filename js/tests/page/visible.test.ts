import { expect, test } from "vitest";
import { visible, visibleLines, visibleToken } from "../../src/page/text";
import { RowView } from "../../src/tree/row_view";
import { Skeleton } from "../../src/tree/skeleton";
import { TreeState } from "../../src/tree/tree_state";
import { ColumnsBuilder, FakeModel, FakeView, tensor, traits } from "../fixtures";

test.each([
  ["h_0.größe 名 ش 😀", "h_0.größe 名 ش 😀"],
  ["a\u202eb\u2066c", "a\\u202eb\\u2066c"],
  ["\u0000\x1b[31m\x7f", "\\x00\\x1b[31m\\x7f"],
  ["a\nb\tc\r", "a\\nb\\tc\\r"],
  ["a\u00a0b\u2028", "a\\xa0b\\u2028"],
  ["می\u200cخواهم क्\u200dष 👩\u200d🔬", "می\u200cخواهم क्\u200dष 👩\u200d🔬"],
  ["a\u200db \u200c", "a\\u200db \\u200c"],
  ["\ud800 \u{e0041}", "\\ud800 \\U000e0041"],
])("%j is shown as %j", (text, expected) => {
  expect(visible(text)).toBe(expected);
});

test.each([
  [" می\u200cخواهم", "\u2068␣می\u200cخواهم\u2069"],
  ["क्\u200dष", "क्\u200dष"],
  ["\u200d🔬", "\u200d🔬"],
  ["\u200d", "\\u200d"],
  ["a\u202e", "a\\u202e"],
])("the token %j is shown as %j: joiners as such, what is written from the right for itself", (text, expected) => {
  expect(visibleToken(text)).toBe(expected);
});

test("line breaks of a message are kept", () => {
  expect(visibleLines("a\nb\u202e")).toBe("a\nb\\u202e");
});

test("a row shows hidden characters of its name; its path is unchanged", () => {
  const name = "a\u202eb\u0007";
  const tree = new ColumnsBuilder();
  tree.graph("", "Odd", () => {
    tree.row("op", name, { op: "mul", spec: tensor(1) });
  });
  const skeleton = new Skeleton(tree.columns);
  const view = new FakeView(new FakeModel(traits()), skeleton);
  const row = new RowView(new TreeState(view), skeleton, 1, "p", "model");
  row.fill(0, false, false);
  const shown = row.element.querySelector(".gp-name");
  expect(shown?.textContent).toBe("a\\u202eb\\x07");
  expect(shown?.getAttribute("title")).toBe("a\\u202eb\\x07");
  expect(row.element.getAttribute("aria-label")).toContain("a\\u202eb\\x07");
  expect(skeleton.path(1)).toBe(name);
  view.remove();
});
