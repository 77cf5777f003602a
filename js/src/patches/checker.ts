/** What the kernel says of a patch while it is typed: asked after a pause; late answers are dropped. */

import { wordsOf } from "../kernel/kernel";
import type { Checked, RequestError } from "../kernel/protocol";
import type { Kernel } from "../view";
import { type Draft, fields, mistake } from "./draft";

/** How long one types before the kernel is asked. */
export const DEBOUNCE_MS = 150;

export type Said = { state: "asked" } | { state: "fine"; checked: Checked } | { state: "wrong"; error: RequestError };

export class Checker {
  said: Said = { state: "asked" };
  /** Counts what was typed and asked: answers to anything but the last mean nothing any more. */
  private turn = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** @param onSaid Is called when `said` is another. */
  constructor(
    private readonly kernel: Kernel,
    private readonly onSaid: () => void,
  ) {}

  /** Asks when nothing has been typed for a while. */
  later(draft: () => Draft, number: number | null): void {
    this.forget();
    this.timer = setTimeout(() => void this.ask(draft(), number), DEBOUNCE_MS);
  }

  /** Asks now. `number`: the patch that is being changed. */
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

  /** The kernel has said it otherwise: it refused the patch. */
  refuse(error: RequestError): void {
    this.forget();
    this.said = { state: "wrong", error };
    this.onSaid();
  }

  /** Whatever was asked is of no interest any more. */
  forget(): void {
    clearTimeout(this.timer);
    this.turn += 1;
    this.said = { state: "asked" };
  }
}
