import { afterEach, expect, test, vi } from "vitest";
import { Found } from "../src/found";
import { parseQuery, QueryError } from "../src/query";
import { pythonRegex } from "../src/regex";
import { SearchIndex } from "../src/search";
import { Skeleton } from "../src/skeleton";
import { ColumnsBuilder, tensor, transformer } from "./fixtures";

const index = new SearchIndex(new Skeleton(transformer(3)));
const find = (query: string, patched: number[] = []) =>
  index.find(parseQuery(query), new Set(patched)).map((row) => index.paths[row]);

test("terms are ANDed, in any case, over path and torch function", () => {
  expect(find("H_1 softmax")).toEqual(["transformer.h_1.attn.attn_weights_1"]);
  expect(find("h_2.mlp -linear -input -weight -output")).toEqual(["transformer.h_2.mlp.mul"]);
});

test("exact names, also those that a path quotes", () => {
  expect(find('"attn.attn_weights"')).toHaveLength(3);
  expect(find("'attn_weigh'")).toEqual([]);
  expect(find('"a.b"')).toEqual(['output|sub_1."a.b"']);
});

test("op, shape, dtype, kinds, module", () => {
  expect(find("op:SOFT*")).toHaveLength(3);
  expect(find("op:add")).toEqual([0, 1, 2].map((layer) => `transformer.h_${layer}.hidden_states_1`));
  expect(find("op:weight")).toEqual([]);
  expect(find("shape:1000 is:parameter")).toEqual(["transformer.wte.weight", "lm_head.weight"]);
  expect(find("shape:[1, 4, 8, 8] h_0")).toHaveLength(2);
  expect(find("shape:[...,192] h_0 -is:output")).toEqual(["transformer.h_0.attn.c_attn.linear"]);
  expect(find("shape:[*,8]")).toEqual(["input_ids", "transformer.input_ids"]);
  expect(find("dtype:i64")).toEqual(find("dtype:torch.int64"));
  expect(find("module:mlp h_0")).toEqual(["transformer.h_0.mlp.mul", "transformer.h_0.mlp.output"]);
  expect(find("kind:output last")).toEqual(["transformer.output|last_hidden_state"]);
});

test("states, and plumbing only where it is asked for", () => {
  expect(find("is:opaque")).toHaveLength(3);
  expect(find("size")).toEqual([]);
  expect(find("is:plumbing h_0")).toEqual(["transformer.h_0.attn.size"]);
  expect(find("-is:plumbing size")).toEqual([]);
  const row = index.paths.indexOf("transformer.h_2.mlp.mul");
  expect(find("is:patched", [row])).toEqual(["transformer.h_2.mlp.mul"]);
  expect(find("")).toHaveLength(index.size);
});

test.each([
  ["-", "nothing after '-'"],
  ['"mlp', 'write "name"'],
  ["/mlp", "write /.../"],
  ["/(/", "not a regular expression"],
  ["/(?x)a b/", "Python's only"],
  ["/(?>a)/", "not understood here"],
  ["/[\\w-z]/", "not a regular expression"],
  ["/[a/", "it does not end"],
  ["/\\q/", "bad escape"],
  ["shpe:64", "nearest: shape:"],
  ["op:", "write op:mul"],
  ["is:pathced", "nearest: is:patched"],
  ["kind:opp", "nearest: kind:op"],
  ["shape:[a]", "write shape:64"],
  ["/(x+x+)+y/", "may take forever: /(x+x+)+y/ repeats a group that itself repeats"],
  ["-/(\\w+)+!/", "may take forever"],
  ["/\\w*\\w*\\w*\\w*\\w*\\w*\\w*!/", "has 7 open repetitions"],
])("%s is no query, and the message says what to write", (query, message) => {
  expect(() => parseQuery(query)).toThrow(QueryError);
  expect(() => parseQuery(query)).toThrow(message);
});

test.each([
  ["h_[0-4]\\.attn$", "x.h_3.attn", true],
  ["(?P<a>\\w)_(?P=a)", "1_1", true],
  ["(?P<a>\\w)_(?P=a)", "1_2", false],
  ["\\Ax\\Z", "x", true],
  ["\\Ax\\Z", "xx", false],
  ["(?i)ATTN", "attn", true],
  ["(?#why)a{,2}b", "aab", true],
  ["a{}", "a{}", true],
  ["a{x", "a{x", true],
  ["[]x]", "]", true],
  ["[^]x]", "]", false],
  ["[a&&b~~c|]", "|", true],
  ["[a-c-e]", "-", true],
  ["[a-c-e]", "d", false],
  ["[--/]", ".", true],
  ["[a-]", "-", true],
  ["[\\w.-]+:", "a.b-c:", true],
  ["[\\W]", "a", false],
  ["\\bmul\\b", "a.mul|x", true],
  ["\\bmul\\b", "ümul", false],
  ["\\d", "٣", true],
  ["\\x41\\u0042\\U00000043", "ABC", true],
  ["(a)\\1", "aa", true],
  ["\\101", "A", true],
  ["a/b", "a/b", true],
  ["\\.", "x", false],
  ["\\-\\ ", "- ", true],
])("the regular expression %s in %s", (pattern, text, expected) => {
  expect(pythonRegex(pattern).test(text)).toBe(expected);
});

afterEach(() => void vi.restoreAllMocks());

test("a long path is named where it is too long for repetitions, and can be left out", () => {
  const tree = new ColumnsBuilder();
  tree.graph("", "Odd", () => {
    tree.row("op", "x".repeat(3000), { op: "mul", spec: tensor(1) });
    tree.row("op", "y", { op: "mul", spec: tensor(1) });
  });
  const odd = new SearchIndex(new Skeleton(tree.columns));
  const search = (query: string) => odd.find(parseQuery(query), new Set()).length;
  expect(() => search("/\\w+\\w+!/")).toThrow(
    /2 open repetitions, which may take forever on the 3,000 letters of x{60}…; leave this path out with another term/,
  );
  expect(search("/^\\w*\\w+$/ -xxx")).toBe(1);
  expect(search("/^x+$/")).toBe(1);
  expect(search(`op:${"*".repeat(40)}a${"*a".repeat(40)}!`)).toBe(0);
  expect(search("op:*u*l op:m*")).toBe(2);
});

test("a regular expression that takes too long stops in the middle, and what was found before stays", () => {
  const found = new Found(new Skeleton(transformer(3)));
  found.search("softmax", new Set());
  const before = found.matches;
  let now = 0;
  vi.spyOn(performance, "now").mockImplementation(() => (now += 100));
  const tests = vi.spyOn(RegExp.prototype, "test");
  found.search("/zzz/", new Set());
  expect(found.error).toContain("/zzz/ takes too long to search here");
  expect(tests.mock.calls.length).toBeLessThan(10);
  expect(found.matches).toBe(before);
  vi.restoreAllMocks();
  found.search("/softmax|attn_weights_1$/", new Set());
  expect(found.error).toBeNull();
  expect(found.matches).toEqual(before);
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
  big.prepare();
  for (const query of ["states_9 mul", "shape:64", '"hidden_states_3"', "/h_[0-4]\\.hidden\\w+_7$/"]) {
    expect(big.find(parseQuery(query), new Set()).length).toBeGreaterThan(0);
  }
});
