/** A dialog beside its anchor, which can be moved and resized. */
import type { Part, View } from "../view";
import { element, focusedElement, iconButton } from "./dom";
import { clamp } from "./grid";

const MARGIN = 8;
const GAP = 4;
/** With less space than this, in pixels, a dialog moves to the other side of its anchor. */
const MIN_HEIGHT = 220;

interface DialogOptions {
  class: string;
  /** The approximate height with all content: with less space below the anchor, the dialog may open above it. */
  height: number;
  /** Whether a click outside closes it. `false` for forms. */
  closesOnOutsideClick: boolean;
  /** Called when Escape is pressed; decides whether to call `close`. */
  onEscape(): void;
  /** Called after it was closed. */
  onClose?(): void;
}

export class Dialog implements Part {
  /** `role=dialog`; the caller adds the content. */
  readonly element: HTMLElement;
  isOpen = false;
  private anchor: Element | null = null;
  /** The anchor's last position in the view, for when its row is out of sight. */
  private anchorBox = { top: 0, bottom: 0, left: 0 };
  /** Where the user has moved it, as what the pointer adds to its place; `null`: it is beside its anchor. */
  private moved: { left: number; top: number } | null = null;
  private side: "below" | "above" = "below";
  private opener: Element | null = null;
  private listening = new AbortController();

  constructor(
    private readonly view: View,
    private readonly options: DialogOptions,
  ) {
    this.element = element("div", {
      class: `gp-floating ${options.class}`,
      role: "dialog",
      tabindex: -1,
      popover: "manual",
      onkeydown: (event: KeyboardEvent) => this.onKey(event),
    });
    view.onRemove(() => this.stopListening());
  }

  /** Shows it beside `anchor`, with `name` as its accessible name. */
  open(anchor: Element, name: string): void {
    this.element.setAttribute("aria-label", name);
    this.anchor = anchor;
    this.moved = null;
    Object.assign(this.element.style, { width: "", height: "" });
    this.measure();
    this.chooseSide();
    if (!this.isOpen) {
      this.opener = focusedElement(this.view.root);
      this.isOpen = true;
      this.element.showPopover();
      this.listen();
    }
    this.position();
  }

  /** Replaces the content, and keeps the focus inside. `buttons`: those beside the one that closes it. */
  fill(title: string, body: HTMLElement, ...buttons: HTMLElement[]): void {
    const hadFocus = this.element.contains(focusedElement(this.element));
    const close = iconButton("close", "Close", { title: "Close (Esc)", onclick: () => this.options.onEscape() });
    const heading = element("div.gp-floating-title.gp-mono", title);
    const drag = { onpointerdown: (event: PointerEvent) => this.drag(event) };
    this.element.replaceChildren(element("div.gp-floating-header", drag, heading, ...buttons, close), body);
    if (hadFocus) this.element.focus({ preventScroll: true });
  }

  /** Closes it, and restores the focus if it is inside. */
  close(): void {
    if (!this.isOpen) return;
    const hadFocus = this.element.contains(focusedElement(this.view.root));
    this.stopListening();
    this.element.hidePopover();
    if (hadFocus) this.restoreFocus();
    this.opener = null;
    this.options.onClose?.();
    // Fields of a closed dialog must not be found by their labels.
    this.element.replaceChildren();
  }

  private stopListening(): void {
    this.isOpen = false;
    this.listening.abort();
  }

  private restoreFocus(): void {
    const { opener, view } = this;
    const isOutsideOfTree = opener instanceof HTMLElement && opener.isConnected && !opener.closest("[role=tree]");
    if (isOutsideOfTree && view.root.contains(opener) && opener.offsetParent !== null) opener.focus();
    else view.focusTree();
  }

  private listen(): void {
    this.listening = new AbortController();
    const { signal } = this.listening;
    const options = { capture: true, passive: true, signal };
    if (this.options.closesOnOutsideClick) {
      document.addEventListener("pointerdown", (event) => this.onPointerDown(event), options);
    }
    const position = () => this.position();
    const onScroll = ({ target }: Event) => {
      if (!(target instanceof Node && this.element.contains(target))) position();
    };
    window.addEventListener("resize", position, options);
    window.addEventListener("scroll", onScroll, options);
    const observer = new ResizeObserver(position);
    observer.observe(this.element);
    observer.observe(this.view.root);
    signal.addEventListener("abort", () => observer.disconnect());
  }

  private onPointerDown(event: Event): void {
    if (!event.composedPath().includes(this.element)) this.close();
  }

  private onKey(event: KeyboardEvent): void {
    if (event.key !== "Escape" || event.isComposing) return;
    event.preventDefault();
    event.stopPropagation();
    this.options.onEscape();
  }

  /** Measures where the anchor is now: rows move when others open, and scroll. */
  private measure(): void {
    const { anchor, view } = this;
    const row = anchor?.closest("[role=treeitem]");
    // Scrolling replaces the elements of rows.
    const found = anchor?.isConnected || !row?.id ? anchor : view.root.querySelector(`#${CSS.escape(row.id)}`);
    if (!found?.isConnected) return;
    const root = view.root.getBoundingClientRect();
    const box = found.getBoundingClientRect();
    const tree =
      found.closest("[role=tree]")?.getBoundingClientRect() ?? document.documentElement.getBoundingClientRect();
    this.anchorBox = {
      top: clamp(box.top, tree.top, tree.bottom) - root.top,
      bottom: clamp(box.bottom, tree.top, tree.bottom) - root.top,
      left: box.left - root.left,
    };
  }

  private chooseSide(): void {
    const root = this.view.root.getBoundingClientRect();
    const box = { top: root.top + this.anchorBox.top, bottom: root.top + this.anchorBox.bottom };
    const below = document.documentElement.clientHeight - MARGIN - GAP - box.bottom;
    const isBelow = below >= this.options.height || below >= box.top - GAP - MARGIN;
    this.side = isBelow ? "below" : "above";
  }

  /** Moves it with the pointer. */
  private drag(event: PointerEvent): void {
    if (event.button !== 0 || (event.target as Element).closest("button")) return;
    const { left, top } = this.element.getBoundingClientRect();
    const header = event.currentTarget as Element;
    const [x, y] = [event.clientX, event.clientY];
    const move = (to: PointerEvent) => {
      this.moved = { left: left + to.clientX - x, top: top + to.clientY - y };
      this.position();
    };
    header.setPointerCapture(event.pointerId);
    header.addEventListener("pointermove", move as EventListener);
    header.addEventListener("lostpointercapture", () =>
      header.removeEventListener("pointermove", move as EventListener),
    );
  }

  /** Places it below or above its anchor, inside the viewport. */
  private position(): void {
    if (!this.isOpen || !this.element.isConnected) return;
    const { style } = this.element;
    const width = document.documentElement.clientWidth;
    const height = document.documentElement.clientHeight;
    style.maxWidth = `${width - 2 * MARGIN}px`;
    // The handle in its corner sets its size.
    if (this.moved !== null || style.height !== "") {
      style.maxHeight = `${height - 2 * MARGIN}px`;
      this.place(this.moved ?? this.element.getBoundingClientRect());
      return;
    }
    this.measure();
    const root = this.view.root.getBoundingClientRect();
    const top = clamp(root.top + this.anchorBox.top, 0, height);
    const bottom = clamp(root.top + this.anchorBox.bottom, 0, height);
    style.maxHeight = "";
    const wanted = Math.min(this.element.scrollHeight + 2, height - 2 * MARGIN);
    const below = height - MARGIN - bottom - GAP;
    const above = top - GAP - MARGIN;
    // It stays on its side unless that becomes too narrow: new content and scrolling do not make it jump.
    const rooms = { below, above };
    const isNarrow = rooms[this.side] < MIN_HEIGHT && rooms[this.side] < Math.max(below, above);
    if (isNarrow) this.side = below >= above ? "below" : "above";
    const isBelow = this.side === "below";
    let room = isBelow ? below : above;
    // Without enough space on either side, it covers the anchor.
    if (room < Math.min(wanted, MIN_HEIGHT)) room = Math.min(wanted, height - 2 * MARGIN);
    const limit = Math.min(room, this.maxHeight(height));
    style.maxHeight = `${Math.round(limit)}px`;
    const y = isBelow ? bottom + GAP : top - GAP - this.element.getBoundingClientRect().height;
    this.place({ left: root.left + this.anchorBox.left, top: y });
  }

  /** Places it there, or as near as it is inside the viewport. */
  private place({ left, top }: { left: number; top: number }): void {
    const size = this.element.getBoundingClientRect();
    const { clientWidth, clientHeight } = document.documentElement;
    this.element.style.left = `${Math.round(clamp(left, MARGIN, Math.max(MARGIN, clientWidth - MARGIN - size.width)))}px`;
    this.element.style.top = `${Math.round(clamp(top, MARGIN, Math.max(MARGIN, clientHeight - MARGIN - size.height)))}px`;
  }

  private maxHeight(height: number): number {
    return Math.max(MIN_HEIGHT, Math.min(height - 2 * MARGIN, 640));
  }
}
