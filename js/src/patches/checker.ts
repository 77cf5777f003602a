/** The kernel's check of a patch while the user types: requested after a pause; late replies are dropped. */

import { wordsOf } from "../kernel/kernel";
import type { Checked, RequestError } from "../kernel/protocol";
import type { Kernel } from "../view";
import { type Draft, fields, mistake } from "./draft";

/** The pause before the kernel is asked. */
export const DEBOUNCE_MS = 150;

type Said = { state: "asked" } | { state: "fine"; checked: Checked } | { state: "wrong"; error: RequestError };

export class Checker {
  said: Said = { state: "asked" };
  /** Counts the requests: only the reply to the last one is used. */
  private turn = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** @param onSaid Called when `said` changes. */
  constructor(
    private readonly kernel: Kernel,
    private readonly onSaid: () => void,
  ) {}

  /** Asks after a pause without typing. */
  later(draft: () => Draft, number: number | null): void {
    this.forget();
    this.timer = setTimeout(() => void this.ask(draft(), number), DEBOUNCE_MS);
  }

  /** Asks now. `number` is the patch that is edited, or `null` for a new one. */
  async ask(draft: Draft, number: number | null): Promise<void> {
    this.forget();
    const { turn } = this;
    this.onSaid();
    if (mistake(draft) !== null) return;
    let said: Said;
    try {
      const { result } = await this.kernel.ask("check", { patch: fields(draft), number });
      said = { state: "fine", checked: result };
    } catch (reason) {
      said = { state: "wrong", error: wordsOf(reason) };
    }
    if (turn !== this.turn) return;
    this.said = said;
    this.onSaid();
  }

  /** Shows the error of an edit that the kernel refused. */
  refuse(error: RequestError): void {
    this.forget();
    this.said = { state: "wrong", error };
    this.onSaid();
  }

  /** Drops pending requests and the current reply. */
  forget(): void {
    clearTimeout(this.timer);
    this.turn += 1;
    this.said = { state: "asked" };
  }
}
