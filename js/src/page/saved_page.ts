/**
 * Shows widgets in a page without a kernel, with nothing from the network: what ipywidgets' embedding does, for views
 * of anywidget. The page has the state of the widgets, and a mark where each is shown, as ipywidgets writes them:
 *
 *     <script type="application/vnd.jupyter.widget-state+json">{"state": {"5e1f…": {"state": {…}, "buffers": […]}}}
 *     <script type="application/vnd.jupyter.widget-view+json">{"model_id": "5e1f…"}
 *
 * `DisplayedWidget.save_html` writes such a page, and the documentation is made of them.
 */

import { importText } from "../import_text";

interface SavedState {
  state: Record<string, unknown>;
  buffers?: { data: string; path: string[] }[];
}
type Listener = (...args: unknown[]) => void;
interface FrontEnd {
  render(context: { model: SavedModel; el: HTMLElement }): unknown;
}

/** An anywidget model without a kernel: the views of the page share its traits. */
class SavedModel {
  /** Reports that there is no kernel. */
  readonly comm_live = false;
  readonly widget_manager: { get_model(id: string): Promise<SavedModel | undefined> };
  private readonly traits: Record<string, unknown>;
  private readonly listeners = new Map<string, Set<Listener>>();

  constructor({ state, buffers = [] }: SavedState, models: Map<string, SavedModel>) {
    this.widget_manager = { get_model: async (id) => models.get(id) };
    this.traits = { ...state };
    // The buffers of anywidget are whole traits.
    for (const { data, path } of buffers) if (path[0] !== undefined) this.traits[path[0]] = decoded(data);
  }

  get(name: string): unknown {
    return this.traits[name];
  }

  set(name: string, value: unknown): void {
    if (this.traits[name] === value) return;
    this.traits[name] = value;
    this.trigger(`change:${name}`, this, value);
    this.trigger("change", this);
  }

  on(event: string, listener: Listener): void {
    this.listeners.set(event, (this.listeners.get(event) ?? new Set()).add(listener));
  }

  off(event?: string | null, listener?: Listener | null): void {
    for (const [name, listeners] of this.listeners) {
      if (event && name !== event) continue;
      if (listener) listeners.delete(listener);
      else listeners.clear();
    }
  }

  save_changes(): void {}

  send(): void {
    throw new Error("a saved page has no kernel");
  }

  private trigger(event: string, ...args: unknown[]): void {
    for (const listener of [...(this.listeners.get(event) ?? [])]) listener(...args);
  }
}

function decoded(data: string): DataView {
  return new DataView(Uint8Array.from(atob(data), (character) => character.charCodeAt(0)).buffer);
}

/** The script elements of a type with their parsed content, in document order. */
function scripts<T>(type: string): [HTMLScriptElement, T][] {
  const found = document.querySelectorAll<HTMLScriptElement>(`script[type="application/vnd.jupyter.${type}+json"]`);
  return [...found].map((script) => [script, JSON.parse(script.textContent ?? "") as T]);
}

/** Inserts each view after its script element. */
export async function showSavedViews(): Promise<void> {
  const states = Object.assign({}, ...scripts<{ state: object }>("widget-state").map(([, { state }]) => state));
  const models = new Map<string, SavedModel>();
  for (const [id, state] of Object.entries<SavedState>(states)) models.set(id, new SavedModel(state, models));
  await Promise.all(
    scripts<{ model_id: string }>("widget-view").map(async ([mark, { model_id }]) => {
      const model = models.get(model_id);
      if (typeof model?.get("_esm") !== "string") return;
      const el = document.createElement("div");
      mark.after(el);
      await (await importText<FrontEnd>(String(model.get("_esm")))).render({ model, el });
    }),
  );
}

await showSavedViews();
