/** The dataflow of one module: which boxes are drawn, and the lines between them. */
import { inflateText } from "../inflate";
import type { Flow } from "../kernel/protocol";
import type { Skeleton } from "../tree/skeleton";

/** An operation, a module that is called, an input, ...; or plumbing that is folded into one box. */
export interface FlowNode {
  row: number;
  /** The parameters and buffers that only this node reads, which are written in its box. */
  held: number[];
  /** The rows that the box stands for, if it is folded plumbing. */
  folded: number[];
}

export interface FlowEdge {
  /** Positions among the nodes. */
  from: number;
  to: number;
  /** The row of the value: the node, or a part of its value. */
  value: number;
}

export interface Dataflow {
  nodes: FlowNode[];
  edges: FlowEdge[];
}

/** What is drawn: as in the tree, rows that only carry sizes are left out, and plumbing is folded. */
export interface FlowChoice {
  isShown(row: number): boolean;
  /** Whether a row is plumbing that is folded. */
  isFolded(row: number): boolean;
}

type Edge = readonly [user: number, value: number];

/** The edges of all graphs, by the graph. */
export class FlowEdges {
  private readonly byGraph: Map<number, Edge[]>;

  constructor(skeleton: Skeleton, { users, values }: Flow) {
    let user = 0;
    const edges = users.map((step, edge): Edge => {
      user += step;
      return [user, user - (values[edge] ?? 0)];
    });
    this.byGraph = grouped(edges, ([user]) => skeleton.parent[user] ?? 0);
  }

  static async decode(skeleton: Skeleton, data: DataView): Promise<FlowEdges> {
    return new FlowEdges(skeleton, JSON.parse(await inflateText(data)) as Flow);
  }

  /** The edges of a graph: from a value, which may be inside of another node's row, to the node that uses it. */
  of(graph: number): readonly Edge[] {
    return this.byGraph.get(graph) ?? [];
  }
}

/** Returns what is drawn of a graph. */
export function dataflowOf(skeleton: Skeleton, flow: FlowEdges, graph: number, choice: FlowChoice): Dataflow {
  const edges = flow.of(graph).map(([user, value]) => ({ user, value, maker: makerOf(skeleton, graph, value) }));
  const into = grouped(edges, ({ user }) => user);
  const users = grouped(edges, ({ maker }) => maker);
  const rows = [...skeleton.children(graph)].filter((row) => skeleton.kindOf(row) !== "unused");
  const isUnpacked = (row: number) => !choice.isShown(row) && skeleton.specOf(row)?.[3] === "container";
  const isHeld = (row: number) =>
    ["parameter", "buffer"].includes(skeleton.kindOf(row)) &&
    (users.get(row) ?? []).some(({ user }) => choice.isShown(user));
  const shown = rows.filter((row) => choice.isShown(row) && !isHeld(row));

  /** What a node reads, past containers of tensors that the code unpacks. */
  const sources = (row: number): { maker: number; value: number }[] =>
    (into.get(row) ?? []).flatMap((edge) => {
      if (!isUnpacked(edge.maker)) return [edge];
      return skeleton.specOf(edge.value)?.[3] === "number" ? [] : sources(edge.maker);
    });

  const folded = foldPlumbing(
    shown.filter((row) => skeleton.kindOf(row) !== "input" && choice.isFolded(row)),
    (row) => sources(row).map(({ maker }) => maker),
  );
  const nodes: FlowNode[] = [];
  const positions = new Map<number, number>();
  for (const row of shown) {
    const group = folded.get(row) ?? [row];
    const first = group[0] ?? row;
    if (first === row) {
      const held = sources(row)
        .map(({ maker }) => maker)
        .filter(isHeld);
      nodes.push({ row, held: group.length > 1 ? [] : [...new Set(held)], folded: group.length > 1 ? group : [] });
    }
    positions.set(row, positions.get(first) ?? nodes.length - 1);
  }
  const found = new Map<string, FlowEdge>();
  for (const row of shown) {
    for (const { maker, value } of sources(row)) {
      const [from, to] = [positions.get(maker), positions.get(row)];
      if (from !== undefined && to !== undefined && from !== to)
        found.set(`${from} ${to} ${value}`, { from, to, value });
    }
  }
  return withoutIdle({ nodes, edges: [...found.values()] }, choice);
}

function grouped<T>(items: readonly T[], key: (item: T) => number): Map<number, T[]> {
  const groups = new Map<number, T[]>();
  for (const item of items) {
    const group = groups.get(key(item));
    if (group === undefined) groups.set(key(item), [item]);
    else group.push(item);
  }
  return groups;
}

/** The node of a graph that a row is, or is inside of: for the output of a called module, the call. */
export function makerOf(skeleton: Skeleton, graph: number, row: number): number {
  let maker = row;
  for (const above of skeleton.ancestors(row)) {
    if (above === graph) return maker;
    maker = above;
  }
  return row;
}

/** By row: the rows that are in one box with it, those that read one another. */
function foldPlumbing(rows: readonly number[], sources: (row: number) => number[]): Map<number, number[]> {
  const groups = new Map(rows.map((row) => [row, [row]]));
  for (const row of rows) {
    for (const source of sources(row)) {
      const [one, other] = [groups.get(source), groups.get(row)];
      if (one === undefined || other === undefined || one === other) continue;
      one.push(...other);
      for (const member of other) groups.set(member, one);
    }
  }
  for (const group of groups.values()) group.sort((a, b) => a - b);
  return groups;
}

/** Leaves out plumbing that nothing drawn reads. */
function withoutIdle({ nodes, edges }: Dataflow, choice: FlowChoice): Dataflow {
  const isRead = new Set(edges.map(({ from }) => from));
  const kept = nodes.map(({ row }, node) => isRead.has(node) || !choice.isFolded(row));
  const positions = new Map([...kept.keys()].filter((node) => kept[node]).map((node, position) => [node, position]));
  return {
    nodes: nodes.filter((_, node) => kept[node]),
    edges: edges.flatMap(({ from, to, value }) => {
      const ends = [positions.get(from), positions.get(to)];
      return ends[0] === undefined || ends[1] === undefined ? [] : [{ from: ends[0], to: ends[1], value }];
    }),
  };
}
