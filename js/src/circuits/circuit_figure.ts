/**
 * The picture of a circuit. The kernel computes the layout (`experiments/circuits/circuit.py`); this draws it, and handles
 * pointer and keyboard: a slider hides weak edges, hovering highlights a node with its neighbors, a click pins it, buttons
 * and the wheel with Ctrl zoom.
 */
import type { CircuitEdge, CircuitNode, CircuitPicture, CircuitTraits, Pinned } from "../kernel/protocol";
import {
  buttonElement,
  consume,
  copyText,
  element,
  icon,
  refresh,
  replaceChildren,
  setAttribute,
  svgElement,
  toggleClasses,
} from "../page/dom";
import { isChoice } from "../page/grid";
import { nextPlace, rove } from "../page/roving";
import { formatCount, formatNumber } from "../page/text";
import { ZoomWindow } from "../page/zoom";
import type { TreeState } from "../tree/tree_state";
import { follow, type Model, type Part, saveChanges, type View } from "../view";
import { itemOf } from "../views/selection";

interface FigureOptions {
  /** Called when another node or edge is pinned; `null`: nothing is pinned. */
  onPin(pinned: Pinned | null): void;
  /** Buttons for a pinned node. */
  actions: ((node: CircuitNode) => HTMLElement[]) | null;
  /** Makes nodes a group with a name; without one, they leave their groups. `null`: there are no groups. */
  onGroup: ((name: string, members: number[]) => void) | null;
}

/** What marks nodes: those selected in the tree, by their numbers; patched ones, and faint ones, by their names. */
interface Marks {
  selected: ReadonlySet<number>;
  patched: ReadonlySet<string>;
  faint: ReadonlySet<string>;
}

/** The minimum width of the area around an edge that reacts to the pointer, in CSS pixels. */
const MIN_HIT_WIDTH = 12;

const isSame = (one: Pinned | null, other: Pinned) => one?.[0] === other[0] && one[1] === other[1];
const endsOf = ({ from, to }: CircuitEdge) => [from, ...to];

export class CircuitFigure {
  readonly element: HTMLElement;
  /** The elements of the nodes, edges and links of the picture; an edge has a line, and a wider one for the pointer. */
  private readonly nodes: SVGGElement[];
  private readonly edges: SVGPathElement[][];
  private readonly links: SVGPathElement[];
  private readonly picture: SVGSVGElement;
  private readonly window = new ZoomWindow("width");
  private readonly details = element("div.gp-line.gp-box.gp-circuit-pinned", { "aria-live": "polite" });
  private readonly finder: HTMLInputElement;
  private readonly slider: HTMLInputElement;
  private count: number;
  private pinned: Pinned | null = null;
  private hovered: Pinned | null = null;
  /** The nodes that are selected for a group. */
  private readonly chosen = new Set<number>();
  private readonly grouping = element("div.gp-line.gp-box.gp-circuit-grouping", { hidden: true });
  /** The node in the tab order. */
  private active = 0;
  private marks: Marks = { selected: new Set(), patched: new Set(), faint: new Set() };
  /** What the finder searches in. */
  private readonly texts: string[];

  constructor(
    private readonly circuit: CircuitPicture,
    private readonly options: FigureOptions,
  ) {
    this.count = circuit.first;
    this.texts = circuit.nodes.map((node) => `${node.label} ${node.name}${placeText(node.position)}`.toLowerCase());
    this.finder = element("input.gp-field", {
      type: "text",
      role: "searchbox",
      "aria-label": "Find nodes",
      placeholder: "Find nodes",
      title: "Enter goes from one node that is found to the next",
      size: 14,
      oninput: () => this.show(),
      onkeydown: (event: KeyboardEvent) => this.onFinderKey(event),
    });
    this.edges = circuit.edges.map((edge, number) => this.drawEdge(edge, number));
    this.nodes = circuit.nodes.map((node, number) => this.drawNode(node, number));
    this.links = circuit.links.map(({ line }) => svgElement("path.gp-circuit-link", { d: line }));
    this.picture = this.draw();
    this.slider = element("input.gp-circuit-slider", {
      type: "range",
      min: Math.min(1, this.count),
      max: circuit.edges.length,
      value: this.count,
      "aria-label": "Number of edges shown",
      "aria-valuetext": () => this.countText(),
      oninput: () => this.showStrongest(Number(this.slider.value)),
    });
    const shown = element("span.gp-number", () => this.countText());
    const found = element("span.gp-muted", { role: "status" }, () =>
      this.finder.value.trim() === "" ? "" : formatCount(this.matches().length, "node"),
    );
    const copies = [this.copyButton("Copy as Python", circuit.python), this.copyButton("Copy as JSON", circuit.json)];
    const threshold = element("label.gp-line.gp-circuit-threshold", "Edges", this.slider, shown);
    this.window.show(this.picture, circuit);
    this.element = element(
      "section.gp-stack.gp-circuit",
      { role: "region", "aria-label": "Circuit" },
      element("div.gp-line", threshold, this.finder, found, this.window.buttons, ...copies),
      this.window.element,
      this.legend(),
      element("div.gp-caption.gp-readout", () => this.describe(this.hovered)),
      this.grouping,
      this.details,
      element("p.gp-note", circuit.summary),
    );
    this.showStrongest(this.count);
    this.pin(null);
  }

  /** Pins a node or an edge, without calling `onPin`. */
  pin(pinned: Pinned | null): void {
    this.pinned = pinned;
    this.details.hidden = pinned === null;
    if (pinned !== null) this.showDetails(pinned);
    this.show();
  }

  /** Marks nodes, and makes those faint that a filter leaves out. */
  mark(marks: Marks): void {
    this.marks = marks;
    this.show();
  }

  private draw(): SVGSVGElement {
    const { width, height, bands, columns, summary } = this.circuit;
    const areas = bands.flatMap((band) => [
      svgElement("rect.gp-circuit-band", { x: 0, y: band.y, width: "100%", height: band.height }),
      svgElement("text.gp-circuit-layer", { x: 10, y: band.y + band.height / 2 + 4 }, band.label),
    ]);
    const tokens = columns.map(({ label, x }) => svgElement("text.gp-circuit-token", { x, y: height - 10 }, label));
    return svgElement(
      "svg.gp-circuit-picture",
      {
        role: "group",
        "aria-label": `Circuit: ${summary}. Arrow keys go from node to node, Enter pins one.`,
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        onkeydown: (event: KeyboardEvent) => this.onKey(event),
      },
      svgElement("g", { "aria-hidden": true }, ...areas, ...tokens, ...this.links),
      svgElement("g", { "aria-hidden": true }, ...[...this.edges].reverse().flat()), // the strongest on top
      ...this.nodes,
    );
  }

  private drawEdge({ line, score, thickness }: CircuitEdge, number: number): SVGPathElement[] {
    const sign = score < 0 ? "gp-negative" : "gp-positive";
    const wide = { d: line, "stroke-width": Math.max(MIN_HIT_WIDTH, thickness + 4) };
    return [
      svgElement("path", { class: `gp-circuit-edge ${sign}`, d: line, "stroke-width": thickness }),
      svgElement("path.gp-circuit-target", { ...wide, ...this.pointerListeners(["edge", number]) }),
    ];
  }

  private drawNode({ x, y, width, height, ports, label, is_error }: CircuitNode, number: number): SVGGElement {
    const onfocus = () => {
      this.active = number;
      this.hover(["node", number]);
    };
    const listeners = { ...this.pointerListeners(["node", number]), onfocus, onblur: () => this.hover(null) };
    return svgElement(
      is_error === true ? "g.gp-circuit-node.gp-circuit-error" : "g.gp-circuit-node",
      { role: "button", ...listeners },
      svgElement("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 6 }),
      svgElement("text", { x, y: y + (ports.length > 0 ? 0 : 4) }, label),
      ...ports.map(([name, at]) => svgElement("text.gp-circuit-port", { x: at, y: y + 14 }, name)),
    );
  }

  private pointerListeners(what: Pinned) {
    return {
      onpointerenter: () => this.hover(what),
      onpointerleave: () => this.hover(null),
      onclick: ({ shiftKey }: MouseEvent) => {
        if (!(shiftKey && this.toggleChosen(what))) this.togglePin(what);
      },
    };
  }

  private legend(): HTMLElement {
    const { edges, links } = this.circuit;
    const strongest = formatNumber(Math.max(0, ...edges.map(({ score }) => Math.abs(score))), 3);
    const sample = (isThere: boolean, line: string, text: string, width: number | null = 8) => {
      const picture = svgElement("path", { class: line, d: "M0 6H34", "stroke-width": width });
      const size = { width: 34, height: 12, "aria-hidden": true };
      return isThere && element("span.gp-pair", svgElement("svg", size, picture), element("span.gp-number", text));
    };
    const [isPositive, isNegative] = [edges.some(({ score }) => score >= 0), edges.some(({ score }) => score < 0)];
    return element(
      "div.gp-line.gp-tight.gp-legend.gp-muted.gp-circuit-legend",
      sample(isPositive, "gp-circuit-edge gp-positive", `score +${strongest}`),
      sample(isNegative, "gp-circuit-edge gp-negative", `score −${strongest}`),
      sample(links.length > 0, "gp-circuit-link", "attention across positions", null),
    );
  }

  private copyButton(name: string, text: string): HTMLElement {
    const said = element("span.gp-visually-hidden", { role: "status" });
    const copy = async () => {
      said.textContent = (await copyText(text, this.element)) ? "copied" : "the browser does not allow copying";
    };
    return element("span", buttonElement({ onclick: copy }, icon("copy"), name), said);
  }

  private showStrongest(count: number): void {
    this.count = count;
    const seen = this.seen();
    if (!seen.has(this.active)) this.active = [...seen][0] ?? 0;
    if (this.pinned !== null && !this.isShown(this.pinned)) this.togglePin(null);
    else this.show();
  }

  private countText(): string {
    const { edges, is_by_influence } = this.circuit;
    const all = formatNumber(edges.length);
    const text = this.count === edges.length ? `all ${all}` : `${formatNumber(this.count)} of ${all}`;
    const least = formatNumber(Math.abs(edges[this.count - 1]?.score ?? 0), 3);
    return `${text}, ${is_by_influence === true ? "most influence first" : `|score| ≥ ${least}`}`;
  }

  /** The nodes of the edges that are shown. All nodes in one group have no edge, but can leave it. */
  private seen(): Set<number> {
    const { edges, nodes } = this.circuit;
    return new Set(edges.length === 0 ? nodes.keys() : edges.slice(0, this.count).flatMap(endsOf));
  }

  private isShown([kind, number]: Pinned): boolean {
    return kind === "edge" ? number < this.count : this.seen().has(number);
  }

  /** Shows the state of all nodes, edges and links. */
  private show(): void {
    const { active, chosen, circuit, count, marks, nodes, pinned } = this;
    const focus = this.hovered ?? pinned;
    const seen = this.seen();
    const found = this.matches();
    const near = new Set(focus?.[0] === "node" ? [focus[1]] : []);
    const into = nodes.map(() => 0);
    const out = nodes.map(() => 0);
    for (const [number, edge] of circuit.edges.entries()) {
      const ends = endsOf(edge);
      const isNear = focus !== null && (focus[0] === "edge" ? focus[1] === number : ends.includes(focus[1]));
      const isFaint = marks.faint.has(edge.sender) || marks.faint.has(edge.receiver);
      const classes = { "gp-circuit-hidden": number >= count, "gp-near": isNear, "gp-faint": isFaint };
      for (const line of this.edges[number] ?? []) toggleClasses(line, classes);
      if (number >= count) continue;
      if (isNear) for (const end of ends) near.add(end);
      out[edge.from] = (out[edge.from] ?? 0) + 1;
      for (const end of edge.to) into[end] = (into[end] ?? 0) + 1;
    }
    for (const [number, { ends }] of circuit.links.entries()) {
      const isNear = focus?.[0] === "node" && ends.includes(focus[1]);
      if (isNear) for (const end of ends) near.add(end);
      const isHidden = !ends.every((end) => seen.has(end));
      toggleClasses(this.links[number], { "gp-circuit-hidden": isHidden, "gp-near": isNear });
    }
    for (const [number, group] of nodes.entries()) {
      const { label = "", name = "", position = null } = circuit.nodes[number] ?? {};
      toggleClasses(group, {
        "gp-circuit-hidden": !seen.has(number),
        "gp-circuit-found": found.includes(number),
        "gp-circuit-chosen": chosen.has(number),
        "gp-in-tree": marks.selected.has(number),
        "gp-patched-node": marks.patched.has(name),
        "gp-faint": marks.faint.has(name),
        "gp-near": near.has(number),
      });
      const counts = `${formatCount(into[number] ?? 0, "edge")} in, ${formatCount(out[number] ?? 0, "edge")} out`;
      setAttribute(group, "aria-label", `${label}${placeText(position)}: ${name}, ${counts}`);
      setAttribute(group, "aria-pressed", isSame(pinned, ["node", number]));
    }
    rove(nodes, nodes[active]);
    toggleClasses(this.picture, { "gp-focused": focus !== null });
    refresh(this.element);
  }

  /** The nodes that are shown and have all words in label, name or position. */
  private matches(): number[] {
    const words = this.finder.value.toLowerCase().split(/\s+/).filter(Boolean);
    const seen = this.seen();
    const isMatch = (text: string | undefined) => words.length > 0 && words.every((word) => text?.includes(word));
    return [...this.texts.keys()].filter((number) => seen.has(number) && isMatch(this.texts[number]));
  }

  /** Enter pins the next node that is found; Esc ends the search. */
  private onFinderKey(event: KeyboardEvent): void {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    consume(event);
    if (event.key === "Escape") this.finder.value = "";
    this.show();
    const found = this.matches();
    const next = found[(found.indexOf(this.pinned?.[0] === "node" ? this.pinned[1] : -1) + 1) % found.length];
    if (next === undefined || isSame(this.pinned, ["node", next])) return;
    this.active = next;
    this.togglePin(["node", next]);
    this.nodes[next]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  private hover(what: Pinned | null): void {
    this.hovered = what;
    this.show();
  }

  private togglePin(what: Pinned | null): void {
    this.pin(what !== null && isSame(this.pinned, what) ? null : what);
    this.options.onPin(this.pinned);
  }

  /** Selects a node for a group, or no longer. Returns whether that is possible. */
  private toggleChosen([kind, number]: Pinned): boolean {
    if (this.options.onGroup === null || kind === "edge") return false;
    if (!this.chosen.delete(number)) this.chosen.add(number);
    this.showChosen();
    return true;
  }

  private showChosen(): void {
    const { chosen, grouping } = this;
    this.show();
    grouping.hidden = chosen.size === 0;
    const parts = [...chosen].map((number) => this.circuit.nodes[number]?.members ?? []);
    const group = (name: string) => this.options.onGroup?.(name, parts.flat());
    const submit = () => (input.value.trim() === "" ? input.focus() : group(input.value.trim()));
    const onkeydown = (event: KeyboardEvent) => {
      if (event.key !== "Enter") return;
      consume(event);
      submit();
    };
    const attributes = { "aria-label": "Name of the group", placeholder: "name", size: 16, onkeydown };
    const input: HTMLInputElement = element("input.gp-field", attributes);
    const clear = () => {
      chosen.clear();
      this.showChosen();
    };
    const ungroup = parts.some(({ length }) => length > 1) && buttonElement({ onclick: () => group("") }, "Ungroup");
    const buttons = [buttonElement({ onclick: submit }, "Group"), ungroup, buttonElement({ onclick: clear }, "Clear")];
    const selected = element("span", { role: "status" }, `${formatCount(chosen.size, "node")} selected`);
    replaceChildren(grouping, selected, input, ...buttons);
  }

  private describe(what: Pinned | null): (Node | string)[] {
    const node = what?.[0] === "node" ? this.circuit.nodes[what[1]] : undefined;
    const edge = what?.[0] === "edge" ? this.circuit.edges[what[1]] : undefined;
    if (node !== undefined) return [element("code", node.name), placeText(node.position)];
    const more = this.options.onGroup === null ? "" : " Shift and a click select nodes for a group.";
    if (edge === undefined) return [`Point at a node or an edge; a click pins it.${more}`];
    const ends = [element("code", edge.sender), " → ", element("code", edge.receiver)];
    return [...ends, `${placeText(edge.position)}: `, element("strong.gp-number", withSign(edge.score))];
  }

  private showDetails([kind, number]: Pinned): void {
    const unpin = () => {
      this.togglePin(null);
      this.nodes[this.active]?.focus();
    };
    const isNode = kind === "node";
    const node = isNode ? this.circuit.nodes[number] : undefined;
    const shown = this.circuit.edges.slice(0, this.count);
    const into = shown.filter(({ to }) => to.includes(number));
    const out = shown.filter(({ from }) => from === number);
    const actions = [...((node && this.options.actions?.(node)) ?? []), buttonElement({ onclick: unpin }, "Unpin")];
    const heading = element(isNode ? "strong" : "span", ...this.describe([kind, number]));
    replaceChildren(
      this.details,
      element("div.gp-line.gp-circuit-actions", heading, ...actions),
      isNode && edgeTable("Reads from", into, ({ sender, receiver }) => `${sender} → ${inputOf(receiver)}`),
      isNode && edgeTable("Passes on to", out, ({ receiver }) => receiver),
      node?.page !== undefined && pageElement(node.page),
    );
  }

  private onKey(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const places = this.circuit.nodes.map(({ x, y }) => [x, y] as const);
    const seen = this.seen();
    const next = nextPlace(event.key, this.active, places, (node) => seen.has(node));
    if (next === undefined && !isChoice(event) && !(event.key === "Escape" && this.pinned !== null)) return;
    consume(event);
    if (next !== undefined) {
      this.active = next;
      this.nodes[next]?.focus();
      rove(this.nodes, this.nodes[next]);
    } else if (!(isChoice(event) && event.shiftKey && this.toggleChosen(["node", this.active])))
      this.togglePin(isChoice(event) ? ["node", this.active] : null);
  }
}

/** ` at 5`, for a node or edge at a position. */
function placeText(position: number | null): string {
  return position === null ? "" : ` at ${position}`;
}

/** The page of a feature; its text is escaped where it is made, and it has no scripts. */
function pageElement(page: string): HTMLElement {
  const found = element("div.gp-circuit-page");
  found.append(...new DOMParser().parseFromString(page, "text/html").body.childNodes);
  return found;
}

function edgeTable(title: string, edges: CircuitEdge[], text: (edge: CircuitEdge) => string): HTMLElement | null {
  if (edges.length === 0) return null;
  const rows = edges.map((edge) =>
    element("tr", element("td", element("code", text(edge))), element("td.gp-number", withSign(edge.score))),
  );
  return element("table.gp-circuit-table", element("caption", title), element("tbody", ...rows));
}

/** The input of a head: `q` of `layers[2].attn.heads[3].q`. */
function inputOf(receiver: string): string {
  return receiver.slice(receiver.lastIndexOf(".") + 1);
}

/** Formats a score, always with a sign. */
function withSign(score: number): string {
  return score < 0 ? `−${formatNumber(-score)}` : `+${formatNumber(score)}`;
}

// -- The picture of a circuit, alone, as `show_circuit` shows it, or above the tree of its model -------------------------

/** What a widget with groups has. */
interface Grouped {
  get(name: "groups"): CircuitTraits["groups"];
  set(name: "groups", value: CircuitTraits["groups"]): void;
  save_changes(): void;
}

/** Makes groups of an attribution graph; `null` for circuits, which have none. */
function groupsOf(model: Grouped, { nodes }: CircuitPicture): FigureOptions["onGroup"] {
  if (nodes.every(({ members }) => members === undefined)) return null;
  return (name, members) => {
    const others = Object.entries(model.get("groups") ?? {}).map(([other, own]): [string, number[]] => {
      return [other, own.filter((member) => !members.includes(member))];
    });
    const kept = Object.fromEntries(others.filter(([other, own]) => own.length > 0 && other !== name));
    model.set("groups", name === "" ? kept : { ...kept, [name]: members });
    saveChanges(model);
  };
}

export function makeCircuitView(model: Model<CircuitTraits>, onRemove: (undo: () => void) => void): HTMLElement {
  const page = element("div");
  let figure: CircuitFigure;
  const showPinned = () => figure.pin(model.get("pinned"));
  const show = () => {
    const circuit = model.get("circuit");
    figure = new CircuitFigure(circuit, {
      onPin: (pinned) => {
        model.set("pinned", pinned);
        saveChanges(model);
      },
      actions: null,
      onGroup: groupsOf(model, circuit),
    });
    replaceChildren(page, figure.element);
    showPinned();
  };
  follow({ model, onRemove }, ["circuit"], show);
  follow({ model, onRemove }, ["pinned"], showPinned);
  show();
  return page;
}

/** The picture above the tree. A pinned node selects its row in the tree, and can be patched. */
export function makeCircuitPanel(view: View, state: TreeState): Part {
  const panel = element("div.gp-circuit-panel");
  let figure: CircuitFigure | null = null;
  const actions = (node: CircuitNode) => {
    if (node.row < 0) return [];
    const target = { row: node.row, component: node.name, positions: String(node.position ?? "") };
    const onclick = ({ currentTarget }: Event) => view.editPatch(target, currentTarget as Element);
    return [buttonElement({ class: "gp-button gp-primary", onclick }, "Patch …")];
  };
  const mark = () => {
    const nodes = view.model.get("circuit")?.nodes ?? [];
    const names = new Set(view.selection.items.map(({ name }) => name));
    // Heads are parts of one row: one that is selected is meant alone.
    const rows = nodes.filter(({ name }) => names.has(name)).map(({ row }) => row);
    const isSelected = ({ name, row }: CircuitNode) =>
      row >= 0 && row === state.activeRow && (names.has(name) || !rows.includes(row));
    const patched = new Set(view.model.get("session").patches.map(({ path }) => path));
    const ends = view.model.get("circuit")?.edges.flatMap(({ sender, receiver }) => [sender, receiver]) ?? [];
    const faint = new Set(
      [...nodes.map(({ name }) => name), ...ends].filter((name) => !view.filter.keeps(itemOf(name))),
    );
    figure?.mark({
      selected: new Set([...nodes.keys()].filter((at) => isSelected(nodes[at] as CircuitNode))),
      patched,
      faint,
    });
  };
  const show = () => {
    const circuit = view.model.get("circuit") ?? null;
    panel.hidden = circuit === null;
    figure = null;
    panel.replaceChildren();
    if (circuit === null) return;
    figure = new CircuitFigure(circuit, {
      onPin: (pinned) => {
        const node = pinned?.[0] === "node" ? circuit.nodes[pinned[1]] : undefined;
        if (node === undefined || node.row < 0) return;
        view.reveal(node.row);
        view.selection.set([itemOf(node.name, { position: node.position })]);
      },
      actions,
      onGroup: groupsOf(view.model, circuit),
    });
    panel.append(figure.element);
    mark();
  };
  follow(view, ["circuit"], show);
  follow(view, ["session", state, view.selection, view.filter], mark);
  show();
  return { element: panel };
}
