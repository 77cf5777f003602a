import { expect, test, vi } from "vitest";
import { userEvent } from "vitest/browser";
import type { AttentionTraits, Item } from "../../src/kernel/protocol";
import { color } from "../../src/plots/matrix";
import { itemOf } from "../../src/views/selection";
import { accessibilityViolations } from "../accessibility";
import { cellColor } from "../canvas";
import { deflatedParts, FakeModel, patch } from "../fixtures";
import { linkedTraits, rendered, setTheme } from "../rendered";

const [LAYERS, HEADS, SIZE] = [2, 2, 4];
const TOKENS = ["The", " cat", " sat", " down"];
/** Weight of head 1 in layer 1: query 3 looks at key 2 only; the other heads look at themselves. */
function cellOf(layer: number, head: number, query: number, key: number): number {
  const isSpecial = layer === 1 && head === 1 && query === 3;
  return key === (isSpecial ? 2 : query) ? 255 : 0;
}

async function packed(runs: number): Promise<DataView> {
  const parts: Uint8Array[] = [];
  for (let run = 0; run < runs; run++) {
    for (let layer = 0; layer < LAYERS; layer++) {
      // Scales, then scales and lengths of values: key 2 has a value of length 3, the others of length 1.
      const lengths = Uint8Array.from({ length: HEADS * SIZE }, (_, at) => (at % SIZE === 2 ? 255 : 85));
      const cells = Uint8Array.from({ length: HEADS * SIZE * SIZE }, (_, at) => {
        const [head, query, key] = [Math.floor(at / SIZE / SIZE), Math.floor(at / SIZE) % SIZE, at % SIZE];
        return run === 1 && layer === 1 ? 0 : cellOf(layer, head, query, key);
      });
      parts.push(
        new Uint8Array(Float32Array.of(1, 1).buffer),
        new Uint8Array(Float32Array.of(3, 3).buffer),
        lengths,
        cells,
      );
    }
  }
  return deflatedParts(parts as BlobPart[]);
}

async function traits(runs: number, group = "one"): Promise<AttentionTraits> {
  return {
    ...linkedTraits("attention", group),
    row: 0,
    cells: await packed(runs),
    attention: {
      version: 1,
      patches: 0,
      runs: runs === 2 ? ["clean", "patched"] : ["clean"],
      rows: 1,
      is_whole: true,
      tokens: [TOKENS],
      picture: null,
      images: [],
      layers: Array.from({ length: LAYERS }, (_, layer) => ({
        name: `layers[${layer}].attn`,
        title: `${layer}`,
        layer,
        is_cross: false,
        heads: HEADS,
        value_heads: HEADS,
        full: [SIZE, SIZE],
        shape: [SIZE, SIZE],
        queries: 0,
        keys: 0,
        image: null,
      })),
    },
  };
}

async function shown(runs = 1, changes: Partial<AttentionTraits> = {}) {
  const model = new FakeModel<AttentionTraits>({ ...(await traits(runs)), ...changes });
  const { el } = await rendered(model, "1000px");
  await vi.waitFor(() => expect(el.querySelector(".gp-large-head canvas")).not.toBeNull());
  const query = <E extends Element = HTMLElement>(selector: string) => el.querySelector(selector) as E;
  const text = (selector: string) => query(selector).textContent ?? "";
  const at = (layer: number, head: number) => {
    const box = query(".gp-heads-field canvas").getBoundingClientRect();
    return {
      clientX: box.left + ((head + 0.5) * box.width) / HEADS,
      clientY: box.top + ((layer + 0.5) * box.height) / LAYERS,
      bubbles: true,
    };
  };
  const field = query(".gp-heads-field");
  const hover = (layer: number, head: number) => field.dispatchEvent(new PointerEvent("pointermove", at(layer, head)));
  const click = (layer: number, head: number, shiftKey = false) =>
    field.dispatchEvent(new MouseEvent("click", { ...at(layer, head), shiftKey }));
  const button = (name: string) =>
    [...el.querySelectorAll("button")].find((one) => one.textContent?.trim() === name) as HTMLButtonElement;
  return { model, el, query, text, field, hover, click, button };
}

test("hovering previews a head, a click selects it, Shift overlays", async () => {
  const { click, field, hover, model, text } = await shown();
  hover(1, 1);
  expect(text(".gp-attention-title")).toBe("Layer 1, head 1");
  expect(model.get("selection")).toEqual([]);
  field.dispatchEvent(new PointerEvent("pointerleave"));
  expect(text(".gp-attention-title")).toBe("Layer 0, head 0");
  click(1, 1);
  expect(model.get("selection")).toEqual([itemOf("layers[1].attn.heads[1].z")]);
  expect(text(".gp-attention-title")).toBe("Layer 1, head 1");
  click(0, 1, true);
  expect(model.get("selection").map(({ layer }) => layer)).toEqual([1, 0]);
  expect(text(".gp-attention-title")).toBe("Layer 1, head 1Layer 0, head 1");
  expect(text(".gp-selected-text")).toBe("layers[1].attn.heads[1].z, layers[0].attn.heads[1].z");
});

test("a layer's number selects all its heads, overlaid or averaged; with no token selected, keys show the attention they receive", async () => {
  const { el, model, query, text } = await shown();
  const mean = query<HTMLInputElement>(".gp-check:nth-child(5) input");
  expect(query(".gp-check:nth-child(5)").hidden).toBe(true);
  query(".gp-layer-labels span:nth-child(2)").click();
  expect(model.get("selection")).toEqual([0, 1].map((head) => itemOf(`layers[1].attn.heads[${head}].z`)));
  mean.click();
  expect(text(".gp-attention-title")).toBe("Mean of Layer 1, head 0; Layer 1, head 1");
  // Of 8 rows of two heads, key 2 has the query 2 twice, and 3 once; key 3 has one.
  const received = [...el.querySelectorAll(".gp-strip-title")].at(-1)?.textContent;
  expect(received).toBe("received, mean over the queries: ␣sat (2) 0.38, The (0) 0.25, ␣cat (1) 0.25");
});

test("pointing at a token shows what it attends to and what attends to it", async () => {
  const { click, el, model, query } = await shown();
  click(1, 1);
  const titles = () => [...el.querySelectorAll(".gp-strip-title")].map((title) => title.textContent);
  const token = query(".gp-token[data-at='3']");
  token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  expect(titles()).toEqual(["␣down (3) looks at: ␣sat (2) 1", "␣down (3) is looked at by: 0 everywhere"]);
  token.click();
  expect(model.get("selection")).toEqual([itemOf("layers[1].attn.heads[1].z", { position: 3 })]);
  query(".gp-token-strip").dispatchEvent(new PointerEvent("pointerleave"));
  expect(titles()[0]).toBe("␣down (3) looks at: ␣sat (2) 1");
});

test("Shift adds a token to the pinned ones, or removes it", async () => {
  const { click, model, query } = await shown();
  click(1, 1);
  const choose = (at: number, shiftKey: boolean) =>
    query(`.gp-token[data-at='${at}']`).dispatchEvent(new MouseEvent("click", { bubbles: true, shiftKey }));
  const positions = () => model.get("selection").map(({ name, position }) => [name, position]);
  const name = "layers[1].attn.heads[1].z";
  choose(3, true);
  choose(1, true);
  expect(positions()).toEqual([
    [name, 3],
    [name, 1],
  ]);
  choose(3, true);
  expect(positions()).toEqual([[name, 1]]);
  choose(1, true);
  expect(positions()).toEqual([[name, null]]);
});

/** Of a layer of cross attention: two queries, four keys. */
async function shownCross() {
  const { attention } = await traits(1);
  const weights = Uint8Array.of(0, 255, 0, 0, 0, 0, 0, 255);
  const cells = await deflatedParts([new Uint8Array(Float32Array.of(1).buffer), weights] as BlobPart[]);
  const [first] = attention.layers;
  if (first === undefined) throw new Error("no layer");
  const sizes = { full: [2, SIZE] as [number, number], shape: [2, SIZE] as [number, number], queries: 1, keys: 0 };
  const cross = { ...first, ...sizes, name: "decoder.layers[0].cross_attn", is_cross: true, heads: 1, value_heads: 0 };
  const encoder = { ...first, ...sizes, name: "encoder.layers[0].attn", heads: 0, value_heads: 0 };
  const found = { ...attention, layers: [cross, encoder], tokens: [TOKENS, ["Le", " chat"]] };
  return shown(1, { attention: found, cells });
}

test("a key of cross attention belongs to the other sequence: it is not a query, and is patched as a key", async () => {
  const { el, model, query, text } = await shownCross();
  const titles = () => [...el.querySelectorAll(".gp-strip-title")].map((title) => title.textContent);
  const key = query(".gp-token[data-at='3']");
  key.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  expect(titles()).toEqual(["… looks at", "␣down (3) is looked at by: ␣chat (1) 1"]);
  key.click();
  const name = "decoder.layers[0].cross_attn.heads[0].pattern";
  expect(model.get("selection")).toEqual([itemOf(name, { key: 3 })]);
  expect(text(".gp-selected-text")).toBe(`${name}[:, :, 3]`);
  expect(el.querySelectorAll(".gp-heatmap-mark").length).toBe(1);
  query(".gp-token-strip").dispatchEvent(new PointerEvent("pointerleave"));
  expect(titles()[1]).toBe("␣down (3) is looked at by: ␣chat (1) 1");
  const queries = el.querySelectorAll(".gp-token-strip")[1] as HTMLElement;
  queries.querySelector<HTMLElement>("[data-at='0']")?.click();
  expect(model.get("selection")).toEqual([itemOf("decoder.layers[0].cross_attn.heads[0].z", { position: 0 })]);
  queries.dispatchEvent(new PointerEvent("pointerleave"));
  expect(titles()).toEqual(["Le (0) looks at: ␣cat (1) 1", "… is looked at by"]);
  // The encoder has a layer 0 of its own.
  const marked = [...el.querySelectorAll(".gp-layer-labels [data-selected]")];
  expect(marked).toEqual([query(".gp-layer-labels span")]);
});

test("a click on a weight selects it, and reads it out as value-weighted in that mode", async () => {
  const { button, click, model, query, text } = await shown();
  click(1, 1);
  button("Value-weighted").click();
  const canvas = query(".gp-large-head canvas");
  const { height, left, top, width } = canvas.getBoundingClientRect();
  const place = { clientX: left + (2.5 * width) / SIZE, clientY: top + (3.5 * height) / SIZE };
  canvas.dispatchEvent(new MouseEvent("click", { bubbles: true, ...place }));
  expect(model.get("selection")).toEqual([itemOf("layers[1].attn.heads[1].pattern", { position: 3, key: 2 })]);
  expect(text(".gp-selected-text")).toBe("layers[1].attn.heads[1].pattern[:, 3, 2]");
  expect(text(".gp-strip-title")).toBe("␣down (3) looks at: ␣sat (2) 3");
});

test("with patches, both runs and their difference can be chosen", async () => {
  const { button, click, el, text } = await shown(2);
  expect([...el.querySelectorAll(".gp-run-title")].map((title) => title.textContent)).toEqual(["Clean", "Patched"]);
  click(1, 1);
  button("Difference").click();
  expect(el.querySelectorAll(".gp-large-head canvas").length).toBe(1);
  click(0, 0, true);
  expect(text(".gp-large-head .gp-legend")).toContain("strongest, up or down: 1.00");
  click(1, 1);
  expect(text(".gp-large-head .gp-range")).toBe("-11");
});

test("with patches, both runs are shown side by side if there is room", async () => {
  const { el } = await shown(2);
  const [clean, patched] = [...el.querySelectorAll(".gp-large-head")].map((one) => one.getBoundingClientRect());
  expect(patched?.top).toBe(clean?.top);
  expect(patched?.left).toBeGreaterThanOrEqual(clean?.right ?? Number.NaN);
});

test("overlaid heads blend from the background color, also after the theme changes", async () => {
  setTheme(true);
  const { click, el } = await shown();
  click(1, 1);
  click(0, 0, true);
  const corner = () => {
    const canvas = el.querySelector(".gp-large-head canvas") as HTMLCanvasElement;
    return [...(canvas.getContext("2d")?.getImageData(canvas.width - 2, 1, 1, 1).data ?? [])].slice(0, 3);
  };
  expect(corner()).toEqual([255, 255, 255]);
  setTheme(false);
  await vi.waitFor(() => expect(corner()).toEqual([24, 26, 30]));
});

test("key presses do not reach the notebook", async () => {
  const { button, click, el, field, query } = await shown();
  click(1, 1);
  button("Steer …").click();
  const reached: string[] = [];
  el.addEventListener("keydown", ({ key }) => reached.push(key));
  const input = query<HTMLInputElement>(".gp-action-form input");
  for (const target of [input, field])
    for (const key of ["Enter", "d", "Tab"]) target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  expect(reached).toEqual(["Tab"]); // of the heads; a text field has its own
});

test("actions edit the patches; changed patches make the kernel run again", async () => {
  const { button, click, model } = await shown();
  expect(button("Zero").disabled).toBe(true);
  click(0, 1);
  button("Zero").click();
  await vi.waitFor(() => expect(model.sent.length).toBe(1));
  const items = [itemOf("layers[0].attn.heads[1].z")];
  expect(model.sent[0]).toMatchObject({
    request: "edit",
    payload: { based_on: 0, edit: { action: "act", act: "zero", items, value: null, steps: null } },
  });
  button("Steer …").click();
  await userEvent.keyboard("2 * d{Enter}"); // the field has the focus
  model.trigger("msg:custom", { id: (model.sent[0] as { id: number }).id, result: { version: 1 } }, []);
  await vi.waitFor(() => expect(model.sent.length).toBe(2));
  expect(model.sent[1]).toMatchObject({ payload: { based_on: 1, edit: { act: "steer", value: "2 * d" } } });
  model.set("session", { version: 2, patches: [], can_undo: true, can_redo: false, note: "" });
  await vi.waitFor(() => expect(model.sent.at(-1)).toMatchObject({ request: "update" }));
});

test("without a kernel, heads can be chosen; patches and batch rows say why they cannot", async () => {
  const { attention } = await traits(1);
  const { session } = linkedTraits("attention");
  const chosen = { ...session, can_undo: true };
  const { button, click, el, model, query, text } = await shown(1, {
    attention: { ...attention, rows: 2 },
    session: chosen,
  });
  const row = query<HTMLSelectElement>("select[aria-label='Row of the batch']");
  const remaining = () => [...el.querySelectorAll<HTMLElement>(".gp-patch-strip button")].filter((one) => !one.hidden);
  expect([row.hidden, row.disabled, remaining().length]).toEqual([false, false, 1]);
  model.trigger("comm:close");
  expect([row.disabled, row.title]).toEqual([true, "Another row of the batch needs the kernel."]);
  expect(remaining()).toEqual([]);
  click(1, 0);
  expect(text(".gp-attention-title")).toBe("Layer 1, head 0");
  expect(button("Zero").disabled).toBe(true);
  expect(button("Zero").title).toContain("kernel");
  expect(button("Copy path").disabled).toBe(false);
});

test("views of a group share the selection without a kernel", async () => {
  const one = await shown();
  const other = await shown();
  one.click(1, 1);
  expect(other.model.get("selection")).toEqual([itemOf("layers[1].attn.heads[1].z")]);
  expect(other.text(".gp-attention-title")).toBe("Layer 1, head 1");
  const resid: Item = itemOf("layers[0].resid_post", { position: 2 });
  other.model.set("selection", [resid]); // from the kernel
  expect(other.query(".gp-layer-labels [data-selected]").textContent).toBe("0");
  expect(other.query(".gp-token[data-active]").textContent).toBe("␣sat");
});

test("the keyboard reaches heads and tokens", async () => {
  const { el, field, model, text } = await shown();
  const press = (target: Element, key: string, shiftKey = false) =>
    target.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey, bubbles: true }));
  for (const key of ["ArrowRight", "ArrowRight", "ArrowDown"]) press(field, key);
  expect(text(".gp-heads .gp-visually-hidden")).toBe("Layer 1, head 1");
  press(field, "Enter");
  expect(model.get("selection").map(({ name }) => name)).toEqual(["layers[1].attn.heads[1].z"]);
  const tokens = el.querySelector(".gp-token-strip") as Element;
  for (const key of ["ArrowRight", "ArrowRight", "Enter"]) press(tokens, key);
  expect(model.get("selection").at(-1)?.position).toBe(2);
});

test.each(["true", "false"])("no accessibility violations; light: %s", async (isLight) => {
  setTheme(isLight === "true");
  const { click, el, query } = await shown(2);
  click(1, 1);
  click(0, 0, true);
  query(".gp-token[data-at='3']").click();
  expect(await accessibilityViolations(el, { rules: { region: { enabled: false } } })).toEqual([]);
});

test("a token that is written from the right does not turn around the numbers beside it", async () => {
  const from = await traits(1);
  const attention = { ...from.attention, tokens: [["سلام", " دنیا", " ש", "a"]] };
  const model = new FakeModel<AttentionTraits>({ ...from, attention });
  model.set("selection", [itemOf("layers[1].attn.heads[1].z", { position: 3 })]);
  const { el } = await rendered(model);
  const [title] = el.querySelectorAll(".gp-strip-title");
  expect(title?.textContent).toBe("a (3) looks at: \u2068␣ש\u2069 (2) 1");
  const at = (text: string) => {
    const nodes = [...(title?.childNodes ?? [])].flatMap((node) =>
      node.nodeType === 3 ? [node] : [...node.childNodes],
    );
    const node = nodes.find(({ textContent }) => textContent?.includes(text)) as Text;
    const range = document.createRange();
    range.setStart(node, node.data.indexOf(text));
    range.setEnd(node, node.data.indexOf(text) + text.length);
    return range.getBoundingClientRect().left;
  };
  expect(at("ש")).toBeLessThan(at("(2)"));
  expect(at("(2)")).toBeLessThan(at(" 1"));
});

test("weights of one in hundreds are seen, in the same colors small and large; linear colors can be chosen", async () => {
  const size = 128;
  const [first] = (await traits(1)).attention.layers;
  if (first === undefined) throw new Error("no layer");
  // As attention that looks at everything before: row n has weights of 1 / n.
  const even = Uint8Array.from({ length: size * size }, (_, at) => {
    const [query, key] = [Math.floor(at / size), at % size];
    return key > query ? 0 : Math.round(255 * Math.sqrt(1 / (query + 1)));
  });
  const layer = { ...first, full: [size, size] as [number, number], shape: [size, size] as [number, number] };
  const { attention } = await traits(1);
  const { el, query } = await shown(1, {
    attention: { ...attention, layers: [{ ...layer, heads: 1, value_heads: 0 }] },
    cells: await deflatedParts([new Uint8Array(Float32Array.of(1).buffer), even] as BlobPart[]),
  });
  const box = [...el.querySelectorAll(".gp-check")].find((one) => one.textContent === "Logarithmic colors");
  const checkbox = box?.querySelector("input") as HTMLInputElement;
  expect(checkbox.checked).toBe(true);
  const colors = () =>
    [".gp-large-head canvas", ".gp-heads-field canvas"].map((name) => {
      const canvas = query<HTMLCanvasElement>(name);
      // Of the thumbnail the last row, without the gap.
      const side = name.includes("field") ? size * (canvas.width / (canvas.width - 3)) : size;
      return cellColor(canvas, [Math.floor(size - 2), 4], [Math.round(side), Math.round(side)]);
    });
  const [large, small] = colors();
  const expected = color(Math.log(10) / Math.log(10 * size), "sequential");
  for (const channel of [0, 1, 2]) {
    expect(Math.abs((large?.[channel] ?? 0) - (expected[channel] ?? 0))).toBeLessThan(6);
    expect(Math.abs((small?.[channel] ?? 0) - (expected[channel] ?? 0))).toBeLessThan(6);
  }
  expect(query(".gp-large-head .gp-legend").textContent).toContain("≤ 7.81e-4");
  checkbox.click();
  const black = color(1 / size, "sequential");
  expect(Math.abs((colors()[0]?.[1] ?? 0) - (black[1] ?? 0))).toBeLessThan(6);
});

test("a patched head has the number of its patch in its picture, its title and, at the positions, its tokens", async () => {
  const { el, model, query } = await shown();
  const session = (path: string, more = {}) =>
    model.set("session", { ...model.get("session"), patches: [patch(7, { path, ...more })] });
  const marks = () => [...el.querySelectorAll("mark")].map((mark) => mark.textContent);
  session("layers[0].attn.heads[0].z", { positions: "1, 3" });
  expect(marks()).toEqual(["#7", "#7 zero"]);
  const [mark, field] = [query(".gp-patched-heads mark"), query(".gp-heads-field")].map((one) =>
    one.getBoundingClientRect(),
  );
  expect([mark?.left, mark?.top]).toEqual([field?.left, field?.top]);
  const tokens = [...query(".gp-token-strip").children].map((token) => token.hasAttribute("data-patched"));
  expect(tokens).toEqual([false, true, false, true]);
  session("layers[1].attn.pattern");
  expect(marks()).toEqual(["#7"]);
  expect(query(".gp-layer-labels span:nth-child(2)").textContent).toBe("1#7");
  session("layers[1].attn.pattern", { is_enabled: false });
  expect(marks()).toEqual([]);
});

test("patches of an image are shown over it: the weights of a head, those of one patch; a click selects its position", async () => {
  const from = await traits(1);
  const layers = from.attention.layers.map((layer) => ({ ...layer, image: 0 }));
  const picture = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
  const images = [{ positions: [2, 3], grid: [1, 2] as [number, number] }];
  const { click, el, model, query } = await shown(1, { attention: { ...from.attention, layers, picture, images } });
  const image = query(".gp-image");
  expect(getComputedStyle(image).backgroundImage).toContain(picture);
  const patches = [...image.querySelectorAll<HTMLElement>(".gp-patch")];
  expect(patches.map(({ dataset }) => dataset.at)).toEqual(["2", "3"]);
  const [first, second] = patches.map((patch) => patch.getBoundingClientRect());
  expect(first?.right).toBeCloseTo(second?.left ?? 0, 0);
  expect(first?.top).toBe(second?.top);
  expect([...query(".gp-token-strip").children].map((one) => one.textContent)).toEqual(["", "The", "␣cat"]);
  click(1, 1);
  // Of this head, query 3 looks at key 2 only.
  patches[1]?.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  expect(query(".gp-strip-title").textContent).toBe("␣down (3) looks at: ␣sat (2) 1");
  const [seen, other] = patches.map((patch) => getComputedStyle(patch).backgroundColor);
  expect(seen).toMatch(/0\.85\)$/);
  expect(other).toBe("rgba(0, 0, 0, 0)");
  patches[1]?.click();
  expect(model.get("selection")).toEqual([itemOf("layers[1].attn.heads[1].z", { position: 3 })]);
  expect(await accessibilityViolations(el)).toEqual([]);
});

test("rows of a generation appear as the kernel sends them: it is asked for them, until it is done", async () => {
  const [first] = (await traits(1)).attention.layers;
  if (first === undefined) throw new Error("no layer");
  const sized = async (size: number) => {
    const layer = { ...first, full: [size, size] as [number, number], shape: [size, size] as [number, number] };
    const cells = await deflatedParts([
      new Uint8Array(Float32Array.of(1).buffer),
      new Uint8Array(size * size),
    ] as BlobPart[]);
    const tokens = [Array.from({ length: size }, (_, at) => `t${at}`)];
    const about = { ...(await traits(1)).attention, tokens, layers: [{ ...layer, heads: 1, value_heads: 0 }] };
    return [about, cells] as const;
  };
  const [prompt, cells] = await sized(2);
  const { el, model } = await shown(1, { attention: { ...prompt, patches: -1 }, cells });
  await vi.waitFor(() => expect(model.sent).toHaveLength(1)); // for other patches than those of the session
  const answer = (state: string) => {
    const { id, request } = model.sent.at(-1) as { id: number; request: string };
    expect(request).toBe("update");
    model.trigger("msg:custom", { id, result: { id: 1, state, seconds: 0, fraction: null, error: null } }, []);
  };
  for (const size of [3, 4]) {
    const [about, more] = await sized(size);
    model.set("attention", about);
    model.set("cells", more);
    const asked = model.sent.length;
    answer("running");
    await vi.waitFor(() => expect(el.querySelectorAll(".gp-large-head .gp-heatmap-rows span")).toHaveLength(size));
    await vi.waitFor(() => expect(model.sent.length).toBe(asked + 1));
  }
  answer("done");
  expect(el.querySelector(".gp-token-strip")?.textContent).toBe("t0t1t2t3");
});
