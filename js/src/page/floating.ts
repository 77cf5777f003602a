/** A dialog beside its anchor, which can be moved and resized. */
import type { View } from "../view";
import { consume, element, focusedElement, iconButton } from "./dom";
import { clamp, followPointer } from "./grid";

const MARGIN = 8;
const GAP = 4;
/** With less space than this, in pixels, a dialog moves to the other side of its anchor. */
const MIN_HEIGHT = 220;
const MAX_HEIGHT = 640;

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

export function makeDialog(view: View, options: DialogOptions) {
  const { root } = view;
  const page = document.documentElement;
  let isOpen = false;
  let anchor: Element | null = null;
  /** The anchor's last place in the view, for when its row is out of sight. */
  let anchorBox = { top: 0, bottom: 0, left: 0 };
  /** Where the user has moved it; `null`: it is beside its anchor. */
  let moved: { left: number; top: number } | null = null;
  let side: "below" | "above" = "below";
  let opener: Element | null = null;
  let listening = new AbortController();
  const onkeydown = (event: KeyboardEvent) => {
    if (event.key !== "Escape" || event.isComposing) return;
    consume(event);
    options.onEscape();
  };
  const attributes = { role: "dialog", tabindex: -1, popover: "manual", onkeydown };
  const dialog = element("div", { class: `gp-floating ${options.class}`, ...attributes });

  /** Shows it beside an element, with `name` as its accessible name. */
  const open = (beside: Element, name: string) => {
    dialog.setAttribute("aria-label", name);
    [anchor, moved] = [beside, null];
    Object.assign(dialog.style, { width: "", height: "" });
    measure();
    const { above, below } = rooms();
    side = below >= options.height || below >= above ? "below" : "above";
    if (!isOpen) {
      opener = focusedElement(root);
      isOpen = true;
      dialog.showPopover();
      listen();
    }
    position();
  };
  /** Replaces the content, and keeps the focus inside. `buttons`: those beside the one that closes it. */
  const fill = (title: string, body: HTMLElement, ...buttons: HTMLElement[]) => {
    const hadFocus = dialog.contains(focusedElement(dialog));
    const close = iconButton("close", "Close", { title: "Close (Esc)", onclick: () => options.onEscape() });
    const heading = element("div.gp-floating-title.gp-mono", title);
    dialog.replaceChildren(
      element("div.gp-floating-header", { onpointerdown: drag }, heading, ...buttons, close),
      body,
    );
    if (hadFocus) dialog.focus({ preventScroll: true });
  };
  /** Closes it, and restores the focus if it is inside. */
  const close = () => {
    if (!isOpen) return;
    const hadFocus = dialog.contains(focusedElement(root));
    stop();
    dialog.hidePopover();
    if (hadFocus) restoreFocus();
    opener = null;
    options.onClose?.();
    // Fields of a closed dialog must not be found by their labels.
    dialog.replaceChildren();
  };
  const stop = () => {
    isOpen = false;
    listening.abort();
  };
  const restoreFocus = () => {
    const isSeen = opener instanceof HTMLElement && root.contains(opener) && opener.offsetParent !== null;
    if (isSeen && !opener?.closest("[role=tree]")) (opener as HTMLElement).focus();
    else view.focusTree();
  };
  const listen = () => {
    listening = new AbortController();
    const { signal } = listening;
    const how = { capture: true, passive: true, signal };
    const isInside = (event: Event) => event.composedPath().includes(dialog);
    const closeOutside = (event: Event) => isInside(event) || close();
    if (options.closesOnOutsideClick) document.addEventListener("pointerdown", closeOutside, how);
    window.addEventListener("resize", position, how);
    window.addEventListener("scroll", (event) => isInside(event) || position(), how);
    const observer = new ResizeObserver(position);
    for (const part of [dialog, root]) observer.observe(part);
    signal.addEventListener("abort", () => observer.disconnect());
  };

  /** Measures where the anchor is now: rows move when others open, and scroll. */
  const measure = () => {
    const row = anchor?.closest("[role=treeitem]");
    // Scrolling replaces the elements of rows.
    const found = anchor?.isConnected || !row?.id ? anchor : root.querySelector(`#${CSS.escape(row.id)}`);
    if (!found?.isConnected) return;
    const from = root.getBoundingClientRect();
    const box = found.getBoundingClientRect();
    const tree = (found.closest("[role=tree]") ?? page).getBoundingClientRect();
    anchorBox = {
      top: clamp(box.top, tree.top, tree.bottom) - from.top,
      bottom: clamp(box.bottom, tree.top, tree.bottom) - from.top,
      left: box.left - from.left,
    };
  };
  /** Where the anchor is in the window, and the room below and above it. */
  const rooms = () => {
    const { left, top } = root.getBoundingClientRect();
    const [start, end] = [top + anchorBox.top, top + anchorBox.bottom].map((at) => clamp(at, 0, page.clientHeight));
    const below = page.clientHeight - MARGIN - GAP - (end ?? 0);
    return {
      left: left + anchorBox.left,
      top: start ?? 0,
      bottom: end ?? 0,
      below,
      above: (start ?? 0) - GAP - MARGIN,
    };
  };
  /** Places it below or above its anchor, inside the viewport. */
  const position = () => {
    if (!isOpen || !dialog.isConnected) return;
    const { style } = dialog;
    const most = page.clientHeight - 2 * MARGIN;
    style.maxWidth = `${page.clientWidth - 2 * MARGIN}px`;
    // The handle in its corner sets its size.
    if (moved !== null || style.height !== "") {
      style.maxHeight = `${most}px`;
      return place(moved ?? dialog.getBoundingClientRect());
    }
    measure();
    style.maxHeight = "";
    const wanted = Math.min(dialog.scrollHeight + 2, most);
    const { left, top, bottom, ...room } = rooms();
    // It stays on its side unless that becomes too narrow: new content and scrolling do not make it jump.
    if (room[side] < MIN_HEIGHT) side = room.below >= room.above ? "below" : "above";
    // Without enough space on either side, it covers the anchor.
    const height = room[side] < Math.min(wanted, MIN_HEIGHT) ? wanted : room[side];
    style.maxHeight = `${Math.round(Math.min(height, Math.max(MIN_HEIGHT, Math.min(most, MAX_HEIGHT))))}px`;
    place({ left, top: side === "below" ? bottom + GAP : top - GAP - dialog.getBoundingClientRect().height });
  };
  /** Places it there, or as near as it is inside the viewport. */
  const place = ({ left, top }: { left: number; top: number }) => {
    const { width, height } = dialog.getBoundingClientRect();
    const inside = (at: number, room: number) => `${Math.round(clamp(at, MARGIN, Math.max(MARGIN, room - MARGIN)))}px`;
    dialog.style.left = inside(left, page.clientWidth - width);
    dialog.style.top = inside(top, page.clientHeight - height);
  };
  /** Moves it with the pointer. */
  const drag = (event: PointerEvent) => {
    if (event.button !== 0 || (event.target as Element).closest("button")) return;
    const { left, top } = dialog.getBoundingClientRect();
    followPointer(event, (x, y) => {
      moved = { left: left + x, top: top + y };
      position();
    });
  };
  view.onRemove(stop);
  return {
    /** `role=dialog`; the caller adds the content. */
    element: dialog,
    get isOpen() {
      return isOpen;
    },
    open,
    fill,
    close,
  };
}
