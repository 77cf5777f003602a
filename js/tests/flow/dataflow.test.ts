import { expect, test } from "vitest";
import { type Dataflow, dataflowOf, FlowEdges } from "../../src/flow/dataflow";
import { FLAG, type Spec } from "../../src/kernel/protocol";
import { Skeleton } from "../../src/tree/skeleton";
import { ColumnsBuilder, deflated, tensor } from "../fixtures";

const CONTAINER: Spec = ["tuple(2)", null, null, "container"];
const NUMBER: Spec = ["int(8)", null, null, "number"];

/** Unpacks a projection, adds a mask that is plumbing, and calls a module. */
function attention(): [Skeleton, (path: string) => number] {
  const tree = new ColumnsBuilder();
  tree.graph("<root>", "Attention", () => {
    tree.row("input", "x", { spec: tensor(8, 4) });
    tree.row("input", "flag", { spec: NUMBER, flags: FLAG.plumbing });
    tree.row("parameter", "weight", { spec: tensor(8, 4) });
    tree.row("op", "linear", { op: "linear", spec: tensor(8, 8) });
    tree.row("op", "size", { op: "size", spec: NUMBER, flags: FLAG.size });
    tree.row("op", "split", { op: "split", spec: CONTAINER, flags: FLAG.size });
    tree.inside(() => {
      tree.row("item", "sub_0", { spec: tensor(8, 4), flags: FLAG.size });
      tree.row("item", "sub_1", { spec: tensor(8, 4), flags: FLAG.size });
    });
    tree.row("op", "query", { op: "split", spec: tensor(8, 4) });
    tree.row("op", "ones", { op: "ones", spec: tensor(8, 8), flags: FLAG.plumbing });
    tree.row("op", "mask", { op: "tril", spec: tensor(8, 8), flags: FLAG.plumbing });
    tree.row("op", "idle", { op: "ones", spec: tensor(8), flags: FLAG.plumbing });
    tree.row("op", "scores", { op: "add", spec: tensor(8, 8) });
    tree.graph("proj", "Linear", () => {
      tree.row("input", "input", { spec: tensor(8, 8) });
      tree.row("output", "output", { spec: tensor(8, 8) });
    });
    tree.row("unused", "extra", { op: "Linear" });
    tree.row("output", "output", { spec: tensor(8, 8) });
  });
  const skeleton = new Skeleton(tree.columns);
  return [skeleton, (path) => skeleton.find(path) ?? -1];
}

function edgesOf(row: (path: string) => number, edges: [user: string, value: string][]) {
  const rows = edges.map(([user, value]) => [row(user), row(value)] as const).sort(([one], [other]) => one - other);
  const users = rows.map(([user], at) => user - (rows[at - 1]?.[0] ?? 0));
  return { users, values: rows.map(([user, value]) => user - value) };
}

const EDGES: [string, string][] = [
  ["linear", "x"],
  ["linear", "weight"],
  ["size", "x"],
  ["split", "linear"],
  ["split", "size"],
  ["query", "split|sub_0"],
  ["mask", "ones"],
  ["scores", "query"],
  ["scores", "mask"],
  ["proj", "scores"],
  ["proj.output", "proj.input"],
  ["output", "proj.output"],
];

function shown(flow: Dataflow, skeleton: Skeleton) {
  const name = ({ row, folded }: Dataflow["nodes"][number]) =>
    folded.length > 0 ? folded.map((one) => skeleton.nameOf(one)).join("+") : skeleton.nameOf(row);
  return flow.edges.map(({ from, to, value }) => {
    const [one, other] = [flow.nodes[from], flow.nodes[to]];
    return [one && name(one), other && name(other), skeleton.path(value)].join(" ");
  });
}

test("values that are unpacked come from where they were made; parameters are in the only box; plumbing is one box", async () => {
  const [skeleton, row] = attention();
  const edges = new FlowEdges(skeleton, edgesOf(row, EDGES));
  const isShown = (one: number) => !skeleton.isHiddenByDefault(one);
  const isFolded = (one: number) => skeleton.has(one, FLAG.plumbing);
  const folded = dataflowOf(skeleton, edges, 0, { isShown, isFolded });
  expect(shown(folded, skeleton)).toEqual([
    "x linear x",
    "linear query linear",
    "query scores query",
    "ones+mask scores mask",
    "scores proj scores",
    "proj output proj.output",
  ]);
  expect(folded.nodes.flatMap(({ held }) => held)).toEqual([row("weight")]);
  expect(folded.nodes.some(({ row: one }) => ["idle", "flag", "extra"].includes(skeleton.nameOf(one)))).toBe(false);

  const all = dataflowOf(skeleton, edges, 0, { isShown: () => true, isFolded: () => false });
  expect(shown(all, skeleton)).toEqual([
    "x linear x",
    "x size x",
    "linear split linear",
    "size split size",
    "split query split|sub_0",
    "ones mask ones",
    "query scores query",
    "mask scores mask",
    "scores proj scores",
    "proj output proj.output",
  ]);
  expect(all.nodes.map(({ row: one }) => skeleton.nameOf(one))).toContain("idle");
  const inside = dataflowOf(skeleton, edges, row("proj"), { isShown, isFolded });
  expect(shown(inside, skeleton)).toEqual(["input output proj.input"]);
});

test("a parameter that nothing shown reads, and one of two readers", () => {
  const [skeleton, row] = attention();
  const twice: [string, string][] = [
    ...EDGES.filter(([, value]) => value !== "weight"),
    ["query", "weight"],
    ["scores", "weight"],
  ];
  const choice = { isShown: (one: number) => !skeleton.isHiddenByDefault(one), isFolded: () => false };
  const both = dataflowOf(skeleton, new FlowEdges(skeleton, edgesOf(row, twice)), 0, choice);
  expect(both.nodes.filter(({ held }) => held.length > 0)).toHaveLength(2);
  const none = EDGES.filter(([, value]) => value !== "weight");
  const alone = dataflowOf(skeleton, new FlowEdges(skeleton, edgesOf(row, none)), 0, choice);
  expect(alone.nodes.map(({ row: one }) => one)).toContain(row("weight"));
});

test("edges are read as the kernel packs them", async () => {
  const [skeleton, row] = attention();
  const data = await deflated(edgesOf(row, EDGES) as never);
  const edges = await FlowEdges.decode(skeleton, data);
  expect(edges.of(0)).toContainEqual([row("output"), row("proj.output")]);
  expect(edges.of(row("proj"))).toEqual([[row("proj.output"), row("proj.input")]]);
});
