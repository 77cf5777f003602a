/**
 * The parts of a view, and what they know of each other. Parts import nothing of one another but these types; `index.ts`
 * puts them together.
 *
 *     view
 *     ├── toolbar      search, count, plumbing, legend of scores      toolbar.ts, scores.ts
 *     ├── tree         the rows                                       tree_view.ts, rows.ts, keyboard.ts
 *     ├── popup        details of a node, its activation              popup.ts, activation_view.ts
 *     ├── editor       a patch, being typed                           editor.ts
 *     ├── patches      the chosen patches                             patch_list.ts
 *     ├── run          what they change                               run_panel.ts
 *     └── notices      the live region; errors; the lost kernel       notices.ts
 */

import type { RequestError, RequestName, Requests, Traits } from "./kernel/protocol";
import type { Skeleton } from "./tree/skeleton";

/** The model as anywidget gives it, with types: that of the tree, or another widget's. */
export interface Model<T = Traits> {
  get<K extends keyof T>(name: K): T[K];
  set<K extends keyof T>(name: K, value: T[K]): void;
  save_changes(): void;
  send(content: unknown, callbacks?: unknown, buffers?: ArrayBuffer[]): void;
  // biome-ignore lint/suspicious/noExplicitAny: events carry whatever their sender says
  on(event: string, listener: (...args: any[]) => void): void;
  // biome-ignore lint/suspicious/noExplicitAny: events carry whatever their sender says
  off(event?: string | null, listener?: ((...args: any[]) => void) | null): void;
  /** The host's own manager, of which every host has another. */
  widget_manager?: unknown;
}

/** A reply, with the binary parts that came beside it. */
export interface Answer<N extends RequestName> {
  result: Requests[N]["result"];
  buffers: DataView[];
}

/** What a request is rejected with. */
export class RequestFailed extends Error {
  constructor(readonly error: RequestError) {
    super(error.message);
  }
}

/** `idle`; `busy`: something was asked and no answer came for half a second; `lost`: none will come. */
export type KernelState = "idle" | "busy" | "lost";

export interface Kernel {
  readonly state: KernelState;
  /** Why it is lost, in words, with what to do; empty before. */
  readonly why?: string;
  /** Rejects with `RequestFailed`; never hangs once the kernel is known to be lost. */
  ask<N extends RequestName>(request: N, payload: Requests[N]["payload"]): Promise<Answer<N>>;
  /** Returns what stops that. */
  onState(listener: (state: KernelState) => void): () => void;
}

export interface Notices {
  /** Into the live region: read out by screen readers, not seen. */
  say(text: string): void;
  /** Seen until it is closed or the next one comes; read out as an alert. */
  error(message: string): void;
  clear(): void;
}

/** What every part gets. */
export interface View {
  /** `.gp-root`. */
  readonly root: HTMLElement;
  readonly model: Model;
  readonly skeleton: Skeleton;
  readonly kernel: Kernel;
  readonly notices: Notices;
  /** Runs when the view is taken away. Every listener, timer and observer of a part goes through it. */
  onRemove(undo: () => void): void;

  /** Opens what is above a row, scrolls to it and makes it the selected one. */
  reveal(row: number): void;
  /** Puts the keyboard's focus on the tree. */
  focusTree(): void;
  /** Opens the popup of a row beside `anchor` (in the inline panel, where there is no popover). */
  showDetails(row: number, anchor: Element): void;
  /** Opens the editor for a new patch of a row, or for a patch that is chosen. */
  editPatch(target: { row: number } | { number: number }, anchor: Element): void;
}

/** A part in place. */
export interface Part {
  readonly element: HTMLElement;
}
