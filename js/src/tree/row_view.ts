/** One line of the tree as an element: made once, filled again whenever something about it changes. */

import { type Component, FLAG, type PatchState, type Spec } from "../kernel/protocol";
import { buttonElement, cutElement, element, replaceChildren, setAttribute } from "../page/dom";
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
  // In the row only if they are not empty, so that few elements exist for 50,000 rows.
  private readonly chevron = element("span.gp-chevron.gp-muted");
  private readonly badges = element("span.gp-badges");
  private readonly cells = element("span.gp-cells");
  private badgesKey = "[0,0,[]]";
  private cellsKey = "";
  private scoreText = "";
  private readonly op: HTMLElement;
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
    const path = folded ? name : visible(this.path);
    this.op = cutElement("span.gp-op.gp-muted", { title: note ?? op }, mark ?? op);
    this.element = element(
      "div",
      { id: rowId(prefix, id), role: "treeitem", class: "gp-row", "data-id": id, "data-kind": kind },
      cutElement("span.gp-name", { title: path }, name),
      " ",
      this.op,
      " ",
      label && valueLabel(label, spec),
      !folded && rowButton("info", `Details of ${name}`, "Details (Enter)"),
      isPatchable && rowButton("add", `Patch ${name}`, "Patch (+)"),
    );
    if (mark) this.element.dataset.mark = kind === "folded" ? "folded" : mark.split(" ")[0];
    if (folded?.name === PLUMBING) this.element.dataset.mark = PLUMBING;
  }

  fill(line: number, isActive: boolean, isSelected: boolean): void {
    const { lines } = this.tree;
    const level = lines.levels[line] ?? 1;
    const state = lines.states[line];
    const row = this.element;
    row.style.transform = `translateY(${line * ROW}px)`;
    row.style.setProperty("--gp-level", String(level - 1));
    setAttribute(row, "aria-level", level);
    setAttribute(row, "aria-posinset", lines.positions[line]);
    setAttribute(row, "aria-setsize", lines.sizes[line]);
    setAttribute(row, "aria-expanded", state === LEAF ? null : state !== CLOSED);
    setAttribute(row, "aria-selected", isSelected);
    setAttribute(row, "data-active", isActive);
    setAttribute(row, "data-found", this.tree.found.has(this.id));
    this.togglePart(this.chevron, state !== LEAF, row.firstChild);
    const patches = this.tree.patched.at(this.id);
    const below = state === CLOSED ? countPatchesIn(this.tree, this.id) : 0;
    this.fillBadges(patches, below);
    this.fillScores(state === CLOSED);
    setAttribute(row, "aria-label", this.name(patches, below));
  }

  private togglePart(part: HTMLElement, isWanted: boolean, before: Node | null): void {
    if (isWanted === (part.parentNode !== null)) return;
    if (isWanted) this.element.insertBefore(part, before);
    else part.remove();
  }

  private fillBadges(patches: readonly PatchState[], below: number): void {
    const components = this.components();
    const key = JSON.stringify([
      components.length,
      below,
      patches.map((patch) => [patch.number, patch.kind, patch.is_enabled]),
    ]);
    if (this.badgesKey === key) return;
    this.badgesKey = key;
    const badges = components.length > 0 ? this.componentBadges(components) : [];
    badges.push(...patches.slice(0, MAX_BADGES).map(badge));
    if (patches.length > MAX_BADGES) badges.push(mark(`+${patches.length - MAX_BADGES}`));
    if (below > 0) badges.push(mark(formatCount(below, "patch", "patches")));
    replaceChildren(this.badges, ...badges.flatMap((each) => [each, " "]));
    const hasBadges = components.length + patches.length + below > 0;
    this.element.classList.toggle("gp-badged", hasBadges);
    this.togglePart(this.badges, hasBadges, this.cells.parentNode ? this.cells : this.op);
  }

  private components(): readonly Component[] {
    return this.tree.components.get(this.id) ?? [];
  }

  /** The first name of a value; in the view by components, which has it as the name of the row, the path. */
  private componentText(): string {
    const [first] = this.components();
    return !first ? "" : this.tree.isByComponent ? visible(this.path) : first.name;
  }

  /** The type of the first component; empty without components. */
  private componentType(): string {
    const [first] = this.components();
    return first ? componentType(first.name) : "";
  }

  /** Badges whose tooltips have all names and dimensions. */
  private componentBadges(components: readonly Component[]): HTMLElement[] {
    const title = components.map(({ name, axes }) => `${name}: ${axes.join(", ")}`).join("\n");
    const type = this.componentType();
    return [
      element("span.gp-component-type", { "data-type": type, title }, type),
      element("span.gp-component.gp-cut.gp-muted", { title }, this.componentText()),
    ];
  }

  /** Shows a cell for each column of scores; a single column colors the whole row. */
  private fillScores(isClosed: boolean): void {
    const { columns, scores } = this.tree;
    const cells = columns.map((column) => this.cellOf(column, isClosed));
    const active = cells[scores ? columns.indexOf(scores) : -1];
    this.element.style.setProperty("--gp-heat", active?.heat ?? "0%");
    setAttribute(this.element, "data-heat", columns.length > 1 ? null : active?.side);
    const key = JSON.stringify(cells);
    if (this.cellsKey === key) return;
    this.cellsKey = key;
    this.scoreText = cells
      .map(({ text }) => text)
      .filter(Boolean)
      .join(" ");
    const shown = cells.flatMap(({ text, title, heat, side }) => {
      const cell = element("span.gp-score", { title, "data-heat": side }, text);
      cell.style.setProperty("--gp-heat", heat);
      return [cell, " "];
    });
    replaceChildren(this.cells, ...shown);
    this.togglePart(this.cells, this.scoreText !== "", this.op);
  }

  /** The row's own score, or for a closed graph without a score the strongest score inside. */
  private cellOf(scores: Scores, isClosed: boolean) {
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
  private name(patches: readonly PatchState[], below: number): string {
    const { name, op, label, note, countBadge: mark, kind } = this.content;
    const badges = patches.slice(0, MAX_BADGES).map(badgeText);
    if (patches.length > MAX_BADGES) badges.push(`+${patches.length - MAX_BADGES}`);
    if (below > 0) badges.push(formatCount(below, "patch", "patches"));
    const seen = [name, this.componentType(), this.componentText(), ...badges, this.scoreText, mark ?? op, label]
      .filter(Boolean)
      .join(" ");
    const more = patches.filter((patch) => !patch.is_enabled).map((patch) => `#${patch.number} is switched off`);
    if (note && (kind === "graph" || kind === "unused") && note !== mark) more.push(note);
    return [seen, ...more].join(", ");
  }
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

function mark(text: string): HTMLElement {
  return element("span.gp-badge.gp-below", text);
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
