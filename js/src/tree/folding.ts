/**
 * Runs of siblings that look the same but for the numbers in their names: `h_0 ... h_79`, also where a group of them
 * repeats (layers with the ops between them). As `_folded_runs` of `graphpatch_notebook/inspection/tree.py` finds them.
 */

import { FLAG, KINDS } from "../kernel/protocol";
import type { Skeleton } from "./skeleton";

/** `count` siblings from the position `from` on: a group of `period` of them, `times` times. */
export interface Run {
  from: number;
  count: number;
  period: number;
  times: number;
}

const GRAPH = KINDS.indexOf("graph");
const LONGEST_PERIOD = 24;
// A marker stands for three rows at least: for less it would be no shorter.
const FEWEST_ROWS = 3;
// Ops without a graph between them are folded only among so many siblings, and from so many repetitions on.
const MANY_SIBLINGS = 40;
const MANY_TIMES = 4;

/** Says which rows look the same. What a row `isShown` says `false` of plays no part. */
export class Folding {
  private readonly stems: Int32Array;
  private readonly patterns: Float64Array;

  constructor(
    private readonly skeleton: Skeleton,
    isShown: (row: number) => boolean,
  ) {
    this.stems = stemsOf(skeleton.columns.names);
    this.patterns = patternsOf(skeleton, isShown);
  }

  /** The runs among siblings, in order; rows that are in none are left out. */
  runs(siblings: readonly number[]): Run[] {
    const keys = siblings.map((row) => this.key(row));
    const isGraph = siblings.map((row) => this.skeleton.kind[row] === GRAPH);
    const runs: Run[] = [];
    for (let from = 0; from < keys.length; ) {
      const run = repetition(keys, isGraph, from);
      if (run) runs.push(run);
      from += run?.count ?? 1;
    }
    return runs;
  }

  /** Equal for rows that look the same but for the numbers at the ends of their own names. */
  private key(row: number): number {
    return mixed(this.patterns[row] ?? 0, this.stems[this.skeleton.name[row] ?? 0] ?? 0);
  }
}

function repetition(keys: readonly number[], isGraph: readonly boolean[], from: number): Run | null {
  const longest = Math.min(LONGEST_PERIOD, Math.floor((keys.length - from) / 2));
  for (let period = 1; period <= longest; period++) {
    let end = from + period;
    while (end < keys.length && keys[end] === keys[end - period]) end += 1;
    const times = Math.floor((end - from) / period);
    const count = times * period;
    if (times < 2 || count < FEWEST_ROWS) continue;
    const hasGraph = isGraph.slice(from, from + period).includes(true);
    if (hasGraph || (times >= MANY_TIMES && keys.length >= MANY_SIBLINGS)) return { from, count, period, times };
  }
  return null;
}

/** By name: a number that is equal for names that differ only in the number at their end. */
function stemsOf(names: readonly string[]): Int32Array {
  const known = new Map<string, number>();
  return Int32Array.from(names, (name) => {
    const stem = name.replace(/_?[0-9]+$/, "");
    const number = known.get(stem) ?? known.size + 1;
    known.set(stem, number);
    return number;
  });
}

/** By row: a number that is equal for rows that look the same but for their own name, children included. */
function patternsOf(skeleton: Skeleton, isShown: (row: number) => boolean): Float64Array {
  const patterns = new Float64Array(skeleton.length);
  for (let row = skeleton.length - 1; row >= 0; row--) {
    let pattern = mixed(skeleton.op[row] ?? 0, skeleton.spec[row] ?? 0);
    pattern = mixed(pattern, (skeleton.kind[row] ?? 0) * 2 + Number(skeleton.has(row, FLAG.opaque)));
    for (let child = row + 1; child < (skeleton.end[row] ?? 0); child = skeleton.end[child] ?? skeleton.length) {
      if (isShown(child)) pattern = mixed(mixed(pattern, skeleton.name[child] ?? 0), patterns[child] ?? 0);
    }
    patterns[row] = pattern;
  }
  return patterns;
}

/** A hash of 53 bits. */
function mixed(a: number, b: number): number {
  const low = Math.imul(a ^ (b >>> 15), 0x85ebca6b) ^ Math.imul(b + 0x165667b1, 0x9e3779b1);
  const highs = Math.floor(a / 0x100000000) ^ Math.imul(Math.floor(b / 0x100000000) + 0x27d4eb2f, 0xc2b2ae35);
  const high = Math.imul(highs ^ (low >>> 13), 0x2545f491) ^ Math.imul(low ^ (low >>> 16), 0x7feb352d);
  return ((high >>> 0) & 0x1fffff) * 0x100000000 + ((low ^ (low >>> 15)) >>> 0);
}
