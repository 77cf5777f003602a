import { afterEach, beforeEach, describe, expect, it, onTestFinished } from "vitest";
import { makeNodePopup, type NodePopup } from "../../src/details/popup";
import type { Details } from "../../src/kernel/protocol";
import { FakeView } from "../fixtures";
import { activationStatus } from "../job_fixtures";
import { HOSTILE, named, Rig, settled } from "../panel_rig";

const PATH = "transformer.h_0.attn.attn_weights";

let rig: Rig;
let popup: NodePopup;
let anchor: HTMLElement;

const text = () => popup.element.textContent ?? "";

function details(row: number, more: Partial<Details> = {}): Details {
  return {
    ...{ row, path: PATH, kind: "op", notes: [], shape: [1, 4, 8, 8], dtype: "float32", device: "cpu" },
    ...{ code: "a = b @ c", source: [], inputs: [], users: [] },
    ...more,
  };
}

beforeEach(() => {
  rig = new Rig();
  popup = makeNodePopup(rig.view);
  anchor = document.createElement("div");
  rig.view.root.append(anchor, popup.element);
});
afterEach(() => rig.view.remove());

async function show(path = PATH, more: Partial<Details> = {}): Promise<number> {
  const row = rig.row(path);
  popup.show(row, anchor);
  await rig.answer("details", details(row, { path, ...more }));
  return row;
}

describe("a popup", () => {
  it("is a dialog named after the path, which waits for the kernel", () => {
    popup.show(rig.row(PATH), anchor);
    expect(popup.element.getAttribute("role")).toBe("dialog");
    expect(popup.element.getAttribute("aria-label")).toBe(PATH);
    expect(rig.last("details").payload).toEqual({ row: rig.row(PATH) });
    expect(text()).toContain("Asking the kernel");
  });

  it("shows the kernel's reply", async () => {
    await show(PATH, {
      notes: ["opaque: compiled code"],
      source: [{ file: "/home/a/b.py", line: 7, function: "forward", text: "   x = f(y)\n" }],
    });
    for (const part of ["[1, 4, 8, 8]", "float32", "cpu", "matmul", "opaque: compiled code", "a = b @ c"]) {
      expect(text()).toContain(part);
    }
    expect(text()).toContain("b.py:7 in forward");
    expect(text()).toContain("x = f(y)");
    expect(text()).not.toContain("Asking");
  });

  it("links to inputs and users, also if there are many", async () => {
    const users = Array.from({ length: 30 }, (_, index) => ({ row: index, text: `user_${index}` }));
    await show(PATH, { inputs: [{ row: 5, text: "query" }], users });
    expect(text()).not.toContain("user_29");
    named(popup.element, "18 more").click();
    expect(document.activeElement).toBe(named(popup.element, "user_12"));
    expect(text()).toContain("user_29");
    named(popup.element, "query").click();
    expect(rig.view.calls[0]).toEqual(["reveal", 5]);
    expect(rig.view.calls.at(-1)).toEqual(["focusTree"]);
    expect(popup.element.hidden).toBe(true);
  });

  it("opens the editor", async () => {
    const row = await show();
    named(popup.element, "Patch").click();
    expect(rig.view.calls[0]).toEqual(["editPatch", { row }, anchor]);
    expect(popup.element.hidden).toBe(true);
  });

  it("patches a module's output, and shows its activation", async () => {
    await show("transformer.h_0", { kind: "graph", shape: null, dtype: null, device: null });
    named(popup.element, "Patch output").click();
    expect(rig.view.calls[0]).toEqual(["editPatch", { row: rig.row("transformer.h_0.output") }, anchor]);
  });

  it("is named after the model for the root", async () => {
    popup.show(0, anchor);
    expect(popup.element.getAttribute("aria-label")).toBe("TinyLM");
  });

  it("shows errors, and can retry", async () => {
    popup.show(rig.row(PATH), anchor);
    await rig.refuse("details", { message: "the graph is gone; make it again", field: null });
    expect(popup.element.querySelector("[role=alert]")?.textContent).toBe("the graph is gone; make it again");
    named(popup.element, "Ask again").click();
    await rig.answer("details", details(rig.row(PATH)));
    expect(text()).toContain("float32");
  });

  it("says what to do if the kernel is lost", async () => {
    rig.model.trigger("comm:close");
    popup.show(rig.row(PATH), anchor);
    await settled();
    expect(text()).toContain("run the cell again");
    expect(() => named(popup.element, "Ask again")).toThrow();
  });

  it("ignores the reply for a node it no longer shows", async () => {
    popup.show(rig.row(PATH), anchor);
    const first = rig.last("details");
    popup.show(rig.row("transformer.h_0"), anchor);
    await rig.answer("details", details(rig.row(PATH)), first);
    expect(text()).not.toContain("float32");
    expect(popup.element.getAttribute("aria-label")).toBe("transformer.h_0");
  });

  it("shows markup from the user's model as text", async () => {
    const source = [{ file: HOSTILE, line: 1, function: HOSTILE, text: HOSTILE }];
    const links = [{ row: 1, text: HOSTILE }];
    const [shape, dtype, device] = [[1], HOSTILE, HOSTILE];
    await show(PATH, { notes: [HOSTILE], code: HOSTILE, source, inputs: links, users: links, shape, dtype, device });
    expect(popup.element.querySelector("img")).toBeNull();
    expect(text().split(HOSTILE).length).toBeGreaterThan(7);
  });

  it("closes on Escape, and returns the focus to the tree", async () => {
    await show();
    expect(popup.element.contains(document.activeElement)).toBe(true);
    popup.element.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true, cancelable: true }));
    expect(popup.element.hidden).toBe(true);
    expect(rig.view.calls).toEqual([["focusTree"]]);
  });

  it("closes on a click elsewhere", async () => {
    await show();
    popup.element.dispatchEvent(new Event("pointerdown", { bubbles: true, composed: true }));
    expect(popup.element.hidden).toBe(false);
    document.body.dispatchEvent(new Event("pointerdown", { bubbles: true, composed: true }));
    expect(popup.element.hidden).toBe(true);
  });
});

it("closes its sections when it shows another node and when it is closed", async () => {
  const view = new FakeView();
  onTestFinished(() => view.remove());
  const facts = { path: "", kind: "op" as const, notes: [], shape: null, dtype: null, device: null, code: "" };
  const rest = { source: [], inputs: [], users: [] };
  const closed: number[] = [];
  view.kernel.script = {
    details: ({ row }) => ({ result: { row, ...facts, ...rest }, buffers: [] }),
    activation: ({ row }) => activationStatus(row),
    activation_close: ({ id }) => {
      closed.push(id);
      return { result: {}, buffers: [] };
    },
  };
  const popup = makeNodePopup(view);
  view.root.append(popup.element);
  const run = async (row: number, count: number) => {
    popup.show(row, view.root);
    await expect.poll(() => popup.element.textContent).toContain("Show activation");
    named(popup.element, "Show activation").click();
    await expect.poll(() => view.kernel.count("activation")).toBe(count);
    await settled();
  };
  await run(1, 1);
  await run(4, 2);
  expect(closed).toEqual([1]);
  popup.close();
  expect(closed).toEqual([1, 4]);
});
