import { expect, test } from "vitest";
import { parseQuery, QueryError, SearchIndex } from "../../src/tree/search";
import { Skeleton } from "../../src/tree/skeleton";
import { ColumnsBuilder, tensor, transformer } from "../fixtures";

const index = new SearchIndex(new Skeleton(transformer(3)));
const find = (query: string, patched: number[] = []) =>
  index.find(parseQuery(query), new Set(patched)).map((row) => index.paths[row]);

test("all terms must match path or torch function, ignoring case", () => {
  expect(find("H_1 softmax")).toEqual(["transformer.h_1.attn.attn_weights_1"]);
  expect(find("h_2.mlp -linear -input -weight -output")).toEqual(["transformer.h_2.mlp.mul"]);
});

test("op and shape filters", () => {
  expect(find("op:SOFT*")).toHaveLength(3);
  expect(find("op:add")).toEqual([0, 1, 2].map((layer) => `transformer.h_${layer}.hidden_states_1`));
  expect(find("op:weight")).toEqual([]);
  expect(find("shape:1000 is:parameter")).toEqual(["transformer.wte.weight", "lm_head.weight"]);
  expect(find("shape:[1, 4, 8, 8] h_0")).toHaveLength(2);
  expect(find("shape:[*,8]")).toEqual(["input_ids", "transformer.input_ids"]);
  expect(find("is:output last")).toEqual(["transformer.output|last_hidden_state"]);
});

test("is: filters states; sizes are found only on request", () => {
  expect(find("is:opaque")).toHaveLength(3);
  expect(find("size")).toEqual([]);
  expect(find("is:size h_0")).toEqual(["transformer.h_0.attn.size"]);
  expect(find("-is:size size")).toEqual([]);
  const row = index.paths.indexOf("transformer.h_2.mlp.mul");
  expect(find("is:patched", [row])).toEqual(["transformer.h_2.mlp.mul"]);
  expect(find("")).toHaveLength(index.size);
});

test.each([
  ["-", "nothing after '-'"],
  ["shpe:64", "keys are op, shape, is"],
  ["op:", "write op:mul"],
  ["is:pathced", "there are patched, "],
  ["shape:[a]", "write shape:64"],
])("%s is an invalid query, and the message says what to write", (query, message) => {
  expect(() => parseQuery(query)).toThrow(QueryError);
  expect(() => parseQuery(query)).toThrow(message);
});

test("stars match any characters", () => {
  expect(find("h_*.attn_weights_1")).toHaveLength(3);
  expect(find("H_*attn*SOFT")).toHaveLength(3);
  expect(find("*.mlp*h_1")).toEqual([]);
  expect(find(`${"*".repeat(40)}a${"*a".repeat(40)}!`)).toEqual([]);
  expect(find(`op:${"*".repeat(40)}a${"*a".repeat(40)}!`)).toEqual([]);
  expect(find("op:*oft*ax")).toEqual(find("op:softmax"));
});

test("50,000 rows are searched", () => {
  const tree = new ColumnsBuilder();
  tree.graph("", "Big", () => {
    for (let layer = 0; layer < 500; layer++) {
      tree.graph(`transformer_h_${layer}`, "Block", () => {
        for (let op = 0; op < 99; op++) tree.row("op", `hidden_states_${op}`, { op: "mul", spec: tensor(1, op) });
      });
    }
  });
  const big = new SearchIndex(new Skeleton(tree.columns));
  for (const query of ["states_9 mul", "shape:64", "h_*4.hidden*_7"]) {
    expect(big.find(parseQuery(query), new Set()).length).toBeGreaterThan(0);
  }
});
