import { expect, it } from "vitest";
import { makeNotices } from "../../src/page/notices";
import type { Kernel, KernelState } from "../../src/view";
import { HOSTILE, named } from "../panel_rig";

function made(state: KernelState = "idle") {
  const listeners = new Set<(state: KernelState) => void>();
  const kernel = {
    state,
    lostReason: "The kernel has stopped: run the cell again.",
    ask: () => Promise.reject(new Error("nobody")),
    onChange: (listener: (state: KernelState) => void) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
  const undos: (() => void)[] = [];
  const notices = makeNotices(kernel as unknown as Kernel, (undo) => undos.push(undo));
  document.body.replaceChildren(notices.element);
  const become = (now: KernelState, more: Partial<Kernel> = {}) => {
    Object.assign(kernel, more, { state: now });
    for (const listener of listeners) listener(now);
  };
  return { notices, become, listeners, undos, text: () => notices.element.textContent ?? "" };
}

it("announces messages to screen readers, also the same one twice", () => {
  const { notices } = made();
  const live = notices.element.querySelector("[aria-live=polite]") as HTMLElement;
  notices.announce("path copied");
  const first = live.textContent;
  notices.announce("path copied");
  expect(live.textContent).not.toBe(first);
  expect(live.textContent?.trim()).toBe("path copied");
});

it("shows an error in an existing alert element until it is closed", () => {
  const { notices, text } = made();
  const alert = notices.element.querySelector("[role=alert]") as HTMLElement;
  const bar = alert.firstElementChild as HTMLElement;
  expect(bar.hidden).toBe(true);
  notices.error(HOSTILE);
  expect(bar.hidden).toBe(false);
  expect(alert.textContent).toBe(HOSTILE);
  expect(notices.element.querySelector("img")).toBeNull();
  named(alert, "Close the message").click();
  expect(bar.hidden).toBe(true);
  notices.error("another");
  notices.clear();
  expect(text()).toBe("");
});

it("says that the kernel is busy, lost (and what to do), or was never there", () => {
  const { become, text, undos, listeners } = made();
  become("busy");
  expect(text()).toBe("The kernel is busy: the answer follows when it is idle.");
  become("idle");
  expect(text()).toBe("");
  become("lost");
  expect(text()).toContain("The kernel has stopped: run the cell again.");
  become("lost", { lostReason: "This is a saved view.", isSaved: true });
  expect(text()).toBe("This is a saved view.");
  for (const undo of undos) undo();
  expect(listeners.size).toBe(0);
});

it("shows that the kernel was lost before the view was opened", () => {
  expect(made("lost").text()).toContain("run the cell again");
});
