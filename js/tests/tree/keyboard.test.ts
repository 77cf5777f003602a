import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Edit, PatchState } from "../../src/kernel/protocol";
import { type TreeActions, watchKeys } from "../../src/tree/keyboard";
import { makeToolbar, type Toolbar } from "../../src/tree/toolbar";
import { TreeState } from "../../src/tree/tree_state";
import { makeTreeView } from "../../src/tree/tree_view";
import { FakeView } from "../fixtures";

class Widget {
  readonly view = new FakeView();
  readonly state = new TreeState(this.view);
  readonly edits: Edit[] = [];
  readonly copied: string[] = [];
  canCopy = true;
  readonly tree: HTMLElement;
  readonly toolbar: Toolbar;
  readonly box: HTMLInputElement;

  constructor() {
    const actions: TreeActions = {
      edit: (edit) => this.edits.push(edit),
      copy: async (text) => {
        this.copied.push(text);
        return this.canCopy;
      },
    };
    const tree = makeTreeView(this.view, this.state, actions);
    this.tree = tree.element;
    this.toolbar = makeToolbar(this.view, this.state);
    this.view.focusTree = () => tree.focus();
    this.view.root.append(this.toolbar.element, this.tree);
    watchKeys(this.view, this.toolbar);
    this.box = this.toolbar.element.querySelector("input") as HTMLInputElement;
    tree.focus();
  }

  press(key: string, more: KeyboardEventInit = {}, target: HTMLElement = this.tree): KeyboardEvent {
    const event = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, composed: true, ...more });
    target.dispatchEvent(event);
    return event;
  }

  get at(): string {
    return this.view.skeleton.path(this.state.activeRow);
  }

  row(path: string): number {
    return this.view.row(path);
  }
}

let widget: Widget;
beforeEach(() => {
  widget = new Widget();
});
afterEach(() => widget.view.remove());

test("arrows, Home and End move through the visible rows", () => {
  widget.press("ArrowDown");
  expect(widget.at).toBe("input_ids");
  widget.press("End");
  expect(widget.at).toBe("output");
  widget.press("ArrowDown");
  expect(widget.at).toBe("output");
  widget.press("Home");
  widget.press("ArrowUp");
  expect(widget.at).toBe("");
});

test("right opens, then enters; left closes, then leaves", () => {
  widget.state.change({ isFolded: false });
  widget.state.select(widget.row("transformer.h_1"));
  widget.press("ArrowRight");
  expect(widget.at).toBe("transformer.h_1");
  widget.press("ArrowRight");
  expect(widget.at).toBe("transformer.h_1.hidden_states");
  widget.press("ArrowRight");
  expect(widget.at).toBe("transformer.h_1.hidden_states");
  widget.press("ArrowLeft");
  expect(widget.at).toBe("transformer.h_1");
  widget.press("ArrowLeft");
  expect(widget.state.lines.has(widget.row("transformer.h_1.hidden_states"))).toBe(false);
  widget.press("ArrowLeft");
  expect(widget.at).toBe("transformer");
});

test("a letter moves to the next row that starts with it; repeated, to the one after", () => {
  widget.state.change({ isFolded: false });
  widget.state.setOpen(widget.row("transformer.h_0"), false);
  for (const [letter, path] of [
    ["h", "transformer.h_0"],
    ["h", "transformer.h_1"],
    ["h", "transformer.h_2"],
  ]) {
    widget.press(letter as string);
    expect(widget.at).toBe(path);
  }
});

test("several letters are a prefix", () => {
  for (const letter of "lm_") widget.press(letter);
  expect(widget.at).toBe("lm_head");
});

test("moving with other keys ends the prefix", () => {
  widget.state.setOpen(widget.row("transformer.h_0"), false);
  widget.press("l");
  widget.press("Home");
  widget.press("h");
  expect(widget.at).toBe("transformer.h_0");
});

test("* opens all siblings", () => {
  widget.state.change({ isFolded: false });
  widget.state.select(widget.row("transformer.h_1"));
  widget.press("*");
  for (const layer of [0, 3]) expect(widget.state.lines.has(widget.row(`transformer.h_${layer}.mlp`))).toBe(true);
  expect(widget.at).toBe("transformer.h_1");
});

test("Enter shows details, + patches, Space reads out the selection", () => {
  const row = widget.row("lm_head");
  widget.state.select(row);
  widget.press("Enter");
  widget.press("+");
  widget.press(" ");
  expect(widget.view.calls.map((call) => call.slice(0, 2))).toEqual([
    ["showDetails", row],
    ["editPatch", { row }],
  ]);
  const anchor = widget.view.calls[0]?.[2] as Element;
  expect(anchor.getAttribute("aria-label")).toMatch(/^lm_head/);
  expect(widget.view.said.at(-1)).toMatch(/^lm_head selected/);
});

test("Delete removes the patches of the row, or says that there are none", () => {
  const row = widget.row("lm_head.linear");
  const patch = { number: 7, row, kind: "zero", is_enabled: true } as PatchState;
  widget.view.model.set("session", { version: 3, patches: [patch], can_undo: true, can_redo: false, note: "" });
  widget.state.reveal(row);
  widget.press("Delete");
  expect(widget.edits).toEqual([{ action: "remove", numbers: [7] }]);
  widget.press("Home");
  widget.press("Delete");
  expect(widget.edits).toHaveLength(1);
  expect(widget.view.said.at(-1)).toContain("no patch");
});

test("undo and redo, if there is something to undo", () => {
  widget.press("z", { ctrlKey: true });
  expect(widget.view.said.at(-1)).toContain("nothing to undo");
  widget.view.model.set("session", { version: 3, patches: [], can_undo: true, can_redo: true, note: "" });
  widget.press("z", { ctrlKey: true });
  widget.press("Z", { ctrlKey: true, shiftKey: true });
  widget.press("y", { ctrlKey: true });
  expect(widget.edits.map((edit) => edit.action)).toEqual(["undo", "redo", "redo"]);
});

test("Ctrl+C copies the path, or shows it if copying is forbidden", async () => {
  widget.state.select(widget.row("lm_head"));
  widget.press("c", { ctrlKey: true });
  expect(widget.copied).toEqual(["lm_head"]);
  widget.canCopy = false;
  widget.press("c", { ctrlKey: true });
  await vi.waitFor(() => expect(widget.view.errors.at(-1)).toContain("lm_head"));
});

test("/ moves to the search field, Esc back to a match, a second Esc ends the search", () => {
  widget.press("/");
  expect(document.activeElement).toBe(widget.box);
  widget.box.value = "softmax";
  widget.box.dispatchEvent(new Event("input"));
  expect(widget.state.found.matches).toHaveLength(4);
  expect(widget.toolbar.element.textContent).toContain("4 of 100 nodes");
  const typed = widget.press("/", {}, widget.box);
  expect(typed.defaultPrevented).toBe(false);
  widget.press("Escape", {}, widget.box);
  expect(document.activeElement).toBe(widget.tree);
  expect(widget.state.found.matches).toHaveLength(4);
  expect(widget.at).toBe("transformer.h_0.attn.attn_weights_1");
  widget.press("Escape", {}, widget.tree);
  expect([widget.box.value, widget.state.found.matches]).toEqual(["", null]);
  expect(document.activeElement).toBe(widget.tree);
});

test("F3 works from everywhere in the widget", () => {
  widget.state.search("softmax");
  widget.press("F3", {}, widget.box);
  expect(widget.at).toBe("transformer.h_0.attn.attn_weights_1");
  widget.press("F3", { shiftKey: true });
  expect(widget.at).toBe("transformer.h_3.attn.attn_weights_1");
  expect(widget.view.said.at(-1)).toContain("Match 4 of 4");
});

test("an invalid query shows an error beside the field", () => {
  widget.box.value = "is:pathced";
  widget.box.dispatchEvent(new Event("input"));
  expect(widget.box.getAttribute("aria-invalid")).toBe("true");
  const described = document.getElementById(widget.box.getAttribute("aria-describedby") ?? "");
  expect(described?.textContent).toContain("there are patched");
  widget.box.value = "";
  widget.box.dispatchEvent(new Event("input"));
  expect(widget.box.getAttribute("aria-invalid")).toBe("false");
  expect(described?.hidden).toBe(true);
});

test("a search without matches says where they may be hidden", () => {
  const type = (text: string) => {
    widget.box.value = text;
    widget.box.dispatchEvent(new Event("input"));
    return widget.toolbar.element.textContent;
  };
  expect(type("op:size")).toContain("5 that only carry sizes");
  expect(type("zzz")).toContain("No matches. Try fewer");
  expect(widget.toolbar.element.querySelector<HTMLElement>(".gp-query-error.gp-muted")?.hidden).toBe(false);
  type("softmax");
  expect(widget.toolbar.element.querySelector<HTMLElement>(".gp-query-error.gp-muted")?.hidden).toBe(true);
});

test.each(["x", "d", "a", "Delete", "Enter", "ArrowDown", "Escape", "0", " "])(
  "the notebook does not receive %s",
  (key) => {
    const outside = vi.fn();
    document.body.addEventListener("keydown", outside);
    widget.press(key);
    widget.press(key, {}, widget.toolbar.element.querySelector("button") as HTMLElement);
    document.body.removeEventListener("keydown", outside);
    expect(outside).not.toHaveBeenCalled();
  },
);

test.each([
  ["Tab", {}],
  ["s", { ctrlKey: true }],
  ["F5", {}],
])("the page keeps %s", (key, more) => {
  const outside = vi.fn();
  document.body.addEventListener("keydown", outside);
  const event = widget.press(key, more);
  document.body.removeEventListener("keydown", outside);
  expect(outside).toHaveBeenCalledOnce();
  expect(event.defaultPrevented).toBe(false);
});

test("Enter opens a folded row", () => {
  widget.state.change({ isFolded: true });
  widget.state.select(~widget.row("transformer.h_0"));
  widget.press("Enter");
  expect(widget.state.lines.has(widget.row("transformer.h_3"))).toBe(true);
  widget.press("ArrowLeft");
  expect(widget.state.lines.has(widget.row("transformer.h_3"))).toBe(false);
});
