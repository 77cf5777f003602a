import { expect, test } from "vitest";
import loader from "../../src/loader";
import type { Model } from "../../src/view";
import { FakeModel, traits } from "../fixtures";

test("a front end that cannot be unpacked shows an error and what to do", async () => {
  const el = document.createElement("div");
  const shared = new Map([["bundle", new DataView(new ArrayBuffer(5))]]);
  const model: Model = new FakeModel(traits({ front_end: "IPY_MODEL_shared" }));
  model.widget_manager = { get_model: async () => shared };
  loader.initialize({ model });
  const undo = await loader.render({ model, el });
  expect(el.querySelector("[role=alert]")?.textContent).toMatch(
    /could not be loaded.*Reload the page and run the cell again/,
  );
  undo();
  expect(el.querySelector("[role=alert]")).toBeNull();
});
