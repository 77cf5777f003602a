/**
 * The picture of a circuit. The kernel computes the layout (`experiments/circuits/picture.py`); this draws it, and handles
 * pointer and keyboard: a slider hides weak edges, hovering highlights a node with its neighbors, a click pins it.
 */
import type { CircuitEdge, CircuitNode, CircuitPicture, Pinned } from "../kernel/protocol";
import { buttonElement, copyText, element, icon, replaceChildren, setAttribute, svgElement } from "../page/dom";
import { formatCount, formatNumber } from "../page/numbers";

interface FigureOptions {
  /** Called when another node or edge is pinned; `null`: nothing is pinned. */
  onPin(pinned: Pinned | null): void;
  /** Buttons for a pinned node. */
  actions: ((node: CircuitNode) => HTMLElement[]) | null;
}

/** The minimum width of the area around an edge that reacts to the pointer, in CSS pixels. */
const MIN_HIT_WIDTH = 12;

interface DrawnNode {
  node: CircuitNode;
  group: SVGGElement;
}

interface DrawnEdge {
  edge: CircuitEdge;
  lines: SVGPathElement[];
}

export class CircuitFigure {
  readonly element: HTMLElement;
  private readonly nodes: DrawnNode[];
  private readonly edges: DrawnEdge[];
  private readonly links: { ends: [number, number]; path: SVGPathElement }[];
  private readonly picture: SVGSVGElement;
  private readonly scroll = element("div", { class: "gp-circuit-scroll" });
  private readonly readout = element("div", { class: "gp-readout" });
  private readonly details = element("div", { class: "gp-circuit-pinned", "aria-live": "polite" });
  private readonly shownText = element("span", { class: "gp-number" });
  private readonly slider: HTMLInputElement;
  private count: number;
  private pinned: Pinned | null = null;
  private hovered: Pinned | null = null;
  /** The node in the tab order. */
  private active = 0;

  constructor(
    private readonly circuit: CircuitPicture,
    private readonly options: FigureOptions,
  ) {
    this.count = circuit.first;
    this.edges = circuit.edges.map((edge, number) => this.drawEdge(edge, number));
    this.nodes = circuit.nodes.map((node, number) => this.drawNode(node, number));
    this.links = circuit.links.map(({ ends, line }) => ({
      ends,
      path: svgElement("path", { class: "gp-circuit-link", d: line }),
    }));
    this.picture = this.draw();
    this.scroll.append(this.picture);
    this.slider = element("input", {
      type: "range",
      class: "gp-circuit-slider",
      min: Math.min(1, this.count),
      max: circuit.edges.length,
      value: this.count,
      "aria-label": "Number of edges shown",
      oninput: () => this.showStrongest(Number(this.slider.value)),
    });
    const head = element(
      "div",
      { class: "gp-line" },
      element("label", { class: "gp-line gp-circuit-threshold" }, "Edges", this.slider, this.shownText),
      element(
        "div",
        { class: "gp-line" },
        this.copyButton("Copy as Python", circuit.python),
        this.copyButton("Copy as JSON", circuit.json),
      ),
    );
    const summary = element("p", { class: "gp-note" }, circuit.summary);
    this.element = element("section", { class: "gp-stack gp-circuit", role: "region", "aria-label": "Circuit" });
    this.element.append(head, this.scroll, this.legend(), this.readout, this.details, summary);
    this.showStrongest(this.count);
    this.showPinned();
  }

  /** Pins a node or an edge, without calling `onPin`. */
  pin(pinned: Pinned | null): void {
    this.pinned = pinned;
    this.showPinned();
  }

  /** Marks the node of the row that is selected in the tree, and the nodes of rows with patches. */
  mark(selected: number | null, patched: ReadonlySet<string>): void {
    for (const { node, group } of this.nodes) {
      group.classList.toggle("gp-in-tree", node.row >= 0 && node.row === selected);
      group.classList.toggle("gp-patched-node", patched.has(node.name));
    }
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  private draw(): SVGSVGElement {
    const { width, height, bands, columns } = this.circuit;
    const areas = bands.flatMap((band) => [
      svgElement("rect", { class: "gp-circuit-band", x: 0, y: band.y, width: "100%", height: band.height }),
      svgElement("text", { class: "gp-circuit-layer", x: 10, y: band.y + band.height / 2 + 4 }, band.label),
    ]);
    const tokens = columns.map(({ label, x }) =>
      svgElement("text", { class: "gp-circuit-token", x, y: height - 10 }, label),
    );
    const weakFirst = [...this.edges].reverse();
    return svgElement(
      "svg",
      {
        class: "gp-circuit-picture",
        role: "group",
        "aria-label": `Circuit: ${this.circuit.summary}. Arrow keys go from node to node, Enter pins one.`,
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        onkeydown: (event: KeyboardEvent) => this.onKey(event),
      },
      svgElement("g", { "aria-hidden": true }, ...areas, ...tokens, ...this.links.map(({ path }) => path)),
      svgElement("g", { "aria-hidden": true }, ...weakFirst.flatMap(({ lines }) => lines)),
      ...this.nodes.map(({ group }) => group),
    );
  }

  private drawEdge(edge: CircuitEdge, number: number): DrawnEdge {
    const sign = edge.score < 0 ? "gp-negative" : "gp-positive";
    const line = svgElement("path", { class: `gp-circuit-edge ${sign}`, d: edge.line, "stroke-width": edge.thickness });
    const target = svgElement("path", {
      class: "gp-circuit-target",
      d: edge.line,
      "stroke-width": Math.max(MIN_HIT_WIDTH, edge.thickness + 4),
    });
    this.addPointerListeners(target, ["edge", number]);
    return { edge, lines: [line, target] };
  }

  private drawNode(node: CircuitNode, number: number): DrawnNode {
    const { x, y, width, height, ports } = node;
    const box = svgElement("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 6 });
    const label = svgElement("text", { x, y: y + (ports.length > 0 ? 0 : 4) }, node.label);
    const inputs = ports.map(([name, atPosition]) =>
      svgElement("text", { class: "gp-circuit-port", x: atPosition, y: y + 14 }, name),
    );
    const group = svgElement(
      "g",
      { class: "gp-circuit-node", role: "button", tabindex: number === 0 ? 0 : -1 },
      box,
      label,
      ...inputs,
    );
    this.addPointerListeners(group, ["node", number]);
    group.addEventListener("focus", () => {
      this.active = number;
      this.hover(["node", number]);
    });
    group.addEventListener("blur", () => this.hover(null));
    return { node, group };
  }

  private addPointerListeners(target: Element, what: Pinned): void {
    target.addEventListener("pointerenter", () => this.hover(what));
    target.addEventListener("pointerleave", () => this.hover(null));
    target.addEventListener("click", () => this.togglePin(what));
  }

  private legend(): HTMLElement {
    const { edges, links } = this.circuit;
    const strongest = Math.abs(edges[0]?.score ?? 0);
    const sample = (what: "positive" | "negative" | "link", text: string) => {
      const ofWhat =
        what === "link" ? { class: "gp-circuit-link" } : { class: `gp-circuit-edge gp-${what}`, "stroke-width": 8 };
      const line = svgElement("path", { ...ofWhat, d: "M0 6H34" });
      const picture = svgElement("svg", { width: 34, height: 12, "aria-hidden": true }, line);
      return element("span", { class: "gp-circuit-sample" }, picture, element("span", { class: "gp-number" }, text));
    };
    return element(
      "div",
      { class: "gp-legend gp-circuit-legend" },
      ...(edges.some(({ score }) => score >= 0) ? [sample("positive", `score +${formatNumber(strongest, 3)}`)] : []),
      ...(edges.some(({ score }) => score < 0) ? [sample("negative", `score −${formatNumber(strongest, 3)}`)] : []),
      ...(links.length > 0 ? [sample("link", "attention across positions")] : []),
    );
  }

  private copyButton(name: string, text: string): HTMLElement {
    const said = element("span", { class: "gp-visually-hidden", role: "status" });
    const copy = async () => {
      said.textContent = (await copyText(text, this.element)) ? "copied" : "the browser does not allow copying";
    };
    const button = buttonElement({ onclick: copy }, icon("copy"), name);
    return element("span", {}, button, said);
  }

  // -- visible edges -------------------------------------------------------------------------------------------------

  private showStrongest(count: number): void {
    this.count = count;
    const seen = new Set<number>();
    this.edges.forEach(({ edge, lines }, number) => {
      const isShown = number < count;
      for (const line of lines) line.classList.toggle("gp-circuit-hidden", !isShown);
      if (isShown) for (const end of [edge.from, ...edge.to]) seen.add(end);
    });
    this.nodes.forEach(({ group }, number) => {
      group.classList.toggle("gp-circuit-hidden", !seen.has(number));
    });
    for (const { ends, path } of this.links) {
      path.classList.toggle("gp-circuit-hidden", !ends.every((end) => seen.has(end)));
    }
    const least = this.edges[count - 1]?.edge.score ?? 0;
    const all = this.edges.length;
    const text = count === all ? `all ${formatNumber(all)}` : `${formatNumber(count)} of ${formatNumber(all)}`;
    this.shownText.textContent = `${text}, |score| ≥ ${formatNumber(Math.abs(least), 3)}`;
    setAttribute(this.slider, "aria-valuetext", this.shownText.textContent);
    this.nodes.forEach((_, number) => {
      this.nameNode(number);
    });
    if (!seen.has(this.active)) this.setActive([...seen][0] ?? 0);
    if (this.pinned !== null && !this.isShown(this.pinned)) this.togglePin(null);
    else this.highlight();
  }

  /** Makes nodes faint that do not pass a filter, and their edges. */
  fade(isFaint: (name: string) => boolean): void {
    for (const { group, node } of this.nodes) group.classList.toggle("gp-faint", isFaint(node.name));
    for (const { edge, lines } of this.edges) {
      for (const line of lines) line.classList.toggle("gp-faint", isFaint(edge.sender) || isFaint(edge.receiver));
    }
  }

  private isShown([kind, number]: Pinned): boolean {
    if (kind === "edge") return number < this.count;
    return !this.nodes[number]?.group.classList.contains("gp-circuit-hidden");
  }

  private edgesOf(number: number): { into: CircuitEdge[]; out: CircuitEdge[] } {
    const shown = this.circuit.edges.slice(0, this.count);
    return { into: shown.filter(({ to }) => to.includes(number)), out: shown.filter(({ from }) => from === number) };
  }

  private nameNode(number: number): void {
    const drawn = this.nodes[number];
    if (drawn === undefined) return;
    const { into, out } = this.edgesOf(number);
    const counts = `${formatCount(into.length, "edge")} in, ${formatCount(out.length, "edge")} out`;
    const { label, name, position } = drawn.node;
    setAttribute(drawn.group, "aria-label", `${label}${this.at(position)}: ${name}, ${counts}`);
  }

  // -- hovering and pinning ------------------------------------------------------------------------------------------

  private hover(what: Pinned | null): void {
    this.hovered = what;
    this.highlight();
  }

  private togglePin(what: Pinned | null): void {
    const isSame = what !== null && this.pinned?.[0] === what[0] && this.pinned[1] === what[1];
    this.pinned = isSame ? null : what;
    this.showPinned();
    this.options.onPin(this.pinned);
  }

  private highlight(): void {
    const focus = this.hovered ?? this.pinned;
    const near = new Set<number>();
    this.edges.forEach(({ edge, lines }, number) => {
      const ends = [edge.from, ...edge.to];
      const isNear = focus !== null && (focus[0] === "edge" ? focus[1] === number : ends.includes(focus[1]));
      for (const line of lines) line.classList.toggle("gp-near", isNear);
      if (isNear && number < this.count) for (const end of ends) near.add(end);
    });
    for (const { ends, path } of this.links) {
      const isNear = focus?.[0] === "node" && ends.includes(focus[1]);
      path.classList.toggle("gp-near", isNear);
      if (isNear) for (const end of ends) near.add(end);
    }
    if (focus?.[0] === "node") near.add(focus[1]);
    this.nodes.forEach(({ group }, number) => {
      group.classList.toggle("gp-near", near.has(number));
    });
    this.picture.classList.toggle("gp-focused", focus !== null);
    this.readout.replaceChildren(...this.describe(this.hovered));
  }

  private describe(what: Pinned | null): (Node | string)[] {
    if (what === null) return ["Point at a node or an edge; a click pins it."];
    if (what[0] === "node") {
      const { name, position } = (this.nodes[what[1]] as DrawnNode).node;
      return [element("code", {}, name), this.at(position)];
    }
    const { edge } = this.edges[what[1]] as DrawnEdge;
    return [
      element("code", {}, edge.sender),
      " → ",
      element("code", {}, edge.receiver),
      `${this.at(edge.position)}: `,
      element("strong", { class: "gp-number" }, withSign(edge.score)),
    ];
  }

  /** ` at 5`, for a node or edge at a position. */
  private at(position: number | null): string {
    return position === null ? "" : ` at ${position}`;
  }

  private showPinned(): void {
    const { pinned } = this;
    this.nodes.forEach(({ group }, number) => {
      const isPinned = pinned?.[0] === "node" && pinned[1] === number;
      setAttribute(group, "aria-pressed", isPinned);
    });
    this.edges.forEach(({ lines }, number) => {
      lines[0]?.classList.toggle("gp-pinned", pinned?.[0] === "edge" && pinned[1] === number);
    });
    this.details.hidden = pinned === null;
    if (pinned?.[0] === "node") this.showNode(pinned[1]);
    if (pinned?.[0] === "edge") this.showEdge(pinned[1]);
    this.highlight();
  }

  private showNode(number: number): void {
    const drawn = this.nodes[number];
    if (drawn === undefined) return;
    const { into, out } = this.edgesOf(number);
    const actions = this.options.actions?.(drawn.node) ?? [];
    const heading = element("strong", {}, element("code", {}, drawn.node.name), this.at(drawn.node.position));
    replaceChildren(
      this.details,
      element("div", { class: "gp-line gp-circuit-actions" }, heading, ...actions, this.unpin()),
      this.table("Reads from", into, ({ sender, receiver }) => `${sender} → ${inputOf(receiver)}`),
      this.table("Passes on to", out, ({ receiver }) => receiver),
    );
  }

  private showEdge(number: number): void {
    const text = element("span", {}, ...this.describe(["edge", number]));
    replaceChildren(this.details, element("div", { class: "gp-line gp-circuit-actions" }, text, this.unpin()));
  }

  private unpin(): HTMLElement {
    const close = () => {
      this.togglePin(null);
      this.nodes[this.active]?.group.focus();
    };
    return buttonElement({ onclick: close }, "Unpin");
  }

  private table(title: string, edges: CircuitEdge[], text: (edge: CircuitEdge) => string): HTMLElement | null {
    if (edges.length === 0) return null;
    const rows = edges.map((edge) =>
      element(
        "tr",
        {},
        element("td", {}, element("code", {}, text(edge))),
        element("td", { class: "gp-number" }, withSign(edge.score)),
      ),
    );
    const caption = element("caption", {}, title);
    return element("table", { class: "gp-circuit-table" }, caption, element("tbody", {}, ...rows));
  }

  // -- keyboard ------------------------------------------------------------------------------------------------------

  private onKey(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const next = this.nextNode(event.key);
    const isChoice = event.key === "Enter" || event.key === " ";
    if (next === undefined && !isChoice && !(event.key === "Escape" && this.pinned !== null)) return;
    event.preventDefault();
    event.stopPropagation();
    if (next !== undefined) {
      this.setActive(next);
      this.nodes[next]?.group.focus();
    } else this.togglePin(isChoice ? ["node", this.active] : null);
  }

  private setActive(number: number): void {
    this.active = number;
    this.nodes.forEach(({ group }, index) => {
      setAttribute(group, "tabindex", index === number ? 0 : -1);
    });
  }

  /** The node that an arrow key goes to; `undefined` for other keys. */
  private nextNode(key: string): number | undefined {
    const from = this.nodes[this.active]?.node;
    if (from === undefined) return undefined;
    const ahead: Record<string, (node: CircuitNode) => number> = {
      ArrowUp: ({ y }) => from.y - y,
      ArrowDown: ({ y }) => y - from.y,
      ArrowLeft: ({ x, y }) => (y === from.y ? from.x - x : 0),
      ArrowRight: ({ x, y }) => (y === from.y ? x - from.x : 0),
    };
    const distance = ahead[key];
    if (distance === undefined) return undefined;
    const shown = this.nodes
      .map(({ node }, number) => ({ number, far: distance(node), aside: Math.abs(node.x - from.x) }))
      .filter(({ number, far }) => far > 0 && this.isShown(["node", number]));
    shown.sort((one, other) => one.far - other.far || one.aside - other.aside);
    return shown[0]?.number ?? this.active;
  }
}

/** The input of a head: `q` of `layers[2].attn.heads[3].q`. */
function inputOf(receiver: string): string {
  return receiver.slice(receiver.lastIndexOf(".") + 1);
}

/** Formats a score, always with a sign. */
function withSign(score: number): string {
  return score < 0 ? `−${formatNumber(-score)}` : `+${formatNumber(score)}`;
}
