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
  replaceChildren,
  setAttribute,
  setAttributes,
  svgElement,
} from "../page/dom";
import { isChoice } from "../page/grid";
import { nextPlace, rove } from "../page/roving";
import { formatCount, visible } from "../page/text";
import { ZoomWindow } from "../page/zoom";
import { tryEdit } from "../patches/edits";
import type { TreeState } from "../tree/tree_state";
import { follow, type Part, type View } from "../view";
import { makeActions } from "../views/linked_view";
import { itemOf } from "../views/selection";
import { dataflowOf, FlowEdges, type FlowNode, makerOf } from "./dataflow";
import { FlowPicture, standaloneSvg } from "./flow_picture";

/** In CSS pixels: the height of the window, and how small texts are at first. */
const [MAX_HEIGHT, MIN_ZOOM] = [520, 0.85];
const HINT = "Click a node to select it, a module to enter it; drag to move, Ctrl and the wheel to zoom.";

export class FlowPanel implements Part {
  readonly element: HTMLElement;
  private readonly window = new ZoomWindow("both");
  private readonly crumbs = element("nav.gp-line.gp-tight.gp-crumbs", { "aria-label": "Modules" });
  private readonly note = element("p.gp-note", { role: "status" });
  private readonly readout = element("div.gp-caption.gp-readout");
  private readonly patch: HTMLButtonElement;
  private readonly adder = svgElement("g.gp-flow-add", { "aria-hidden": true });
  private edges: FlowEdges | null = null;
  private picture: FlowPicture | null = null;
  /** What is drawn: another text needs another picture. */
  private key = "";
  private graph = -1;
  /** The node in the tab order, by its position. */
  private active = 0;
  /** The row that it scrolled to last; -1: none in this module. */
  private followed = -1;
  private readonly unfolded = new Set<number>();
  /** The node that the pointer or the keyboard is at; -1: nothing was shown yet. */
  private pointed: number | null = -1;

  constructor(
    private readonly view: View,
    private readonly state: TreeState,
  ) {
    const onActive = (act: (row: number, anchor: Element) => void) => (event: Event) =>
      act(state.activeRow, event.currentTarget as Element);
    this.patch = buttonElement(
      { onclick: onActive((row, anchor) => view.editPatch({ row }, anchor)) },
      icon("add"),
      "Patch …",
    );
    const details = onActive((row, anchor) => view.showDetails(row, anchor));
    const save = buttonElement({ title: "Save the picture as SVG", onclick: () => this.save() }, icon("down"), "SVG");
    this.element = element(
      "section.gp-stack.gp-flow",
      { role: "region", "aria-label": "Graph" },
      element("div.gp-line", this.crumbs, element("div.gp-line.gp-tight.gp-flow-tools", this.window.buttons, save)),
      this.note,
      this.window.element,
      this.readout,
      element(
        "div.gp-line.gp-flow-actions",
        makeActions(view).element,
        element("div.gp-line.gp-tight", this.patch, buttonElement({ onclick: details }, icon("info"), "Details")),
      ),
    );
    this.adder.append(
      svgElement("title", "Patch it (+)"),
      svgElement("circle", { r: 8 }),
      svgElement("path", { d: "M-4 0H4M0-4V4" }),
    );
    follow(view, ["edges"], () => void this.read());
    follow(view, [state, view.selection, view.kernel], () => this.update());
    void this.read();
  }

  private async read(): Promise<void> {
    const data = this.view.model.get("edges");
    this.edges = data?.byteLength ? await FlowEdges.decode(this.view.skeleton, data) : null;
    this.key = "";
    this.update();
  }

  /** Draws the module of the selected row, if it is another one, and marks what is selected, found and patched. */
  private update(): void {
    const { edges, state, view } = this;
    this.element.hidden = !state.showsGraph;
    if (!state.showsGraph) return;
    const { skeleton } = view;
    const graph = skeleton.graphOf(state.activeRow);
    const isLost = view.kernel.state === "lost";
    this.patch.hidden = isLost;
    const waiting = isLost ? "The dataflow needs the kernel: run the cell again." : "Reading the dataflow …";
    const note = edges === null ? waiting : skeleton.noteOf(graph);
    this.note.textContent = note;
    this.note.hidden = note === null;
    if (edges === null) return;
    const shown = [...skeleton.children(graph)].filter((row) => state.isShown(row));
    const key = JSON.stringify([graph, state.isFolded, state.components.size, this.unfolded.size, shown]);
    if (key !== this.key) this.draw(edges, graph);
    this.key = key;
    this.picture?.mark(this.selectedRows());
    this.follow();
  }

  private draw(edges: FlowEdges, graph: number): void {
    const { skeleton } = this.view;
    const before = this.graph;
    this.graph = graph;
    const flow = dataflowOf(skeleton, edges, graph, {
      isShown: (row) => this.state.isShown(row),
      isFolded: (row) => this.state.isFolded && !this.unfolded.has(row) && skeleton.has(row, FLAG.plumbing),
    });
    const picture = new FlowPicture(skeleton, flow, this.state, (node) => this.about(node));
    const { svg, size, drawn } = picture;
    const name = graph === 0 ? this.view.model.get("about").module : skeleton.path(graph);
    setAttributes(svg, {
      "aria-label": `Dataflow of ${name}, ${formatCount(drawn.length, "node")}. Arrow keys go from node to node.`,
      onclick: (event: MouseEvent) => this.onClick(event),
      onkeydown: (event: KeyboardEvent) => this.onKey(event),
      onfocusin: (event: FocusEvent) => this.onFocus(event),
      onfocusout: () => this.point(null),
      onpointerover: (event: PointerEvent) => this.point(this.positionOf(event)),
      onpointerleave: () => this.point(null),
    });
    // On the way up, the module that was left is the one in the tab order.
    const place = graph === before ? this.drawnAt(this.active)?.node.row : makerOf(skeleton, graph, before);
    const hadFocus = this.window.element.contains(focusedElement(this.element));
    this.picture = picture;
    this.window.show(svg, size);
    if (graph !== before) {
      this.window.element.style.height = `${Math.min(MAX_HEIGHT, size.height + 4)}px`;
      this.window.fit(MIN_ZOOM);
      this.followed = -1;
    }
    this.showCrumbs();
    this.pointed = -1;
    this.point(null);
    const active = drawn.findIndex(({ node }) => node.row === place);
    this.setActive(Math.max(0, active));
    if (hadFocus) this.drawnAt(this.active)?.element.focus({ preventScroll: true });
  }

  /** Scrolls to a node that was selected elsewhere; in another module, to the one that was left, or the top. */
  private follow(): void {
    const drawn = this.picture?.drawn ?? [];
    const row = this.view.skeleton.nodeOf(this.state.activeRow);
    if (row === this.followed) return;
    this.followed = row;
    const place = drawn.findIndex(
      ({ node }) => node.row === row || node.held.includes(row) || node.folded.includes(row),
    );
    if (place >= 0) this.setActive(place);
    const shown = drawn[this.active];
    if (shown) this.window.reveal(...shown.center);
  }

  private selectedRows(): Set<number> {
    const { components } = this.state;
    const names = new Set(this.view.selection.items.map(({ name }) => name));
    const chosen = (this.picture?.drawn ?? [])
      .map(({ node }) => node.row)
      .filter((row) => {
        return names.has(this.view.skeleton.path(row)) || components.get(row)?.some(({ name }) => names.has(name));
      });
    return new Set([this.state.activeRow, ...chosen]);
  }

  private showCrumbs(): void {
    const { skeleton } = this.view;
    const graphs = [...skeleton.ancestors(this.graph)].reverse();
    const nameOf = (graph: number) => (graph === 0 ? this.view.model.get("about").name : skeleton.nameOf(graph));
    const links = graphs.map((graph) => {
      const onclick = () => this.view.reveal(graph);
      return [buttonElement({ class: "gp-button gp-quiet gp-mono", onclick }, visible(nameOf(graph))), "›"];
    });
    const here = element("strong.gp-mono", { "aria-current": "location" }, visible(nameOf(this.graph)));
    replaceChildren(this.crumbs, ...links.flat(), here, element("span.gp-muted", visible(skeleton.opOf(this.graph))));
  }

  // -- One node ----------------------------------------------------------------------------------------------------------

  /** What the box of a node does not say: what it is, the whole names of components, and patches. */
  private about({ row, folded }: FlowNode): string {
    const { skeleton } = this.view;
    if (folded.length > 0) return visible(folded.map((one) => skeleton.nameOf(one)).join(", "));
    const kind = skeleton.kindOf(row);
    const names = this.state.components.get(row)?.map(({ name }) => name) ?? [];
    const patches = this.state.patched.at(row).map((one) => `patched: ${one.kind}`);
    const words = [
      kind === "graph" ? "module" : kind === "op" ? "" : kind,
      skeleton.labelOf(row),
      ...names,
      ...patches,
    ];
    return visible(words.filter(Boolean).join(", "));
  }

  private drawnAt(position: number) {
    return this.picture?.drawn[position];
  }

  private positionOf({ target }: Event): number | null {
    const group = (target as Element).closest("[data-row]");
    const position = this.picture?.drawn.findIndex(({ element }) => element === group) ?? -1;
    return position < 0 ? null : position;
  }

  /** Shows what the pointer or the keyboard is at, with a button to patch it. */
  private point(position: number | null): void {
    // A button that is placed again between the two halves of a click would not get it.
    if (position === this.pointed) return;
    this.pointed = position;
    const { adder, readout } = this;
    const drawn = position === null ? undefined : this.drawnAt(position);
    this.picture?.highlight(position);
    adder.remove();
    replaceChildren(readout, HINT);
    if (drawn === undefined) return;
    const { node, center, box, element: group } = drawn;
    const { skeleton } = this.view;
    const op = skeleton.kindOf(node.row) === "op" ? skeleton.opOf(node.row) : "";
    const words = [op, this.about(node)].filter(Boolean).join(", ");
    replaceChildren(readout, element("code", visible(skeleton.path(node.row))), ` ${visible(words)}`);
    if (node.folded.length > 0 || this.patch.hidden) return;
    setAttribute(adder, "transform", `translate(${center[0] + box.width / 2}, ${center[1]})`);
    group.append(adder);
  }

  private choose(node: FlowNode, isMore: boolean): void {
    const { components } = this.state;
    const { skeleton, selection } = this.view;
    if (node.folded.length > 0) {
      for (const row of node.folded) this.unfolded.add(row);
      this.update();
    } else if (isMore) {
      selection.click(itemOf(components.get(node.row)?.[0]?.name ?? skeleton.path(node.row)), true);
    } else this.view.reveal(node.row);
  }

  private onClick(event: MouseEvent): void {
    const position = this.positionOf(event);
    const drawn = position === null ? undefined : this.drawnAt(position);
    if (drawn === undefined || position === null) return;
    this.setActive(position);
    const target = event.target as Element;
    const held = target.closest("[data-held]")?.getAttribute("data-held");
    if (held) this.view.reveal(Number(held));
    else if (target.closest(".gp-flow-add") !== null) this.view.editPatch({ row: drawn.node.row }, drawn.element);
    else this.choose(drawn.node, event.shiftKey);
  }

  private onFocus(event: FocusEvent): void {
    const position = this.positionOf(event);
    if (position === null) return;
    this.setActive(position);
    this.point(position);
  }

  private onKey(event: KeyboardEvent): void {
    const drawn = this.drawnAt(this.active);
    if (drawn === undefined || event.ctrlKey || event.metaKey) return;
    const { row, folded } = drawn.node;
    const { state, view } = this;
    const isNode = folded.length === 0 && view.skeleton.kindOf(row) !== "graph";
    const places = this.picture?.drawn.map(({ center }) => center) ?? [];
    const near = new Set(this.picture?.neighbors(this.active));
    const next = event.altKey ? undefined : nextPlace(event.key, this.active, places, undefined, near);
    const numbers = state.patched.at(row).map(({ number }) => number);
    if (event.altKey && event.key === "ArrowUp" && this.graph > 0) view.reveal(view.skeleton.parent[this.graph] ?? 0);
    else if (event.altKey) return;
    else if (next !== undefined) {
      this.setActive(next);
      const to = this.drawnAt(next);
      to?.element.focus({ preventScroll: true });
      if (to) this.window.reveal(...to.center);
    } else if (event.key === "Enter" && isNode) view.showDetails(row, drawn.element);
    else if (isChoice(event)) this.choose(drawn.node, event.shiftKey);
    else if (event.key === "+" && folded.length === 0) view.editPatch({ row }, drawn.element);
    else if ((event.key === "Delete" || event.key === "Backspace") && numbers.length > 0)
      void tryEdit(view, () => ({ action: "remove", numbers }));
    else return;
    consume(event);
  }

  private setActive(position: number): void {
    this.active = position;
    const elements = this.picture?.drawn.map(({ element }) => element) ?? [];
    rove(elements, elements[position]);
  }

  private save(): void {
    if (this.picture === null) return;
    const file = new Blob([standaloneSvg(this.picture.svg, this.view.root)], { type: "image/svg+xml" });
    const href = URL.createObjectURL(file);
    const path = [this.view.model.get("about").name, this.view.skeleton.path(this.graph)].filter(Boolean).join(".");
    const link = element("a", { href, download: `${path}.svg`, hidden: true });
    this.view.root.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(href), 1000);
  }
}
