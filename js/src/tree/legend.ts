/** The legend of the scores: their name, colors and range; sorts the tree by them, and filters it. */

import { buttonElement, element, icon, setAttribute } from "../page/dom";
import { formatNumber } from "../page/numbers";
import type { Part, View } from "../view";
import { type ScoreFilter, type Scores, scoreText } from "./scores";
import type { TreeState } from "./tree_state";

const TOP_COUNTS = [10, 50, 200];

export class Legend implements Part {
  readonly element = element("div", { class: "gp-scores", role: "group", "aria-label": "Scores", hidden: true });
  private shown: Scores | null = null;
  private sort: HTMLButtonElement | null = null;
  private filter: HTMLSelectElement | null = null;
  private minimum: HTMLInputElement | null = null;

  constructor(
    view: View,
    private readonly tree: TreeState,
  ) {
    view.onRemove(tree.onChange((change) => change === "lines" && this.show()));
    this.show();
  }

  private show(): void {
    const { tree } = this;
    if (this.shown !== tree.scores) {
      this.shown = tree.scores;
      this.element.replaceChildren(...(tree.scores ? this.makeControls(tree.scores) : []));
    }
    this.element.hidden = tree.scores === null;
    if (this.sort) setAttribute(this.sort, "aria-pressed", tree.isSorted);
    if (this.filter && tree.filter === null && this.filter.value !== "least") this.filter.value = "all";
  }

  private makeControls(scores: Scores): HTMLElement[] {
    const { tree } = this;
    const { isByMagnitude: isBySize, maximum, minimum } = scores;
    const middle = (isBySize ? Math.max(-minimum, maximum) : minimum + maximum) / 2;
    this.sort = buttonElement(
      { "aria-pressed": tree.isSorted, onclick: () => tree.setSorted(!tree.isSorted) },
      isBySize ? "Sort by size of score" : "Sort by score",
    );
    this.minimum = element("input", {
      class: "gp-field gp-minimum",
      inputmode: "decimal",
      "aria-label": isBySize ? "Minimum size of a score" : "Minimum score",
      hidden: true,
      value: scoreText(middle),
      oninput: () => this.applyFilter(),
    });
    this.filter = element(
      "select",
      {
        class: "gp-field",
        "aria-label": "Which scores",
        title: "Rows with the same score have the same rank: most are names of one value",
        onchange: () => this.applyFilter(),
      },
      element("option", { value: "all" }, `all ${formatNumber(scores.count)}`),
      ...TOP_COUNTS.filter((count) => count < scores.rankCount).map((count) =>
        element("option", { value: count }, `the ${count} ${isBySize ? "largest in size" : "highest"}`),
      ),
      element("option", { value: "least" }, isBySize ? "size at least …" : "at least …"),
    );
    const range = element(
      "span",
      { class: "gp-range" },
      scoreText(scores.minimum),
      this.scale(scores),
      scoreText(scores.maximum),
    );
    return [
      element("strong", { class: "gp-score-name" }, scores.name),
      range,
      this.sort,
      this.filter,
      this.minimum,
      buttonElement(
        {
          class: "gp-button gp-quiet",
          "aria-label": "Hide scores",
          title: "Hide scores",
          onclick: () => tree.clearScores(),
        },
        icon("close"),
      ),
    ];
  }

  private scale(scores: Scores): HTMLElement {
    const scale = element("span", { class: "gp-scale", "aria-hidden": true });
    const color = (value: number) => {
      const strength = scores.strength(value);
      const share = Math.round(Math.abs(strength) * 100);
      return `color-mix(in srgb, var(--gp-${strength < 0 ? "cold" : "hot"}) ${share}%, var(--gp-background))`;
    };
    const stops = scores.isDiverging ? [scores.minimum, 0, scores.maximum] : [scores.minimum, scores.maximum];
    const span = scores.maximum - scores.minimum || 1;
    const parts = stops.map((value) => `${color(value)} ${Math.round(((value - scores.minimum) / span) * 100)}%`);
    scale.style.background = `linear-gradient(to right, ${parts.join(", ")})`;
    return scale;
  }

  private applyFilter(): void {
    const { filter, minimum, tree } = this;
    if (!filter || !minimum) return;
    minimum.hidden = filter.value !== "least";
    const wanted = this.parseFilter(filter.value, minimum.value);
    setAttribute(minimum, "aria-invalid", wanted === undefined);
    if (wanted !== undefined) tree.setFilter(wanted);
  }

  /** `undefined`: the text is not a number. */
  private parseFilter(choice: string, typed: string): ScoreFilter | null | undefined {
    if (choice === "all") return null;
    if (choice !== "least") return { count: Number(choice) };
    const minimum = Number(typed.replaceAll(",", "").trim() || Number.NaN);
    return Number.isNaN(minimum) ? undefined : { minimum };
  }
}
