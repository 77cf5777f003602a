import { expect, test, vi } from "vitest";
import { page, userEvent } from "vitest/browser";
import type { Generation, GenerationTraits } from "../../src/kernel/protocol";
import { color, cssColor } from "../../src/plots/matrix";
import { itemOf } from "../../src/views/selection";
import { accessibilityViolations } from "../accessibility";
import { deflatedParts, FakeModel } from "../fixtures";
import { linkedTraits, rendered } from "../rendered";

const TOP = 2;
const HOSTILE = "<img src=x onerror=window.wasRun=1>";

function generation(changes: Partial<Generation> = {}): Generation {
  return {
    prompt: ["The", " cat"],
    vocabulary: [" sat", HOSTILE, " on"],
    tokens: [7, 8, 9],
    size: 100,
    top: TOP,
    lines: [{ name: "Without patches", steps: 3, branch: null, start: 0 }],
    version: 0,
    remarks: [],
    ...changes,
  };
}

/** The tokens 0, 1, 2; the other probable one of each step is the next one. */
function line(): ArrayBuffer[] {
  return [
    new Uint32Array([0, 1, 2]).buffer,
    new Float32Array([-0.5, -1, -2]).buffer,
    new Float32Array([0.25, 0.5, 1]).buffer,
    new Uint32Array([0, 1, 1, 2, 2, 0]).buffer,
    new Float32Array([0.5, 0.25, 0.5, 0.25, 0.5, 0.25]).buffer,
  ];
}

async function shown(changes: Partial<Generation> = {}, ...more: ArrayBuffer[]) {
  const model = new FakeModel<GenerationTraits>({
    ...linkedTraits("generation"),
    generation: generation(changes),
    numbers: await deflatedParts([...line(), ...more]),
  });
  await page.viewport(720, 700);
  const { el, remove } = await rendered(model);
  const sent = (request: string) => model.sent.filter((one) => (one as { request: string }).request === request);
  return { model, el, remove, sent, tokens: [...el.querySelectorAll<HTMLButtonElement>(".gp-generated")] };
}

test("tokens show their score as color and text, and a click branches", async () => {
  const { el, tokens, sent } = await shown();
  const now = (at: number) => el.querySelectorAll<HTMLButtonElement>(".gp-generated")[at] as HTMLButtonElement;
  expect(tokens.map((token) => token.getAttribute("aria-label"))).toEqual([
    "step 0: ␣sat, probability 60.7%",
    `step 1: ${HOSTILE.replaceAll(" ", "␣")}, probability 36.8%`,
    "step 2: ␣on, probability 13.5%",
  ]);
  expect(new Set(tokens.map((token) => token.style.background)).size).toBe(3);
  expect(el.querySelector(".gp-legend")?.textContent).toBe("0%100%");
  await userEvent.selectOptions(el.querySelector("select") as HTMLSelectElement, "entropy");
  expect(now(2).getAttribute("aria-label")).toBe("step 2: ␣on, entropy (nats) 1");
  expect(el.querySelector(".gp-legend")?.textContent).toBe("04.61"); // of 100 tokens that are as probable
  await userEvent.click(now(0));
  const branch = el.querySelector<HTMLButtonElement>("[aria-label^='Branch with']") as HTMLButtonElement;
  expect(branch.getAttribute("aria-label")).toBe(`Branch with ${HOSTILE.replaceAll(" ", "␣")} at step 0`);
  await userEvent.click(branch);
  expect(sent("generation")).toMatchObject([{ payload: { line: 0, step: 0, token: 8, remove: null } }]);
  expect("wasRun" in window).toBe(false);
});

test("a probable token looks probable, also if the others are more so; its alternatives are beside it", async () => {
  const most = new Float32Array([Math.log(0.98), -1e-6, -1e-6]).buffer;
  const { el, tokens } = await shown(
    { lines: [...generation().lines, ...generation().lines] },
    ...line().with(1, most),
  );
  expect(tokens[3]?.style.background).toBe(cssColor(color(0.98, "sequential")));
  await userEvent.hover(tokens[3] as HTMLButtonElement);
  const details = el.querySelector(".gp-lens-details") as HTMLElement;
  expect(details.textContent).toContain("probability 98.0% (-0.0202 nats)");
  const lines = (el.querySelector(".gp-generation-lines") as HTMLElement).getBoundingClientRect();
  expect(details.getBoundingClientRect().left - (tokens[5] as HTMLElement).getBoundingClientRect().right).toBeLessThan(
    60,
  );
  expect(details.getBoundingClientRect().top).toBeLessThan(lines.bottom);
});

test("selected tokens are positions, also if selected in another view; a patch applies to their steps", async () => {
  const { model, el, tokens, sent } = await shown();
  (tokens[0] as HTMLButtonElement).focus();
  await userEvent.keyboard("{ArrowRight}{Enter}");
  expect(model.get("selection")).toEqual([itemOf(null, { position: 3 })]);
  await vi.waitFor(() => expect(model.saved).toBe(1));
  model.set(
    "selection",
    [3, 4].map((position) => itemOf("layers[1].mlp_out", { position })),
  );
  expect(tokens.map((token) => token.getAttribute("aria-pressed"))).toEqual(["false", "true", "true"]);
  await userEvent.click(el.querySelector("form .gp-primary") as HTMLButtonElement);
  await vi.waitFor(() => expect(sent("edit")).toHaveLength(1));
  const edit = { action: "act", act: "zero", items: [itemOf("layers[1].mlp_out")], value: null, steps: "1, 2" };
  expect(sent("edit")[0]).toMatchObject({ payload: { edit } });
  const kind = el.querySelector("form select") as HTMLSelectElement;
  await userEvent.selectOptions(kind, "steer");
  expect(el.querySelector<HTMLInputElement>("[aria-label='Value, as Python']")?.hidden).toBe(false);
  expect(await accessibilityViolations(el)).toEqual([]);
});

test("the path to patch follows the selection until the user types one", async () => {
  const { model, el } = await shown();
  const path = el.querySelector("[aria-label='Value to patch']") as HTMLInputElement;
  for (const name of ["layers[1].mlp_out", "layers[0].attn.heads[1].z"]) {
    model.set("selection", [itemOf(name)]);
    expect(path.value).toBe(name);
  }
  model.set("selection", [itemOf(null, { position: 3 })]);
  expect(path.value).toBe("layers[0].attn.heads[1].z");
  path.value = "layers[0].mlp_out";
  model.set("selection", [itemOf("layers[1].mlp_out")]);
  expect(path.value).toBe("layers[0].mlp_out");
});

test("branches are listed below and can be removed", async () => {
  const branch = { name: "Branch at step 1", steps: 3, branch: 0, start: 1 };
  const lines = [...generation().lines, branch];
  const { el, tokens, sent } = await shown({ lines }, ...line());
  expect(tokens).toHaveLength(6);
  expect(tokens.map((token) => token.className)).toEqual([
    ...Array(3).fill("gp-generated"),
    "gp-generated gp-generated-before",
    "gp-generated gp-generated-branch",
    "gp-generated",
  ]);
  await userEvent.click(el.querySelector("[aria-label='Remove: Branch at step 1']") as HTMLButtonElement);
  expect(sent("generation")).toMatchObject([{ payload: { remove: 0, step: null } }]);
});

test("without a kernel, tokens can be read but not branched; a removed view leaves nothing behind", async () => {
  const { model, el, remove, tokens } = await shown();
  model.trigger("comm:close");
  await userEvent.click(tokens[1] as HTMLButtonElement);
  expect(el.querySelector<HTMLButtonElement>("[aria-label^='Branch with']")?.disabled).toBe(true);
  expect(el.querySelector<HTMLButtonElement>("form .gp-primary")?.disabled).toBe(true);
  remove();
  expect(model.listening).toBe(0);
});
