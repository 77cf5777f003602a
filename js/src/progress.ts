/** How far a job is: a bar, the module that runs now, the time so far, and a button that stops it. */
import { element } from "./dom";
import { formatSeconds } from "./numbers";
import type { Job } from "./polling";

export class Progress {
  private readonly bar: HTMLProgressElement;
  private readonly text = element("span", { class: "gp-progress-text" });
  private readonly button: HTMLButtonElement;
  readonly element: HTMLElement;

  /** `name`: of the bar, for those who do not see it: `Progress of the run`. */
  constructor(name: string, interrupt: () => void) {
    this.bar = element("progress", { class: "gp-progress-bar", max: 1, "aria-label": name });
    this.button = element("button", { type: "button", class: "gp-button", onclick: interrupt }, "Interrupt");
    this.element = element("div", { class: "gp-progress", hidden: true }, this.bar, this.text, this.button);
  }

  get hasFocus(): boolean {
    return this.element.contains(document.activeElement);
  }

  show({ fraction, at, seconds }: Pick<Job, "fraction" | "at" | "seconds">): void {
    if (fraction === null) this.bar.removeAttribute("value");
    else this.bar.value = fraction;
    const parts = [formatSeconds(seconds)];
    if (fraction !== null) parts.unshift(`${Math.floor(100 * fraction)}%`);
    this.text.replaceChildren(parts.join(" · "));
    if (at !== null) this.text.append(" · ", element("code", { title: at }, at));
    this.element.hidden = false;
  }

  /** The kernel stops a run between two modules: that can take a moment. */
  showInterrupting(): void {
    this.button.textContent = "Interrupting …";
    this.button.setAttribute("aria-disabled", "true");
  }

  hide(): void {
    this.element.hidden = true;
    this.button.textContent = "Interrupt";
    this.button.removeAttribute("aria-disabled");
  }
}
