import { afterEach, beforeEach, describe, expect, it } from "vitest";
import { page, userEvent } from "vitest/browser";
import { makeNodePopup, type NodePopup } from "../../src/details/popup";
import type { Checked, Details } from "../../src/kernel/protocol";
import { makeNotices } from "../../src/page/notices";
import { makePatchEditor, type PatchEditor } from "../../src/patches/editor";
import { makePatchList } from "../../src/patches/patch_list";
import type { Part } from "../../src/view";
import { accessibilityViolations } from "../accessibility";
import "../../src/style.css";
import { patch } from "../fixtures";
import { HOSTILE, named, Rig, settled } from "../panel_rig";

const PATH = "transformer.h_0.attn.attn_weights";
const FINE: Checked = { shape: [1, 4, 8, 8], sliced: [1, 4, 8, 8], warning: null, name: null };

let rig: Rig;
let popup: NodePopup;
let editor: PatchEditor;
let list: Part;
let tree: HTMLElement;
let anchor: HTMLElement;

const box = (of: Element) => of.getBoundingClientRect();
const focused = () => document.activeElement as HTMLElement;
const frame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

function details(row: number, lines = 3): Details {
  const code = Array.from({ length: lines }, (_, line) => `x_${line} = torch.matmul(a, ${line})  # "${line}"`).join(
    "\n",
  );
  const links = [{ row: 3, text: "query" }];
  const source = [{ file: "/a/model.py", line: 7, function: "forward", text: "x = self.attn(x)" }];
  return {
    ...{ row, path: PATH, kind: "op", notes: ["The model writes into it later."], shape: [1, 4, 8, 8] },
    ...{ dtype: "float32", device: "cpu", code, source, inputs: links, users: links },
  };
}

beforeEach(async () => {
  await page.viewport(800, 600);
  rig = new Rig();
  const notices = makeNotices(rig.view.kernel, (undo) => rig.view.onRemove(undo));
  Object.assign(rig.view, { notices });
  popup = makeNodePopup(rig.view);
  editor = makePatchEditor(rig.view);
  list = makePatchList(rig.view);
  tree = document.createElement("div");
  Object.assign(tree, { tabIndex: 0, role: "tree", ariaLabel: "Graph" });
  anchor = document.createElement("div");
  Object.assign(anchor, { textContent: "attn_weights", role: "treeitem" });
  anchor.style.cssText = "width: max-content";
  tree.append(anchor);
  Object.assign(rig.view, {
    focusTree: () => tree.focus(),
    editPatch: (target: { row: number }, at: Element) => editor.open(target, at),
  });
  rig.view.root.append(notices.element, tree, list.element, popup.element, editor.element);
});
afterEach(() => {
  rig.view.remove();
  document.body.removeAttribute("style");
});

async function showPopup(lines?: number): Promise<void> {
  popup.show(rig.row(PATH), anchor);
  await rig.answer("details", details(rig.row(PATH), lines));
  await frame();
}

function inViewport(dialog: Element): boolean {
  const { top, bottom, left, right } = box(dialog);
  return top >= 0 && left >= 0 && bottom <= window.innerHeight && right <= window.innerWidth;
}

describe("a dialog", () => {
  it("is below its anchor in the top layer, not clipped by the output", async () => {
    rig.view.root.style.cssText = "overflow: hidden; height: 60px; contain: layout paint; transform: translateX(0)";
    await showPopup();
    expect(popup.element.matches(":popover-open")).toBe(true);
    expect(box(popup.element).top).toBeGreaterThanOrEqual(box(anchor).bottom);
    expect(box(popup.element).top - box(anchor).bottom).toBeLessThan(10);
    const { left, bottom } = box(popup.element);
    expect(popup.element.contains(document.elementFromPoint(left + 30, bottom - 10))).toBe(true);
  });

  it.each([
    ["at the end of the page", "margin-top: 560px"],
    ["at the right edge", "margin-left: 700px"],
    ["in the middle, with more code than fits", "margin-top: 290px"],
    ["above the page", "margin-top: -400px"],
  ])("stays in the viewport: %s", async (_, style) => {
    anchor.style.cssText += `;${style}`;
    await showPopup(200);
    expect(inViewport(popup.element)).toBe(true);
    expect(box(popup.element).height).toBeGreaterThan(180);
  });

  it("is above its anchor if there is more room", async () => {
    anchor.style.cssText += ";margin-top: 520px";
    await showPopup();
    expect(box(popup.element).bottom).toBeLessThanOrEqual(box(anchor).top);
  });

  it("moves with its anchor on scrolling, and stays inside a shrinking window", async () => {
    anchor.style.cssText += ";margin-top: 100px";
    tree.style.height = "2000px";
    await showPopup();
    const before = box(popup.element).top;
    window.scrollTo(0, 60);
    await frame();
    expect(Math.round(before - box(popup.element).top)).toBe(60);
    await page.viewport(420, 300);
    await frame();
    expect(inViewport(popup.element)).toBe(true);
    window.scrollTo(0, 0);
  });

  it("follows its anchor when what is above it grows", async () => {
    await showPopup();
    const before = box(popup.element).top - box(anchor).bottom;
    const notice = document.createElement("p");
    notice.style.cssText = "height: 70px; margin: 0";
    rig.view.root.prepend(notice);
    await frame();
    expect(box(anchor).top).toBeGreaterThan(70);
    expect(box(popup.element).top - box(anchor).bottom).toBeCloseTo(before, 0);
  });

  it("is moved by its header and resized by its corner, and stays so until it opens again", async () => {
    await showPopup();
    const before = box(popup.element);
    const header = popup.element.querySelector(".gp-floating-header") as HTMLElement;
    header.setPointerCapture = () => undefined; // there is no true pointer
    const point = (type: string, x: number, y: number) =>
      header.dispatchEvent(new PointerEvent(type, { clientX: x, clientY: y, bubbles: true }));
    const from = [before.left + 20, before.top + 10] as const;
    point("pointerdown", ...from);
    point("pointermove", from[0] + 90, from[1] + 50);
    point("lostpointercapture", from[0] + 90, from[1] + 50);
    point("pointermove", 0, 0);
    window.dispatchEvent(new Event("scroll"));
    expect(box(popup.element).left - before.left).toBeCloseTo(90, 0);
    expect(box(popup.element).top - before.top).toBeCloseTo(50, 0);
    expect(getComputedStyle(popup.element).resize).toBe("both");
    Object.assign(popup.element.style, { width: "300px", height: "420px" });
    await frame();
    expect(box(popup.element)).toMatchObject({ width: 300, height: 420 });
    expect(inViewport(popup.element)).toBe(true);
    popup.close();
    await showPopup();
    expect(box(popup.element).top).toBe(before.top);
    expect(box(popup.element).width).toBe(before.width);
  });
});

describe("the keyboard's focus", () => {
  it("moves into the popup; Escape returns it to the tree", async () => {
    tree.focus();
    await showPopup();
    expect(popup.element.contains(focused())).toBe(true);
    await userEvent.keyboard("{Tab}");
    expect(focused()).toBe(named(popup.element, "Copy"));
    await userEvent.keyboard("{Escape}");
    expect(popup.element.matches(":popover-open")).toBe(false);
    expect(focused()).toBe(tree);
  });

  it("moves from the popup to the editor, and back to the tree", async () => {
    tree.focus();
    await showPopup();
    await userEvent.click(named(popup.element, "Patch"));
    expect(popup.element.matches(":popover-open")).toBe(false);
    expect(focused()).toBe(named(editor.element, "Kind"));
    await userEvent.keyboard("{Escape}");
    expect(focused()).toBe(tree);
  });

  it("moves from the list to the editor, and back to the list", async () => {
    rig.session([patch(3)]);
    const edit = named(list.element, "Edit #3 zero transformer.h_0.output");
    await userEvent.click(edit);
    rig.view.editPatch({ number: 3 }, edit);
    await userEvent.keyboard("{Escape}");
    expect(focused()).toBe(edit);
  });

  it("stays in the editor on a click elsewhere: nothing typed is lost", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    await userEvent.fill(named(editor.element, "Slice"), "0");
    await userEvent.click(document.body, { position: { x: 790, y: 590 } });
    expect(editor.element.matches(":popover-open")).toBe(true);
    expect(named<HTMLInputElement>(editor.element, "Slice").value).toBe("0");
  });
});

it("a patch can be made with the keyboard alone", async () => {
  tree.focus();
  editor.open({ row: rig.row(PATH) }, anchor);
  await userEvent.keyboard("a");
  expect(named<HTMLSelectElement>(editor.element, "Kind").value).toBe("add");
  await userEvent.keyboard("{Tab}:, 0{Tab}-1e-3");
  await expect
    .poll(() => rig.last("check").payload.patch)
    .toMatchObject({ kind: "add", slice: ":, 0", value: "-1e-3" });
  await rig.answer("check", { ...FINE, sliced: [1, 8, 8] });
  expect(editor.element.textContent).toContain("Recorded [1, 4, 8, 8] → [1, 8, 8] patched");
  await userEvent.keyboard("{Enter}");
  await settled();
  expect(rig.last("edit").payload.edit).toMatchObject({
    action: "add",
    patch: { path: PATH, slice: ":, 0", value: "-1e-3" },
  });
  await rig.answer("edit", { version: 1 });
  expect(editor.element.matches(":popover-open")).toBe(false);
  expect(focused()).toBe(tree);
});

it("long paths do not break the layout", async () => {
  const path = `transformer.${"a_very_long_name_of_a_module.".repeat(12)}output`;
  rig.session([
    patch(1, {
      path,
      value: "x".repeat(300),
      slice: ":, ".repeat(40),
      name: "n".repeat(200),
      warning: "w".repeat(300),
    }),
  ]);
  await page.viewport(420, 600);
  await frame();
  expect(list.element.scrollWidth).toBeLessThanOrEqual(list.element.clientWidth);
  expect(document.documentElement.scrollWidth).toBeLessThanOrEqual(420);
  editor.open({ number: 1 }, anchor);
  await frame();
  expect(inViewport(editor.element)).toBe(true);
  expect(editor.element.scrollWidth).toBeLessThanOrEqual(editor.element.clientWidth);
});

describe.each(["light", "dark"])("no accessibility violations: %s", (theme) => {
  beforeEach(() => {
    rig.view.root.dataset.gpTheme = theme;
    document.body.style.background = theme === "light" ? "#fff" : "#111";
    rig.session(
      [
        patch(1, { kind: "add", slice: ":, -1", value: HOSTILE, warning: "index 9 is beyond the recorded size 8" }),
        patch(2, { kind: "probe", name: "seen", is_enabled: false, steps: "decoding" }),
      ],
      { can_redo: true, note: "" },
    );
  });

  async function clean(): Promise<void> {
    const rules = { "aria-required-children": { enabled: false } };
    expect(await accessibilityViolations(rig.view.root, { rules })).toEqual([]);
  }

  it("the list, errors and a lost kernel", async () => {
    rig.view.notices.error(HOSTILE);
    rig.model.trigger("comm:close");
    await clean();
  });

  it("the popup", async () => {
    popup.show(rig.row(PATH), anchor);
    await clean();
    await rig.answer("details", { ...details(rig.row(PATH), 60), notes: [HOSTILE] });
    await clean();
  });

  it("the editor with all its fields and errors", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    await rig.answer("check", { ...FINE, warning: "beyond" });
    await clean();
    await userEvent.click(editor.element.querySelector("summary") as HTMLElement);
    await userEvent.selectOptions(named(editor.element, "Kind"), "probe");
    await expect.poll(() => rig.asked("check").length).toBe(2);
    await rig.refuse("check", { message: HOSTILE, field: "slice" });
    await clean();
  });

  it("a row that cannot be patched, and code to copy by hand", async () => {
    editor.open({ row: rig.row("transformer.h_0") }, anchor);
    await clean();
    editor.close();
    await userEvent.click(named(list.element, "Insert cell"));
    await rig.answer("export", { code: "with pg.patch({}):\n    pg()" });
    await expect.poll(() => list.element.querySelector("textarea")?.value).toContain("pg.patch");
    await clean();
  });
});

it("the user's text never becomes an element", async () => {
  rig.session([patch(1, { path: HOSTILE, value: HOSTILE, warning: HOSTILE })]);
  rig.view.notices.error(HOSTILE);
  popup.show(rig.row(PATH), anchor);
  await rig.answer("details", { ...details(rig.row(PATH)), code: HOSTILE, notes: [HOSTILE], path: HOSTILE });
  await frame();
  expect(document.querySelector("img")).toBeNull();
  expect((globalThis as { isHacked?: boolean }).isHacked).toBeUndefined();
});
