import { expect, test } from "vitest";
import loader from "../../src/loader";
import { deflatedParts, FakeModel, traits } from "../fixtures";

function packed(parts: { css: string; js: string }): Promise<DataView> {
  return deflatedParts([JSON.stringify(parts)]);
}

function host(): HTMLElement {
  const el = document.createElement("div");
  document.body.append(el);
  return el;
}

test("shows nothing if the front end was not saved with the widget", async () => {
  const el = host();
  await loader.render({ model: new FakeModel(traits({ front_end: new DataView(new ArrayBuffer(0)) })), el });
  expect(el.childElementCount).toBe(0);
});

test("unpacks and shows the front end with its style; leaves nothing behind afterwards", async () => {
  const el = host();
  const js = `export default { async render({ model, el }) {
    const p = document.createElement("p"); p.className = "unpacked"; p.textContent = model.get("query"); el.append(p);
    return () => p.remove();
  } };`;
  const model = new FakeModel(
    traits({ front_end: await packed({ css: ".unpacked { height: 77px; }", js }), query: "é☃" }),
  );
  loader.initialize({ model });
  const undo = await loader.render({ model, el });
  const shown = el.querySelector("p");
  expect(shown?.textContent).toBe("é☃");
  expect(shown?.getBoundingClientRect().height).toBe(77);
  undo();
  expect(el.childElementCount).toBe(0);
});

test("widgets with the same front end load it once; a different one is loaded separately", async () => {
  const load = async (front_end: DataView) => {
    const el = host();
    await loader.render({ model: new FakeModel(traits({ front_end })), el });
    return el.textContent;
  };
  const js = (name: string) => `let shown = 0; export default {
    async render({ el }) { el.append("${name}" + ++shown); return () => undefined; } };`;
  const pack = (name: string) => packed({ css: "", js: js(name) });
  expect([await load(await pack("a")), await load(await pack("b")), await load(await pack("a"))]).toEqual([
    "a1",
    "b1",
    "a2",
  ]);
});
