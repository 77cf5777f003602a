/** Tokens colored by an activation, without and with the patches. */
import { PackedNumbers } from "../inflate";
import type { TokensTraits } from "../kernel/protocol";
import { element, replaceChildren, setOptions } from "../page/dom";
import { formatNumber, visible, visibleToken } from "../page/text";
import { makeRange } from "../plots/heatmap";
import { colorOf, joined, MISSING, summarize } from "../plots/matrix";
import { follow } from "../view";
import { labeled, type MakeView, makeActions, makePatchStrip, makeUpdates, showTraits } from "./linked_view";
import { itemOf } from "./selection";
import { TokenLines } from "./token_lines";

export const makeTokensView: MakeView<TokensTraits> = async (view, place, onError) => {
  const { kernel, selection } = view;
  const coloring = () => view.model.get("coloring");
  let numbers = new Float32Array();
  const lines = new TokenLines();
  const title = element("h3.gp-heading.gp-muted");
  const legend = element("div.gp-line.gp-tight.gp-legend.gp-muted");
  const readout = element("div.gp-caption.gp-readout");
  const scores = element("select.gp-field", { onchange: () => draw() });
  const choice = labeled("Score", scores);
  const updates = makeUpdates(view, lines.element, {
    version: () => coloring().version,
    ask: () => kernel.ask("update", {}),
  });
  /** The numbers of the chosen score in a run: all rows, one after the other. */
  const scoresOf = (run: number) => {
    const { runs, scores: all } = coloring();
    const size = numbers.length / runs / all.length;
    const start = (run * all.length + scores.selectedIndex) * size;
    return numbers.subarray(start, start + size);
  };
  const markSelected = () => lines.press(new Set(selection.items.map(({ position }) => position)));
  const draw = () => {
    const { name, rows, runs } = coloring();
    const all = Array.from({ length: runs }, (_, run) => scoresOf(run));
    const { full } = summarize(joined(all));
    const scale = full.map === "sequential" && full.low > 0 ? { ...full, low: 0 } : full;
    const shown = rows.flatMap((texts, row) =>
      all.map((own, run) => {
        const tokens = texts.map((text, position) => {
          const score = own[row * texts.length + position] ?? Number.NaN;
          const words = `${position} ${visibleToken(text)}: ${formatNumber(score, 4)}`;
          const say = () => replaceChildren(readout, words);
          const onclick = ({ shiftKey }: MouseEvent) => selection.click(itemOf(name, { position }), shiftKey);
          const attributes = { "aria-label": words, onpointerenter: say, onfocus: say, onclick };
          return { text, color: colorOf(score, scale) ?? MISSING, attributes };
        });
        const names = [rows.length > 1 && `Row ${row}`, runs > 1 && (run ? "with the patches" : "without patches")];
        return { name: names.filter(Boolean).join(", "), tokens };
      }),
    );
    lines.show(shown);
    replaceChildren(legend, makeRange(scale.map, formatNumber(scale.low, 3), formatNumber(scale.high, 3)));
    replaceChildren(readout, "Point at a token to read its number; a click selects its position.");
    markSelected();
  };
  const show = (found: Float32Array<ArrayBuffer>) => {
    const { name, scores: all } = coloring();
    numbers = found;
    title.textContent = visible(name);
    const names = all.map((score, at) => [at, visible(score)] as const);
    setOptions(scores, names, Math.min(Math.max(scores.selectedIndex, 0), all.length - 1));
    choice.hidden = all.length < 2;
    draw();
  };
  const read = async () => {
    const { rows, runs, scores: all } = coloring();
    const packed = await PackedNumbers.of(view.model.get("numbers"));
    const found = packed.floats(runs * all.length * rows.reduce((sum, row) => sum + row.length, 0));
    packed.checkAllRead();
    return found;
  };
  follow(view, [selection], markSelected);
  place({
    element: element(
      "section.gp-result.gp-stack",
      { "aria-label": "Colored tokens" },
      element("div.gp-line", title, choice, legend, updates.element),
      lines.element,
      readout,
      makeActions(view).element,
      makePatchStrip(view).element,
    ),
  });
  await showTraits(view, ["coloring", "numbers"], read, show, onError);
};
