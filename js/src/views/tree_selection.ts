/** Connects the tree to the selection and the filter that all views of a graph share. */
import type { Component } from "../kernel/protocol";
import type { ScoreFilter } from "../tree/scores";
import type { TreeState } from "../tree/tree_state";
import type { View } from "../view";
import { itemOf } from "./selection";

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
      if (state.filter !== null) state.setFilter(null);
    }
    const all = [...state.components.values()].flat();
    const isKept = ({ name }: Component) => filter.keeps(itemOf(name));
    state.setFilteredRows(filter.isFromOtherView ? all.filter(isKept).map(({ row }) => row) : null);
  };
  view.onRemove(filter.onChange(applyFilter));
  view.onRemove(
    state.onChange((change) => {
      if (change === "lines") shareFilter();
    }),
  );
  if (filter.isFromOtherView) applyFilter();
}

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
    const row = rowOf(name);
    pendingName = row === null ? name : null;
    if (row === null || row === state.activeRow) return;
    isFollowing = true;
    view.reveal(row);
    isFollowing = false;
  };
  const shareSelection = () => {
    const row = state.active;
    // A marker represents several rows: none of them is selected.
    const name = row < 0 ? "" : (state.components.get(row)?.[0]?.name ?? view.skeleton.path(row));
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
