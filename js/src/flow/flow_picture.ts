/** Draws the dataflow of a module as SVG: boxes with what they hold, shapes where values leave them. */
import { FLAG } from "../kernel/protocol";
import { element, svgElement, toggleClasses } from "../page/dom";
import type { Size } from "../page/grid";
import { formatCount, visible } from "../page/text";
import { componentType } from "../tree/row_view";
import type { Skeleton } from "../tree/skeleton";
import type { TreeState } from "../tree/tree_state";
import type { Dataflow, FlowNode } from "./dataflow";
import { firstAbove, layOut, type Passage, type Point } from "./layout";

// In pixels; characters of the fonts that hosts use for code are not wider than this share of their size.
const [NAME_SIZE, SMALL_SIZE, LABEL_SIZE, CHARACTER] = [12, 11, 10, 0.61];
const [LINE, PADDING, LABEL_GAP, ARROW, TRUNK] = [15, 10, 6, 4, 15];
const MAX_LETTERS = 30;

/** A text, and the type of a component behind it. */
type Line = [text: string, component?: string];

interface Drawn {
  element: SVGGElement;
  node: FlowNode;
  box: Size;
  center: Point;
  /** The edges into and out of it, by their positions. */
  into: number[];
  out: number[];
}

/** Where a value leaves a node; its shape is written there. */
interface Port {
  value: number;
  text: string;
}

export type FlowPicture = ReturnType<typeof drawFlow>;

/** @param about What screen readers say of a node besides its texts. */
export function drawFlow(skeleton: Skeleton, flow: Dataflow, state: TreeState, about: (node: FlowNode) => string) {
  const { nodes, edges } = flow;
  const tags: SVGElement[] = [];
  let near: (Element | undefined)[] = [];

  /** The texts in a box: the name, what makes it and which component it is, and the parameters that only it reads. */
  const linesOf = ({ row, held, folded }: FlowNode): Line[] => {
    if (folded.length > 0) return [["plumbing"], [formatCount(folded.length, "node")]];
    const name = shortened(visible(skeleton.nameOf(row)));
    const [kind, op] = [skeleton.kindOf(row), shortened(visible(skeleton.opOf(row)))];
    const isSaid = ["input", "output"].includes(kind) || name.replace(/_\d+$/, "") === op;
    const [component] = state.components.get(row) ?? [];
    const made: Line = isSaid ? [""] : [op];
    if (component !== undefined) made.push(componentType(component.name));
    const values = held.map((one): Line => [shortened(`${skeleton.nameOf(one)} ${shapeOf(skeleton, one)}`)]);
    return [[name], ...(made.join("") === "" ? [] : [made]), ...values];
  };
  const boxOf = (node: FlowNode): Size => {
    const lines = linesOf(node);
    const widths = lines.map((line, at) => textWidth(line.join(" "), at === 0 ? NAME_SIZE : SMALL_SIZE));
    return { width: Math.ceil(Math.max(36, ...widths)) + 2 * PADDING, height: LINE * lines.length + PADDING };
  };
  const draw = (node: FlowNode, { width, height }: Size, [x, y]: Point) => {
    const own = skeleton.kindOf(node.row);
    const isPlumbing = node.folded.length > 0 || (own === "op" && skeleton.has(node.row, FLAG.plumbing));
    const kind = isPlumbing ? "plumbing" : own;
    const top = y - height / 2;
    const isRound = kind === "input" || kind === "output";
    const lines = linesOf(node);
    const first = lines.length - node.held.length; // the line of the first parameter
    const texts = lines.flatMap(([text, type], at) => [
      " ",
      svgElement(
        at === 0 ? "text.gp-flow-name" : "text.gp-flow-more",
        { x, y: top + PADDING / 2 + LINE * (at + 1) - 4, "data-held": node.held[at - first] },
        text && type ? `${text} ` : text,
        type && svgElement("tspan.gp-flow-component", { "data-type": type }, type),
      ),
    ]);
    return svgElement(
      "g.gp-flow-node",
      { role: "button", tabindex: -1, "data-kind": kind, "data-row": node.row },
      svgElement("title", node.folded.length > 0 ? "Click to unfold" : visible(skeleton.path(node.row))),
      svgElement("rect", { x: x - width / 2, y: top, width, height, rx: isRound ? Math.min(14, height / 2) : 5 }),
      ...texts,
    );
  };

  const ports: Port[][] = nodes.map(() => []);
  for (const { from, value } of edges) {
    if (ports[from]?.every((port) => port.value !== value))
      ports[from]?.push({ value, text: shapeOf(skeleton, value) });
  }
  const boxes = nodes.map((node) => ({ ...boxOf(node), isLast: skeleton.kindOf(node.row) === "output" }));
  const wide = boxes.map((box, node) => ({ ...box, width: Math.max(box.width, widthOfPorts(ports[node] ?? [])) }));
  const { width, height, centers, ways } = layOut(wide, edges);
  const drawn = nodes.map((node, position): Drawn => {
    const [box = { width: 0, height: 0 }, center = [0, 0]] = [boxes[position], centers[position]];
    return { element: draw(node, box, center), node, box, center, into: [], out: [] };
  });
  for (const [edge, { from, to }] of edges.entries()) {
    drawn[from]?.out.push(edge);
    drawn[to]?.into.push(edge);
  }
  const portAt = (node: number, value: number): Point => {
    const own = ports[node] ?? [];
    const { center = [0, 0], box = { height: 0 } } = drawn[node] ?? {};
    const place = own.findIndex((port) => port.value === value);
    const x = own.length < 2 ? 0 : (place - (own.length - 1) / 2) * spacing(own) - LABEL_GAP;
    return [center[0] + x, center[1] + box.height / 2];
  };
  const labels = new Map<string, SVGTextElement>();
  for (const [node, own] of ports.entries()) {
    for (const { value, text } of own) {
      const [x, y] = portAt(node, value);
      labels.set(`${node} ${value}`, svgElement("text.gp-flow-shape", { x: x + 5, y: y + LABEL_SIZE + 3 }, text));
    }
  }
  const starts = edges.map(({ from, value }) => portAt(from, value));
  const entries: Point[] = edges.map(() => [0, 0]);
  const cameFrom = (edge: number) => ways[edge]?.at(-1)?.[0] ?? starts[edge]?.[0] ?? 0;
  for (const { center, box, into: own } of drawn) {
    const into = [...own].sort((one, other) => cameFrom(one) - cameFrom(other));
    const step = Math.min(16, (box.width - 12) / Math.max(1, into.length));
    for (const [place, edge] of into.entries()) {
      entries[edge] = [center[0] + (place - (into.length - 1) / 2) * step, center[1] - box.height / 2];
    }
  }
  const lines = edges.map((_, edge) => {
    const d = pathOf(starts[edge] ?? [0, 0], ways[edge] ?? [], entries[edge] ?? [0, 0]);
    return svgElement("path.gp-flow-edge", { d });
  });
  const svg = svgElement(
    "svg.gp-flow-picture",
    { role: "group", viewBox: `0 0 ${width} ${height}`, width, height },
    svgElement("g", { "aria-hidden": true }, ...lines),
    ...drawn.map(({ element }) => element),
    svgElement("g", { "aria-hidden": true }, ...labels.values()),
  );

  /** The positions of the nodes that have an edge with a node. */
  const neighbors = (position: number): number[] => {
    const { into = [], out = [] } = drawn[position] ?? {};
    return [...into.map((edge) => edges[edge]?.from ?? -1), ...out.map((edge) => edges[edge]?.to ?? -1)];
  };
  /** Makes the edges and neighbors of a node stand out; `null`: all are alike. */
  const highlight = (position: number | null) => {
    const { into = [], out = [] } = (position === null ? undefined : drawn[position]) ?? {};
    for (const part of near) part?.classList.remove("gp-near");
    near = [...into, ...out].flatMap((edge) => {
      const { from = -1, to = -1, value = -1 } = edges[edge] ?? {};
      return [lines[edge], labels.get(`${from} ${value}`), drawn[from]?.element, drawn[to]?.element];
    });
    for (const part of near) part?.classList.add("gp-near");
  };
  /** Shows what is selected, found, scored and patched. */
  const mark = (selected: ReadonlySet<number>) => {
    const { matches } = state.found;
    for (const tag of tags.splice(0)) tag.remove();
    for (const one of drawn) {
      const { element, node } = one;
      const end = node.folded.length > 0 ? node.row + 1 : (skeleton.end[node.row] ?? 0);
      const rows = [...node.held, ...node.folded];
      const spans = [[node.row, end] as const, ...rows.map((row) => [row, row + 1] as const)];
      const found = spans.map(([from, to]) => firstAbove(matches ?? [], to - 1) - firstAbove(matches ?? [], from - 1));
      const count = found.reduce((sum, each) => sum + each, 0);
      const patches = [node.row, ...rows].flatMap((row) => state.patched.at(row));
      const below = state.patched.countBelow(node.row);
      toggleClasses(element, {
        "gp-in-tree": [node.row, ...rows].some((row) => selected.has(row)),
        "gp-patched-node": patches.length + below > 0,
        "gp-found": count > 0,
        "gp-faint": matches !== null && count === 0,
      });
      heat(one);
      const texts = linesOf(node).map((line) => line.filter(Boolean).join(" "));
      element.setAttribute("aria-label", [texts.join(" "), about(node)].filter(Boolean).join(", "));
      const isModule = skeleton.kindOf(node.row) === "graph";
      const words = [
        ...patches.map(({ kind }) => kind),
        below > 0 && formatCount(below, "patch", "patches"),
        isModule && count > 0 && `${count} found`,
      ];
      const text = words.filter(Boolean).join(", ");
      if (text) addTag(one, text);
    }
  };
  const heat = ({ element, node }: Drawn) => {
    const score = state.scores?.valueOf(node.row) ?? null;
    const strength = score === null ? 0 : (state.scores?.strength(score) ?? 0);
    element.style.setProperty("--gp-heat", `${Math.round(Math.abs(strength) * 100)}%`);
    element.dataset.heat = score === null ? "" : strength < 0 ? "cold" : "hot";
  };
  /** Writes what patches a node on the right end of its upper border. */
  const addTag = ({ element, box, center }: Drawn, text: string) => {
    const [x, y] = [center[0] + box.width / 2 - 12, center[1] - box.height / 2];
    const wide = textWidth(text, LABEL_SIZE) + 10;
    const tag = svgElement(
      "g.gp-flow-patch",
      { "aria-hidden": true },
      svgElement("rect", { x, y: y - 8, width: wide, height: 15, rx: 7 }),
      svgElement("text", { x: x + wide / 2, y: y + 3 }, text),
    );
    element.append(tag);
    tags.push(tag);
  };
  return { svg, size: { width, height }, drawn, neighbors, highlight, mark };
}

function textWidth(text: string, size: number): number {
  return [...text].length * size * CHARACTER;
}

function spacing(ports: readonly Port[]): number {
  return Math.max(...ports.map(({ text }) => textWidth(text, LABEL_SIZE))) + 2 * LABEL_GAP;
}

function widthOfPorts(ports: readonly Port[]): number {
  if (ports.length === 0) return 0;
  return ports.length === 1 ? 2 * spacing(ports) : (ports.length + 1) * spacing(ports);
}

/** A long name without its middle. */
function shortened(text: string): string {
  const letters = [...text];
  if (letters.length <= MAX_LETTERS) return text;
  return `${letters.slice(0, MAX_LETTERS / 2).join("")}…${letters.slice(1 - MAX_LETTERS / 2).join("")}`;
}

/** The shape of a value; what it is, if it is not a tensor. */
function shapeOf(skeleton: Skeleton, row: number): string {
  const spec = skeleton.specOf(row);
  return spec === null ? "" : spec[1] === null ? visible(spec[0]) : `[${spec[1].join(", ")}]`;
}

/** Down from `start`, straight through the rows in between, to the arrow at `end`. */
function pathOf(start: Point, way: readonly Passage[], end: Point): string {
  let [x, y] = start;
  const isUpward = end[1] < start[1];
  let line = `M${x} ${y}`;
  if (!isUpward) {
    y += TRUNK; // past the shape, which is beside it
    line += `V${y}`;
  }
  const bend = (toX: number, toY: number) => {
    const middle = (y + toY) / 2;
    line += x === toX ? `V${toY}` : `C${x} ${middle} ${toX} ${middle} ${toX} ${toY}`;
    [x, y] = [toX, toY];
  };
  for (const [passed, top, bottom] of way) {
    bend(passed, isUpward ? bottom : top);
    line += `V${isUpward ? top : bottom}`;
    y = isUpward ? top : bottom;
  }
  bend(end[0], end[1] - 1);
  return `${line}M${x - ARROW + 1} ${y - ARROW - 1}L${x} ${y}L${x + ARROW - 1} ${y - ARROW - 1}`;
}

// -- A picture that stands by itself, for papers: light, with its styles in it -------------------------------------------

const STYLES = "fill stroke stroke-width stroke-dasharray paint-order opacity font text-anchor".split(" ");

/** Returns the picture as the text of an SVG file. */
export function standaloneSvg(svg: SVGSVGElement, root: HTMLElement): string {
  const copy = svg.cloneNode(true) as SVGSVGElement;
  const light = { "data-gp-theme": "light", style: "--gp-background: #fff; --gp-text: #1f2328; position: absolute" };
  const stage = element("div.gp-root", light, copy);
  for (const name of ["gp-focused", "gp-near", "gp-in-tree", "gp-found", "gp-faint"])
    for (const marked of [copy, ...copy.querySelectorAll(`.${name}`)]) marked.classList.remove(name);
  for (const added of copy.querySelectorAll(".gp-flow-add")) added.remove();
  root.append(stage);
  const parts = [copy, ...copy.querySelectorAll<SVGElement>("*")];
  const styles = parts.map((part) => {
    const computed = getComputedStyle(part);
    return STYLES.map((name) => `${name}: ${computed.getPropertyValue(name)}`).join("; ");
  });
  for (const [at, part] of parts.entries()) {
    for (const name of ["class", "tabindex", "role", "aria-label", "aria-hidden"]) part.removeAttribute(name);
    part.setAttribute("style", styles[at] ?? "");
  }
  stage.remove();
  const [, , width, height] = (copy.getAttribute("viewBox") ?? "").split(" ");
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width ?? "");
  copy.setAttribute("height", height ?? "");
  return new XMLSerializer().serializeToString(copy);
}
