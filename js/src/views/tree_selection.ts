/** Joins the tree to the selection: the row of what is selected elsewhere is revealed, and a row that is selected is an item. */
import type { Component } from "../kernel/protocol";
import { rowsMeant } from "../tree/component_names";
import type { ScoreFilter } from "../tree/scores";
import type { TreeState } from "../tree/tree_state";
import type { View } from "../view";
import { itemOf } from "./selection";

/** Joins the tree to the filter: that of its scores is shared, and that of another view leaves its rows. */
export function joinFilter(view: View, state: TreeState): void {
  const { filter, skeleton } = view;
  let shared: [ScoreFilter | null, unknown] = [null, null];
  const lead = () => {
    const { components, filter: own, scores } = state;
    if (own === shared[0] && (own === null || components === shared[1])) return;
    const wasShared = shared[0] !== null;
    shared = [own, components];
    if (own === null || scores === null) {
      if (wasShared && !filter.isOfOther) filter.set(null);
      return;
    }
    const names = (row: number) => components.get(row)?.map(({ name }) => name) ?? [skeleton.path(row)];
    const items = scores.passing(own).flatMap((row) => names(row).map((name) => itemOf(name)));
    filter.set({ items, words: scores.wordsOf(own) });
  };
  const follow = () => {
    if (filter.left === null || filter.isOfOther) {
      shared = [null, null];
      if (state.filter !== null) state.setFilter(null);
    }
    const all = [...state.components.values()].flat();
    const isLeft = ({ name }: Component) => filter.leaves(itemOf(name));
    state.setLeft(filter.isOfOther ? all.filter(isLeft).map(({ row }) => row) : null);
  };
  view.onRemove(filter.onChange(follow));
  view.onRemove(
    state.onChange((change) => {
      if (change === "lines") lead();
    }),
  );
  if (filter.isOfOther) follow();
}

export function joinSelection(view: View, state: TreeState): void {
  let isFollowing = false;
  // Its row is not known before the kernel has said where components are.
  let unknown: string | null = null;
  const rowOf = (name: string | null): number | null => {
    if (!name) return null;
    const [meant] = rowsMeant(name, [...state.components.values()].flat());
    return meant ?? view.skeleton.find(name);
  };
  const follow = () => {
    const name = view.selection.items.at(-1)?.name ?? null;
    const row = rowOf(name);
    unknown = row === null ? name : null;
    if (row === null || row === state.activeRow) return;
    isFollowing = true;
    view.reveal(row);
    isFollowing = false;
  };
  const lead = () => {
    const row = state.active;
    // The row of what is folded stands for several: none of them is selected.
    const name = row < 0 ? "" : (state.components.get(row)?.[0]?.name ?? view.skeleton.path(row));
    if (!state.isMore) view.selection.set(name ? [itemOf(name)] : []);
    else if (name) view.selection.click(itemOf(name), true);
  };
  view.onRemove(view.selection.onChange(follow));
  view.onRemove(
    state.onChange((change) => {
      if (change === "selected" && !isFollowing) lead();
      if (change === "lines" && unknown !== null && state.components.size > 0) follow();
    }),
  );
}
