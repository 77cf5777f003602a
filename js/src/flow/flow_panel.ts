/**
 * The dataflow of the module that is selected in the tree, or that the selected node is in: a click on a node selects it
 * in all views, a click on a module enters it, the path above the picture leads back.
 */
import { FLAG } from "../kernel/protocol";
import {
  buttonElement,
  consume,
  element,
  focusedElement,
  icon,
  refresh,
  replaceChildren,
  setAttribute,
  setAttributes,
  svgElement,
} from "../page/dom";
import { isChoice } from "../page/grid";
import { nextPlace, rove } from "../page/roving";
import { formatCount, visible } from "../page/text";
import { makeZoomWindow } from "../page/zoom";
import { tryEdit } from "../patches/edits";
import type { TreeState } from "../tree/tree_state";
import { follow, type Part, type View } from "../view";
import { makeActions } from "../views/linked_view";
import { itemOf } from "../views/selection";
import { dataflowOf, FlowEdges, type FlowNode, makerOf } from "./dataflow";
import { drawFlow, type FlowPicture, standaloneSvg } from "./flow_picture";

/** In CSS pixels: the height of the window, and how small texts are at first. */
const [MAX_HEIGHT, MIN_ZOOM] = [520, 0.85];
const HINT = "Click a node to select it, a module to enter it; drag to move, Ctrl and the wheel to zoom.";

export function makeFlowPanel(view: View, state: TreeState): Part {
  const { kernel, model, selection, skeleton } = view;
  const window = makeZoomWindow("both");
  let edges: FlowEdges | null = null;
  let picture: FlowPicture | null = null;
  /** What is drawn: another text needs another picture. */
  let key = "";
  let graph = -1;
  /** The node in the tab order, by its position. */
  let active = 0;
  /** The row that it scrolled to last; -1: none in this module. */
  let followed = -1;
  const unfolded = new Set<number>();
  /** The node that the pointer or the keyboard is at; -1: nothing was shown yet. */
  let pointed: number | null = -1;

  const isLost = () => kernel.state === "lost";
  const drawnAt = (position: number | null) => (position === null ? undefined : picture?.drawn[position]);
  const noteText = () => {
    if (edges !== null) return skeleton.noteOf(skeleton.graphOf(state.activeRow));
    return isLost() ? "The dataflow needs the kernel: run the cell again." : "Reading the dataflow …";
  };

  const read = async () => {
    const data = model.get("edges");
    edges = data?.byteLength ? await FlowEdges.decode(skeleton, data) : null;
    key = "";
    update();
  };
  /** Draws the module of the selected row, if it is another one, and marks what is selected, found and patched. */
  const update = () => {
    refresh(main);
    if (!state.showsGraph || edges === null) return;
    const shownGraph = skeleton.graphOf(state.activeRow);
    const shown = [...skeleton.children(shownGraph)].filter((row) => state.isShown(row));
    const now = JSON.stringify([shownGraph, state.isFolded, state.components.size, unfolded.size, shown]);
    if (now !== key) draw(edges, shownGraph);
    key = now;
    picture?.mark(selectedRows());
    scrollToSelected();
  };
  const draw = (all: FlowEdges, shownGraph: number) => {
    const before = graph;
    const activeRow = drawnAt(active)?.node.row;
    graph = shownGraph;
    const flow = dataflowOf(skeleton, all, graph, {
      isShown: (row) => state.isShown(row),
      isFolded: (row) => state.isFolded && !unfolded.has(row) && skeleton.has(row, FLAG.plumbing),
    });
    picture = drawFlow(skeleton, flow, state, about);
    const { svg, size, drawn } = picture;
    const name = graph === 0 ? model.get("about").module : skeleton.path(graph);
    setAttributes(svg, {
      "aria-label": `Dataflow of ${name}, ${formatCount(drawn.length, "node")}. Arrow keys go from node to node.`,
      onclick: onClick,
      onkeydown: onKey,
      onfocusin: (event: FocusEvent) => {
        const position = positionOf(event);
        if (position === null) return;
        setActive(position);
        point(position);
      },
      onfocusout: () => point(null),
      onpointerover: (event: PointerEvent) => point(positionOf(event)),
      onpointerleave: () => point(null),
    });
    const hadFocus = window.element.contains(focusedElement(main));
    window.show(svg, size);
    if (graph !== before) {
      window.element.style.height = `${Math.min(MAX_HEIGHT, size.height + 4)}px`;
      window.fit(MIN_ZOOM);
      followed = -1;
    }
    showCrumbs();
    pointed = -1;
    point(null);
    // On the way up, the module that was left is the one in the tab order.
    const place = graph === before ? activeRow : makerOf(skeleton, graph, before);
    const found = drawn.findIndex(({ node }) => node.row === place);
    setActive(Math.max(0, found));
    if (hadFocus) drawnAt(active)?.element.focus({ preventScroll: true });
  };
  /** Scrolls to a node that was selected elsewhere; in another module, to the one that was left, or the top. */
  const scrollToSelected = () => {
    const row = skeleton.nodeOf(state.activeRow);
    if (row === followed) return;
    followed = row;
    const isIn = ({ node }: { node: FlowNode }) => [node.row, ...node.held, ...node.folded].includes(row);
    const found = picture?.drawn.findIndex(isIn) ?? -1;
    if (found >= 0) setActive(found);
    const shown = drawnAt(active);
    if (shown) window.reveal(...shown.center);
  };
  const selectedRows = () => {
    const names = new Set(selection.items.map(({ name }) => name));
    const isChosen = (row: number) =>
      names.has(skeleton.path(row)) || state.components.get(row)?.some(({ name }) => names.has(name));
    const rows = picture?.drawn.map(({ node }) => node.row) ?? [];
    return new Set([state.activeRow, ...rows.filter(isChosen)]);
  };
  const showCrumbs = () => {
    const nameOf = (row: number) => visible(row === 0 ? model.get("about").name : skeleton.nameOf(row));
    const links = [...skeleton.ancestors(graph)].reverse().map((above) => {
      const onclick = () => view.reveal(above);
      return [buttonElement({ class: "gp-button gp-quiet gp-mono", onclick }, nameOf(above)), "›"];
    });
    const here = element("strong.gp-mono", { "aria-current": "location" }, nameOf(graph));
    replaceChildren(crumbs, ...links.flat(), here, element("span.gp-muted", visible(skeleton.opOf(graph))));
  };

  // -- One node ----------------------------------------------------------------------------------------------------------

  /** What the box of a node does not say: what it is, the whole names of components, and patches. */
  const about = ({ row, folded }: FlowNode): string => {
    if (folded.length > 0) return visible(folded.map((one) => skeleton.nameOf(one)).join(", "));
    const kind = skeleton.kindOf(row);
    const names = state.components.get(row)?.map(({ name }) => name) ?? [];
    const patches = state.patched.at(row).map((one) => `patched: ${one.kind}`);
    const word = kind === "graph" ? "module" : kind === "op" ? "" : kind;
    return visible([word, skeleton.labelOf(row), ...names, ...patches].filter(Boolean).join(", "));
  };
  const positionOf = ({ target }: Event): number | null => {
    const group = (target as Element).closest("[data-row]");
    const position = picture?.drawn.findIndex(({ element }) => element === group) ?? -1;
    return position < 0 ? null : position;
  };
  /** Shows what the pointer or the keyboard is at, with a button to patch it. */
  const point = (position: number | null) => {
    // A button that is placed again between the two halves of a click would not get it.
    if (position === pointed) return;
    pointed = position;
    picture?.highlight(position);
    adder.remove();
    replaceChildren(readout, HINT);
    const drawn = drawnAt(position);
    if (drawn === undefined) return;
    const { node, center, box, element: group } = drawn;
    const op = skeleton.kindOf(node.row) === "op" ? skeleton.opOf(node.row) : "";
    const words = [op, about(node)].filter(Boolean).join(", ");
    replaceChildren(readout, element("code", visible(skeleton.path(node.row))), ` ${visible(words)}`);
    if (node.folded.length > 0 || isLost()) return;
    setAttribute(adder, "transform", `translate(${center[0] + box.width / 2}, ${center[1]})`);
    group.append(adder);
  };
  const choose = ({ folded, row }: FlowNode, isMore: boolean) => {
    if (folded.length > 0) {
      for (const one of folded) unfolded.add(one);
      update();
    } else if (isMore) selection.click(itemOf(state.components.get(row)?.[0]?.name ?? skeleton.path(row)), true);
    else view.reveal(row);
  };
  const onClick = (event: MouseEvent) => {
    const position = positionOf(event);
    const drawn = drawnAt(position);
    if (drawn === undefined || position === null) return;
    setActive(position);
    const target = event.target as Element;
    const held = target.closest("[data-held]")?.getAttribute("data-held");
    if (held) view.reveal(Number(held));
    else if (target.closest(".gp-flow-add") !== null) view.editPatch({ row: drawn.node.row }, drawn.element);
    else choose(drawn.node, event.shiftKey);
  };
  const onKey = (event: KeyboardEvent) => {
    const drawn = drawnAt(active);
    if (drawn === undefined || event.ctrlKey || event.metaKey) return;
    const { row, folded } = drawn.node;
    const isNode = folded.length === 0 && skeleton.kindOf(row) !== "graph";
    const places = picture?.drawn.map(({ center }) => center) ?? [];
    const near = new Set(picture?.neighbors(active));
    const next = event.altKey ? undefined : nextPlace(event.key, active, places, undefined, near);
    const numbers = state.patched.at(row).map(({ number }) => number);
    if (event.altKey && event.key === "ArrowUp" && graph > 0) view.reveal(skeleton.parent[graph] ?? 0);
    else if (event.altKey) return;
    else if (next !== undefined) {
      setActive(next);
      const to = drawnAt(next);
      to?.element.focus({ preventScroll: true });
      if (to) window.reveal(...to.center);
    } else if (event.key === "Enter" && isNode) view.showDetails(row, drawn.element);
    else if (isChoice(event)) choose(drawn.node, event.shiftKey);
    else if (event.key === "+" && folded.length === 0) view.editPatch({ row }, drawn.element);
    else if ((event.key === "Delete" || event.key === "Backspace") && numbers.length > 0)
      void tryEdit(view, () => ({ action: "remove", numbers }));
    else return;
    consume(event);
  };
  const setActive = (position: number) => {
    active = position;
    const elements = picture?.drawn.map(({ element }) => element) ?? [];
    rove(elements, elements[position]);
  };

  const save = () => {
    if (picture === null) return;
    const file = new Blob([standaloneSvg(picture.svg, view.root)], { type: "image/svg+xml" });
    const href = URL.createObjectURL(file);
    const path = [model.get("about").name, skeleton.path(graph)].filter(Boolean).join(".");
    const link = element("a", { href, download: `${path}.svg`, hidden: true });
    view.root.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(href), 1000);
  };
  const adder = svgElement(
    "g.gp-flow-add",
    { "aria-hidden": true },
    svgElement("title", "Patch it (+)"),
    svgElement("circle", { r: 8 }),
    svgElement("path", { d: "M-4 0H4M0-4V4" }),
  );
  const crumbs = element("nav.gp-line.gp-tight.gp-crumbs", { "aria-label": "Modules" });
  const readout = element("div.gp-caption.gp-readout");
  const edit = ({ currentTarget }: Event) => view.editPatch({ row: state.activeRow }, currentTarget as Element);
  const patch = buttonElement({ hidden: isLost, onclick: edit }, icon("add"), "Patch …");
  const details = ({ currentTarget }: Event) => view.showDetails(state.activeRow, currentTarget as Element);
  const svg = buttonElement({ title: "Save the picture as SVG", onclick: save }, icon("down"), "SVG");
  const main = element(
    "section.gp-stack.gp-flow",
    { role: "region", "aria-label": "Graph", hidden: () => !state.showsGraph },
    element("div.gp-line", crumbs, element("div.gp-line.gp-tight.gp-flow-tools", window.buttons, svg)),
    element("p.gp-note", { role: "status", hidden: () => noteText() === null }, noteText),
    window.element,
    readout,
    element(
      "div.gp-line.gp-flow-actions",
      makeActions(view).element,
      element("div.gp-line.gp-tight", patch, buttonElement({ onclick: details }, icon("info"), "Details")),
    ),
  );
  follow(view, ["edges"], () => void read());
  follow(view, [state, selection, kernel], update);
  void read();
  return { element: main };
}
