/** One line of the tree as an element: made once, filled again whenever something about it changes. */

import { FLAG, type PatchState, type Spec } from "../kernel/protocol";
import { buttonElement, cutElement, element, replaceChildren, setAttribute, setAttributes } from "../page/dom";
import { formatCount, visible } from "../page/text";
import { CLOSED, type Folded, LEAF, PLUMBING } from "./rows";
import { type Scores, scoreText, textOfBest } from "./scores";
import { patchedRow, type Skeleton } from "./skeleton";
import type { TreeState } from "./tree_state";

/** The height of a row, `--gp-row` in theme.css. */
export const ROW = 22;

/** With more patches, a row shows their count only. */
const MAX_BADGES = 2;

interface RowContent {
  name: string;
  /** The text in the op column: torch function, class of the module, or kind. */
  op: string;
  label: string;
  spec: Spec | null;
  kind: string;
  isPatchable: boolean;
  /** Why the row is opaque or unused. */
  note: string | null;
  countBadge: string | null;
}

export class RowView {
  readonly element: HTMLDivElement;
  /** What does not change: before the badges, and after the cells. */
  private readonly start: HTMLElement;
  private readonly rest: (HTMLElement | string | false)[];
  private key = "";
  private readonly content: RowContent;
  private readonly path: string;

  constructor(
    private readonly tree: TreeState,
    skeleton: Skeleton,
    readonly id: number,
    prefix: string,
    rootName: string,
  ) {
    const folded = tree.lines.folded.get(id);
    const shown = folded ? contentOfFolded(skeleton, folded) : contentOfRow(skeleton, id, rootName);
    this.content = tree.isByComponent && id !== 0 ? { ...shown, name: visible(tree.nameOf(id)) } : shown;
    this.path = skeleton.path(id < 0 ? ~id : id);
    const { name, op, label, spec, kind, isPatchable, countBadge: mark, note } = this.content;
    this.start = cutElement("span.gp-name", { title: folded ? name : visible(this.path) }, name);
    this.rest = [
      cutElement("span.gp-op.gp-muted", { title: note ?? op }, mark ?? op),
      " ",
      label !== "" && valueLabel(label, spec),
      !folded && rowButton("info", `Details of ${name}`, "Details (Enter)"),
      isPatchable && rowButton("add", `Patch ${name}`, "Patch (+)"),
    ];
    const attributes = { id: rowId(prefix, id), role: "treeitem", class: "gp-row", "data-id": id, "data-kind": kind };
    this.element = element("div", attributes);
    if (mark) this.element.dataset.mark = kind === "folded" ? "folded" : mark.split(" ")[0];
    if (folded?.name === PLUMBING) this.element.dataset.mark = PLUMBING;
  }

  fill(line: number, isActive: boolean, isSelected: boolean): void {
    const { columns, found, lines, patched, scores } = this.tree;
    const { element: row, id } = this;
    const [level = 1, state] = [lines.levels[line], lines.states[line]];
    const isClosed = state === CLOSED;
    row.style.transform = `translateY(${line * ROW}px)`;
    row.style.setProperty("--gp-level", String(level - 1));
    setAttributes(row, {
      "aria-level": level,
      "aria-posinset": lines.positions[line],
      "aria-setsize": lines.sizes[line],
      "aria-expanded": state === LEAF ? null : !isClosed,
      "aria-selected": isSelected,
      "data-active": isActive,
      "data-found": found.has(id),
    });
    const cells = columns.map((column) => this.cellOf(column, isClosed));
    const active = cells[scores ? columns.indexOf(scores) : -1];
    row.style.setProperty("--gp-heat", active?.heat ?? "0%");
    setAttribute(row, "data-heat", columns.length > 1 ? null : active?.side); // a single column colors the whole row
    const components = this.tree.components.get(id) ?? [];
    const patches = patched.at(id);
    const below = isClosed ? countPatchesIn(this.tree, id) : 0;
    const key = JSON.stringify([
      state === LEAF,
      components.length,
      below,
      cells,
      patches.map(({ number, kind, is_enabled }) => [number, kind, is_enabled]),
    ]);
    if (this.key === key) return;
    this.key = key;
    const type = components[0] ? componentType(components[0].name) : "";
    // In the view by components, the name of the row is that of the component.
    const component = components[0] && (this.tree.isByComponent ? visible(this.path) : components[0].name);
    const title = components.map(({ name, axes }) => `${name}: ${axes.join(", ")}`).join("\n");
    const marks = [
      patches.length > MAX_BADGES && `+${patches.length - MAX_BADGES}`,
      below > 0 && formatCount(below, "patch", "patches"),
    ].filter((text) => text !== false);
    const badges = [
      ...(component === undefined
        ? []
        : [
            element("span.gp-component-type", { "data-type": type, title }, type),
            element("span.gp-component.gp-cut.gp-muted", { title }, component),
          ]),
      ...patches.slice(0, MAX_BADGES).map(badge),
      ...marks.map((text) => element("span.gp-badge.gp-below", text)),
    ];
    row.classList.toggle("gp-badged", badges.length > 0);
    const scored = cells.map(({ text }) => text).filter(Boolean);
    // Few elements, also for a screen of rows.
    replaceChildren(
      row,
      state !== LEAF && element("span.gp-chevron.gp-muted"),
      this.start,
      " ",
      badges.length > 0 && element("span.gp-badges", ...badges.flatMap((each) => [each, " "])),
      scored.length > 0 && element("span.gp-cells", ...cells.flatMap((cell) => [scoreCell(cell), " "])),
      ...this.rest,
    );
    const seen = [type, component, ...patches.slice(0, MAX_BADGES).map(badgeText), ...marks, ...scored];
    setAttribute(row, "aria-label", this.name(seen, patches));
  }

  /** The row's own score, or for a closed graph without a score the strongest score inside. */
  private cellOf(scores: Scores, isClosed: boolean): ScoreCell {
    const own = this.id < 0 ? null : scores.valueOf(this.id);
    const best = this.id < 0 ? undefined : scores.best[this.id];
    const value = own ?? (isClosed && best !== undefined && !Number.isNaN(best) ? best : null);
    if (value === null) return { text: "", title: null, heat: "0%", side: null };
    const strength = scores.strength(value);
    const most = scores.isByMagnitude ? "The score of the largest size" : "The highest score";
    return {
      text: own === null ? textOfBest(value, scores) : scoreText(value),
      title: own === null ? `${most} in it` : null,
      heat: `${Math.round(Math.abs(strength) * 100)}%`,
      side: strength < 0 ? "cold" : "hot",
    };
  }

  /** The accessible name: the visible text in the same order, then what only colors and marks show. */
  private name(middle: readonly (string | undefined)[], patches: readonly PatchState[]): string {
    const { name, op, label, note, countBadge: mark, kind } = this.content;
    const more = patches.filter((patch) => !patch.is_enabled).map((patch) => `#${patch.number} is switched off`);
    if (note && (kind === "graph" || kind === "unused") && note !== mark) more.push(note);
    return [[name, ...middle, mark ?? op, label].filter(Boolean).join(" "), ...more].join(", ");
  }
}

/** A score beside a row, with the strength and the side of its color. */
interface ScoreCell {
  text: string;
  title: string | null;
  heat: string;
  side: "cold" | "hot" | null;
}

function scoreCell({ text, title, heat, side }: ScoreCell): HTMLElement {
  const cell = element("span.gp-score", { title, "data-heat": side }, text);
  cell.style.setProperty("--gp-heat", heat);
  return cell;
}

function badge(patch: PatchState): HTMLElement {
  const attributes = {
    tabindex: -1,
    class: "gp-badge",
    "data-number": patch.number,
    "data-off": !patch.is_enabled,
    title: `Change patch #${patch.number}${patch.is_enabled ? "" : " (switched off)"}`,
  };
  return buttonElement(attributes, badgeText(patch));
}

function badgeText({ kind, number }: PatchState): string {
  return `${kind} #${number}`;
}

export function rowId(prefix: string, id: number): string {
  return `${prefix}-${id < 0 ? `folded-${~id}` : id}`;
}

/** The shape and dtype; for a sharded model, preceded by the placement of the value. */
function valueLabel(label: string, spec: Spec | null): HTMLElement {
  const [, , , what, placement] = spec ?? [];
  const attributes = { class: "gp-label gp-cut gp-mono gp-muted", title: label, "data-what": what };
  const word = visible(placement ?? "").split(":")[0];
  if (!placement || !word) return element("span", attributes, label);
  const title = `${visible(placement)}, over the processes of the model`;
  const badge = element("span.gp-placement", { "data-is": word, title }, word.replace("along dimension ", ""));
  return element("span", attributes, badge, " ", label.replace(` ${word}`, ""));
}

function rowButton(action: string, name: string, title: string): HTMLElement {
  const marks = { class: `gp-row-button gp-row-${action}`, "data-action": action };
  return buttonElement({ ...marks, tabindex: -1, "aria-label": name, title });
}

function contentOfRow(skeleton: Skeleton, row: number, rootName: string): RowContent {
  const kind = skeleton.kindOf(row);
  const written = skeleton.noteOf(row);
  const note = written === null ? null : visible(written);
  const mark = skeleton.has(row, FLAG.opaque) ? "opaque" : kind === "unused" ? "unused" : null;
  const op = visible(skeleton.opOf(row));
  const value = patchedRow(skeleton, row);
  return {
    name: visible(row === 0 ? rootName : skeleton.nameOf(row)),
    op,
    label: visible(skeleton.labelOf(value ?? row)),
    spec: skeleton.specOf(value ?? row),
    kind,
    isPatchable: value !== null,
    note: note ?? (mark ? `${mark} ${op}` : null),
    countBadge: mark && `${mark} ${op}`,
  };
}

const ABOUT_PLUMBING = "Masks, indices and positions: integers, booleans, and what is made of them alone";

function contentOfFolded(skeleton: Skeleton, { name, period, rows, times }: Folded): RowContent {
  const folded = { label: "", spec: null, kind: "folded", isPatchable: false, note: null };
  const count = formatCount(rows.length, name === PLUMBING ? "row" : "component");
  if (name === PLUMBING) return { ...folded, name, op: count, note: ABOUT_PLUMBING, countBadge: count };
  if (name !== undefined) return { ...folded, name: visible(name), op: count, kind: "graph", countBadge: null };
  const [first = 0, last = 0] = [rows[0], rows.at(-1)];
  const op = `×${times} ${period === 1 ? visible(skeleton.opOf(first)) : formatCount(period, "row")}`;
  const label = period === 1 ? visible(skeleton.labelOf(patchedRow(skeleton, first) ?? first)) : "";
  return {
    ...folded,
    name: visible(`${skeleton.nameOf(first)} … ${skeleton.nameOf(last)}`),
    op,
    label,
    countBadge: op,
  };
}

function countPatchesIn(tree: TreeState, id: number): number {
  if (id >= 0) return tree.patched.countBelow(id);
  const rows = tree.lines.folded.get(id)?.rows ?? [];
  return rows.reduce((sum, row) => sum + tree.patched.countBelow(row) + tree.patched.at(row).length, 0);
}

const TYPES: Record<string, string> = {
  resid_pre: "stream",
  resid_mid: "stream",
  resid_post: "stream",
  "mlp.pre": "neurons",
  "mlp.post": "neurons",
};

/** The type of a component: `stream` or `neurons`, else the last part of its name: `q`, `pattern`, `attn_out`, `embed`. */
export function componentType(name: string): string {
  const [, part = ""] = /([\w]+(?:\.\w+)?)$/.exec(name) ?? [];
  const last = part.slice(part.indexOf(".") + 1);
  return TYPES[part] ?? TYPES[last] ?? last;
}
