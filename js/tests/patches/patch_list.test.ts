import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { makePatchList } from "../../src/patches/patch_list";
import type { Part } from "../../src/view";
import { patch } from "../fixtures";
import { HOSTILE, named, Rig, settled } from "../panel_rig";

let rig: Rig;
let list: Part;

const items = () => [...list.element.querySelectorAll<HTMLElement>("li")];
const text = (of: Element | undefined = list.element) => of?.textContent ?? "";
const button = (name: string) => named<HTMLButtonElement>(list.element, name);
const isOff = (name: string) => button(name).getAttribute("aria-disabled") === "true";
const press = (of: HTMLElement, key: string, more: KeyboardEventInit = {}) =>
  of.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
const edits = () => rig.asked("edit").map(({ payload }) => payload);

const ONE = patch(1, {
  kind: "add",
  path: "transformer.h_0.output",
  slice: ":, -1",
  value: "0.5 * v",
  sliced: [1, 64],
});
const TWO = patch(2, { kind: "probe", path: "transformer.h_1.output", name: "seen" });
const THREE = patch(3, { path: "transformer.h_2.output", is_enabled: false });
const NAME_1 = "#1 add transformer.h_0.output[:, -1]";
const NAME_2 = "#2 probe transformer.h_1.output";
const NAME_3 = "#3 zero transformer.h_2.output";

beforeEach(() => {
  rig = new Rig();
  list = makePatchList(rig.view);
  rig.view.root.append(list.element);
});
afterEach(() => {
  rig.view.remove();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

describe("dragging", () => {
  const drag = (of: HTMLElement | undefined, type: string, side: "before" | "after" = "before") => {
    const event = new MouseEvent(type, { bubbles: true, cancelable: true, clientY: side === "before" ? -1 : 1 });
    (type === "dragstart" ? of?.querySelector(".gp-grip") : of)?.dispatchEvent(event);
    return event;
  };
  const dropped = async (from: number, onto: number, side: "before" | "after") => {
    rig.session([ONE, TWO, THREE]);
    drag(items()[from], "dragstart");
    expect(drag(items()[onto], "dragover", side).defaultPrevented).toBe(true);
    drag(items()[onto], "drop", side);
    await settled();
    return edits().at(-1)?.edit;
  };

  it.each([
    [0, 2, "after", 2],
    [0, 2, "before", 1],
    [2, 0, "before", 0],
  ] as const)("moves patch %d to patch %d, %s it", async (from, onto, side, position) => {
    expect(await dropped(from, onto, side)).toEqual({ action: "move", number: from + 1, position });
  });

  it("to where it was changes nothing, nor does what was dragged from elsewhere", async () => {
    expect(await dropped(1, 1, "after")).toBeUndefined();
    expect(await dropped(0, 1, "before")).toBeUndefined();
    expect(drag(items()[0], "dragover").defaultPrevented).toBe(false);
  });
});

describe("what is shown", () => {
  it("is how to choose one, where there are none", () => {
    expect(list.element.getAttribute("role")).toBe("region");
    expect(list.element.getAttribute("aria-label")).toBe("Patches");
    expect(list.element.querySelector<HTMLElement>(".gp-patches-empty")?.hidden).toBe(false);
    expect(text()).toContain("Choose a node in the tree");
    for (const name of ["Undo", "Redo", "Clear", "Copy as Python", "Insert cell"]) expect(isOff(name)).toBe(true);
  });

  it("is each patch in order, with all that was typed", () => {
    const restricted = patch(4, {
      steps: "decoding",
      positions: "2, 4",
      position_dim: 1,
      any_shape: true,
      allow_empty: true,
      warning: "beyond",
    });
    rig.session([ONE, TWO, THREE, restricted]);
    expect(items().map(({ dataset }) => dataset.number)).toEqual(["1", "2", "3", "4"]);
    for (const part of ["#1", "add", "transformer.h_0.output[:, -1]", "0.5 * v", "[1, 64]"]) {
      expect(text(items()[0])).toContain(part);
    }
    expect(text(items()[1])).toContain("→ seen");
    for (const part of [
      "steps decoding",
      "positions 2, 4",
      "position dimension 1",
      "any shape",
      "may be empty",
      "beyond",
    ]) {
      expect(text(items()[3])).toContain(part);
    }
    expect(named<HTMLInputElement>(list.element, `Apply ${NAME_3}`).checked).toBe(false);
    expect(text(list.element.querySelector(".gp-count") ?? undefined)).toBe("3 of 4 applied");
    expect(isOff("Undo")).toBe(false);
    expect(isOff("Redo")).toBe(true);
    expect(isOff(`Move up ${NAME_1}`)).toBe(true);
    expect(isOff(`Move down ${NAME_1}`)).toBe(false);
  });

  it("follows the session", () => {
    rig.session([ONE]);
    rig.session([ONE, TWO], { can_redo: true, note: "" });
    expect(items()).toHaveLength(2);
    expect(isOff("Redo")).toBe(false);
    rig.session([]);
    expect(items()).toHaveLength(0);
    expect(isOff("Clear")).toBe(true);
  });

  it("is text, whatever names and values look like", () => {
    rig.session([
      patch(1, { path: HOSTILE, value: HOSTILE, name: HOSTILE, warning: HOSTILE, slice: HOSTILE, steps: HOSTILE }),
    ]);
    expect(list.element.querySelector("img")).toBeNull();
    expect(text().split(HOSTILE)).toHaveLength(7);
  });

  it("says of a patch whose node is gone that it is, and jumps nowhere", () => {
    rig.session([patch(1, { row: -1, shape: null, sliced: null })]);
    expect(text(items()[0])).toContain("not in the graph any more");
    expect(items()[0]?.querySelector(".gp-node-link")).toBeNull();
  });
});

describe("edits", () => {
  beforeEach(() => rig.session([ONE, TWO, THREE]));

  it.each([
    ["Undo", { action: "undo" }],
    ["Clear", { action: "clear" }],
    [`Remove ${NAME_2}`, { action: "remove", numbers: [2] }],
    [`Move down ${NAME_1}`, { action: "move", number: 1, position: 1 }],
    [`Move up ${NAME_3}`, { action: "move", number: 3, position: 1 }],
  ])("%s", async (name, edit) => {
    button(name).click();
    await settled();
    expect(edits()).toEqual([{ based_on: 1, edit }]);
  });

  it("are not made by disabled buttons", async () => {
    for (const name of ["Redo", `Move up ${NAME_1}`, `Move down ${NAME_3}`]) button(name).click();
    await settled();
    expect(edits()).toEqual([]);
  });

  it("switch a patch on and off", async () => {
    named<HTMLInputElement>(list.element, `Apply ${NAME_3}`).click();
    await settled();
    expect(edits().at(-1)?.edit).toEqual({ action: "enable", number: 3, is_enabled: true });
    await rig.answer("edit", { version: 2 });
    named<HTMLInputElement>(list.element, `Apply ${NAME_1}`).click();
    await settled();
    expect(edits().at(-1)?.edit).toEqual({ action: "enable", number: 1, is_enabled: false });
  });

  it("by keyboard", async () => {
    const reveal = items()[1]?.querySelector<HTMLElement>(".gp-node-link") as HTMLElement;
    for (const [key, more] of [
      ["ArrowUp", { altKey: true }],
      ["ArrowDown", { altKey: true }],
      ["Delete", {}],
    ] as const) {
      press(reveal, key, more);
      await settled();
      await rig.answer("edit", { version: 1 });
    }
    press(reveal, "ArrowUp");
    await settled();
    expect(edits().map(({ edit }) => edit)).toEqual([
      { action: "move", number: 2, position: 0 },
      { action: "move", number: 2, position: 2 },
      { action: "remove", numbers: [2] },
    ]);
  });

  it("are sent one after the other, each based on the version before", async () => {
    button(`Move down ${NAME_1}`).click();
    button(`Move down ${NAME_1}`).click();
    await settled();
    expect(edits()).toHaveLength(1);
    rig.session([TWO, ONE, THREE]);
    await rig.answer("edit", { version: 2 });
    expect(edits()[1]).toEqual({ based_on: 2, edit: { action: "move", number: 1, position: 2 } });
  });

  it("use the version of the last reply before the session arrives", async () => {
    button("Undo").click();
    await settled();
    await rig.answer("edit", { version: 2 });
    button("Undo").click();
    await settled();
    expect(edits().map(({ based_on }) => based_on)).toEqual([1, 2]);
  });

  it("that are refused show an error, and the checkbox shows the actual state", async () => {
    const box = () => named<HTMLInputElement>(list.element, `Apply ${NAME_3}`);
    box().click();
    await settled();
    await rig.refuse("edit", { message: "#3 does not fit", field: "value" });
    expect(rig.view.errors).toEqual(["#3 does not fit"]);
    expect(box().checked).toBe(false);
    button("Clear").click();
    await settled();
    await rig.refuse("edit", { message: "stale", field: "version" });
    expect(rig.view.errors.at(-1)).toContain("changed meanwhile");
  });

  it("keep the keyboard focus, or move it to the replacement", async () => {
    button(`Move up ${NAME_2}`).focus();
    rig.session([TWO, ONE, THREE]);
    expect(document.activeElement).toBe(button(`Move up ${NAME_2}`));
    button(`Remove ${NAME_1}`).focus();
    rig.session([TWO, THREE]);
    expect(document.activeElement).toBe(button(`Remove ${NAME_3}`));
    rig.session([]);
    expect(document.activeElement).toBe(button("Undo"));
  });
});

it("jumps to a node, and opens the editor", () => {
  rig.session([ONE]);
  items()[0]?.querySelector<HTMLElement>(".gp-node-link")?.click();
  expect(rig.view.calls).toEqual([["reveal", 10], ["focusTree"]]);
  const edit = button(`Edit ${NAME_1}`);
  edit.click();
  expect(rig.view.calls.at(-1)).toEqual(["editPatch", { number: 1 }, edit]);
});

describe("as Python", () => {
  const CODE = "with pg.patch({}):\n    pg(ids)\n";
  const box = () => list.element.querySelector<HTMLElement>(".gp-code-box") as HTMLElement;
  const clipboard = (writeText: (text: string) => Promise<void>) =>
    vi.stubGlobal("navigator", { clipboard: { writeText } });
  beforeEach(() => rig.session([ONE]));

  async function take(name: string): Promise<void> {
    button(name).click();
    await settled();
    expect(rig.last("export").payload).toEqual({ inputs: null });
    await rig.answer("export", { code: CODE });
    await settled();
  }

  it("is copied", async () => {
    const copied: string[] = [];
    clipboard(async (code) => void copied.push(code));
    await take("Copy as Python");
    expect(copied).toEqual([CODE]);
    expect(rig.view.said.at(-1)).toContain("clipboard");
    expect(box().hidden).toBe(true);
  });

  it("is copied with execCommand if the clipboard API is forbidden", async () => {
    clipboard(() => Promise.reject(new Error("not allowed")));
    let selected = "";
    Object.assign(document, {
      execCommand: () => {
        selected = document.querySelector<HTMLTextAreaElement>("textarea.gp-visually-hidden")?.value ?? "";
        return true;
      },
    });
    await take("Copy as Python");
    expect(selected).toBe(CODE);
    expect(document.querySelector("textarea.gp-visually-hidden")).toBeNull();
  });

  it("is shown to be copied by hand if nothing else works", async () => {
    clipboard(() => Promise.reject(new Error("not allowed")));
    Object.assign(document, { execCommand: () => false });
    await take("Copy as Python");
    expect(box().hidden).toBe(false);
    expect(box().querySelector("textarea")?.value).toBe(CODE);
    expect(text(box())).toContain("by hand");
    named(box(), "Close").click();
    expect(box().hidden).toBe(true);
  });

  it("is inserted into a cell if the host has cells", async () => {
    const inserted: unknown[] = [];
    const sharedModel = { cells: [{}], insertCell: (...args: unknown[]) => inserted.push(args) };
    Object.assign(rig.model, { widget_manager: { context: { model: { sharedModel } } } });
    await take("Insert cell");
    expect(inserted).toEqual([[1, { cell_type: "code", source: CODE.trimEnd(), metadata: { trusted: true } }]]);
    expect(box().hidden).toBe(true);
  });

  it("is copied if the host has no cells, and says so", async () => {
    const copied: string[] = [];
    clipboard(async (code) => void copied.push(code));
    await take("Insert cell");
    expect(copied).toEqual([CODE]);
    expect(text(box())).toContain("does not let widgets insert cells");
    expect(text(box())).toContain("clipboard");
    expect(box().querySelector("textarea")?.value).toBe(CODE);
  });

  it("shows an error if the kernel cannot make it", async () => {
    button("Copy as Python").click();
    await settled();
    await rig.refuse("export", { message: "no name for the graph", field: null });
    expect(rig.view.errors).toEqual(["no name for the graph"]);
  });
});

it("leaves nothing behind", () => {
  rig.view.remove();
  expect(rig.model.listening).toBe(0);
});
