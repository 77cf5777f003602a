/** The toolbar above the tree: the search field with its result, toggles, and the legend of the scores. */
import { buttonElement, element, icon, iconButton, replaceChildren, setAttribute } from "../page/dom";
import { formatCount, formatNumber } from "../page/text";
import type { Part, View } from "../view";
import { makeColumnMenu } from "./columns";
import { KEYS } from "./keyboard";
import { type ScoreFilter, type Scores, scoreText } from "./scores";
import type { TreeState } from "./tree_state";

/** A pause, so that screen readers do not announce the count after each letter. */
const ANNOUNCE_AFTER_MS = 600;

let count = 0;

export class Toolbar implements Part {
  readonly element: HTMLElement;
  private readonly field: HTMLInputElement;
  private readonly count = element("span.gp-found-count.gp-muted");
  private readonly error = element("p.gp-error.gp-query-error", { id: `gp-query-error-${++count}`, hidden: true });
  private readonly hint = element("p.gp-muted.gp-query-error", { hidden: true });
  private readonly steps: HTMLButtonElement[];
  private readonly sizes: HTMLButtonElement;
  private readonly folding: HTMLButtonElement;
  private readonly components: HTMLButtonElement;
  private readonly graph: HTMLButtonElement;
  private readonly keys = keysHelp();
  private announceTimer: ReturnType<typeof setTimeout> | undefined;
  private rowWhenTyped: number | null = null;

  constructor(
    private readonly view: View,
    private readonly tree: TreeState,
  ) {
    this.field = this.searchField();
    this.steps = [
      iconButton("up", "Previous match", { title: "Previous match (Shift+F3)", onclick: () => this.goToMatch(-1) }),
      iconButton("down", "Next match", { title: "Next match (F3)", onclick: () => this.goToMatch(1) }),
    ];
    this.sizes = toggle("Sizes", "Show what only carries sizes, constants and flags", () =>
      tree.setShowsSizes(!tree.showsSizes),
    );
    this.folding = toggle("Fold repeats", "Fold equal layers into one row, and masks, indices and positions", () =>
      tree.change({ isFolded: !tree.isFolded }),
    );
    this.components = toggle("Components", "Show layers and their components in place of modules and nodes", () =>
      tree.setByComponent(!tree.isByComponent),
    );
    this.graph = toggle("Graph", "Draw the dataflow of the selected module", () =>
      tree.setShowsGraph(!tree.showsGraph),
    );
    this.element = element(
      "div.gp-stack.gp-toolbar",
      this.bar(),
      this.error,
      this.hint,
      new Legend(view, tree).element,
    );
    view.onRemove(tree.onChange((change) => change === "lines" && this.show()));
    view.onRemove(() => clearTimeout(this.announceTimer));
    this.show();
  }

  focus(): void {
    this.field.focus();
    this.field.select();
  }

  goToMatch(step: 1 | -1): void {
    const number = this.tree.goToMatch(step);
    if (number === null) return;
    const path = this.view.skeleton.path(this.tree.activeRow);
    this.view.notices.announce(`Match ${formatNumber(number)} of ${this.countText()}: ${path}`);
  }

  /** Ends the search; the selected row stays visible. */
  clearSearch(): void {
    const { active } = this.tree;
    this.tree.search("");
    if (active > 0) this.view.reveal(active);
  }

  showKeys(): void {
    this.keys.open = !this.keys.open;
    if (this.keys.open) this.keys.querySelector("summary")?.focus();
  }

  private bar(): HTMLElement {
    const { tree } = this;
    return element(
      "div.gp-line.gp-tight.gp-tools",
      element("span.gp-search", { role: "search" }, icon("search"), this.field, this.count, ...this.steps),
      this.graph,
      this.components,
      this.sizes,
      this.folding,
      makeColumnMenu(this.view, tree).element,
      iconButton("expand", "Expand all", {
        title: "Expand all below the selected row",
        onclick: () => tree.expandBelow(tree.activeRow),
      }),
      iconButton("collapse", "Collapse all", { onclick: () => tree.collapseAll() }),
      this.keys,
    );
  }

  private searchField(): HTMLInputElement {
    return element("input", {
      // Not type=search: some browsers draw its cross in black on a dark page.
      type: "text",
      role: "searchbox",
      class: "gp-field",
      "aria-label": "Search nodes",
      "aria-describedby": this.error.id,
      placeholder: "Search: attn op:mul shape:64 is:patched",
      title: HELP,
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.search(),
      onkeydown: (event: KeyboardEvent) => this.onKey(event),
    });
  }

  private search(): void {
    this.tree.search(this.field.value);
    this.rowWhenTyped = this.tree.activeRow;
    clearTimeout(this.announceTimer);
    this.announceTimer = setTimeout(() => {
      if (this.field.value.trim()) this.view.notices.announce(this.tree.found.error ?? this.countText());
    }, ANNOUNCE_AFTER_MS);
  }

  /** Focuses the tree, at a match unless the user has selected a row since typing the query. */
  private toTree(): void {
    const { matches } = this.tree.found;
    const { activeRow } = this.tree;
    if (matches?.length && activeRow === this.rowWhenTyped && !matches.includes(activeRow)) this.goToMatch(1);
    this.view.focusTree();
  }

  /** Enter goes through the matches; Esc and the arrow lead to the tree, where another Esc ends the search. */
  private onKey(event: KeyboardEvent): void {
    if (event.isComposing) return;
    if (event.key === "Enter") this.goToMatch(event.shiftKey ? -1 : 1);
    else if (event.key === "ArrowDown" || event.key === "Escape") this.toTree();
    else return;
    event.preventDefault();
  }

  private show(): void {
    const { tree, field } = this;
    // Another view may have changed the query.
    if (field.value !== tree.query) field.value = tree.query;
    setAttribute(field, "aria-invalid", tree.found.error !== null);
    this.error.hidden = tree.found.error === null;
    this.error.textContent = tree.found.error;
    replaceChildren(this.count, this.countText());
    this.hint.hidden = tree.found.matches?.length !== 0 || tree.found.error !== null;
    this.hint.textContent = tree.found.onlySizesCount
      ? `No matches except ${formatNumber(tree.found.onlySizesCount)} that only carry sizes: add is:size.`
      : "No matches. Try fewer or shorter terms.";
    for (const step of this.steps) step.disabled = !tree.found.matches?.length;
    setAttribute(this.sizes, "aria-pressed", tree.showsSizes);
    setAttribute(this.folding, "aria-pressed", tree.isFolded);
    this.folding.disabled = !tree.canFold;
    setAttribute(this.graph, "aria-pressed", tree.showsGraph);
    setAttribute(this.components, "aria-pressed", tree.isByComponent);
    this.components.hidden = tree.components.size === 0;
    this.sizes.disabled = tree.isByComponent;
  }

  private countText(): string {
    const { found } = this.tree;
    const { matches } = found;
    const all = formatCount(this.view.model.get("about").nodes || found.index.size, "node");
    return matches === null ? all : `${formatNumber(matches.length)} of ${all}`;
  }
}

const HELP = `All terms must hold.
attn  text in path, torch function or component
layers[3].attn.q  layers[*].resid_post
h_*.attn  * is any text
op:mul  shape:64  shape:[1,*,64]
is:patched  is:opaque  is:parameter  is:size
-term  without`;

function keysHelp(): HTMLDetailsElement {
  const pairs = KEYS.flatMap(([keys, what]) => [element("dt", keys), element("dd", what)]);
  const summary = element("summary.gp-button.gp-quiet", { "aria-label": "Keys", title: "Keys" }, "?");
  const close = () => {
    details.open = false;
  };
  const onkeydown = (event: KeyboardEvent) => event.key === "Escape" && close();
  const details = element(
    "details.gp-menu",
    { onkeydown, onfocusout: close },
    summary,
    element("dl.gp-menu-list.gp-keys", ...pairs),
  );
  return details;
}

function toggle(label: string, title: string, onclick: () => void): HTMLButtonElement {
  return buttonElement({ "aria-pressed": false, title, onclick }, label);
}

// -- The legend of the scores: their name, colors and range; sorts the tree by them, and filters it ----------------------

const TOP_COUNTS = [10, 50, 200];

export class Legend implements Part {
  readonly element = element("div.gp-line.gp-tight.gp-scores", { role: "group", "aria-label": "Scores", hidden: true });
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
      { "aria-pressed": tree.isSorted, onclick: () => tree.change({ isSorted: !tree.isSorted }) },
      isBySize ? "Sort by size of score" : "Sort by score",
    );
    this.minimum = element("input.gp-field.gp-minimum", {
      inputmode: "decimal",
      "aria-label": isBySize ? "Minimum size of a score" : "Minimum score",
      hidden: true,
      value: scoreText(middle),
      oninput: () => this.applyFilter(),
    });
    this.filter = element(
      "select.gp-field",
      {
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
      "span.gp-pair.gp-range",
      scoreText(scores.minimum),
      this.scale(scores),
      scoreText(scores.maximum),
    );
    return [
      element("strong.gp-score-name.gp-cut", scores.name),
      range,
      this.sort,
      this.filter,
      this.minimum,
      iconButton("close", "Hide scores", { onclick: () => tree.clearScores() }),
    ];
  }

  private scale(scores: Scores): HTMLElement {
    const scale = element("span.gp-scale", { "aria-hidden": true });
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
    if (wanted !== undefined) tree.change({ filter: wanted });
  }

  /** `undefined`: the text is not a number. */
  private parseFilter(choice: string, typed: string): ScoreFilter | null | undefined {
    if (choice === "all") return null;
    if (choice !== "least") return { count: Number(choice) };
    const minimum = Number(typed.replaceAll(",", "").trim() || Number.NaN);
    return Number.isNaN(minimum) ? undefined : { minimum };
  }
}
