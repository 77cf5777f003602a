import { expect, test } from "vitest";
import loader from "../../src/loader";
import type { Model } from "../../src/view";
import { deflatedParts, FakeModel, traits } from "../fixtures";

/** A widget whose manager has the model of its front end, if there is one. */
async function widget(parts: { css: string; js: string } | null, query = "") {
  const bundle = parts && (await deflatedParts([JSON.stringify(parts)]));
  const shared = new Map<string, unknown>([
    ["bundle", bundle],
    ["digest", JSON.stringify(parts)],
  ]);
  const model: Model = new FakeModel(traits({ front_end: parts ? "IPY_MODEL_shared" : "", query }));
  const asked: string[] = [];
  model.widget_manager = {
    get_model: async (id: string) => {
      asked.push(id);
      return shared;
    },
  };
  return { model, asked };
}

function host(): HTMLElement {
  const el = document.createElement("div");
  document.body.append(el);
  return el;
}

test("shows nothing if the front end was not saved with the widget", async () => {
  const el = host();
  const { model } = await widget(null);
  await loader.render({ model, el });
  expect(el.childElementCount).toBe(0);
});

test("unpacks and shows the front end with its style; leaves nothing behind afterwards", async () => {
  const el = host();
  const js = `export default { async render({ model, el }) {
    const p = document.createElement("p"); p.className = "unpacked"; p.textContent = model.get("query"); el.append(p);
    return () => p.remove();
  } };`;
  const { model, asked } = await widget({ css: ".unpacked { height: 77px; }", js }, "é☃");
  loader.initialize({ model });
  const undo = await loader.render({ model, el });
  expect(asked).toEqual(["shared", "shared"]);
  const shown = el.querySelector("p");
  expect(shown?.textContent).toBe("é☃");
  expect(shown?.getBoundingClientRect().height).toBe(77);
  undo();
  expect(el.childElementCount).toBe(0);
});

test("widgets with the same front end load it once; a different one is loaded separately", async () => {
  const load = async (name: string) => {
    const el = host();
    const js = `let shown = 0; export default {
      async render({ el }) { el.append("${name}" + ++shown); return () => undefined; } };`;
    await loader.render({ model: (await widget({ css: "", js })).model, el });
    return el.textContent;
  };
  expect([await load("a"), await load("b"), await load("a")]).toEqual(["a1", "b1", "a2"]);
});

test("waits for a front end that the host has not fetched from the kernel yet", async () => {
  const el = host();
  const js = `export default { async render({ el }) { el.append("shown"); return () => undefined; } };`;
  const { model } = await widget({ css: "", js });
  const manager = model.widget_manager as { get_model(id: string): Promise<unknown> };
  let missing = 3;
  model.widget_manager = {
    get_model: async (id: string) => {
      if (missing-- > 0) throw new Error("widget model not found");
      return manager.get_model(id);
    },
  };
  await loader.render({ model, el });
  expect(el.textContent).toBe("shown");
});
