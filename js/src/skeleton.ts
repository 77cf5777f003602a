import type { Columns } from "./protocol";

/** The rows of the tree. */
export class Skeleton {
  constructor(readonly columns: Columns) {}

  get length(): number {
    return this.columns.name.length;
  }
}
