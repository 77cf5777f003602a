/** The messages of a view: to screen readers, in an error bar, and about a kernel that is busy, lost, or was never there. */

import type { Kernel, Notices, Part } from "../view";
import { buttonElement, element, icon, iconButton } from "./dom";

const BUSY = "The kernel is busy: the answer follows when it is idle.";
const LOST_TOO = "You can still browse the tree.";

/** Returns the notices, with their element, which goes above the tree. */
export function makeNotices(kernel: Kernel, onRemove: (undo: () => void) => void): Notices & Part {
  const spoken = element("div.gp-visually-hidden", { role: "status", "aria-live": "polite" });
  const words = element("div.gp-notice-text");
  const close = iconButton("close", "Close the message", { onclick: () => clear() });
  const bar = element("div.gp-notice.gp-notice-error", { hidden: true }, icon("warning"), words, close);
  // The alert exists before it has a text: some screen readers do not read one that is inserted with its text.
  const alert = element("div", { role: "alert" }, bar);
  const banner = element("div", { role: "status" });
  const clear = () => {
    bar.hidden = true;
    words.textContent = "";
  };
  const show = () => banner.replaceChildren(...kernelNotice(kernel));
  onRemove(kernel.onChange(show));
  show();
  return {
    element: element("div.gp-stack.gp-notices", spoken, alert, banner),
    announce: (text) => {
      // Screen readers read a repeated message only if the text changes.
      spoken.textContent = spoken.textContent === text ? `${text}\u00a0` : text;
    },
    error: (message) => {
      bar.hidden = false;
      words.textContent = message;
    },
    clear,
  };
}

/** A line of text with a button; `say` changes the text, and hides both if it is empty, or the button alone. */
export function makeOffer(button: string, act: () => void): Part & { say(text: string, isOffered?: boolean): void } {
  const words = element("span");
  const line = element("p.gp-line.gp-note.gp-offer", { role: "status", hidden: true }, words);
  const offer = buttonElement({ onclick: act }, button);
  line.append(offer);
  const say = (text: string, isOffered = true) => {
    words.textContent = text;
    line.hidden = text === "";
    offer.hidden = !isOffered;
  };
  return { element: line, say };
}

function kernelNotice({ state, lostReason: why = "The kernel has stopped.", isSaved }: Kernel): HTMLElement[] {
  if (state === "idle") return [];
  const notice = (kind: string, picture: Element, text: string) => [
    element("div", { class: `gp-notice gp-notice-${kind}` }, picture, element("div.gp-notice-text", text)),
  ];
  if (state === "busy") return notice("busy", element("span.gp-spinner", { "aria-hidden": true }), BUSY);
  if (isSaved) return notice("saved", icon("info"), why);
  return notice("lost", icon("warning"), `${why} ${LOST_TOO}`);
}
