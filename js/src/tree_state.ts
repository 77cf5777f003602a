/**
 * What the tree shows, between the traits and the eye: tree and toolbar act on it and are told when it changes. Views of
 * one model share the traits `expanded`, `selected`, `query`, `shows_plumbing`; the rest is each view's own.
 */

import { Folding } from "./folding";
import type { View } from "./parts";
import type { PatchState, Traits } from "./protocol";
import { parseQuery, QueryError } from "./query";
import { firstOpen, type Lines, layOut, withAncestors } from "./rows";
import { type ScoreFilter, Scores } from "./scores";
import { SearchIndex } from "./search";
import type { Skeleton } from "./skeleton";

/** The last changes of a burst are sent together. */
const SAVE_AFTER = 60;

export class TreeState {
  lines: Lines;
  /** The line that has the focus: a row, or `~first` for the marker of a folded run. */
  active: number;
  /** The rows that the query found; `null`: there is no query. */
  matches: number[] | null = null;
  /** Why the text in the search field is no query. */
  queryError: string | null = null;
  isFolded = false;
  scores: Scores | null = null;
  isSorted = false;
  filter: ScoreFilter | null = null;
  /** By row: the patches chosen there, and how many are chosen in it. */
  patchesByRow = new Map<number, PatchState[]>();
  patchesBelow = new Map<number, number>();
  readonly index: SearchIndex;

  private readonly skeleton: Skeleton;
  private open: Set<number>;
  private readonly openRuns = new Set<number>();
  /** What was closed by hand among the rows found. */
  private readonly closedFound = new Set<number>();
  /** By whether plumbing is shown. */
  private readonly foldings = new Map<boolean, Folding>();
  private readonly listeners = new Set<(isNewLayout: boolean) => void>();
  private saving: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly view: View) {
    this.skeleton = view.skeleton;
    this.index = new SearchIndex(view.skeleton);
    this.readSession();
    this.open = this.readOpen();
    this.active = this.readSelected();
    this.readScores();
    this.readQuery();
    this.lines = this.layOut();
    this.listen("expanded", () => this.takeExpanded());
    this.listen("selected", () => this.takeSelected());
    this.listen("query", () => this.changed(() => this.readQuery()));
    this.listen("shows_plumbing", () => this.changed(() => undefined));
    this.listen("session", () => this.changed(() => this.takeSession()));
    this.listen("scores", () => this.changed(() => this.readScores()));
    this.listen("scores_name", () => this.changed(() => this.readScores()));
    view.onRemove(() => this.flush());
  }

  /** Returns what stops that. */
  onChange(listener: (isNewLayout: boolean) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  get query(): string {
    return this.view.model.get("query");
  }

  get showsPlumbing(): boolean {
    return this.view.model.get("shows_plumbing");
  }

  get activeLine(): number {
    return this.lines.lineOf(this.active);
  }

  /** The row that is selected; for the marker of a run its first one. */
  get activeRow(): number {
    const id = this.lines.ids[this.activeLine] ?? 0;
    return id < 0 ? ~id : id;
  }

  // -- what is selected ------------------------------------------------------------------------------------------------

  select(id: number): void {
    if (id === this.active) return;
    this.active = id;
    this.save("selected", id < 0 ? ~id : id);
    this.tell(false);
  }

  selectLine(line: number): void {
    const last = this.lines.length - 1;
    this.select(this.lines.ids[Math.max(0, Math.min(line, last))] ?? 0);
  }

  /** Makes a row seen and selects it: opens what is above it, gives up a search or filter that leaves it out. */
  reveal(row: number): void {
    this.changed(() => {
      if (!this.isShown(row)) this.save("shows_plumbing", true);
      if (this.kept()?.[row] === 0) {
        this.filter = null;
        if (this.kept()?.[row] === 0) this.setQueryText("");
      }
      for (const above of this.skeleton.ancestors(row)) {
        this.open.add(above);
        this.closedFound.delete(above);
      }
      this.saveOpen();
      if (this.folding) this.openRunsAbove(row);
    });
    this.select(row);
  }

  private openRunsAbove(row: number): void {
    for (let tries = 0; tries < 50; tries++) {
      this.lines = this.layOut();
      const seen = this.lines.ids[this.lines.lineOf(row)] ?? 0;
      if (seen >= 0 || this.lines.has(row)) return;
      this.openRuns.add(~seen);
    }
  }

  // -- what is open ----------------------------------------------------------------------------------------------------

  setOpen(id: number, isOpen: boolean): void {
    this.setAllOpen([id], isOpen);
  }

  setAllOpen(ids: readonly number[], isOpen: boolean): void {
    this.changed(() => {
      for (const id of ids) {
        const [set, at] = id < 0 ? [this.openRuns, ~id] : [this.open, id];
        if (id >= 0 && this.isFiltered) setMember(this.closedFound, id, !isOpen);
        else setMember(set, at, isOpen);
      }
      if (!this.isFiltered) this.saveOpen();
    });
  }

  /** Opens a row and all that is in it. */
  expandBelow(row: number): void {
    const end = this.skeleton.end[row] ?? 0;
    const rows = [];
    for (let below = row; below < end; below++) if (this.skeleton.hasChildren(below)) rows.push(below);
    this.setAllOpen(rows, true);
  }

  /** Closes everything but the whole model. */
  collapseAll(): void {
    this.changed(() => {
      if (this.isFiltered) {
        for (const id of this.lines.ids) if (id > 0 && this.skeleton.hasChildren(id)) this.closedFound.add(id);
        return;
      }
      this.open = new Set([0]);
      this.openRuns.clear();
      this.saveOpen();
    });
  }

  setFolded(isFolded: boolean): void {
    this.changed(() => {
      this.isFolded = isFolded;
      this.openRuns.clear();
    });
  }

  /** Folding rows that were found or sorted would hide what was asked for. */
  get canFold(): boolean {
    return !this.isFiltered && !this.isSorted;
  }

  setShowsPlumbing(isShown: boolean): void {
    this.save("shows_plumbing", isShown);
  }

  // -- search ----------------------------------------------------------------------------------------------------------

  /** Searches; where the text is no query, `queryError` says why and the rows found before stay. */
  search(text: string): void {
    this.setQueryText(text);
  }

  /** The next match after the selected line, or the one before it; around the ends. Returns its number from 1 on. */
  goToMatch(step: 1 | -1): number | null {
    const { matches } = this;
    if (!matches?.length) return null;
    const found = new Set(matches);
    const seen = this.isSorted || this.filter ? [...this.lines.ids].filter((id) => found.has(id)) : matches;
    if (!seen.length) return null;
    const here = seen.indexOf(this.active);
    const next = step > 0 ? seen.findIndex((row) => row > this.active) : seen.findLastIndex((row) => row < this.active);
    const at = here >= 0 ? here + step : next >= 0 ? next : step > 0 ? 0 : seen.length - 1;
    const row = seen.at(at % seen.length) ?? 0;
    this.reveal(row);
    return seen.indexOf(row) + 1;
  }

  private matchSet(): Set<number> {
    return new Set(this.matches);
  }

  // -- scores ----------------------------------------------------------------------------------------------------------

  setSorted(isSorted: boolean): void {
    this.changed(() => {
      this.isSorted = isSorted;
    });
  }

  setFilter(filter: ScoreFilter | null): void {
    this.changed(() => {
      this.filter = filter;
      this.closedFound.clear();
    });
  }

  /** Takes the scores out of this view, until others come. */
  clearScores(): void {
    this.changed(() => {
      this.scores = null;
      this.isSorted = false;
      this.filter = null;
    });
  }

  // -- how it is laid out ----------------------------------------------------------------------------------------------

  isShown(row: number): boolean {
    return (
      !this.skeleton.isPlumbing(row) || this.showsPlumbing || this.patchesByRow.has(row) || this.patchesBelow.has(row)
    );
  }

  private get isFiltered(): boolean {
    return this.matches !== null || this.filter !== null;
  }

  private get folding(): Folding | null {
    return this.isFolded && this.canFold ? this.foldingNow() : null;
  }

  private foldingNow(): Folding {
    const { skeleton, showsPlumbing } = this;
    let folding = this.foldings.get(showsPlumbing);
    if (!folding) {
      folding = new Folding(skeleton, (row) => showsPlumbing || !skeleton.isPlumbing(row));
      this.foldings.set(showsPlumbing, folding);
    }
    return folding;
  }

  private kept(): Uint8Array | null {
    const { matches, filter, scores } = this;
    if (!filter || !scores) return matches && withAncestors(this.skeleton, matches);
    const passing = scores.passing(filter);
    const found = matches && this.matchSet();
    return withAncestors(this.skeleton, found ? passing.filter((row) => found.has(row)) : passing);
  }

  private layOut(): Lines {
    const { isFiltered, showsPlumbing } = this;
    return layOut(this.skeleton, {
      isOpen: (row) => (isFiltered ? !this.closedFound.has(row) : this.open.has(row)),
      isShown: (row) => showsPlumbing || this.isShown(row),
      kept: this.kept(),
      folding: this.folding,
      isRunOpen: (first) => this.openRuns.has(first),
      order: this.isSorted && this.scores ? this.scores.order : null,
    });
  }

  private changed(change: () => void): void {
    change();
    this.lines = this.layOut();
    this.tell(true);
  }

  private tell(isNewLayout: boolean): void {
    for (const listener of this.listeners) listener(isNewLayout);
  }

  // -- traits ----------------------------------------------------------------------------------------------------------

  private listen(trait: keyof Traits, listener: () => void): void {
    const { model } = this.view;
    model.on(`change:${trait}`, listener);
    this.view.onRemove(() => model.off(`change:${trait}`, listener));
  }

  private save<K extends "expanded" | "selected" | "query" | "shows_plumbing">(trait: K, value: Traits[K]): void {
    if (this.view.model.get(trait) === value) return;
    this.view.model.set(trait, value);
    this.saving ??= setTimeout(() => this.flush(), SAVE_AFTER);
  }

  private flush(): void {
    if (this.saving === undefined) return;
    clearTimeout(this.saving);
    this.saving = undefined;
    this.view.model.save_changes();
  }

  private saveOpen(): void {
    this.save(
      "expanded",
      [...this.open].sort((a, b) => a - b),
    );
  }

  private setQueryText(text: string): void {
    if (text === this.query) return;
    this.save("query", text);
  }

  private readOpen(): Set<number> {
    const expanded = this.view.model.get("expanded");
    return new Set(expanded ?? firstOpen(this.skeleton, this.foldingNow(), (row) => this.isShown(row)));
  }

  private takeExpanded(): void {
    const expanded = this.view.model.get("expanded");
    const isOwn = expanded?.length === this.open.size && expanded.every((row) => this.open.has(row));
    if (isOwn) return;
    this.changed(() => {
      this.open = this.readOpen();
    });
  }

  private readSelected(): number {
    const selected = this.view.model.get("selected");
    return selected >= 0 && selected < this.skeleton.length ? selected : 0;
  }

  private takeSelected(): void {
    const selected = this.readSelected();
    if (selected === (this.active < 0 ? ~this.active : this.active)) return;
    this.active = selected;
    this.tell(false);
  }

  private readQuery(): void {
    const text = this.query;
    this.queryError = null;
    try {
      const terms = parseQuery(text);
      this.matches = terms.length ? this.index.find(terms, new Set(this.patchesByRow.keys())) : null;
      this.closedFound.clear();
    } catch (error) {
      if (!(error instanceof QueryError)) throw error;
      this.queryError = error.message;
    }
  }

  private takeSession(): void {
    this.readSession();
    if (/\bis:patched/i.test(this.query)) this.readQuery();
  }

  private readSession(): void {
    this.patchesByRow = new Map();
    this.patchesBelow = new Map();
    for (const patch of this.view.model.get("session").patches) {
      if (patch.row < 0 || patch.row >= this.skeleton.length) continue;
      this.patchesByRow.set(patch.row, [...(this.patchesByRow.get(patch.row) ?? []), patch]);
      for (const above of this.skeleton.ancestors(patch.row)) {
        this.patchesBelow.set(above, (this.patchesBelow.get(above) ?? 0) + 1);
      }
    }
  }

  private readScores(): void {
    const { model } = this.view;
    this.scores = Scores.of(model.get("scores"), model.get("scores_name"), this.skeleton);
    if (this.scores) return;
    this.isSorted = false;
    this.filter = null;
  }
}

function setMember(set: Set<number>, member: number, isIn: boolean): void {
  if (isIn) set.add(member);
  else set.delete(member);
}
