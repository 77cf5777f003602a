import { afterEach, expect, it } from "vitest";
import { makePopup, type SectionPart } from "../src/details/popup";
import { JobView } from "./job_fixtures";

let view: JobView;
afterEach(() => view.remove());

it("closes what it shows of a node when it shows another one, and when it is closed", async () => {
  view = new JobView();
  const details = { path: "", kind: "op" as const, notes: [], shape: null, dtype: null, device: null, code: "" };
  const rest = { source: [], inputs: [], users: [] };
  view.kernel.script = { details: ({ row }) => ({ result: { row, ...details, ...rest }, buffers: [] }) };
  const events: string[] = [];
  const section = (_view: unknown, row: number): SectionPart => {
    events.push(`open ${row}`);
    return { element: document.createElement("div"), close: () => events.push(`close ${row}`) };
  };
  const popup = makePopup(view, [section]);
  view.root.append(popup.element);
  popup.show(1, view.root);
  await expect.poll(() => events).toEqual(["open 1"]);
  popup.show(4, view.root);
  await expect.poll(() => events).toEqual(["open 1", "close 1", "open 4"]);
  popup.close();
  expect(events.slice(3)).toEqual(["close 4"]);
});
