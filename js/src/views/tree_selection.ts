/** Joins the tree to the selection: the row of what is selected elsewhere is revealed, and a row that is selected is an item. */
import { rowsMeant } from "../tree/component_names";
import type { TreeState } from "../tree/tree_state";
import type { View } from "../view";
import { itemOf } from "./selection";

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
    view.selection.set(name ? [itemOf(name)] : []);
  };
  view.onRemove(view.selection.onChange(follow));
  view.onRemove(
    state.onChange((change) => {
      if (change === "selected" && !isFollowing) lead();
      if (change === "lines" && unknown !== null && state.components.size > 0) follow();
    }),
  );
}
