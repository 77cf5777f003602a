/** The toolbar above the tree: the search field with its result, toggles, and the legend of the scores. */
import {
  type Attributes,
  buttonElement,
  element,
  icon,
  iconButton,
  refresh,
  setAttribute,
  setOptions,
} from "../page/dom";
import { formatCount, formatNumber } from "../page/text";
import { follow, type Part, type View } from "../view";
import { makeColumnMenu } from "./columns";
import { KEYS } from "./keyboard";
import { type ScoreFilter, type Scores, scoreText } from "./scores";
import type { TreeState } from "./tree_state";

/** A pause, so that screen readers do not announce the count after each letter. */
const ANNOUNCE_AFTER_MS = 600;

let count = 0;

export type Toolbar = ReturnType<typeof makeToolbar>;

export function makeToolbar(view: View, tree: TreeState) {
  const { model, notices, skeleton } = view;
  const { found } = tree;
  let announceTimer: ReturnType<typeof setTimeout> | undefined;
  let rowWhenTyped: number | null = null;

  const countText = () => {
    const all = formatCount(model.get("about").nodes || found.index.size, "node");
    return found.matches === null ? all : `${formatNumber(found.matches.length)} of ${all}`;
  };
  const goToMatch = (step: 1 | -1) => {
    const number = tree.goToMatch(step);
    if (number === null) return;
    notices.announce(`Match ${formatNumber(number)} of ${countText()}: ${skeleton.path(tree.activeRow)}`);
  };
  const search = () => {
    tree.search(field.value);
    rowWhenTyped = tree.activeRow;
    clearTimeout(announceTimer);
    announceTimer = setTimeout(
      () => field.value.trim() && notices.announce(found.error ?? countText()),
      ANNOUNCE_AFTER_MS,
    );
  };
  /** Focuses the tree, at a match unless the user has selected a row since typing the query. */
  const toTree = () => {
    const { activeRow } = tree;
    if (found.matches?.length && activeRow === rowWhenTyped && !found.matches.includes(activeRow)) goToMatch(1);
    view.focusTree();
  };
  /** Enter goes through the matches; Esc and the arrow lead to the tree, where another Esc ends the search. */
  const onkeydown = (event: KeyboardEvent) => {
    if (event.isComposing) return;
    if (event.key === "Enter") goToMatch(event.shiftKey ? -1 : 1);
    else if (event.key === "ArrowDown" || event.key === "Escape") toTree();
    else return;
    event.preventDefault();
  };
  const errorId = `gp-query-error-${++count}`;
  const field = element("input.gp-field", {
    // Not type=search: some browsers draw its cross in black on a dark page.
    type: "text",
    role: "searchbox",
    "aria-label": "Search nodes",
    "aria-describedby": errorId,
    "aria-invalid": () => found.error !== null,
    placeholder: "Search: attn op:mul shape:64 is:patched",
    title: HELP,
    autocomplete: "off",
    spellcheck: "false",
    oninput: search,
    onkeydown,
  });
  const noMatch = () => !found.matches?.length;
  const step = (by: 1 | -1, name: string, keys: string) => {
    const attributes = { title: `${name} (${keys})`, disabled: noMatch, onclick: () => goToMatch(by) };
    return iconButton(by < 0 ? "up" : "down", name, attributes);
  };
  const steps = [step(-1, "Previous match", "Shift+F3"), step(1, "Next match", "F3")];
  const toggle = (label: string, title: string, attributes: Attributes) =>
    buttonElement({ title, ...attributes }, label);
  const keys = keysHelp();
  const bar = element(
    "div.gp-line.gp-tight.gp-tools",
    element(
      "span.gp-search",
      { role: "search" },
      icon("search"),
      field,
      element("span.gp-found-count.gp-muted", countText),
      ...steps,
    ),
    toggle("Graph", "Draw the dataflow of the selected module", {
      "aria-pressed": () => tree.showsGraph,
      onclick: () => tree.setShowsGraph(!tree.showsGraph),
    }),
    toggle("Components", "Show layers and their components in place of modules and nodes", {
      "aria-pressed": () => tree.isByComponent,
      hidden: () => tree.components.size === 0,
      onclick: () => tree.setByComponent(!tree.isByComponent),
    }),
    toggle("Sizes", "Show what only carries sizes, constants and flags", {
      "aria-pressed": () => tree.showsSizes,
      disabled: () => tree.isByComponent,
      onclick: () => tree.setShowsSizes(!tree.showsSizes),
    }),
    toggle("Fold repeats", "Fold equal layers into one row, and masks, indices and positions", {
      "aria-pressed": () => tree.isFolded,
      disabled: () => !tree.canFold,
      onclick: () => tree.change({ isFolded: !tree.isFolded }),
    }),
    makeColumnMenu(view, tree).element,
    iconButton("expand", "Expand all", {
      title: "Expand all below the selected row",
      onclick: () => tree.expandBelow(tree.activeRow),
    }),
    iconButton("collapse", "Collapse all", { onclick: () => tree.collapseAll() }),
    keys,
  );
  const error = element(
    "p.gp-error.gp-query-error",
    { id: errorId, hidden: () => found.error === null },
    () => found.error,
  );
  const isHinted = () => found.matches?.length === 0 && found.error === null;
  const hint = element("p.gp-muted.gp-query-error", { hidden: () => !isHinted() }, () => {
    const more = `No matches except ${formatNumber(found.onlySizesCount)} that only carry sizes: add is:size.`;
    return found.onlySizesCount ? more : "No matches. Try fewer or shorter terms.";
  });
  const parts = element("div.gp-stack.gp-toolbar", bar, error, hint, makeLegend(view, tree).element);
  const show = () => {
    // Another view may have changed the query.
    if (field.value !== tree.query) field.value = tree.query;
    refresh(parts);
  };
  follow(view, [tree.content], show);
  view.onRemove(() => clearTimeout(announceTimer));
  show();
  return {
    element: parts,
    focus: () => {
      field.focus();
      field.select();
    },
    goToMatch,
    /** Ends the search; the selected row stays visible. */
    clearSearch: () => {
      const { active } = tree;
      tree.search("");
      if (active > 0) view.reveal(active);
    },
    showKeys: () => {
      keys.open = !keys.open;
      if (keys.open) keys.querySelector("summary")?.focus();
    },
  };
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

// -- The legend of the scores: their name, colors and range; sorts the tree by them, and filters it ----------------------

const TOP_COUNTS = [10, 50, 200];

function makeLegend(view: View, tree: TreeState): Part {
  let shown: Scores | null = null;
  const root = element("div.gp-line.gp-tight.gp-scores", {
    role: "group",
    "aria-label": "Scores",
    hidden: () => tree.scores === null,
  });
  const filter = element("select.gp-field", {
    "aria-label": "Which scores",
    title: "Rows with the same score have the same rank: most are names of one value",
    onchange: () => applyFilter(),
  });
  const isBySize = () => tree.scores?.isByMagnitude === true;
  const minimum = element("input.gp-field.gp-minimum", {
    inputmode: "decimal",
    "aria-label": () => (isBySize() ? "Minimum size of a score" : "Minimum score"),
    hidden: () => filter.value !== "least",
    oninput: () => applyFilter(),
  });
  const applyFilter = () => {
    const wanted = parseFilter(filter.value, minimum.value);
    setAttribute(minimum, "aria-invalid", wanted === undefined);
    if (wanted !== undefined) tree.change({ filter: wanted });
    refresh(root);
  };
  const controls = (scores: Scores): HTMLElement[] => {
    const { count, maximum, minimum: least, name, rankCount } = scores;
    minimum.value = scoreText((isBySize() ? Math.max(-least, maximum) : least + maximum) / 2);
    const word = isBySize() ? "largest in size" : "highest";
    const counts = TOP_COUNTS.filter((top) => top < rankCount).map((top) => [top, `the ${top} ${word}`] as const);
    const all = ["all", `all ${formatNumber(count)}`] as const;
    setOptions(filter, [all, ...counts, ["least", isBySize() ? "size at least …" : "at least …"]], "all");
    const onclick = () => tree.change({ isSorted: !tree.isSorted });
    const sort = buttonElement(
      { "aria-pressed": () => tree.isSorted, onclick },
      isBySize() ? "Sort by size of score" : "Sort by score",
    );
    const close = iconButton("close", "Hide scores", { onclick: () => tree.clearScores() });
    const range = element("span.gp-pair.gp-range", scoreText(least), scaleOf(scores), scoreText(maximum));
    return [element("strong.gp-score-name.gp-cut", name), range, sort, filter, minimum, close];
  };
  const show = () => {
    if (shown !== tree.scores) root.replaceChildren(...(tree.scores ? controls(tree.scores) : []));
    shown = tree.scores;
    if (tree.filter === null && filter.value !== "least") filter.value = "all";
    refresh(root);
  };
  follow(view, [tree.content], show);
  show();
  return { element: root };
}

/** The colors of scores, from the lowest to the highest. */
function scaleOf(scores: Scores): HTMLElement {
  const { isDiverging, maximum, minimum } = scores;
  const part = (value: number) => {
    const strength = scores.strength(value);
    const color = `var(--gp-${strength < 0 ? "cold" : "hot"}) ${Math.round(Math.abs(strength) * 100)}%`;
    const place = Math.round((100 * (value - minimum)) / (maximum - minimum || 1));
    return `color-mix(in srgb, ${color}, var(--gp-background)) ${place}%`;
  };
  const parts = (isDiverging ? [minimum, 0, maximum] : [minimum, maximum]).map(part);
  const scale = element("span.gp-scale", { "aria-hidden": true });
  scale.style.background = `linear-gradient(to right, ${parts.join(", ")})`;
  return scale;
}

/** `undefined`: the text is not a number. */
function parseFilter(choice: string, typed: string): ScoreFilter | null | undefined {
  if (choice === "all") return null;
  if (choice !== "least") return { count: Number(choice) };
  const minimum = Number(typed.replaceAll(",", "").trim() || Number.NaN);
  return Number.isNaN(minimum) ? undefined : { minimum };
}
