/** The most probable next tokens without and with the patches, side by side. */

import type { RunReport, Token } from "../kernel/protocol";
import { element } from "../page/dom";
import { formatPercent } from "../page/numbers";
import { visibleToken } from "../page/tokens";

type Tokens = NonNullable<RunReport["tokens"]>;

/** How many places a token went up; `null`: it was not among the first ones. */
export function rise(token: Token, rank: number, before: readonly Token[]): number | null {
  const old = before.findIndex(([text]) => text === token[0]);
  return old < 0 ? null : old - rank;
}

function mark(token: Token, rank: number, before: readonly Token[]): HTMLElement {
  const places = rise(token, rank, before);
  const [text, name, words] =
    places === null
      ? ["new", "up", "not among the first before"]
      : places === 0
        ? ["", "same", ""]
        : places > 0
          ? [`▲${places}`, "up", `up ${places}`]
          : [`▼${-places}`, "down", `down ${-places}`];
  const made = element("td", { class: `gp-rank gp-rank-${name}` });
  if (text !== "")
    made.append(element("span", { "aria-hidden": "true" }, text), element("span", { class: "gp-unseen" }, words));
  return made;
}

function bar(probability: number, most: number): HTMLElement {
  const filled = element("span", { class: "gp-token-bar", "aria-hidden": "true" });
  filled.style.setProperty("--gp-part", String(most > 0 ? probability / most : 0));
  return element("td", { class: "gp-number gp-probability" }, filled, element("span", {}, formatPercent(probability)));
}

function table(caption: string, tokens: readonly Token[], before: readonly Token[] | null, most: number): HTMLElement {
  const rows = tokens.map((token, rank) =>
    element(
      "tr",
      {},
      element("td", { class: "gp-number gp-muted" }, String(rank + 1)),
      element("th", { scope: "row" }, element("code", { class: "gp-token" }, visibleToken(token[0]))),
      bar(token[1], most),
      before === null ? null : mark(token, rank, before),
    ),
  );
  return element("table", { class: "gp-tokens" }, element("caption", {}, caption), element("tbody", {}, ...rows));
}

/** `isPatched`: whether any patch was applied; without one there is nothing to compare. */
export function makeNextTokens({ position, before, after }: Tokens, isPatched: boolean): HTMLElement {
  const most = Math.max(...[...before, ...after].map(([, probability]) => probability), 0);
  const tables = isPatched
    ? [table("Without patches", before, null, most), table("With patches", after, before, most)]
    : [table("Without patches", before, null, most)];
  return element(
    "section",
    { class: "gp-report-part" },
    element("h4", {}, `Next token after position ${position}`),
    element("div", { class: "gp-token-tables" }, ...tables),
  );
}
