/**
 * The interfaces between the parts of a view. `index.ts` creates the parts and connects them;
 * they import only these from one another.
 *
 *     index.ts       creates the view of a model in the page
 *     ├── kernel/    messages: requests and replies; a lost kernel                  protocol.ts, kernel.ts
 *     ├── tree/      rows, search, scores, keyboard, toolbar                        tree_view.ts, tree_state.ts
 *     ├── flow/      the dataflow of a module as a picture                          dataflow.ts, layout.ts, flow_panel.ts
 *     ├── details/   the popup of a node, and its activation                        popup.ts, activation_view.ts
 *     ├── patches/   the editor of a patch, the list of chosen patches              editor.ts, edits.ts, patch_list.ts
 *     ├── runs/      jobs and their progress, the inputs of a run, its report       jobs.ts, run_panel.ts, run_report.ts
 *     ├── plots/     heatmaps and histograms; the heatmap of a sweep's results      plots.ts, result_heatmap.ts
 *     ├── views/     what all views share: selection, actions; the other views      selection.ts, linked_view.ts
 *     ├── circuits/  the picture of a circuit, alone or above the tree              circuit_figure.ts
 *     └── page/      elements, grids of cells, arrow keys, dialogs, theme, formatted text  dom.ts, grid.ts, roving.ts, text.ts
 *
 * From a click to a patch: a row calls `View.editPatch`, `patches/editor.ts` sends what is typed as a `check` request,
 * and `patches/edits.ts` sends the finished patch as an `edit` request. `notebook/views/linked.py` answers both.
 */

import type { LinkedTraits, RequestError, RequestName, Requests, Traits } from "./kernel/protocol";
import type { Skeleton } from "./tree/skeleton";
import type { Selection, SharedFilter } from "./views/selection";

/** The anywidget model of a tree or another widget, with types. */
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

/** Calls `show` after each change of traits, given by their names, and of what else it depends on. */
export function follow(
  view: Parameters<typeof listen>[0],
  sources: readonly (string | { onChange(listener: () => void): () => void })[],
  show: () => void,
): void {
  for (const source of sources) {
    if (typeof source === "string") listen(view, `change:${source}`, show);
    else view.onRemove(source.onChange(show));
  }
}

/** Listeners of one kind of change. */
export class Listeners<T = void> {
  private readonly all = new Set<(change: T) => unknown>();

  /** Returns a function that removes the listener. */
  add(listener: (change: T) => unknown): () => void {
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

/** A reply with its buffers. */
export interface Answer<N extends RequestName> {
  result: Requests[N]["result"];
  buffers: DataView[];
}

export class RequestFailed extends Error {
  constructor(readonly error: RequestError) {
    super(error.message);
  }
}

/** `busy`: a request has had no reply for half a second; `lost`: there will be no more replies. */
export type KernelState = "idle" | "busy" | "lost";

export interface Kernel {
  readonly state: KernelState;
  /** Why it is lost and what to do, as a sentence; empty before. */
  readonly lostReason?: string;
  /** Whether there never was a kernel: in a saved notebook or page. */
  readonly isSaved?: boolean;
  /**
   * Rejects with `RequestFailed`; never hangs once the kernel is known to be lost.
   * `isQuiet`: the user does not wait for the reply, so that the kernel does not count as busy.
   */
  ask<N extends RequestName>(request: N, payload: Requests[N]["payload"], isQuiet?: boolean): Promise<Answer<N>>;
  /** Returns a function that removes the listener. */
  onChange(listener: (state: KernelState) => void): () => void;
}

export interface Notices {
  /** Announces text to screen readers, in a live region. */
  announce(text: string): void;
  /** Shows an error until it is closed or replaced; screen readers read it as an alert. */
  error(message: string): void;
  clear(): void;
}

/** What the editor is opened for: a row (or a component of its value, by name), or a chosen patch. */
export type PatchTarget = { row: number; component?: string; positions?: string } | { number: number };

/** The context of the parts of every view of a graph. */
export interface Linked<T extends LinkedTraits = LinkedTraits> {
  /** `.gp-root`. */
  readonly root: HTMLElement;
  readonly model: Model<T>;
  readonly kernel: Kernel;
  readonly notices: Notices;
  readonly selection: Selection;
  readonly filter: SharedFilter;
  /** Calls `undo` when the view is removed. Parts register every listener, timer and observer here. */
  onRemove(undo: () => void): void;
}

/** The context of the parts of the tree browser. */
export interface View extends Linked<Traits> {
  readonly skeleton: Skeleton;

  /** Expands the ancestors of a row, scrolls to it and selects it. */
  reveal(row: number): void;
  focusTree(): void;
  /** Opens the popup of a row beside `anchor`. */
  showDetails(row: number, anchor: Element): void;
  /** Opens the editor for a new patch of a row, or for a patch that is chosen. */
  editPatch(target: PatchTarget, anchor: Element): void;
}

export interface Part {
  readonly element: HTMLElement;
}
