/** What the query in the search field found. */

import { parseQuery, QueryError } from "./query";
import { SearchIndex } from "./search";
import type { Skeleton } from "./skeleton";

export class Found {
  /** The rows found, in order; `null`: there is no query. */
  matches: number[] | null = null;
  /** How many more are in the plumbing, where nothing else was found. */
  inPlumbing = 0;
  /** Why the text in the search field is no query. */
  error: string | null = null;
  readonly index: SearchIndex;

  constructor(skeleton: Skeleton) {
    this.index = new SearchIndex(skeleton);
  }

  /** Searches; where the text is no query, `error` says why and what was found before stays. */
  search(text: string, patched: ReadonlySet<number>): void {
    this.error = null;
    try {
      const terms = parseQuery(text);
      this.matches = terms.length ? this.index.find(terms, patched) : null;
      this.inPlumbing = this.matches?.length === 0 ? this.index.find(terms, patched, true).length : 0;
    } catch (error) {
      if (!(error instanceof QueryError)) throw error;
      this.error = error.message;
    }
  }

  /** Whether a row was found, rather than what is in it. */
  has(row: number): boolean {
    const matches = this.matches ?? [];
    let [from, to] = [0, matches.length];
    while (from < to) {
      const middle = (from + to) >> 1;
      if ((matches[middle] ?? 0) < row) from = middle + 1;
      else to = middle;
    }
    return matches[from] === row;
  }
}

/** The position in `rows` that follows that of `row`, or the one before it; around the ends. */
export function nextPosition(rows: readonly number[], row: number, step: 1 | -1): number {
  const here = rows.indexOf(row);
  if (here >= 0) return (here + step + rows.length) % rows.length;
  const beyond = step > 0 ? rows.findIndex((other) => other > row) : rows.findLastIndex((other) => other < row);
  return beyond >= 0 ? beyond : step > 0 ? 0 : rows.length - 1;
}
