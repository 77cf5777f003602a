/**
 * The script that anywidget loads: decompresses the front end, which is in a trait, and runs it. Uncompressed, it
 * would be three times as large, in every message that shows a widget and in every notebook that is saved with one.
 */
import { importText } from "./import_text";
import { inflateText } from "./inflate";
import type { Model } from "./view";

type Undo = () => void;
interface FrontEnd {
  css: string;
  render: (context: { model: Model; el: HTMLElement }) => Promise<Undo>;
}

interface Unpacked {
  readonly data: DataView;
  readonly frontEnd: Promise<FrontEnd>;
}

// Hosts load this script once for each widget. The front end is loaded once per page: ids that it gives to
// elements stay unique, and only the first widget waits for it. Kernels of other versions send another front end.
const page = globalThis as unknown as Record<symbol, Unpacked[] | undefined>;
const UNPACKED = Symbol.for("graphpatch-notebook: front ends");

/** Returns the front end of a widget, from the cache if an earlier widget has the same one. */
function frontEndOf(data: DataView): Promise<FrontEnd> {
  page[UNPACKED] ??= [];
  const known = page[UNPACKED];
  const same = known.find((other) => isEqual(other.data, data));
  if (same) return same.frontEnd;
  const made = { data, frontEnd: unpack(data) };
  known.push(made);
  // The next widget tries again; `render` says why this one failed.
  made.frontEnd.catch(() => known.splice(known.indexOf(made), 1));
  return made.frontEnd;
}

function isEqual(a: DataView, b: DataView): boolean {
  const [left, right] = [a, b].map((data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  return left?.length === right?.length && left?.every((byte, at) => byte === right?.[at]) === true;
}

async function unpack(data: DataView): Promise<FrontEnd> {
  const { css, js } = JSON.parse(await inflateText(data)) as { css: string; js: string };
  return { css, render: (await importText<Pick<FrontEnd, "render">>(js)).render };
}

/** Hosts call this when the model exists, before they render it. */
function initialize({ model }: { model: Model }): void {
  if (!model.get("front_end")?.byteLength) return;
  void frontEndOf(model.get("front_end"));
}

async function render(context: { model: Model; el: HTMLElement }): Promise<Undo> {
  const { model, el } = context;
  // A notebook that was saved without the front end: the static HTML stays.
  if (!model.get("front_end")?.byteLength) return () => undefined;
  const style = document.createElement("style");
  try {
    const { css, render } = await frontEndOf(model.get("front_end"));
    style.textContent = css;
    el.append(style);
    const undo = await render(context);
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
