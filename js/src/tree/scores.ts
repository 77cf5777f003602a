/** The scores of nodes: their values, filter, order and colors. */

import { formatNumber } from "../page/text";
import type { Skeleton } from "./skeleton";

/** Keeps the rows with at least a minimum (or with such a magnitude), or with the `count` strongest scores. */
export type ScoreFilter = { minimum: number } | { count: number };

/** Numbers this close count as one: the scores of one value under several names differ by rounding. */
const RELATIVE_TOLERANCE = 1e-5;

export class Scores {
  /** Of all finite scores. */
  readonly minimum: number;
  readonly maximum: number;
  /** How many rows have a score. */
  readonly count: number;
  /** How many different scores there are. */
  readonly rankCount: number;
  /** By row: the number of stronger scores; NaN without a score. Rows with the same score have the same rank. */
  private readonly rank: Float64Array;
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
    this.rank = new Float64Array(values.length).fill(Number.NaN);
    this.rankCount = this.computeRanks();
    this.best = Float32Array.from(values);
    for (let row = values.length - 1; row >= 0; row--) {
      const best = this.best[row] ?? Number.NaN;
      const parent = skeleton.parent[row] ?? -1;
      if (parent >= 0 && !Number.isNaN(best) && !(Math.abs(best) <= Math.abs(this.best[parent] ?? Number.NaN))) {
        this.best[parent] = best;
      }
    }
  }

  /** Fills `rank`; returns the number of ranks. */
  private computeRanks(): number {
    const size = (row: number) => Math.abs(this.values[row] ?? 0);
    const rows = [...this.values.keys()].filter((row) => !Number.isNaN(this.values[row]));
    const last = new Map<number, { value: number; place: number }>(); // by sign
    let places = 0;
    for (const row of rows.sort((a, b) => size(b) - size(a))) {
      const value = this.values[row] ?? 0;
      const before = last.get(Math.sign(value));
      const isSame =
        before?.value === value || Math.abs((before?.value ?? Number.NaN) - value) <= RELATIVE_TOLERANCE * size(row);
      const place = before && isSame ? before.place : places++;
      last.set(Math.sign(value), { value, place });
      this.rank[row] = place;
    }
    return places;
  }

  /** The columns in the traits that have scores. */
  static all(data: DataView, names: readonly string[], skeleton: Skeleton): Scores[] {
    const { length } = skeleton;
    const count = data.byteLength / (4 * length);
    if (!Number.isInteger(count)) return [];
    const columns = Array.from({ length: count }, (_, column) => {
      const value = (_: unknown, row: number) => data.getFloat32(4 * (column * length + row), true);
      return new Scores(Float32Array.from({ length }, value), names[column] ?? "score", skeleton);
    });
    return columns.filter((scores) => scores.count > 0);
  }

  valueOf(row: number): number | null {
    const value = this.values[row];
    return value === undefined || Number.isNaN(value) ? null : value;
  }

  /** Whether there are negative scores: then scores are ranked by magnitude. */
  get isByMagnitude(): boolean {
    return this.minimum < 0;
  }

  /** Whether there are scores of both signs, which then have two colors. */
  get isDiverging(): boolean {
    return this.minimum < 0 && this.maximum > 0;
  }

  /** From -1 to 1: the strength of the color of a value; the sign selects one of the two colors. */
  strength(value: number): number {
    if (!Number.isFinite(value)) return value > 0 ? 1 : value < 0 ? -1 : 0;
    if (this.isDiverging || this.minimum === this.maximum) {
      return value / (Math.max(Math.abs(this.minimum), Math.abs(this.maximum)) || 1);
    }
    const from = this.isByMagnitude ? this.maximum : this.minimum;
    return (value - from) / (this.maximum - this.minimum);
  }

  /** The rows that pass a filter, in order. */
  matching(filter: ScoreFilter): number[] {
    const rows = [...this.values.keys()].filter((row) => !Number.isNaN(this.values[row]));
    if ("minimum" in filter) return rows.filter((row) => Math.abs(this.values[row] ?? 0) >= filter.minimum);
    return rows.filter((row) => (this.rank[row] ?? Number.NaN) < filter.count);
  }

  describeFilter(filter: ScoreFilter): string {
    if ("count" in filter) return `the ${filter.count} ${this.isByMagnitude ? "largest" : "highest"} of ${this.name}`;
    return this.isByMagnitude
      ? `|${this.name}| ≥ ${scoreText(filter.minimum)}`
      : `${this.name} ≥ ${scoreText(filter.minimum)}`;
  }

  /** Compares siblings: by the strongest score inside, those without scores last, else in the order of the graph. */
  readonly order = (a: number, b: number): number => {
    const [first, second] = [this.best[a] ?? Number.NaN, this.best[b] ?? Number.NaN];
    if (Number.isNaN(first) || Number.isNaN(second))
      return Number(Number.isNaN(first)) - Number(Number.isNaN(second)) || a - b;
    const [one, other] = [Math.abs(first), Math.abs(second)];
    return one === other ? a - b : other > one ? 1 : -1;
  };
}

/** The text of a row without a score: the strongest score in it. */
export function textOfBest(value: number, scores: Scores): string {
  return scores.isByMagnitude ? `≤ |${scoreText(value)}|` : `≤ ${scoreText(value)}`;
}

const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

/** A score in few characters: `0.123`, `-4.57e-6`, `12,300`, `124M`. */
export function scoreText(value: number): string {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "-∞";
  const size = Math.abs(value);
  if (size >= 1e6 && size < 1e15) return COMPACT.format(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2).replace("e+", "e");
  return Number.isInteger(value) ? formatNumber(value) : String(Number(value.toPrecision(3)));
}
