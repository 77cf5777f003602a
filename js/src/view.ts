/**
 * The view: what its parts get, and the types they know each other by. `index.ts` creates the parts and connects them;
 * they import nothing else of one another.
 *
 *     index.ts       creates the view of a model in the page
 *     ├── kernel/    messages: requests, replies, polling; a lost kernel            protocol.ts, kernel.ts
 *     ├── tree/      rows, search, scores, keyboard, toolbar                        tree_view.ts, tree_state.ts
 *     ├── details/   the popup of a node, and its activation                        popup.ts, activation_view.ts
 *     ├── patches/   the editor of a patch, the list of chosen patches              editor.ts, edits.ts, patch_list.ts
 *     ├── runs/      the inputs of a run, its progress and its report               run_panel.ts, run_report.ts
 *     ├── plots/     heatmaps and histograms; the heatmap of a sweep's results      plots.ts, result_heatmap.ts
 *     ├── views/     the selection that all views share, what can be done with it   selection.ts, actions.ts, attention_view.ts
 *     ├── circuits/  the picture of a circuit, alone or above the tree              circuit_figure.ts, circuit_views.ts
 *     └── page/      elements, floating panels, notices, theme, formatted text      dom.ts, notices.ts
 *
 * From a click to a patch: a row calls `View.editPatch`, `patches/editor.ts` sends what is typed as a `check` request,
 * and `patches/edits.ts` sends the finished patch as an `edit` request. `notebook/views/requests.py` answers both.
 */

import type { LinkedTraits, RequestError, RequestName, Requests, Traits } from "./kernel/protocol";
import type { Skeleton } from "./tree/skeleton";
import type { Selection } from "./views/selection";
import type { SharedFilter } from "./views/shared_filter";

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
  /** The widget manager, which is different in each host. */
  widget_manager?: unknown;
}

/** Calls `listener` at each event of a model, until the view is removed. */
export function listen(
  view: { readonly model: Pick<Model, "on" | "off">; onRemove(undo: () => void): void },
  event: string,
  listener: Parameters<Model["on"]>[1],
): void {
  const { model } = view;
  model.on(event, listener);
  view.onRemove(() => model.off(event, listener));
}

/** Listeners of one kind of change. */
export class Listeners<T = void> {
  private readonly all = new Set<(change: T) => void>();

  /** Returns a function that removes the listener. */
  add(listener: (change: T) => void): () => void {
    this.all.add(listener);
    return () => this.all.delete(listener);
  }

  notify(change: T): void {
    for (const listener of [...this.all]) listener(change);
  }
}

/** Sends the traits that were set to the kernel. Returns whether that was possible: hosts throw without a connection. */
export function saveChanges(model: Pick<Model, "save_changes">): boolean {
  try {
    model.save_changes();
    return true;
  } catch {
    return false;
  }
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
  /** Whether there was none from the start: in a saved notebook or page. */
  readonly isSaved?: boolean;
  /**
   * Rejects with `RequestFailed`; never hangs once the kernel is known to be lost.
   * `isQuiet`: nobody waits for the answer, so that the kernel is not called busy for want of it.
   */
  ask<N extends RequestName>(request: N, payload: Requests[N]["payload"], isQuiet?: boolean): Promise<Answer<N>>;
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

/** What the editor is opened for: a row (or a component of its value, by name), or a patch that is chosen. */
export type PatchTarget = { row: number; component?: string; positions?: string } | { number: number };

/** What the parts of every view of a graph get. */
export interface Linked<T extends LinkedTraits = LinkedTraits> {
  /** `.gp-root`. */
  readonly root: HTMLElement;
  readonly model: Model<T>;
  readonly kernel: Kernel;
  readonly notices: Notices;
  readonly selection: Selection;
  readonly filter: SharedFilter;
  /** Runs when the view is taken away. Every listener, timer and observer of a part goes through it. */
  onRemove(undo: () => void): void;
}

/** What every part of the tree browser gets. */
export interface View extends Linked<Traits> {
  readonly skeleton: Skeleton;

  /** Opens what is above a row, scrolls to it and makes it the selected one. */
  reveal(row: number): void;
  /** Puts the keyboard's focus on the tree. */
  focusTree(): void;
  /** Opens the popup of a row beside `anchor` (in the inline panel, where there is no popover). */
  showDetails(row: number, anchor: Element): void;
  /** Opens the editor for a new patch of a row, or for a patch that is chosen. */
  editPatch(target: PatchTarget, anchor: Element): void;
}

/** A part in place. */
export interface Part {
  readonly element: HTMLElement;
}
