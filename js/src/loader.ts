/**
 * The script that anywidget loads: finds the model that holds the compressed front end, which all views of a kernel
 * refer to, and runs it. So a saved notebook has it once.
 */
import { importText } from "./import_text";
import { inflateText } from "./inflate";
import type { Model } from "./view";

type Undo = () => void;
interface FrontEnd {
  css: string;
  render: (context: { model: Model; el: HTMLElement }) => Promise<Undo>;
}
interface Manager {
  get_model(id: string): Promise<{ get(name: string): unknown }>;
}

// Hosts load this script once for each widget. The front end is loaded once per page: ids that it gives to
// elements stay unique, and only the first widget waits for it. Kernels of other versions send another front end.
const page = globalThis as unknown as Record<symbol, Map<string, Promise<FrontEnd>> | undefined>;
const MOST_MILLISECONDS = 60_000; // the kernel may be busy
const UNPACKED = Symbol.for("graphpatch-notebook: front ends by their digests");

/** Returns the front end of a widget, from the cache if an earlier widget has the same one; `null`: it was not saved. */
async function frontEndOf(model: Model): Promise<FrontEnd | null> {
  const manager = model.widget_manager as Manager;
  const id = model.get("front_end")?.replace("IPY_MODEL_", "");
  if (!id) return null;
  const shared = await restored(manager, id);
  const [bundle, digest] = [shared.get("bundle") as DataView, String(shared.get("digest"))];
  page[UNPACKED] ??= new Map();
  const known = page[UNPACKED];
  const found = known.get(digest) ?? unpack(bundle);
  known.set(digest, found);
  // The next widget tries again; `render` says why this one failed.
  found.catch(() => known.delete(digest));
  return found;
}

/**
 * Returns a model of the page. In a page that was loaded again, a cell may run before the host has fetched from the
 * kernel what earlier cells made, among it the front end: until then there is no such model.
 */
async function restored(manager: Manager, id: string): ReturnType<Manager["get_model"]> {
  const start = performance.now();
  for (;;) {
    try {
      return await manager.get_model(id);
    } catch (error) {
      if (performance.now() - start > MOST_MILLISECONDS) throw error;
      await new Promise((done) => setTimeout(done, 50));
    }
  }
}

async function unpack(data: DataView): Promise<FrontEnd> {
  const { css, js } = JSON.parse(await inflateText(data)) as { css: string; js: string };
  return { css, render: (await importText<Pick<FrontEnd, "render">>(js)).render };
}

/** Hosts call this when the model exists, before they render it. */
function initialize({ model }: { model: Model }): void {
  frontEndOf(model).catch(() => undefined);
}

async function render(context: { model: Model; el: HTMLElement }): Promise<Undo> {
  const { model, el } = context;
  const style = document.createElement("style");
  try {
    const frontEnd = await frontEndOf(model);
    if (frontEnd === null) return () => undefined; // the static HTML stays
    style.textContent = frontEnd.css;
    el.append(style);
    const undo = await frontEnd.render(context);
    return () => {
      undo();
      style.remove();
    };
  } catch (error) {
    const failure = document.createElement("p");
    failure.setAttribute("role", "alert");
    failure.textContent = `This widget could not be loaded (${error}). Reload the page and run the cell again.`;
    el.append(failure);
    return () => failure.remove();
  }
}

export default { initialize, render };
