/** Shows widgets in the page of a test; each is removed when its test ends. */
import { afterEach } from "vitest";
import widget from "../src/index";
import "../src/style.css";
import { traits } from "./fixtures";

/** What runs when the test ends. */
export const undos: (() => void)[] = [];

afterEach(() => {
  for (const undo of undos.splice(0)) undo();
  delete document.body.dataset.jpThemeLight;
  document.body.removeAttribute("style");
});

export async function rendered(model: object, width = "") {
  const el = document.createElement("div");
  el.style.width = width;
  document.body.append(el);
  const remove = await widget.render({ model: model as never, el });
  undos.push(() => {
    remove();
    el.remove();
  });
  return { el, remove };
}

export function setTheme(isLight: boolean): void {
  document.body.dataset.jpThemeLight = String(isLight);
  document.body.style.background = isLight ? "#fff" : "#111";
}

/** The traits that all views of a graph have. */
export function linkedTraits<V extends string>(view: V, group = "one") {
  const { session, front_end } = traits();
  return { front_end, session, group, selection: [], about: { view, name: "pg", model_id: "abc", version: "0" } };
}
