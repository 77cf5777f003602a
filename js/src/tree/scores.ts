/** The scores of nodes: their values, filter, order and colors. */

import { formatNumber } from "../page/numbers";
import type { Skeleton } from "./skeleton";

/** Which rows a filter leaves: those of a number at least (or of such a size), or of the `count` strongest. */
export type ScoreFilter = { least: number } | { count: number };

/** Up to such a share two numbers are the same: that of one value under several names, but for rounding. */
const ROUNDING = 1e-5;

export class Scores {
  /** Of all rows that have one. */
  readonly minimum: number;
  readonly maximum: number;
  /** How many rows have one. */
  readonly count: number;
  /** How many different numbers there are. */
  readonly places: number;
  /** By row: the number of stronger scores; NaN without a score. Rows with the same score have the same rank. */
  private readonly place: Float64Array;
  /** By row: the strongest score of the row and the rows below it; NaN without any. */
  readonly best: Float32Array;

  private constructor(
    /** By row; NaN without a score. */
    readonly values: Float32Array,
    readonly name: string,
    skeleton: Skeleton,
  ) {
    let [minimum, maximum, count] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, 0];
    for (const value of values) {
      if (Number.isFinite(value)) {
        minimum = Math.min(minimum, value);
        maximum = Math.max(maximum, value);
      }
      if (!Number.isNaN(value)) count += 1;
    }
    this.count = count;
    this.minimum = minimum <= maximum ? minimum : 0;
    this.maximum = minimum <= maximum ? maximum : 0;
    this.place = new Float64Array(values.length).fill(Number.NaN);
    this.places = this.rank();
    this.best = Float32Array.from(values);
    for (let row = values.length - 1; row >= 0; row--) {
      const best = this.best[row] ?? Number.NaN;
      const parent = skeleton.parent[row] ?? -1;
      if (parent >= 0 && !Number.isNaN(best) && !(Math.abs(best) <= Math.abs(this.best[parent] ?? Number.NaN))) {
        this.best[parent] = best;
      }
    }
  }

  /** Fills `place`; returns how many there are. */
  private rank(): number {
    const size = (row: number) => Math.abs(this.values[row] ?? 0);
    const rows = [...this.values.keys()].filter((row) => !Number.isNaN(this.values[row]));
    const last = new Map<number, { value: number; place: number }>(); // by sign
    let places = 0;
    for (const row of rows.sort((a, b) => size(b) - size(a))) {
      const value = this.values[row] ?? 0;
      const before = last.get(Math.sign(value));
      const isSame = before?.value === value || Math.abs((before?.value ?? Number.NaN) - value) <= ROUNDING * size(row);
      const place = before && isSame ? before.place : places++;
      last.set(Math.sign(value), { value, place });
      this.place[row] = place;
    }
    return places;
  }

  /** The scores in the traits; `null` without any. */
  static of(data: DataView, name: string, skeleton: Skeleton): Scores | null {
    if (data.byteLength !== 4 * skeleton.length) return null;
    const values = Float32Array.from({ length: skeleton.length }, (_, row) => data.getFloat32(4 * row, true));
    const scores = new Scores(values, name || "score", skeleton);
    return scores.count > 0 ? scores : null;
  }

  valueOf(row: number): number | null {
    const value = this.values[row];
    return value === undefined || Number.isNaN(value) ? null : value;
  }

  /** Whether there are values below zero: then the strongest are those of the largest size, not the highest. */
  get isBySize(): boolean {
    return this.minimum < 0;
  }

  /** Whether there are values on both sides of zero, which then have two colors. */
  get isDiverging(): boolean {
    return this.minimum < 0 && this.maximum > 0;
  }

  /** From -1 to 1: how strong the color of a value is, and which of the two it is. */
  strength(value: number): number {
    if (!Number.isFinite(value)) return value > 0 ? 1 : value < 0 ? -1 : 0;
    if (this.isDiverging || this.minimum === this.maximum) {
      return value / (Math.max(Math.abs(this.minimum), Math.abs(this.maximum)) || 1);
    }
    const from = this.isBySize ? this.maximum : this.minimum;
    return (value - from) / (this.maximum - this.minimum);
  }

  /** The rows that a filter leaves, in order. */
  passing(filter: ScoreFilter): number[] {
    const rows = [...this.values.keys()].filter((row) => !Number.isNaN(this.values[row]));
    if ("least" in filter) return rows.filter((row) => Math.abs(this.values[row] ?? 0) >= filter.least);
    return rows.filter((row) => (this.place[row] ?? Number.NaN) < filter.count);
  }

  /** A filter in words. */
  wordsOf(filter: ScoreFilter): string {
    if ("count" in filter) return `the ${filter.count} ${this.isBySize ? "largest" : "highest"} of ${this.name}`;
    return this.isBySize ? `|${this.name}| ≥ ${scoreText(filter.least)}` : `${this.name} ≥ ${scoreText(filter.least)}`;
  }

  /** Siblings in order: those with the strongest in them first, those without scores last, else as they came up. */
  readonly order = (a: number, b: number): number => {
    const [first, second] = [this.best[a] ?? Number.NaN, this.best[b] ?? Number.NaN];
    if (Number.isNaN(first) || Number.isNaN(second))
      return Number(Number.isNaN(first)) - Number(Number.isNaN(second)) || a - b;
    const [one, other] = [Math.abs(first), Math.abs(second)];
    return one === other ? a - b : other > one ? 1 : -1;
  };
}

/** The text of a row without a score: the strongest score in it. */
export function insideText(value: number, scores: Scores): string {
  return scores.isBySize ? `≤ |${scoreText(value)}|` : `≤ ${scoreText(value)}`;
}

/** A score in few letters: `0.123`, `-4.57e-6`, `12,300`. */
export function scoreText(value: number): string {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "-∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return Number.isInteger(value) ? formatNumber(value) : String(Number(value.toPrecision(3)));
}
