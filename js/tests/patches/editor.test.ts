import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { Checked, PatchKind } from "../../src/kernel/protocol";
import { DEBOUNCE_MS, makePatchEditor, type PatchEditor } from "../../src/patches/editor";
import { ABOUT, patch } from "../fixtures";
import { choose, HOSTILE, named, Rig, settled, type } from "../panel_rig";

const FINE: Checked = { shape: [1, 8, 64], sliced: [1, 8, 64], warning: null, name: null };
const PATH = "transformer.h_0.output";

let rig: Rig;
let editor: PatchEditor;
let anchor: HTMLElement;

const field = (name: string) => named<HTMLInputElement>(editor.element, name);
const kind = (value: string) => choose(named<HTMLSelectElement>(editor.element, "Kind"), value);
const text = () => editor.element.textContent ?? "";
const isOff = () => named(editor.element, "Apply").getAttribute("aria-disabled") === "true";
const isShown = (name: string) => field(name).closest<HTMLElement>(".gp-form-row")?.hidden === false;
const isOpen = () => !editor.element.hidden;
const submit = () => named(editor.element, "Apply").closest("form")?.dispatchEvent(new Event("submit"));

async function wait(ms = DEBOUNCE_MS): Promise<void> {
  await vi.advanceTimersByTimeAsync(ms);
}

function start(changes = {}): void {
  rig = new Rig(changes);
  editor = makePatchEditor(rig.view);
  anchor = document.createElement("div");
  rig.view.root.append(anchor, editor.element);
}

beforeEach(() => {
  vi.useFakeTimers();
  start();
});
afterEach(() => {
  rig.view.remove();
  vi.useRealTimers();
});

describe("the fields", () => {
  it("depend on the patch kind", () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    const more = ["Steps", "Positions", "Position dimension", "Any shape", "Allow empty"];
    const fields = ["Slice", "Value", "Variable", ...more];
    const shown = (of: string) => {
      kind(of);
      return fields
        .filter(isShown)
        .slice(0, 3)
        .filter((name) => !name.startsWith("Ste") && !name.startsWith("Pos"));
    };
    expect(shown("zero")).toEqual(["Slice"]);
    for (const of of ["add", "replace", "custom"]) expect(shown(of)).toEqual(["Slice", "Value"]);
    for (const of of ["probe", "record"]) expect(shown(of)).toEqual(["Slice", "Variable"]);
    expect(fields.slice(3).every(isShown)).toBe(true);
    expect(editor.element.querySelector("details")?.open).toBe(false);
  });

  it("start with the positions that a new patch is for", () => {
    editor.open({ row: rig.row(PATH), positions: "5" }, anchor);
    expect(field("Positions").value).toBe("5");
    expect(editor.element.querySelector("details")?.open).toBe(true);
    editor.open({ row: rig.row(PATH) }, anchor);
    expect(field("Positions").value).toBe("");
  });

  it("keep their text while another kind hides them, and do not send it", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    kind("add");
    type(field("Value"), "0.5 * v");
    kind("probe");
    await wait();
    expect(rig.last("check").payload.patch).toMatchObject({ kind: "probe", value: null });
    kind("add");
    expect(field("Value").value).toBe("0.5 * v");
    await wait();
    expect(rig.last("check").payload.patch).toMatchObject({ kind: "add", value: "0.5 * v", name: null });
  });

  it("show the unused name that a probe gets", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    kind("probe");
    await wait();
    await rig.answer("check", { ...FINE, name: "h_0_output" });
    expect(field("Variable").placeholder).toBe("h_0_output");
    submit();
    await settled();
    expect(rig.last("edit").payload.edit).toMatchObject({ patch: { kind: "probe", name: null } });
  });

  it("are filled from an edited patch, and opened if not empty", () => {
    rig.session([
      patch(3, {
        kind: "add",
        slice: ":, -1",
        value: "v",
        positions: "2, 4",
        position_dim: 1,
        any_shape: true,
        allow_empty: true,
      }),
    ]);
    editor.open({ number: 3 }, anchor);
    expect([field("Slice").value, field("Value").value, field("Positions").value]).toEqual([":, -1", "v", "2, 4"]);
    expect([field("Position dimension").value, field("Any shape").checked]).toEqual(["1", true]);
    expect(field("Allow empty").checked).toBe(true);
    expect(editor.element.querySelector("details")?.open).toBe(true);
  });
});

it("has the fields of a kind registered later", async () => {
  const scale = {
    name: "scale",
    summary: "multiplies the value",
    fields: ["value", "steps", "positions", "position_dim", "any_shape", "allow_empty"] as PatchKind["fields"],
    value: { noun: "a number", example: "0.5" },
  };
  rig.model.set("about", { ...ABOUT, patch_kinds: [...ABOUT.patch_kinds, scale] });
  editor.open({ row: rig.row(PATH) }, anchor);
  kind("scale");
  expect([isShown("Slice"), isShown("Value"), isShown("Variable"), isShown("Steps")]).toEqual([
    false,
    true,
    false,
    true,
  ]);
  expect(text()).toContain("multiplies the value");
  expect(text()).toContain("Type a number");
  expect(field("Value").placeholder).toBe("e.g. 0.5");
  type(field("Value"), "2.0");
  await wait();
  await rig.answer("check", FINE);
  submit();
  await settled();
  expect(rig.last("edit").payload.edit).toMatchObject({
    action: "add",
    patch: { kind: "scale", slice: null, value: "2.0", name: null },
  });
});

describe("while typing", () => {
  beforeEach(() => editor.open({ row: rig.row(PATH) }, anchor));

  it("one request is sent, after a pause", async () => {
    expect(rig.asked("check")).toHaveLength(1);
    type(field("Slice"), ":");
    await wait(DEBOUNCE_MS - 1);
    type(field("Slice"), ":, -1");
    await wait(DEBOUNCE_MS - 1);
    expect(rig.asked("check")).toHaveLength(1);
    await wait(1);
    expect(rig.asked("check")).toHaveLength(2);
    expect(rig.last("check").payload).toEqual({
      patch: {
        ...{ path: PATH, kind: "zero", slice: ":, -1", value: null, name: null },
        ...{ steps: null, positions: null, position_dim: null, any_shape: false, allow_empty: false },
      },
      number: null,
    });
  });

  it("shapes and warnings are shown", async () => {
    type(field("Slice"), ":, 9");
    await wait();
    await rig.answer("check", { ...FINE, sliced: [1, 64], warning: "index 9 is beyond the recorded size 8" });
    expect(text()).toContain("Recorded [1, 8, 64] → [1, 64] patched");
    expect(text()).toContain("index 9 is beyond the recorded size 8");
    expect(isOff()).toBe(false);
  });

  it("an error is shown beside its field, and linked for screen readers", async () => {
    type(field("Slice"), "0, 0, 0, 0");
    await wait();
    await rig.refuse("check", { message: "too many indices: 4 for 3 dimensions", field: "slice" });
    const slice = field("Slice");
    expect(slice.getAttribute("aria-invalid")).toBe("true");
    const ids = slice.getAttribute("aria-describedby")?.split(" ") ?? [];
    expect(ids.map((id) => document.getElementById(id)?.textContent).join()).toContain("too many indices");
    expect(isOff()).toBe(true);
    submit();
    await settled();
    expect(rig.asked("edit")).toHaveLength(0);
    expect(document.activeElement).toBe(slice);
    type(slice, "0");
    expect(slice.hasAttribute("aria-invalid")).toBe(false);
    expect(isOff()).toBe(false);
  });

  it("an error without a field, or for a missing one, is also shown", async () => {
    await rig.refuse("check", { message: "add takes another thing", field: "value" });
    expect(text()).toContain("add takes another thing");
    expect(isOff()).toBe(true);
  });

  it("an error in a hidden field opens it", async () => {
    type(field("Steps"), "x");
    await wait();
    await rig.refuse("check", { message: "'x' are no whole numbers", field: "steps" });
    expect(editor.element.querySelector("details")?.open).toBe(true);
    expect(field("Steps").getAttribute("aria-invalid")).toBe("true");
  });

  it("late replies to earlier text are ignored", async () => {
    const first = rig.last("check");
    type(field("Slice"), "0");
    await wait();
    const second = rig.last("check");
    await rig.answer("check", { ...FINE, sliced: [8, 64] }, second);
    await rig.refuse("check", { message: "too late", field: "slice" }, first);
    expect(text()).toContain("[8, 64]");
    expect(text()).not.toContain("too late");
    type(field("Slice"), "0, 0");
    await rig.answer("check", { ...FINE, sliced: [1] }, second);
    expect(text()).not.toContain("[1] patched");
  });

  it("a missing value is not an error, and the slice is checked without it", async () => {
    kind("add");
    type(field("Slice"), "0");
    await wait();
    expect(rig.last("check").payload.patch).toMatchObject({ kind: "add", slice: "0", value: null });
    await rig.answer("check", { ...FINE, sliced: [8, 64] });
    expect(text()).toContain("[8, 64] patched");
    expect(text()).toContain("Type a number or a tensor");
    expect(field("Value").hasAttribute("aria-invalid")).toBe(false);
    expect(isOff()).toBe(true);
    submit();
    expect(document.activeElement).toBe(field("Value"));
  });

  it("a position dimension that is not a number is an error without asking the kernel", async () => {
    const asked = rig.asked("check").length;
    type(field("Position dimension"), "1.5");
    await wait();
    expect(rig.asked("check")).toHaveLength(asked);
    expect(field("Position dimension").getAttribute("aria-invalid")).toBe("true");
    expect(isOff()).toBe(true);
    type(field("Position dimension"), "-2");
    await wait();
    expect(rig.last("check").payload.patch.position_dim).toBe(-2);
  });

  it("markup from the user's model is shown as text", async () => {
    await rig.refuse("check", { message: HOSTILE, field: "slice" });
    expect(editor.element.querySelector("img")).toBeNull();
    expect(text()).toContain(HOSTILE);
  });
});

describe("Apply", () => {
  it("adds a patch to the shown version, and returns the focus to the tree", async () => {
    rig.session([patch(1)]);
    editor.open({ row: rig.row(PATH) }, anchor);
    kind("add");
    type(field("Value"), " 0.5 ");
    submit();
    await settled();
    expect(rig.last("edit").payload).toMatchObject({
      based_on: 1,
      edit: { action: "add", patch: { path: PATH, kind: "add", value: "0.5" } },
    });
    await rig.answer("edit", { version: 2 });
    expect(isOpen()).toBe(false);
    expect(rig.view.calls).toContainEqual(["focusTree"]);
    expect(rig.view.said).toEqual([`added add ${PATH} 0.5`]);
  });

  it("changes the edited patch", async () => {
    rig.session([patch(3, { slice: "0" })]);
    editor.open({ number: 3 }, anchor);
    expect(rig.last("check").payload.number).toBe(3);
    type(field("Slice"), "");
    submit();
    await settled();
    expect(rig.last("edit").payload.edit).toMatchObject({ action: "change", number: 3, patch: { slice: null } });
  });

  it("also happens on Enter in the kind field", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    named(editor.element, "Kind").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    await settled();
    expect(rig.asked("edit")).toHaveLength(1);
  });

  it("sends one request, however often it is pressed", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    submit();
    named(editor.element, "Applying …").click();
    await settled();
    expect(rig.asked("edit")).toHaveLength(1);
  });

  it("keeps the fields if refused", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    kind("add");
    type(field("Value"), "steering");
    submit();
    await settled();
    await rig.refuse("edit", { message: "shapes (3,) and (1, 8, 64) do not fit", field: "value" });
    expect(isOpen()).toBe(true);
    expect(field("Value").value).toBe("steering");
    expect(field("Value").readOnly).toBe(false);
    expect(field("Value").getAttribute("aria-invalid")).toBe("true");
    expect(document.activeElement).toBe(field("Value"));
  });

  it("says if the patches are newer, shows them, and can be repeated", async () => {
    rig.session([patch(1)]);
    editor.open({ row: rig.row(PATH) }, anchor);
    type(field("Slice"), "0");
    await wait();
    await rig.answer("check", FINE);
    submit();
    await settled();
    rig.session([patch(1), patch(2, { kind: "probe", name: "seen" })]);
    await rig.refuse("edit", { message: "stale", field: "version" });
    expect(text()).toContain("changed meanwhile");
    expect(text()).toContain(`#2 probe ${PATH} seen`);
    expect(field("Slice").value).toBe("0");
    await rig.answer("check", FINE);
    expect(text()).toContain("changed meanwhile");
    submit();
    await settled();
    expect(rig.last("edit").payload.based_on).toBe(2);
  });

  it("adds the patch again if it was removed meanwhile", async () => {
    rig.session([patch(3)]);
    editor.open({ number: 3 }, anchor);
    type(field("Slice"), "0");
    rig.session([]);
    expect(text()).toContain("#3 was removed meanwhile");
    expect(field("Slice").value).toBe("0");
    submit();
    await settled();
    expect(rig.last("edit").payload.edit.action).toBe("add");
  });

  it("says if the patch was changed meanwhile, and keeps the fields", () => {
    rig.session([patch(3)]);
    editor.open({ number: 3 }, anchor);
    type(field("Slice"), "0");
    rig.session([patch(3), patch(4)]);
    expect(text()).not.toContain("meanwhile");
    rig.session([patch(3, { slice: "5" }), patch(4)]);
    expect(text()).toContain(`#3 was changed meanwhile, to: zero ${PATH}[5]`);
    expect(field("Slice").value).toBe("0");
  });
});

describe("a kernel", () => {
  it("that is busy queues Apply, and says so", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    await wait(600);
    expect(rig.view.kernel.state).toBe("busy");
    expect(text()).toContain("kernel is busy");
    expect(isOff()).toBe(false);
    submit();
    await settled();
    expect(text()).toContain("It is applied when the kernel is free");
    expect(field("Slice").readOnly).toBe(true);
    await rig.answer("edit", { version: 1 });
    expect(isOpen()).toBe(false);
  });

  it("that is lost says what to do, and keeps the fields", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    type(field("Slice"), "0");
    rig.model.trigger("comm:close");
    await wait();
    expect(text()).toContain("run the cell again");
    expect(isOff()).toBe(true);
    expect(field("Slice").value).toBe("0");
  });

  it("that refuses after the editor was closed still shows its error", async () => {
    editor.open({ row: rig.row(PATH) }, anchor);
    submit();
    await settled();
    editor.close();
    await rig.refuse("edit", { message: "no such thing", field: null });
    expect(rig.view.errors).toEqual(["no such thing"]);
  });
});

it("is for the output of a module", () => {
  editor.open({ row: rig.row("transformer.h_0") }, anchor);
  expect(editor.element.getAttribute("aria-label")).toBe(`Patch ${PATH}`);
  expect(isShown("Slice")).toBe(true);
});

describe("rows that cannot be patched", () => {
  it.each([
    ["transformer.output", "Patch transformer.output|last_hidden_state"],
    ["output", "Patch output|sub_0"],
  ])("name the first part of a container: %s", (path, button) => {
    editor.open({ row: rig.row(path) }, anchor);
    expect(text()).toContain("is a container");
    named(editor.element, button).click();
    expect(editor.element.getAttribute("aria-label")).toBe(button);
  });

  it("offer nothing instead for unused modules", () => {
    editor.open({ row: rig.row("extra_head") }, anchor);
    expect(text()).toContain("never called");
    expect(editor.element.querySelector(".gp-primary")).toBeNull();
  });
});

it("leaves nothing behind, and closes on Escape", () => {
  editor.open({ row: rig.row(PATH) }, anchor);
  field("Slice").dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true, cancelable: true }));
  expect(isOpen()).toBe(false);
  editor.open({ row: rig.row(PATH) }, anchor);
  type(field("Slice"), "0");
  rig.view.remove();
  expect(rig.model.listening).toBe(0);
  expect(vi.getTimerCount()).toBe(0);
});
