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

let unpacked: Promise<FrontEnd> | null = null;

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
  unpacked ??= unpack(model.get("front_end"));
  unpacked.catch(() => undefined); // `render` says so
}

async function render(context: { model: Model; el: HTMLElement }): Promise<Undo> {
  const { model, el } = context;
  // A notebook that was saved without the front end: the HTML beside the view stays in its place.
  if (!model.get("front_end")?.byteLength) return () => undefined;
  const style = document.createElement("style");
  try {
    unpacked ??= unpack(model.get("front_end"));
    const { css, render } = await unpacked;
    style.textContent = css;
    el.append(style);
    const undo = await render(context);
    return () => {
      undo();
      style.remove();
    };
  } catch (error) {
    unpacked = null;
    const failure = document.createElement("p");
    failure.setAttribute("role", "alert");
    failure.textContent = `This widget could not be loaded (${error}). Reload the page and run the cell again.`;
    el.append(failure);
    return () => failure.remove();
  }
}

export default { initialize, render };
