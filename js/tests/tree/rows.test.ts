import { expect, test } from "vitest";
import { FLAG, type PatchState } from "../../src/kernel/protocol";
import { CLOSED, Folding, firstOpen, OPEN } from "../../src/tree/rows";
import { Scores, scoreText, textOfBest } from "../../src/tree/scores";
import { Skeleton } from "../../src/tree/skeleton";
import { TreeState } from "../../src/tree/tree_state";
import { ColumnsBuilder, FakeModel, FakeView, patch, tensor, traits, transformer } from "../fixtures";

const skeleton = new Skeleton(transformer(6));
const paths = Array.from({ length: skeleton.length }, (_, row) => skeleton.path(row));
const row = (path: string) => paths.indexOf(path);

function opened(changes: Parameters<typeof traits>[0] = {}, own = skeleton) {
  const view = new FakeView(new FakeModel(traits(changes)), own);
  const tree = new TreeState(view);
  const seen = () => [...tree.lines.ids].map((id) => (id < 0 ? `~${own.path(~id)}` : own.path(id)));
  return { view, tree, seen, model: view.model };
}

function patchAt(path: string, number = 1): PatchState {
  return patch(number, { path, row: row(path) });
}

test("the first view shows the layers folded and closed, and is neither short nor long", () => {
  const { seen, tree } = opened();
  expect(seen()).toContain("~transformer.h_0");
  expect(seen().filter((path) => /h_\d/.test(path))).toHaveLength(1);
  expect(tree.lines.length).toBeGreaterThan(10);
  expect(tree.lines.length).toBeLessThan(32);
  tree.change({ isFolded: false });
  for (const layer of [0, 5]) expect(seen()).toContain(`transformer.h_${layer}`);
  expect(seen()).not.toContain("transformer.h_1.attn");
});

test("folded layers open together, also rows inside; unfolded layers open one by one", () => {
  const { seen, tree, model } = opened({ expanded: [0, row("transformer")] });
  const marker = ~row("transformer.h_0");
  const layers = [0, 1, 2, 3, 4, 5];
  const opens = (part: string) => layers.map((layer) => seen().includes(`transformer.h_${layer}.${part}`));
  tree.setOpen(marker, true);
  tree.setOpen(row("transformer.h_2"), true);
  expect(opens("attn")).toEqual(layers.map(() => true));
  tree.setOpen(row("transformer.h_4.attn"), true);
  expect(opens("attn.query")).toEqual(layers.map(() => true));
  expect(model.get("expanded")).toHaveLength(2 + 2 * layers.length);
  tree.setOpen(row("transformer.h_1"), false);
  expect(opens("attn")).toEqual(layers.map(() => false));
  tree.change({ isFolded: false });
  tree.setOpen(row("transformer.h_3"), true);
  expect(opens("attn")).toEqual(layers.map((layer) => layer === 3));
});

test("plumbing is one row at the top that opens, in all layers together; searches look inside", () => {
  const columns = new ColumnsBuilder();
  const flags = FLAG.plumbing;
  columns.graph("<root>", "Model", () => {
    columns.row("input", "ids", { spec: tensor(8) });
    columns.row("input", "positions", { spec: tensor(8), flags });
    for (let layer = 0; layer < 4; layer++) {
      columns.graph(`h_${layer}`, "Block", () => {
        columns.row("input", "mask", { spec: tensor(8), flags });
        columns.row("op", "mul", { op: "mul", spec: tensor(8) });
        columns.row("op", "le", { op: "le", spec: tensor(8), flags });
      });
    }
    columns.row("op", "bias", { op: "to", spec: tensor(8), flags });
    columns.graph("only", "Masks", () => columns.row("op", "and", { op: "and", spec: tensor(8), flags }));
  });
  const own = new Skeleton(columns.columns);
  const { seen, tree } = opened({ expanded: [0] }, own);
  const at = (path: string) => Array.from({ length: own.length }, (_, id) => own.path(id)).indexOf(path);
  expect(seen()).toEqual(["", "~positions", "ids", "~h_0", "only"]);
  const line = tree.lines.lineOf(at("bias"));
  expect([tree.lines.ids[line], tree.lines.positions[line], tree.lines.sizes[line]]).toEqual([~at("positions"), 1, 4]);
  expect(tree.nameOf(~at("positions"))).toBe("plumbing");
  tree.setOpen(~at("positions"), true);
  expect(seen().slice(0, 4)).toEqual(["", "~positions", "positions", "bias"]);
  tree.setOpen(~at("h_0"), true);
  tree.setOpen(at("h_1"), true);
  expect(seen().filter((path) => path.startsWith("h_2"))).toEqual(["h_2", "h_2.mul"]);
  tree.setOpen(~at("h_1.mask"), true);
  expect(seen()).toContain("h_3.le");
  tree.search("le");
  expect(seen()).toContain("h_3.le");
  tree.search("");
  tree.collapseAll();
  tree.reveal(at("h_3.le"));
  expect(seen()).toContain("h_3.le");
  expect(seen()).not.toContain("bias");
  expect(opened({ expanded: [0], selected: at("bias") }, own).seen()).toContain("bias"); // `pg.browse("bias")`
  const other = opened({ expanded: [0] }, own);
  other.model.set("selected", at("bias")); // `browser.select("bias")`
  expect(other.seen()).toContain("bias");
  tree.setShowsSizes(true);
  tree.change({ isFolded: false });
  expect(seen()).not.toContain("~positions");
});

test("80 layers count as one; a flat graph of thousands is not partly opened", () => {
  const many = new Skeleton(transformer(80));
  const open = firstOpen(
    many,
    new Folding(many, (at) => !many.isHiddenByDefault(at)),
    (at) => !many.isHiddenByDefault(at),
  );
  expect(open.map((at) => many.path(at))).toContain("transformer");
  expect(open.map((at) => many.path(at))).not.toContain("transformer.h_1");
  const tree = new ColumnsBuilder();
  tree.graph("<root>", "Flat", () => {
    for (let at = 0; at < 3000; at++) tree.graph(`m_${at}`, `M${at}`, () => tree.row("op", "x", { spec: tensor(at) }));
  });
  const flat = new Skeleton(tree.columns);
  expect(firstOpen(flat, new Folding(flat, () => true), () => true)).toEqual([0]);
});

test("sizes and clutter are shown on request, patched rows always", () => {
  const { seen, tree, model } = opened({
    expanded: [0, row("transformer"), row("transformer.h_0"), row("transformer.h_0.attn")],
  });
  tree.change({ isFolded: false });
  expect(seen()).not.toContain("transformer.h_0.attn.size");
  model.set("session", {
    version: 2,
    patches: [patchAt("transformer.h_0.attn.size")],
    can_undo: true,
    can_redo: false,
    note: "",
  });
  expect(seen()).toContain("transformer.h_0.attn.size");
  expect(seen()).not.toContain("use_cache");
  tree.setShowsSizes(true);
  expect(seen()).toContain("use_cache");
  expect(model.get("shows_sizes")).toBe(true);
});

test("positions among siblings count visible rows", () => {
  const { tree } = opened({ expanded: [0] });
  expect([...tree.lines.ids].map((id) => paths[id])).toEqual([
    "",
    "input_ids",
    "transformer",
    "lm_head",
    "extra_head",
    "output",
  ]);
  const at = tree.lines.lineOf(row("lm_head"));
  expect([tree.lines.levels[at], tree.lines.positions[at], tree.lines.sizes[at]]).toEqual([2, 3, 5]);
  expect(tree.lines.lineOf(row("transformer.h_3.attn"))).toBe(tree.lines.lineOf(row("transformer")));
});

test("matches are shown with their ancestors; clearing restores what was open", () => {
  const { seen, tree, model } = opened({ expanded: [0, row("lm_head")] });
  const before = seen();
  tree.search("h_2 softmax");
  expect(seen()).toEqual([
    "",
    "transformer",
    "transformer.h_2",
    "transformer.h_2.attn",
    "transformer.h_2.attn.attn_weights_1",
  ]);
  expect(tree.found.has(row("transformer.h_2.attn.attn_weights_1"))).toBe(true);
  expect(tree.found.has(row("transformer.h_2.attn"))).toBe(false);
  tree.setOpen(row("transformer.h_2"), false);
  expect(seen()).toHaveLength(3);
  expect(model.get("expanded")).toEqual([0, row("lm_head")]);
  tree.search("");
  expect(seen()).toEqual(before);
});

test("an invalid query is reported, and the last valid result stays", () => {
  const { seen, tree } = opened();
  tree.search("softmax");
  const found = seen();
  tree.search("softmax is:pathced");
  expect(tree.found.error).toContain("there are patched");
  expect(seen()).toEqual(found);
  tree.search("softmax");
  expect(tree.found.error).toBeNull();
});

test("F3 cycles through the matches in order", () => {
  const { tree, view } = opened();
  tree.search("op:softmax");
  const visited = [1, 1, 1, -1].map((step) => tree.goToMatch(step as 1 | -1) && view.skeleton.path(tree.activeRow));
  expect(visited).toEqual([0, 1, 2, 1].map((layer) => `transformer.h_${layer}.attn.attn_weights_1`));
  expect(tree.lines.has(row("transformer.h_2.attn"))).toBe(true);
  tree.search("");
  expect(tree.lines.has(row("transformer.h_2.attn"))).toBe(false); // what was open before is open again
  tree.search("op:softmax");
  tree.select(0);
  tree.goToMatch(-1);
  expect(paths[tree.activeRow]).toBe("transformer.h_5.attn.attn_weights_1");
});

test("is:patched follows the session", () => {
  const { tree, model } = opened({ query: "is:patched" });
  expect(tree.found.matches).toEqual([]);
  model.set("session", { version: 2, patches: [patchAt("lm_head.linear")], can_undo: true, can_redo: false, note: "" });
  expect(tree.found.matches).toEqual([row("lm_head.linear")]);
  expect(tree.patched.countBelow(row("lm_head"))).toBe(1);
});

test("equal layers fold into one row, which can be opened", () => {
  const { seen, tree } = opened({ expanded: [0, row("transformer")] });
  tree.change({ isFolded: true });
  const marker = ~row("transformer.h_0");
  expect(seen()).toContain("~transformer.h_0");
  expect(seen()).not.toContain("transformer.h_0");
  expect(tree.lines.folded.get(marker)).toMatchObject({ times: 6, period: 1 });
  expect(tree.lines.lineOf(row("transformer.h_4.mlp"))).toBe(tree.lines.lineOf(marker));
  tree.setOpen(marker, true);
  const line = tree.lines.lineOf(row("transformer.h_5"));
  expect(tree.lines.states[tree.lines.lineOf(marker)]).toBe(OPEN);
  expect([tree.lines.levels[line], tree.lines.positions[line], tree.lines.sizes[line]]).toEqual([4, 6, 6]);
  tree.change({ isFolded: false });
  expect(seen()).toContain("transformer.h_0");
});

test("repeating groups also fold: layers with the ops between them", () => {
  const tree = new ColumnsBuilder();
  tree.graph("<root>", "Model", () => {
    tree.row("input", "x", { spec: tensor(8) });
    for (let layer = 0; layer < 10; layer++) {
      tree.graph(`h_${layer}`, "Block", () => tree.row("op", "mul", { op: "mul", spec: tensor(8) }));
      tree.row("op", layer ? `x_${layer}` : "x_0", { op: "add", spec: tensor(8) });
    }
    tree.graph("other", "Block", () => tree.row("op", "mul", { op: "mul", spec: tensor(8) }));
  });
  const own = new Skeleton(tree.columns);
  const { tree: state } = opened({ expanded: [0] }, own);
  state.change({ isFolded: true });
  expect([...state.lines.ids].map((id) => (id < 0 ? "folded" : own.nameOf(id)))).toEqual([
    "<root>",
    "x",
    "folded",
    "other",
  ]);
  expect([...state.lines.folded.values()][0]).toMatchObject({ period: 2, times: 10 });
});

test("layers that differ inside are not folded", () => {
  const tree = new ColumnsBuilder();
  tree.graph("<root>", "Model", () => {
    for (const width of [1, 2, 3, 4]) {
      tree.graph(`h_${width}`, "Block", () => tree.row("op", "mul", { op: "mul", spec: tensor(width) }));
    }
    for (const at of [1, 2, 3, 4]) tree.row("op", `x_${at}`, { op: "add", spec: tensor(8) });
  });
  const { tree: state } = opened({ expanded: [0] }, new Skeleton(tree.columns));
  state.change({ isFolded: true });
  expect(state.lines.folded.size).toBe(0);
});

test("revealing a row opens graphs and folded rows, and ends a search or filter that hides it", () => {
  const { tree, view } = opened({ expanded: [0] });
  tree.change({ isFolded: true });
  tree.search("lm_head");
  tree.reveal(row("transformer.h_3.attn.size"));
  expect(tree.query).toBe("");
  expect(tree.showsSizes).toBe(true);
  expect(tree.lines.has(row("transformer.h_3.attn.size"))).toBe(true);
  expect(paths[tree.activeRow]).toBe("transformer.h_3.attn.size");
  expect(view.model.get("selected")).toBe(row("transformer.h_3.attn.size"));
});

test("two views of one model stay in sync", () => {
  const { tree, view } = opened();
  const other = new TreeState(view);
  tree.setOpen(row("transformer.h_2"), true);
  expect([...other.lines.ids]).toEqual([...tree.lines.ids]);
  tree.search("softmax");
  expect(other.found.matches).toEqual(tree.found.matches);
  tree.select(row("lm_head"));
  expect(other.active).toBe(row("lm_head"));
  view.remove();
  expect(view.model.listening).toBe(0);
});

function scored(values: Record<string, number>) {
  const data = new Float32Array(skeleton.length).fill(Number.NaN);
  for (const [path, value] of Object.entries(values)) data[row(path)] = value;
  return { scores: new DataView(data.buffer), score_names: ["effect"] };
}

test("sorting by score puts siblings with the best rows first", () => {
  const { seen, tree } = opened({
    expanded: [0, row("transformer")],
    ...scored({ "transformer.h_1.mlp.mul": 1, "transformer.h_4.mlp.mul": 3, "transformer.h_2.mlp.mul": -2 }),
  });
  tree.change({ isSorted: true });
  const layers = seen().filter((path) => /h_\d$/.test(path));
  expect(layers.map((path) => path.at(-1))).toEqual(["4", "2", "1", "0", "3", "5"]);
  expect(tree.scores?.isDiverging).toBe(true);
  tree.change({ filter: { count: 2 } });
  expect(seen().filter((path) => /mul$/.test(path))).toEqual(["transformer.h_4.mlp.mul", "transformer.h_2.mlp.mul"]);
});

test("with scores of both signs a module shows the one with the largest magnitude", () => {
  const { tree } = opened(scored({ "transformer.h_2.mlp.mul": -2, "transformer.h_2.attn.output": 1 }));
  const scores = tree.scores;
  if (!scores) throw new Error("no scores");
  const best = scores.best[row("transformer.h_2")] ?? 0;
  expect(best).toBe(-2);
  expect(textOfBest(best, scores)).toBe("≤ |-2|");
});

test("if all scores are negative the lowest are the strongest, in one color", () => {
  const { seen, tree } = opened(
    scored({ "lm_head.linear": -1, "transformer.h_4.mlp.mul": -3, "transformer.h_2.mlp.mul": -2 }),
  );
  const scores = tree.scores;
  if (!scores) throw new Error("no scores");
  expect([-3, -2, -1].map((value) => scores.strength(value))).toEqual([-1, -0.5, 0]);
  expect(textOfBest(scores.best[0] ?? 0, scores)).toBe("≤ |-3|");
  tree.change({ filter: { count: 1 } });
  expect(seen().at(-1)).toBe("transformer.h_4.mlp.mul");
  tree.change({ filter: { minimum: 2 } });
  expect(seen().filter((path) => /mul$/.test(path))).toEqual(["transformer.h_2.mlp.mul", "transformer.h_4.mlp.mul"]);
});

test("if no score is negative the highest is the strongest", () => {
  const { tree } = opened(scored({ "transformer.h_2.mlp.mul": 2, "transformer.h_2.attn.output": 0 }));
  const scores = tree.scores;
  if (!scores) throw new Error("no scores");
  expect([0, 1, 2].map((value) => scores.strength(value))).toEqual([0, 0.5, 1]);
  expect(textOfBest(scores.best[0] ?? 0, scores)).toBe("≤ 2");
});

test("filtering by score keeps the best, or those above a threshold, with their ancestors", () => {
  const { seen, tree } = opened(
    scored({ "lm_head.linear": 1, "transformer.h_4.mlp.mul": 3, "transformer.h_2.mlp.mul": 2 }),
  );
  tree.change({ filter: { count: 1 } });
  expect(seen()).toEqual(["", "transformer", "transformer.h_4", "transformer.h_4.mlp", "transformer.h_4.mlp.mul"]);
  tree.change({ filter: { minimum: 2 } });
  tree.search("h_2");
  expect(seen().at(-1)).toBe("transformer.h_2.mlp.mul");
  expect(seen()).not.toContain("transformer.h_4");
  tree.clearScores();
  tree.search("");
  expect(seen()).toContain("lm_head");
});

test("rows with the same score up to rounding share a rank; those of the other sign do not", () => {
  const { tree } = opened(
    scored({
      "lm_head.linear": 3,
      "lm_head.weight": -3,
      "lm_head.input": 3.000001,
      "transformer.h_4.mlp.mul": 2,
      "transformer.h_2.mlp.mul": 2.001,
      "transformer.h_1.mlp.mul": Number.NEGATIVE_INFINITY,
      "transformer.h_3.mlp.mul": Number.NEGATIVE_INFINITY,
    }),
  );
  const scores = tree.scores;
  if (!scores) throw new Error("no scores");
  expect([scores.count, scores.rankCount]).toEqual([7, 5]);
  const largest = (count: number) => scores.matching({ count }).map((at) => skeleton.path(at));
  expect(largest(1)).toEqual(["transformer.h_1.mlp.mul", "transformer.h_3.mlp.mul"]);
  expect(largest(2).length).toBe(4);
  expect(largest(3)).toContain("lm_head.weight");
  expect(largest(4)).not.toContain("transformer.h_4.mlp.mul");
  expect(largest(9).length).toBe(7);
});

test("scores of the wrong size are ignored; infinite ones do not affect the range", () => {
  expect(Scores.all(new DataView(new ArrayBuffer(8)), ["x"], skeleton)).toEqual([]);
  const { tree } = opened(
    scored({ "lm_head.linear": Number.POSITIVE_INFINITY, "lm_head.weight": 1, "lm_head.input": 3 }),
  );
  expect([tree.scores?.minimum, tree.scores?.maximum, tree.scores?.count]).toEqual([1, 3, 3]);
  expect(tree.scores?.strength(Number.POSITIVE_INFINITY)).toBe(1);
});

test.each([
  [0.123456, "0.123"],
  [-4.5678e-6, "-4.57e-6"],
  [12300, "12,300"],
  [0, "0"],
  [2.5e7, "25M"],
  [-1.2345e9, "-1.23B"],
  [2.5e17, "2.50e17"],
  [Number.NEGATIVE_INFINITY, "-∞"],
])("the score %d is written %s", (value, text) => {
  expect(scoreText(value)).toBe(text);
});

test("collapsing closes everything but the model", () => {
  const { tree } = opened();
  tree.expandBelow(0);
  expect(tree.lines.length).toBeGreaterThan(150);
  tree.collapseAll();
  expect([...tree.lines.states]).toContain(CLOSED);
  expect(tree.lines.length).toBe(6);
});
