/** A view with the true kernel connection, whose other end the test plays. */
import { connect } from "../src/kernel/kernel";
import type { PatchState, RequestError, RequestName, Requests, SessionState, Traits } from "../src/kernel/protocol";
import { Skeleton } from "../src/tree/skeleton";
import { type FakeKernel, FakeModel, FakeView, traits, transformer } from "./fixtures";

// happy-dom has no popovers; Chromium, where their places are tested, does.
HTMLElement.prototype.showPopover ??= function (this: HTMLElement) {
  this.hidden = false;
};
HTMLElement.prototype.hidePopover ??= function (this: HTMLElement) {
  this.hidden = true;
};

interface Sent<N extends RequestName> {
  id: number;
  request: N;
  payload: Requests[N]["payload"];
}

export class Rig {
  readonly model: FakeModel;
  readonly view: FakeView;

  constructor(changes: Partial<Traits> = {}, columns = transformer()) {
    this.model = new FakeModel(traits(changes));
    const undos: (() => void)[] = [];
    const kernel = connect(this.model, (undo) => undos.push(undo));
    this.view = new FakeView(this.model, new Skeleton(columns), kernel as unknown as FakeKernel);
    for (const undo of undos) this.view.onRemove(undo);
  }

  row(path: string): number {
    return this.view.row(path);
  }

  asked<N extends RequestName>(request: N): Sent<N>[] {
    return (this.model.sent as Sent<N>[]).filter((sent) => sent.request === request);
  }

  last<N extends RequestName>(request: N): Sent<N> {
    const sent = this.asked(request).at(-1);
    if (sent === undefined) throw new Error(`${request} was not asked`);
    return sent;
  }

  /** Answers the last request of that name, or the one that is given. */
  async answer<N extends RequestName>(
    request: N,
    result: Requests[N]["result"],
    sent = this.last(request),
  ): Promise<void> {
    this.model.trigger("msg:custom", { id: sent.id, result }, []);
    await settled();
  }

  async refuse<N extends RequestName>(request: N, error: RequestError, sent = this.last(request)): Promise<void> {
    this.model.trigger("msg:custom", { id: sent.id, error }, []);
    await settled();
  }

  session(patches: PatchState[], more: Partial<SessionState> = {}): void {
    const version = this.model.get("session").version + 1;
    this.model.set("session", { version, patches, can_undo: true, can_redo: false, note: "", ...more });
  }
}

/** Until everything that was waiting for an answer has gone on. */
export async function settled(): Promise<void> {
  for (let turn = 0; turn < 10; turn++) await Promise.resolve();
}

/** What a screen reader calls an element: its label, or its text. */
export function named<E extends HTMLElement = HTMLElement>(within: Element, name: string): E {
  const labels = [...within.querySelectorAll<HTMLLabelElement>("label")];
  const label = labels.find(({ textContent }) => textContent === name);
  const field = label && within.querySelector<E>(`[id="${label.htmlFor}"]`);
  if (field) return field;
  const found = [...within.querySelectorAll<E>("button, [aria-label]")].find(
    (candidate) => (candidate.getAttribute("aria-label") ?? candidate.textContent) === name,
  );
  if (!found) throw new Error(`nothing is called ${name}`);
  return found;
}

export function type(field: HTMLInputElement, text: string): void {
  field.value = text;
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

export function choose(field: HTMLSelectElement, value: string): void {
  field.value = value;
  field.dispatchEvent(new Event("change", { bubbles: true }));
}

export const HOSTILE = '<img src=x onerror="globalThis.isHacked = true">';
