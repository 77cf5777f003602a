/** The kernel's check of a patch while the user types: requested after a pause; late replies are ignored. */

import { asRequestError } from "../kernel/kernel";
import type { Checked, RequestError } from "../kernel/protocol";
import type { Kernel } from "../view";
import { type Draft, fields, localError } from "./draft";

/** The pause before the kernel is asked. */
export const DEBOUNCE_MS = 150;

type CheckState = { state: "asked" } | { state: "fine"; checked: Checked } | { state: "wrong"; error: RequestError };

export class Checker {
  state: CheckState = { state: "asked" };
  /** Counts the requests: only the reply to the last one is used. */
  private turn = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** @param onChange Called when `said` changes. */
  constructor(
    private readonly kernel: Kernel,
    private readonly onChange: () => void,
  ) {}

  /** Asks after a pause without typing. */
  askAfterPause(draft: () => Draft, number: number | null): void {
    this.reset();
    this.timer = setTimeout(() => void this.ask(draft(), number), DEBOUNCE_MS);
  }

  /** Asks now. `number` is the patch that is edited, or `null` for a new one. */
  async ask(draft: Draft, number: number | null): Promise<void> {
    this.reset();
    const { turn } = this;
    this.onChange();
    if (localError(draft) !== null) return;
    let said: CheckState;
    try {
      const { result } = await this.kernel.ask("check", { patch: fields(draft), number });
      said = { state: "fine", checked: result };
    } catch (reason) {
      said = { state: "wrong", error: asRequestError(reason) };
    }
    if (turn !== this.turn) return;
    this.state = said;
    this.onChange();
  }

  /** Shows the error of an edit that the kernel refused. */
  showRefusal(error: RequestError): void {
    this.reset();
    this.state = { state: "wrong", error };
    this.onChange();
  }

  /** Drops pending requests and the current reply. */
  reset(): void {
    clearTimeout(this.timer);
    this.turn += 1;
    this.state = { state: "asked" };
  }
}
