/** The progress of a job: a bar, the elapsed time, and a button that interrupts it. */

import type { JobStatus } from "../kernel/protocol";
import { buttonElement, element } from "../page/dom";
import { formatSeconds } from "../page/numbers";
import type { Kernel } from "../view";

export class Progress {
  private readonly bar: HTMLProgressElement;
  private readonly text = element("span", { class: "gp-progress-text" });
  private readonly button: HTMLButtonElement;
  private stopWaiting: (() => void) | null = null;
  readonly element: HTMLElement;

  /** `name`: the accessible name of the bar: `Progress of the run`. */
  constructor(
    name: string,
    private readonly kernel: Kernel,
    interrupt: () => void,
  ) {
    this.bar = element("progress", { class: "gp-progress-bar", max: 1, "aria-label": name });
    this.button = buttonElement({ onclick: interrupt }, "Interrupt");
    this.element = element("div", { class: "gp-progress", hidden: true }, this.bar, this.text, this.button);
  }

  get hasFocus(): boolean {
    return this.button.matches(":focus");
  }

  /** Shows that the kernel has not replied yet. */
  showWaiting(): void {
    const isBusy = this.kernel.state === "busy";
    this.bar.removeAttribute("value");
    this.text.textContent = isBusy ? "The kernel is busy: this starts when it is idle." : "Asking the kernel …";
    this.button.hidden = true;
    this.element.hidden = false;
    this.stopWaiting ??= this.kernel.onState(() => this.showWaiting());
  }

  private answered(): void {
    this.stopWaiting?.();
    this.stopWaiting = null;
    this.button.hidden = false;
  }

  show({ fraction, seconds }: Pick<JobStatus, "fraction" | "seconds">): void {
    this.answered();
    if (fraction === null) this.bar.removeAttribute("value");
    else this.bar.value = fraction;
    const parts = [formatSeconds(seconds)];
    if (fraction !== null) parts.unshift(`${Math.floor(100 * fraction)}%`);
    this.text.replaceChildren(parts.join(" · "));
    this.element.hidden = false;
  }

  /** The kernel interrupts a run between two modules, which can take a moment. */
  showInterrupting(): void {
    this.button.textContent = "Interrupting …";
    this.button.setAttribute("aria-disabled", "true");
  }

  hide(): void {
    this.answered();
    this.element.hidden = true;
    this.button.textContent = "Interrupt";
    this.button.removeAttribute("aria-disabled");
  }
}
