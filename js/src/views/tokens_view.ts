/** Tokens colored by an activation, without and with the patches. */
import { PackedNumbers } from "../inflate";
import type { Coloring, TokensTraits } from "../kernel/protocol";
import { buttonElement, consume, element, replaceChildren, setAttribute, setOptions } from "../page/dom";
import { gridTarget } from "../page/grid";
import { formatNumber, visible, visibleToken } from "../page/text";
import { makeRange } from "../plots/heatmap";
import { colorOf, cssColor, isLight, MISSING, type Rgb, summarize } from "../plots/matrix";
import type { Linked, Part } from "../view";
import { labeled, type MakeView, makeActions, makePatchStrip, makeUpdates, showTraits } from "./linked_view";
import { itemOf } from "./selection";

export function paintToken({ style }: HTMLElement, color: Rgb): void {
  style.background = cssColor(color);
  style.color = isLight(color) ? "#000" : "#fff";
}

/** Arrow keys go from token to token, and from line to line. */
export function watchTokens(field: HTMLElement, lines: () => readonly HTMLButtonElement[][]): void {
  field.addEventListener("keydown", (event) => {
    const focused = event.target as HTMLButtonElement;
    const line = lines().findIndex((buttons) => buttons.includes(focused));
    const buttons = lines()[line] ?? [];
    const at = buttons.indexOf(focused);
    const [to, next] = gridTarget(event, [line, at], lines().length, buttons.length) ?? [-1, -1];
    const target = lines()[to]?.[next];
    if (line < 0 || target === undefined || event.ctrlKey || event.metaKey) return;
    consume(event);
    for (const button of lines().flat()) button.tabIndex = button === target ? 0 : -1;
    target.focus();
  });
}

export const makeTokensView: MakeView<TokensTraits> = async (view, place, onError) => {
  const shown = new TokensView(view);
  place(shown);
  const read = async () => {
    const { rows, runs, scores } = view.model.get("coloring");
    const packed = await PackedNumbers.of(view.model.get("numbers"));
    const numbers = packed.floats(runs * scores.length * rows.reduce((sum, row) => sum + row.length, 0));
    packed.checkAllRead();
    return numbers;
  };
  await showTraits(view, ["coloring", "numbers"], read, (numbers) => shown.show(numbers), onError);
};

class TokensView implements Part {
  readonly element: HTMLElement;
  private readonly title = element("h3.gp-heading.gp-muted");
  private readonly lines = element("div.gp-stack.gp-generation-lines");
  private readonly legend = element("div.gp-line.gp-tight.gp-legend.gp-muted");
  private readonly scores = element("select.gp-field");
  private readonly choice = labeled("Score", this.scores);
  private readonly readout = element("div.gp-caption.gp-readout");
  private numbers = new Float32Array();
  private tokens: HTMLButtonElement[][] = [];

  constructor(private readonly view: Linked<TokensTraits>) {
    const updates = makeUpdates(
      view,
      () => this.coloring.version,
      () => view.kernel.ask("update", {}),
      this.lines,
    );
    this.scores.addEventListener("change", () => this.draw());
    watchTokens(this.lines, () => this.tokens);
    const bar = element("div.gp-line", this.title, this.choice, this.legend, updates.element);
    this.element = element(
      "section.gp-result.gp-stack",
      { "aria-label": "Colored tokens" },
      bar,
      this.lines,
      this.readout,
      makeActions(view).element,
      makePatchStrip(view).element,
    );
    view.onRemove(view.selection.onChange(() => this.followSelection()));
  }

  private get coloring(): Coloring {
    return this.view.model.get("coloring");
  }

  show(numbers: Float32Array<ArrayBuffer>): void {
    const { name, scores } = this.coloring;
    const before = Math.max(this.scores.selectedIndex, 0);
    this.numbers = numbers;
    this.title.textContent = visible(name);
    setOptions(
      this.scores,
      scores.map((score, at) => [at, visible(score)] as const),
      Math.min(before, scores.length - 1),
    );
    this.choice.hidden = scores.length < 2;
    this.draw();
  }

  /** The numbers of the chosen score in a run: all rows, one after the other. */
  private scoresOf(run: number): Float32Array {
    const { runs, scores } = this.coloring;
    const size = this.numbers.length / runs / scores.length;
    const start = (run * scores.length + this.scores.selectedIndex) * size;
    return this.numbers.subarray(start, start + size);
  }

  private draw(): void {
    const { rows, runs } = this.coloring;
    const all = Array.from({ length: runs }, (_, run) => this.scoresOf(run));
    const { full } = summarize(Float32Array.from(all.flatMap((one) => [...one])));
    const scale = full.map === "sequential" && full.low > 0 ? { ...full, low: 0 } : full;
    this.tokens = [];
    const lines = rows.flatMap((texts, row) =>
      all.map((numbers, run) => {
        const own = numbers.subarray(row * texts.length, (row + 1) * texts.length);
        const buttons = texts.map((text, position) => {
          const score = own[position] ?? Number.NaN;
          const words = `${position} ${visibleToken(text)}: ${formatNumber(score, 4)}`;
          const say = () => replaceChildren(this.readout, words);
          const isFirst = this.tokens.length === 0 && position === 0;
          const button = buttonElement(
            {
              class: "gp-generated",
              "aria-label": words,
              tabindex: isFirst ? 0 : -1,
              onpointerenter: say,
              onfocus: say,
              onclick: ({ shiftKey }: MouseEvent) =>
                this.view.selection.click(itemOf(this.coloring.name, { position }), shiftKey),
            },
            visibleToken(text),
          );
          paintToken(button, colorOf(score, scale) ?? MISSING);
          return button;
        });
        this.tokens.push(buttons);
        const names = [rows.length > 1 && `Row ${row}`, runs > 1 && (run ? "with the patches" : "without patches")];
        const name = names.filter(Boolean).join(", ");
        const heading = name === "" ? null : element("h4.gp-run-title", name);
        const line = element("div.gp-line.gp-tight.gp-generation-tokens", ...buttons);
        return element("div", { role: "group", "aria-label": name || "Tokens" }, heading, line);
      }),
    );
    replaceChildren(this.lines, ...lines);
    replaceChildren(this.legend, makeRange(scale.map, formatNumber(scale.low, 3), formatNumber(scale.high, 3)));
    replaceChildren(this.readout, "Point at a token to read its number; a click selects its position.");
    this.followSelection();
  }

  private followSelection(): void {
    const chosen = new Set(this.view.selection.items.map(({ position }) => position));
    for (const buttons of this.tokens)
      buttons.forEach((button, position) => {
        setAttribute(button, "aria-pressed", chosen.has(position));
      });
  }
}
