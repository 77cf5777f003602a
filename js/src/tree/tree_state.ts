/**
 * The state of the tree, which the tree and the toolbar change and observe. Views of
 * one model share the traits `expanded`, `selected`, `query`, `shows_sizes`; the rest is each view's own.
 */
import type { Component, PatchState } from "../kernel/protocol";
import { SharedTraits } from "../kernel/shared_traits";
import { Listeners, type View } from "../view";
import { itemOf } from "../views/selection";
import { Folding, firstOpen, type Lines, layerOf, layOut, layOutComponents, withAncestors } from "./rows";
import { type ScoreFilter, Scores } from "./scores";
import { nextPosition, SearchResult } from "./search";
import type { Skeleton } from "./skeleton";

class PatchedRows {
  private readonly byRow = new Map<number, PatchState[]>();
  private readonly below = new Map<number, number>();

  constructor(patches: readonly PatchState[], skeleton: Skeleton) {
    for (const patch of patches) {
      if (patch.row < 0 || patch.row >= skeleton.length) continue;
      this.byRow.set(patch.row, [...this.at(patch.row), patch]);
      for (const above of skeleton.ancestors(patch.row)) this.below.set(above, this.countBelow(above) + 1);
    }
  }

  get rows(): ReadonlySet<number> {
    return new Set(this.byRow.keys());
  }

  at(row: number): readonly PatchState[] {
    return this.byRow.get(row) ?? [];
  }

  countBelow(row: number): number {
    return this.below.get(row) ?? 0;
  }

  /** Whether there is a patch on a row or below it. */
  isIn(row: number): boolean {
    return this.byRow.has(row) || this.below.has(row);
  }
}

/** `lines`: the lines or their content changed; `selected`: another row was selected; `followed`: also in another view. */
export type Change = "lines" | "selected" | "followed";

export class TreeState {
  lines: Lines;
  /** The line that has the focus: a row, or `~first` for the marker of folded rows. */
  active: number;
  readonly found: SearchResult;
  /** Whether the active row is selected: another view may have ended the selection. */
  isSelected: boolean;
  /** The rows that were opened together with the last one, which they are equal to; empty: none were. */
  openedToo: readonly number[] = [];
  /** Whether the row is added to the selection of all views, instead of replacing it. */
  addsToSelection = false;
  isFolded = true;
  /** Whether the lines are layers and their components, instead of graphs and their nodes. */
  isByComponent = false;
  /** The columns of scores, and the one that colors, sorts and filters the rows. */
  columns: readonly Scores[] = [];
  scores: Scores | null = null;
  /** The rows that pass the filter of another view; `null`: all. */
  filteredRows: readonly number[] | null = null;
  isSorted = false;
  filter: ScoreFilter | null = null;
  patched: PatchedRows;
  /** By row: the components of its value. */
  components: ReadonlyMap<number, readonly Component[]> = new Map();
  private componentList: readonly Component[] = [];

  private readonly skeleton: Skeleton;
  private readonly traits: SharedTraits;
  private open: Set<number>;
  private readonly openFolded = new Set<number>();
  /** The rows that the user closed in the result of a search or filter. */
  private readonly closedMatches = new Set<number>();
  /** By whether sizes are shown. */
  private readonly foldings = new Map<boolean, Folding>();
  private readonly listeners = new Listeners<Change>();

  constructor(view: View) {
    this.skeleton = view.skeleton;
    this.traits = new SharedTraits(view);
    this.found = new SearchResult(view.skeleton);
    this.patched = this.readPatched();
    this.open = this.readOpen();
    this.active = this.readSelected();
    this.isSelected = this.active > 0 || view.selection.items.length > 0;
    this.readScores();
    this.readQuery();
    this.lines = this.layOut();
    if (this.active > 0) this.showActive();
    this.listen();
  }

  private listen(): void {
    const { traits } = this;
    traits.listen("expanded", () => this.onExpanded());
    traits.listen("selected", () => this.onSelected());
    traits.listen("query", () => this.update(() => this.readQuery()));
    traits.listen("shows_graph", () => this.update(() => undefined));
    traits.listen("shows_sizes", () => this.update(() => undefined));
    traits.listen("session", () => this.update(() => this.onSession()));
    traits.listen("scores", () => this.update(() => this.readScores()));
    traits.listen("score_names", () => this.update(() => this.readScores()));
  }

  onChange(listener: (change: Change) => unknown): () => void {
    return this.listeners.add(listener);
  }

  /** The lines and their content. */
  readonly content = {
    onChange: (listener: () => void) => this.onChange((change) => change === "lines" && listener()),
  };

  get query(): string {
    return this.traits.get("query");
  }

  get showsSizes(): boolean {
    return this.traits.get("shows_sizes");
  }

  get showsGraph(): boolean {
    return this.traits.get("shows_graph");
  }

  setShowsGraph(isShown: boolean): void {
    this.traits.set("shows_graph", isShown);
  }

  /** Shows and finds the names of components, once the kernel has found these. */
  setComponents(components: readonly Component[]): void {
    this.update(() => {
      const byRow = new Map<number, Component[]>();
      for (const one of components) byRow.set(one.row, [...(byRow.get(one.row) ?? []), one]);
      this.components = byRow;
      this.componentList = components;
      this.found.index.setComponents(components);
      this.readQuery();
    });
  }

  get activeLine(): number {
    return this.lines.lineOf(this.active);
  }

  /** The row that is selected; for a marker its first one. */
  get activeRow(): number {
    const id = this.lines.ids[this.activeLine] ?? 0;
    return id < 0 ? ~id : id;
  }

  /** Selects a row on a click, even if it is selected, so that all views follow; `isMore`: adds it to the selection. */
  click(id: number, isMore: boolean): void {
    this.addsToSelection = isMore;
    this.isSelected = false;
    this.select(id);
    this.addsToSelection = false;
  }

  select(id: number): void {
    if (id === this.active && this.isSelected) return;
    this.active = id;
    this.isSelected = true;
    this.traits.set("selected", id < 0 ? ~id : id);
    this.listeners.notify("selected");
  }

  unselect(): void {
    this.isSelected = false;
    this.listeners.notify("lines");
  }

  selectLine(line: number): void {
    const last = this.lines.length - 1;
    this.select(this.lines.ids[Math.max(0, Math.min(line, last))] ?? 0);
  }

  /** Selects a row and makes it visible: opens its ancestors, and ends a search or filter that hides it. */
  reveal(row: number): void {
    this.update(() => {
      if (!this.components.has(row)) this.isByComponent = false;
      if (!this.isShown(row)) this.traits.set("shows_sizes", true);
      if (this.keptRows()?.[row] === 0) this.filter = null;
      if (this.keptRows()?.[row] === 0) this.search("");
      for (const above of this.skeleton.ancestors(row)) {
        if (this.isFiltered) this.closedMatches.delete(above);
        else this.open.add(above);
      }
      if (!this.isFiltered) this.saveOpen();
      if (this.isByComponent) this.closedMatches.clear();
      this.openFoldedAbove(row);
    });
    this.select(row);
  }

  private openFoldedAbove(row: number): void {
    if (!this.folding && !this.isByComponent) return;
    for (let tries = 0; tries < 50; tries++) {
      this.lines = this.layOut();
      const seen = this.lines.ids[this.lines.lineOf(row)] ?? 0;
      if (seen >= 0 || this.lines.has(row)) return;
      this.openFolded.add(~seen);
    }
  }

  /** Opens or closes a row, and the corresponding rows of all folded repetitions. */
  setOpen(id: number, isOpen: boolean): void {
    this.setAllOpen([id], isOpen);
  }

  setAllOpen(rows: readonly number[], isOpen: boolean): void {
    const ids = this.folding ? rows.flatMap((id) => this.corresponding(id)) : rows;
    const others = ids.filter((id) => !rows.includes(id) && !this.isOpen(id));
    this.update(() => {
      for (const id of ids) {
        const [set, at] = id < 0 ? [this.openFolded, ~id] : [this.open, id];
        if (this.isFiltered) setMember(this.closedMatches, id, !isOpen);
        else setMember(set, at, isOpen);
      }
      if (!this.isFiltered) this.saveOpen();
    });
    if (isOpen) {
      this.openedToo = others;
      this.listeners.notify("lines");
    } else this.selectShown();
  }

  private isOpen(id: number): boolean {
    return id < 0 ? this.openFolded.has(~id) : this.open.has(id);
  }

  /** Closes the rows that were opened together with the last one. */
  closeOthers(): void {
    const others = this.openedToo;
    this.update(() => {
      for (const id of others) setMember(id < 0 ? this.openFolded : this.open, id < 0 ? ~id : id, false);
      this.saveOpen();
    });
  }

  /** Selects the row around the selected one, if that was closed. */
  private selectShown(): void {
    if (this.isSelected && !this.lines.has(this.active)) this.selectLine(this.activeLine);
  }

  /** Opens a row and everything below it; in the view by components, all layers. */
  expandBelow(row: number): void {
    if (this.isByComponent) {
      this.setAllOpen([0, ...this.lines.folded.keys()], true);
      return;
    }
    this.update(() => {
      const rows = this.folding?.corresponding(row) ?? [row];
      for (const each of rows) this.openBelow(each);
      if (!this.isFiltered) this.saveOpen();
      this.openFoldedBelow(rows);
    });
  }

  private openFoldedBelow(rows: readonly number[]): void {
    const isBelow = (id: number) => rows.some((row) => row < ~id && ~id < (this.skeleton.end[row] ?? 0));
    for (let before = -1; this.folding && before < this.openFolded.size; ) {
      before = this.openFolded.size;
      this.lines = this.layOut();
      for (const id of this.lines.folded.keys()) if (isBelow(id)) this.openFolded.add(~id);
    }
  }

  private openBelow(row: number): void {
    const end = this.skeleton.end[row] ?? 0;
    for (let below = row; below < end; below++) {
      if (!this.skeleton.hasChildren(below)) continue;
      if (this.isFiltered) this.closedMatches.delete(below);
      else this.open.add(below);
    }
  }

  private corresponding(id: number): number[] {
    const { folding } = this;
    if (!folding) return [id];
    return id < 0 ? folding.corresponding(~id, false).map((first) => ~first) : folding.corresponding(id);
  }

  /** Closes everything but the whole model. */
  collapseAll(): void {
    this.update(() => {
      if (this.isFiltered) {
        for (const id of this.lines.ids) if (id !== 0) this.closedMatches.add(id);
        return;
      }
      this.openFolded.clear();
      if (this.isByComponent) return;
      this.open = new Set([0]);
      this.saveOpen();
    });
    this.selectShown();
  }

  setByComponent(isByComponent: boolean): void {
    this.update(() => {
      this.isByComponent = isByComponent;
      this.closedMatches.clear();
      if (isByComponent) this.openFoldedAbove(this.activeRow);
    });
    this.listeners.notify("followed");
  }

  /** The name that a line shows: that of its row, or in the view by components that of the layer or component. */
  nameOf(id: number): string {
    const row = id < 0 ? ~id : id;
    const group = this.lines.folded.get(id)?.name;
    const name = this.components.get(row)?.[0]?.name;
    if (group !== undefined) return group;
    if (!this.isByComponent || name === undefined) return this.skeleton.nameOf(row);
    const layer = layerOf(name);
    return layer ? name.slice(layer.length + 1) : name;
  }

  /** Folding would hide the result of a search, filter or sort. */
  get canFold(): boolean {
    return !this.isFiltered && !this.isSorted && !this.isByComponent;
  }

  setShowsSizes(isShown: boolean): void {
    this.traits.set("shows_sizes", isShown);
  }

  /** Searches. If the text is not a valid query, `found.error` says why and the rows found before stay. */
  search(text: string): void {
    this.traits.set("query", text);
  }

  /** Goes to the next or previous match; wraps around. Returns its number, from 1. */
  goToMatch(step: 1 | -1): number | null {
    const { found } = this;
    const isOther = this.isSorted || this.isByComponent || this.filter !== null;
    const rows = isOther ? [...this.lines.ids].filter((id) => found.has(id)) : (found.matches ?? []);
    if (rows.length === 0) return null;
    const position = nextPosition(rows, this.active, step);
    this.reveal(rows[position] ?? 0);
    return position + 1;
  }

  /** Changes how the tree is sorted, folded or filtered. Closed rows of another filter are open again. */
  change(
    choice: Partial<Pick<TreeState, "isSorted" | "isFolded" | "filter" | "filteredRows" | "scores" | "columns">>,
  ): void {
    this.update(() => {
      Object.assign(this, choice);
      if (!("isSorted" in choice)) this.closedMatches.clear();
      if ("isFolded" in choice) this.openFolded.clear();
    });
  }

  /** Hides the scores in this view, until there are new ones. */
  clearScores(): void {
    this.change({ columns: [], scores: null, isSorted: false, filter: null });
  }

  /** Colors the rows by a column and sorts them; a second time, ends the sorting. */
  sortBy(scores: Scores): void {
    const isSorted = scores !== this.scores || !this.isSorted;
    this.change({ scores, isSorted, ...(scores === this.scores ? {} : { filter: null }) });
  }

  isShown(row: number): boolean {
    return this.showsSizes || !this.skeleton.isHiddenByDefault(row) || this.patched.isIn(row);
  }

  private get isFiltered(): boolean {
    return this.found.matches !== null || this.filter !== null || this.filteredRows !== null;
  }

  private get folding(): Folding | null {
    return this.isFolded && this.canFold ? this.currentFolding() : null;
  }

  private currentFolding(): Folding {
    const { skeleton, showsSizes } = this;
    let folding = this.foldings.get(showsSizes);
    if (!folding) {
      folding = new Folding(skeleton, (row) => showsSizes || !skeleton.isHiddenByDefault(row));
      this.foldings.set(showsSizes, folding);
    }
    return folding;
  }

  private keptRows(): Uint8Array | null {
    const { filter, found, scores, skeleton } = this;
    const passing = filter && scores ? scores.matching(filter) : this.filteredRows;
    if (!passing) return found.matches && withAncestors(skeleton, found.matches);
    return withAncestors(skeleton, found.matches ? passing.filter((row) => found.has(row)) : passing);
  }

  private layOut(): Lines {
    const { isFiltered, showsSizes, skeleton } = this;
    const choice = {
      isOpen: (row: number) => (isFiltered ? !this.closedMatches.has(row) : this.open.has(row)),
      isShown: (row: number) => showsSizes || this.isShown(row),
      keptRows: this.keptRows(),
      folding: this.folding,
      isFoldedOpen: (first: number) => (isFiltered ? !this.closedMatches.has(~first) : this.openFolded.has(first)),
      order: this.isSorted && this.scores ? this.scores.order : null,
    };
    return this.isByComponent ? layOutComponents(skeleton, this.componentList, choice) : layOut(skeleton, choice);
  }

  private update(change: () => void): void {
    this.openedToo = [];
    change();
    this.lines = this.layOut();
    this.listeners.notify("lines");
  }

  private saveOpen(): void {
    this.traits.set(
      "expanded",
      [...this.open].sort((a, b) => a - b),
    );
  }

  private readOpen(): Set<number> {
    const expanded = this.traits.get("expanded");
    return new Set(expanded ?? firstOpen(this.skeleton, this.currentFolding(), (row) => this.isShown(row)));
  }

  private onExpanded(): void {
    const expanded = this.traits.get("expanded");
    const isOwn = expanded?.length === this.open.size && expanded.every((row) => this.open.has(row));
    if (isOwn) return;
    this.update(() => {
      this.open = this.readOpen();
    });
  }

  private readSelected(): number {
    const selected = this.traits.get("selected");
    return selected >= 0 && selected < this.skeleton.length ? selected : 0;
  }

  private onSelected(): void {
    const selected = this.readSelected();
    if (selected === (this.active < 0 ? ~this.active : this.active)) return;
    this.active = selected;
    this.showActive();
    this.listeners.notify("lines");
    this.listeners.notify("followed");
  }

  /** Opens the folded rows around the selected row; closed ancestors stay closed. */
  private showActive(): void {
    if ([...this.skeleton.ancestors(this.active)].every((above) => this.open.has(above)))
      this.openFoldedAbove(this.active);
  }

  private readQuery(): void {
    this.found.search(this.query, this.patched.rows);
    if (this.found.error === null) this.closedMatches.clear();
  }

  private onSession(): void {
    this.patched = this.readPatched();
    if (/\bis:patched/i.test(this.query)) this.readQuery();
  }

  private readPatched(): PatchedRows {
    return new PatchedRows(this.traits.get("session").patches, this.skeleton);
  }

  private readScores(): void {
    this.columns = Scores.all(this.traits.get("scores"), this.traits.get("score_names"), this.skeleton);
    const same = this.columns.find(({ name }) => name === this.scores?.name);
    this.scores = same ?? this.columns[0] ?? null;
    if (same) return;
    this.isSorted = false;
    this.filter = null;
  }
}

function setMember(set: Set<number>, member: number, isIn: boolean): void {
  if (isIn) set.add(member);
  else set.delete(member);
}

// -- Connects the tree to the selection and the filter that all views of a graph share -----------------------------------

/** Shares the filter of the tree's scores with the other views, and applies their filter to the rows. */
export function connectFilter(view: View, state: TreeState): void {
  const { filter, skeleton } = view;
  let shared: [ScoreFilter | null, unknown] = [null, null];
  const shareFilter = () => {
    const { components, filter: own, scores } = state;
    if (own === shared[0] && (own === null || components === shared[1])) return;
    const wasShared = shared[0] !== null;
    shared = [own, components];
    if (own === null || scores === null) {
      if (wasShared && !filter.isFromOtherView) filter.set(null);
      return;
    }
    const names = (row: number) => components.get(row)?.map(({ name }) => name) ?? [skeleton.path(row)];
    const items = scores.matching(own).flatMap((row) => names(row).map((name) => itemOf(name)));
    filter.set({ items, words: scores.describeFilter(own) });
  };
  const applyFilter = () => {
    if (filter.result === null || filter.isFromOtherView) {
      shared = [null, null];
      if (state.filter !== null) state.change({ filter: null });
    }
    const all = [...state.components.values()].flat();
    const isKept = ({ name }: Component) => filter.keeps(itemOf(name));
    const filteredRows = filter.isFromOtherView ? all.filter(isKept).map(({ row }) => row) : null;
    if (filteredRows !== state.filteredRows) state.change({ filteredRows });
  };
  view.onRemove(filter.onChange(applyFilter));
  view.onRemove(
    state.onChange((change) => {
      if (change === "lines") shareFilter();
    }),
  );
  if (filter.isFromOtherView) applyFilter();
}

/** How the kernel calls the whole model. */
const ROOT = "<root>";

export function connectSelection(view: View, state: TreeState): void {
  let isFollowing = false;
  // The name of a component that was selected before the kernel has sent the components.
  let pendingName: string | null = null;
  const rowOf = (name: string | null): number | null => {
    if (!name) return null;
    const whole = name.replace(/heads\[\d+\]\./, "").replace(/(\w)\[[^[\]]*\]$/, "$1"); // of a head, or a slice
    const meant = [...state.components.values()].flat().find((one) => one.name === name || one.name === whole);
    return meant?.row ?? view.skeleton.find(name);
  };
  const applySelection = () => {
    const name = view.selection.items.at(-1)?.name ?? null;
    if (name === null && state.active >= 0) state.unselect();
    const row = name === ROOT ? 0 : rowOf(name);
    pendingName = row === null ? name : null;
    if (row === null || (row === state.activeRow && state.isSelected)) return;
    isFollowing = true;
    view.reveal(row);
    isFollowing = false;
  };
  const shareSelection = () => {
    const row = state.active;
    // A marker represents several rows: none of them is selected.
    const name = row < 0 ? "" : (state.components.get(row)?.[0]?.name ?? (view.skeleton.path(row) || ROOT));
    if (!state.addsToSelection) view.selection.set(name ? [itemOf(name)] : []);
    else if (name) view.selection.click(itemOf(name), true);
  };
  view.onRemove(view.selection.onChange(applySelection));
  view.onRemove(
    state.onChange((change) => {
      if (change === "selected" && !isFollowing) shareSelection();
      if (change === "lines" && pendingName !== null && state.components.size > 0) applySelection();
    }),
  );
}
