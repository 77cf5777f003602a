/** Where in the tree the chosen patches are. */

import type { PatchState } from "../kernel/protocol";
import type { Skeleton } from "./skeleton";

export class PatchedRows {
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

  /** The patches of a row, in order. */
  at(row: number): readonly PatchState[] {
    return this.byRow.get(row) ?? [];
  }

  /** How many patches there are on what is in a row. */
  countBelow(row: number): number {
    return this.below.get(row) ?? 0;
  }

  /** Whether there is a patch on a row or in it. */
  isIn(row: number): boolean {
    return this.byRow.has(row) || this.below.has(row);
  }
}
