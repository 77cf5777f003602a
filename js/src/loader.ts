/**
 * What anywidget loads: unpacks the front end, which comes deflated in a trait, and hands over to it. As plain text it
 * would be three times as large, in every message that shows a widget and in every notebook that is saved with one.
 */
import { inflated } from "./inflate";
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

// Hosts load this script once for each widget. The front end is loaded once for all of a page: ids that it gives to
// elements stay apart, and only the first widget waits for it. Kernels of other versions send others.
const page = globalThis as unknown as Record<symbol, Unpacked[] | undefined>;
const UNPACKED = Symbol.for("graphpatch-notebook: front ends");

/** The front end of a widget: that of an earlier one, if it is the same. */
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
  const { css, js } = JSON.parse(await inflated(data)) as { css: string; js: string };
  const url = URL.createObjectURL(new Blob([js], { type: "text/javascript" }));
  try {
    const module = (await import(/* @vite-ignore */ url)) as { default: Pick<FrontEnd, "render"> };
    return { css, render: module.default.render };
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** Hosts call this when the model is there, before they show it. */
function initialize({ model }: { model: Model }): void {
  if (!model.get("front_end")?.byteLength) return;
  void frontEndOf(model.get("front_end"));
}

async function render(context: { model: Model; el: HTMLElement }): Promise<Undo> {
  const { model, el } = context;
  // A notebook that was saved without the front end: the HTML beside the view stays in its place.
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
