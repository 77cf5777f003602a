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
import { makeZoomWindow } from "../page/zoom";
import type { TreeState } from "../tree/tree_state";
import { follow, type Model, type Part, saveChanges, type View } from "../view";
import { itemOf } from "../views/selection";

type CircuitFigure = ReturnType<typeof makeCircuitFigure>;

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

export function makeCircuitFigure(circuit: CircuitPicture, options: FigureOptions) {
  const window = makeZoomWindow("width");
  const details = element("div.gp-line.gp-box.gp-circuit-pinned", { "aria-live": "polite" });
  const grouping = element("div.gp-line.gp-box.gp-circuit-grouping", { hidden: true });
  let count = circuit.first;
  let pinned: Pinned | null = null;
  let hovered: Pinned | null = null;
  /** The nodes that are selected for a group. */
  const chosen = new Set<number>();
  /** The node in the tab order. */
  let active = 0;
  let marks: Marks = { selected: new Set(), patched: new Set(), faint: new Set() };
  /** Pins a node or an edge, without calling `onPin`. */
  const pin = (what: Pinned | null) => {
    pinned = what;
    details.hidden = pinned === null;
    if (pinned !== null) showDetails(pinned);
    show();
  };
  /** Marks nodes, and makes those faint that a filter leaves out. */
  const mark = (now: Marks) => {
    marks = now;
    show();
  };
  const draw = (): SVGSVGElement => {
    const { width, height, bands, columns, summary } = circuit;
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
        onkeydown: onKey,
      },
      svgElement("g", { "aria-hidden": true }, ...areas, ...tokens, ...links),
      svgElement("g", { "aria-hidden": true }, ...[...edges].reverse().flat()), // the strongest on top
      ...nodes,
    );
  };
  const drawEdge = ({ line, score, thickness }: CircuitEdge, number: number): SVGPathElement[] => {
    const sign = score < 0 ? "gp-negative" : "gp-positive";
    const wide = { d: line, "stroke-width": Math.max(MIN_HIT_WIDTH, thickness + 4) };
    return [
      svgElement("path", { class: `gp-circuit-edge ${sign}`, d: line, "stroke-width": thickness }),
      svgElement("path.gp-circuit-target", { ...wide, ...pointerListeners(["edge", number]) }),
    ];
  };
  const drawNode = ({ x, y, width, height, ports, label, is_error }: CircuitNode, number: number): SVGGElement => {
    const onfocus = () => {
      active = number;
      hover(["node", number]);
    };
    const listeners = { ...pointerListeners(["node", number]), onfocus, onblur: () => hover(null) };
    return svgElement(
      is_error === true ? "g.gp-circuit-node.gp-circuit-error" : "g.gp-circuit-node",
      { role: "button", ...listeners },
      svgElement("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 6 }),
      svgElement("text", { x, y: y + (ports.length > 0 ? 0 : 4) }, label),
      ...ports.map(([name, at]) => svgElement("text.gp-circuit-port", { x: at, y: y + 14 }, name)),
    );
  };
  const pointerListeners = (what: Pinned) => ({
    onpointerenter: () => hover(what),
    onpointerleave: () => hover(null),
    onclick: ({ shiftKey }: MouseEvent) => {
      if (!(shiftKey && toggleChosen(what))) togglePin(what);
    },
  });
  const legend = (): HTMLElement => {
    const scores = circuit.edges.map(({ score }) => score);
    const strongest = formatNumber(Math.max(0, ...scores.map(Math.abs)), 3);
    const sample = (isThere: boolean, line: string, text: string, width: number | null = 8) => {
      const picture = svgElement("path", { class: line, d: "M0 6H34", "stroke-width": width });
      const size = { width: 34, height: 12, "aria-hidden": true };
      return isThere && element("span.gp-pair", svgElement("svg", size, picture), element("span.gp-number", text));
    };
    return element(
      "div.gp-line.gp-tight.gp-legend.gp-muted.gp-circuit-legend",
      sample(
        scores.some((score) => score >= 0),
        "gp-circuit-edge gp-positive",
        `score +${strongest}`,
      ),
      sample(
        scores.some((score) => score < 0),
        "gp-circuit-edge gp-negative",
        `score −${strongest}`,
      ),
      sample(links.length > 0, "gp-circuit-link", "attention across positions", null),
    );
  };
  const copyButton = (name: string, text: string): HTMLElement => {
    const said = element("span.gp-visually-hidden", { role: "status" });
    const copy = async () => {
      said.textContent = (await copyText(text, main)) ? "copied" : "the browser does not allow copying";
    };
    return element("span", buttonElement({ onclick: copy }, icon("copy"), name), said);
  };
  const showStrongest = (strongest: number) => {
    count = strongest;
    const seen = seenNodes();
    if (!seen.has(active)) active = [...seen][0] ?? 0;
    if (pinned !== null && !isShown(pinned)) togglePin(null);
    else show();
  };
  const countText = (): string => {
    const { edges: sorted, is_by_influence } = circuit;
    const all = formatNumber(sorted.length);
    const text = count === sorted.length ? `all ${all}` : `${formatNumber(count)} of ${all}`;
    const least = formatNumber(Math.abs(sorted[count - 1]?.score ?? 0), 3);
    return `${text}, ${is_by_influence === true ? "most influence first" : `|score| ≥ ${least}`}`;
  };
  /** The nodes of the edges that are shown. All nodes in one group have no edge, but can leave it. */
  const seenNodes = (): Set<number> =>
    new Set(edges.length === 0 ? nodes.keys() : circuit.edges.slice(0, count).flatMap(endsOf));
  const isShown = ([kind, number]: Pinned): boolean => (kind === "edge" ? number < count : seenNodes().has(number));
  /** Shows the state of all nodes, edges and links. */
  const show = () => {
    const focus = hovered ?? pinned;
    const seen = seenNodes();
    const found = matches();
    const near = new Set(focus?.[0] === "node" ? [focus[1]] : []);
    const into = nodes.map(() => 0);
    const out = nodes.map(() => 0);
    for (const [number, edge] of circuit.edges.entries()) {
      const ends = endsOf(edge);
      const isNear = focus !== null && (focus[0] === "edge" ? focus[1] === number : ends.includes(focus[1]));
      const isFaint = marks.faint.has(edge.sender) || marks.faint.has(edge.receiver);
      const classes = { "gp-circuit-hidden": number >= count, "gp-near": isNear, "gp-faint": isFaint };
      for (const line of edges[number] ?? []) toggleClasses(line, classes);
      if (number >= count) continue;
      if (isNear) for (const end of ends) near.add(end);
      out[edge.from] = (out[edge.from] ?? 0) + 1;
      for (const end of edge.to) into[end] = (into[end] ?? 0) + 1;
    }
    for (const [number, { ends }] of circuit.links.entries()) {
      const isNear = focus?.[0] === "node" && ends.includes(focus[1]);
      if (isNear) for (const end of ends) near.add(end);
      const isHidden = !ends.every((end) => seen.has(end));
      toggleClasses(links[number], { "gp-circuit-hidden": isHidden, "gp-near": isNear });
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
    toggleClasses(picture, { "gp-focused": focus !== null });
    refresh(main);
  };
  /** The nodes that are shown and have all words in label, name or position. */
  const matches = (): number[] => {
    const words = finder.value.toLowerCase().split(/\s+/).filter(Boolean);
    const seen = seenNodes();
    const isMatch = (text: string | undefined) => words.length > 0 && words.every((word) => text?.includes(word));
    return [...texts.keys()].filter((number) => seen.has(number) && isMatch(texts[number]));
  };
  /** Enter pins the next node that is found; Esc ends the search. */
  const onFinderKey = (event: KeyboardEvent) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    consume(event);
    if (event.key === "Escape") finder.value = "";
    show();
    const found = matches();
    const next = found[(found.indexOf(pinned?.[0] === "node" ? pinned[1] : -1) + 1) % found.length];
    if (next === undefined || isSame(pinned, ["node", next])) return;
    active = next;
    togglePin(["node", next]);
    nodes[next]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  const hover = (what: Pinned | null) => {
    hovered = what;
    show();
  };
  const togglePin = (what: Pinned | null) => {
    pin(what !== null && isSame(pinned, what) ? null : what);
    options.onPin(pinned);
  };
  /** Selects a node for a group, or no longer. Returns whether that is possible. */
  const toggleChosen = ([kind, number]: Pinned): boolean => {
    if (options.onGroup === null || kind === "edge") return false;
    if (!chosen.delete(number)) chosen.add(number);
    showChosen();
    return true;
  };
  const showChosen = () => {
    show();
    grouping.hidden = chosen.size === 0;
    const parts = [...chosen].map((number) => circuit.nodes[number]?.members ?? []);
    const group = (name: string) => options.onGroup?.(name, parts.flat());
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
      showChosen();
    };
    const ungroup = parts.some(({ length }) => length > 1) && buttonElement({ onclick: () => group("") }, "Ungroup");
    const buttons = [buttonElement({ onclick: submit }, "Group"), ungroup, buttonElement({ onclick: clear }, "Clear")];
    const selected = element("span", { role: "status" }, `${formatCount(chosen.size, "node")} selected`);
    replaceChildren(grouping, selected, input, ...buttons);
  };
  const describe = (what: Pinned | null): (Node | string)[] => {
    const node = what?.[0] === "node" ? circuit.nodes[what[1]] : undefined;
    const edge = what?.[0] === "edge" ? circuit.edges[what[1]] : undefined;
    if (node !== undefined) return [element("code", node.name), placeText(node.position)];
    const more = options.onGroup === null ? "" : " Shift and a click select nodes for a group.";
    if (edge === undefined) return [`Point at a node or an edge; a click pins it.${more}`];
    const ends = [element("code", edge.sender), " → ", element("code", edge.receiver)];
    return [...ends, `${placeText(edge.position)}: `, element("strong.gp-number", withSign(edge.score))];
  };
  const showDetails = ([kind, number]: Pinned) => {
    const unpin = () => {
      togglePin(null);
      nodes[active]?.focus();
    };
    const isNode = kind === "node";
    const node = isNode ? circuit.nodes[number] : undefined;
    const shown = circuit.edges.slice(0, count);
    const into = shown.filter(({ to }) => to.includes(number));
    const out = shown.filter(({ from }) => from === number);
    const actions = [...((node && options.actions?.(node)) ?? []), buttonElement({ onclick: unpin }, "Unpin")];
    const heading = element(isNode ? "strong" : "span", ...describe([kind, number]));
    replaceChildren(
      details,
      element("div.gp-line.gp-circuit-actions", heading, ...actions),
      isNode && edgeTable("Reads from", into, ({ sender, receiver }) => `${sender} → ${inputOf(receiver)}`),
      isNode && edgeTable("Passes on to", out, ({ receiver }) => receiver),
      node?.page !== undefined && pageElement(node.page),
    );
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const places = circuit.nodes.map(({ x, y }) => [x, y] as const);
    const seen = seenNodes();
    const next = nextPlace(event.key, active, places, (node) => seen.has(node));
    if (next === undefined && !isChoice(event) && !(event.key === "Escape" && pinned !== null)) return;
    consume(event);
    if (next !== undefined) {
      active = next;
      nodes[next]?.focus();
      rove(nodes, nodes[next]);
    } else if (!(isChoice(event) && event.shiftKey && toggleChosen(["node", active])))
      togglePin(isChoice(event) ? ["node", active] : null);
  };
  const texts = circuit.nodes.map((node) => `${node.label} ${node.name}${placeText(node.position)}`.toLowerCase());
  const finder: HTMLInputElement = element("input.gp-field", {
    type: "text",
    role: "searchbox",
    "aria-label": "Find nodes",
    placeholder: "Find nodes",
    title: "Enter goes from one node that is found to the next",
    size: 14,
    oninput: show,
    onkeydown: onFinderKey,
  });
  const edges: SVGPathElement[][] = circuit.edges.map(drawEdge);
  const nodes: SVGGElement[] = circuit.nodes.map(drawNode);
  const links = circuit.links.map(({ line }) => svgElement("path.gp-circuit-link", { d: line }));
  const picture = draw();
  const slider: HTMLInputElement = element("input.gp-circuit-slider", {
    type: "range",
    min: Math.min(1, count),
    max: circuit.edges.length,
    value: count,
    "aria-label": "Number of edges shown",
    "aria-valuetext": countText,
    oninput: () => showStrongest(Number(slider.value)),
  });
  const shown = element("span.gp-number", countText);
  const found = element("span.gp-muted", { role: "status" }, () =>
    finder.value.trim() === "" ? "" : formatCount(matches().length, "node"),
  );
  const copies = [copyButton("Copy as Python", circuit.python), copyButton("Copy as JSON", circuit.json)];
  const threshold = element("label.gp-line.gp-circuit-threshold", "Edges", slider, shown);
  window.show(picture, circuit);
  const main: HTMLElement = element(
    "section.gp-stack.gp-circuit",
    { role: "region", "aria-label": "Circuit" },
    element("div.gp-line", threshold, finder, found, window.buttons, ...copies),
    window.element,
    legend(),
    element("div.gp-caption.gp-readout", () => describe(hovered)),
    grouping,
    details,
    element("p.gp-note", circuit.summary),
  );
  showStrongest(count);
  pin(null);
  return { element: main, pin, mark };
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
    figure = makeCircuitFigure(circuit, {
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
    figure = makeCircuitFigure(circuit, {
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
