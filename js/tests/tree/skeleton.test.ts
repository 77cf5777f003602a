import { expect, test } from "vitest";
import { FLAG } from "../../src/kernel/protocol";
import { BrokenSkeleton, decodeSkeleton, Skeleton } from "../../src/tree/skeleton";
import { ColumnsBuilder, deflated, tensor, transformer } from "../fixtures";

const skeleton = new Skeleton(transformer(2));
const rows = new Map(Array.from({ length: skeleton.length }, (_, row) => [skeleton.path(row), row]));
const row = (path: string) => rows.get(path) ?? Number.NaN;

test("paths have dots between names, a bar before parts of a value", () => {
  expect(skeleton.path(0)).toBe("");
  for (const path of [
    "transformer.h_1.attn.attn_weights_1",
    "transformer.output|last_hidden_state",
    "output|sub_0",
    'output|sub_1."a.b"',
  ]) {
    expect(row(path), path).toBeGreaterThan(0);
  }
  expect(new Set(rows.keys()).size).toBe(skeleton.length);
});

test("parents, children and subtree ends agree", () => {
  for (let at = 0; at < skeleton.length; at++) {
    for (const child of skeleton.children(at)) expect(skeleton.parent[child]).toBe(at);
  }
  expect([...skeleton.children(0)].map((child) => skeleton.nameOf(child))).toEqual(
    "input_ids use_cache transformer lm_head extra_head output".split(" "),
  );
  expect([...skeleton.ancestors(row("transformer.h_0.mlp"))]).toEqual([row("transformer.h_0"), row("transformer"), 0]);
  expect(skeleton.end[0]).toBe(skeleton.length);
});

test("a row knows its kind, node and graph", () => {
  const item = row('output|sub_1."a.b"');
  expect(skeleton.nodeOf(item)).toBe(row("output"));
  expect(skeleton.graphOf(item)).toBe(0);
  expect(skeleton.opOf(skeleton.graphOf(row("transformer.h_1.mlp.mul")))).toBe("MLP");
  expect(skeleton.labelOf(row("transformer.h_1.mlp.mul"))).toBe("[1, 8, 256] f32");
  expect(skeleton.has(row("transformer.h_0.drop"), FLAG.opaque)).toBe(true);
  expect(skeleton.noteOf(row("extra_head"))).toContain("never called");
  expect(skeleton.kindOf(row("extra_head"))).toBe("unused");
});

test("deflated data is inflated", async () => {
  expect((await decodeSkeleton(await deflated(transformer(3)))).columns).toEqual(transformer(3));
});

test("broken rows are an error", async () => {
  await expect(decodeSkeleton(new DataView(new ArrayBuffer(3)))).rejects.toThrow(BrokenSkeleton);
  await expect(decodeSkeleton(await deflated({ name: [] } as never))).rejects.toThrow(BrokenSkeleton);
  expect(() => new Skeleton({ ...transformer(1), depth: [0] })).toThrow("incomplete");
  const columns = transformer(1);
  columns.depth[1] = 7;
  expect(() => new Skeleton(columns)).toThrow("out of order");
});

test("50,000 rows are decoded", async () => {
  const tree = new ColumnsBuilder();
  tree.graph("", "Big", () => {
    for (let layer = 0; layer < 500; layer++) {
      tree.graph(`h_${layer}`, "Block", () => {
        for (let op = 0; op < 99; op++) tree.row("op", `mul_${op}`, { op: "mul", spec: tensor(1, op) });
      });
    }
  });
  const data = await deflated(tree.columns);
  expect((await decodeSkeleton(data)).length).toBe(50_001);
});
