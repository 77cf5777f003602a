import { expect, test, vi } from "vitest";
import { userEvent } from "vitest/browser";
import type { Coloring, TokensTraits } from "../../src/kernel/protocol";
import { color, cssColor } from "../../src/plots/matrix";
import { itemOf } from "../../src/views/selection";
import { accessibilityViolations } from "../accessibility";
import { deflatedParts, FakeModel } from "../fixtures";
import { linkedTraits, rendered } from "../rendered";

async function shown(changes: Partial<Coloring> = {}, numbers = [0, 1, -2, 0.5, 0, 4, 2, 1]) {
  const own = {
    name: "layers[1].mlp.post",
    scores: ["3", "5"],
    rows: [
      ["The", " cat"],
      ["<b>", " سلام"],
    ],
  };
  const model = new FakeModel<TokensTraits>({
    ...linkedTraits("tokens"),
    coloring: { ...own, runs: 1, version: 0, ...changes },
    numbers: await deflatedParts([Float32Array.from(numbers)]),
  });
  const { el } = await rendered(model);
  return { model, el, tokens: () => [...el.querySelectorAll<HTMLButtonElement>(".gp-generated")] };
}

test("tokens have the color of their score, which can be chosen; a token reads its number", async () => {
  const { el, tokens } = await shown();
  const colors = () => tokens().map(({ style }) => style.background);
  const diverging = [0, 1, -2, 0.5].map((value) => cssColor(color((value + 2) / 4, "diverging")));
  expect(colors()).toEqual(diverging);
  expect(tokens().map((token) => token.getAttribute("aria-label"))).toEqual([
    "0 The: 0",
    "1 ␣cat: 1",
    "0 <b>: -2",
    "1 \u2068␣سلام\u2069: 0.5",
  ]);
  expect(el.querySelector(".gp-legend")?.textContent).toBe("-22");
  await userEvent.hover(tokens()[2] as HTMLButtonElement);
  expect(el.querySelector(".gp-readout")?.textContent).toBe("0 <b>: -2");
  await userEvent.selectOptions(el.querySelector("select") as HTMLSelectElement, "1");
  expect(colors()).toEqual([0, 4, 2, 1].map((value) => cssColor(color(value / 4, "sequential"))));
  expect(await accessibilityViolations(el)).toEqual([]);
});

test("a click selects a position in all views, and a selection elsewhere is marked; arrow keys go over tokens", async () => {
  const { model, tokens } = await shown();
  await userEvent.click(tokens()[1] as HTMLButtonElement);
  expect(model.get("selection")).toEqual([itemOf("layers[1].mlp.post", { position: 1 })]);
  expect(tokens().map((token) => token.getAttribute("aria-pressed"))).toEqual(["false", "true", "false", "true"]);
  await userEvent.keyboard("{ArrowDown}{ArrowLeft}");
  expect(document.activeElement).toBe(tokens()[2]);
  // What was selected here holds until it is sent, a moment later.
  await vi.waitFor(() => {
    model.set("selection", [itemOf(null, { position: 0 })]);
    expect(tokens()[2]?.getAttribute("aria-pressed")).toBe("true");
  });
});

test("with patches, there is a line without and with them, on one scale; changed patches are computed", async () => {
  const { el, model, tokens } = await shown({ scores: ["h"], rows: [["a", "b"]], runs: 2 }, [1, 2, 8, 0]);
  expect([...el.querySelectorAll("h4")].map((title) => title.textContent)).toEqual([
    "without patches",
    "with the patches",
  ]);
  const expected = [1, 2, 8, 0].map((value) => cssColor(color(value / 8, "sequential")));
  expect(tokens().map(({ style }) => style.background)).toEqual(expected);
  expect(el.querySelector<HTMLElement>(".gp-pair:has(select)")?.hidden).toBe(true);
  model.set("session", { ...model.get("session"), version: 3 });
  await vi.waitFor(() => expect(model.sent.at(-1)).toMatchObject({ request: "update" }));
});
