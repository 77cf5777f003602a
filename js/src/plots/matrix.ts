/** The values of a heatmap, and their colors. */
import type { Heatmap } from "../kernel/protocol";
import type { Size } from "../page/grid";

export type ColorMap = "sequential" | "diverging";
export type Rgb = [red: number, green: number, blue: number];

/** The color of NaN, infinities and fill values, which no color map contains. */
export const MISSING: Rgb = [134, 134, 134];
export const MISSING_STRIPE: Rgb = [74, 74, 74];

/**
 * Evenly spaced stops. Sequential: viridis (van der Walt and Smith), every 32nd color of it. Diverging: computed in
 * OKLCH, hues 260 and 28, with the same lightness and chroma at the same distance from the middle.
 */
const STOPS: Record<ColorMap, readonly Rgb[]> = {
  sequential: "440154 472c7a 3b518b 2c718e 21908d 27ad81 5cc863 aadc32 fde725".split(" ").map(rgbOf),
  diverging: "173f81 3669be 6a98e5 adc9f6 f5f5f5 f2b7ae db786c b04339 75201a".split(" ").map(rgbOf),
};

function rgbOf(hex: string): Rgb {
  const number = Number.parseInt(hex, 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

/** The color of a value, which is clamped to 0 to 1. */
export function color(value: number, map: ColorMap): Rgb {
  if (Number.isNaN(value)) return [...MISSING];
  const stops = STOPS[map];
  const position = Math.min(Math.max(value, 0), 1) * (stops.length - 1);
  const below = Math.min(Math.floor(position), stops.length - 2);
  const from = stops[below] ?? MISSING;
  const to = stops[below + 1] ?? MISSING;
  const part = position - below;
  const mix = (channel: 0 | 1 | 2) => Math.round(from[channel] + (to[channel] - from[channel]) * part);
  return [mix(0), mix(1), mix(2)];
}

/** The alpha of faint pixels, of 255. */
const FAINT_ALPHA = 40;

/** Makes the pixels of cells faint that do not pass a filter. */
export function fade(pixels: ImageData, from = 0, count = pixels.data.length / 4): void {
  for (let pixel = from; pixel < from + count; pixel++) pixels.data[4 * pixel + 3] = FAINT_ALPHA;
}

/** Whether black is easier to read on a color than white. */
export function isLight([red, green, blue]: Rgb): boolean {
  const [r = 0, g = 0, b = 0] = [red, green, blue].map((part) => (part / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18;
}

export function cssColor([red, green, blue]: Rgb): string {
  return `rgb(${red}, ${green}, ${blue})`;
}

/** The whole map as a CSS image, from left to right. */
export function cssGradient(map: ColorMap): string {
  return `linear-gradient(to right, ${STOPS[map].map(cssColor).join(", ")})`;
}

/** Larger magnitudes are fill values of masks (the minimum of float32 or bfloat16). */
const MAX_MAGNITUDE = 1e30;
/** How many times farther out than nearly all values outliers are. */
const OUTLIER_FACTOR = 5;
const NEARLY_ALL = 0.99;
const MIN_FOR_OUTLIERS = 64;

export interface Matrix {
  rows: number;
  columns: number;
  /** Row by row. */
  values: Float32Array;
}

/** Copies the values. A typed array over the buffer would need an aligned start. */
export function readMatrix(
  heatmap: Pick<Heatmap, "rows" | "columns" | "buffer">,
  buffers: readonly DataView[],
): Matrix {
  const { rows, columns, buffer } = heatmap;
  const view = buffers[buffer];
  const count = rows * columns;
  if (view === undefined || view.byteLength < 4 * count) {
    throw new Error(`The kernel sent ${view?.byteLength ?? 0} bytes for a heatmap of ${rows} x ${columns} values.`);
  }
  const bytes = new Uint8Array(view.buffer, view.byteOffset, 4 * count);
  return { rows, columns, values: new Float32Array(bytes.slice().buffer) };
}

export function joined(parts: readonly Float32Array[]): Float32Array {
  return Float32Array.from(parts.flatMap((part) => [...part]));
}

function isOnScale(value: number): boolean {
  return Math.abs(value) < MAX_MAGNITUDE;
}

/** A color map, and the values at its ends. */
export interface Scale {
  map: ColorMap;
  low: number;
  high: number;
  /** Whether equal ratios are equal steps of color: both ends are positive. */
  isLog?: boolean;
}

/** Where a value is on a scale: 0 at the low end, 1 at the high one. */
export function positionOn({ low, high, isLog }: Scale, value: number): number {
  if (!(high > low)) return 0.5;
  return isLog ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
}

export interface Summary {
  /** Of the values that are neither missing nor fill values; `null` without any. */
  minimum: number | null;
  maximum: number | null;
  mean: number | null;
  /** How many are NaN, infinite or a fill value. */
  missing: number;
  /** From the least to the greatest amount. */
  full: Scale;
  /** The same without outliers; `null` without any. */
  clipped: Scale | null;
  /** How many amounts lie beyond `cut`. */
  outliers: number;
}

function scaleOf(minimum: number, maximum: number): Scale {
  if (minimum < 0 && maximum > 0) {
    const limit = Math.max(-minimum, maximum);
    return { map: "diverging", low: -limit, high: limit };
  }
  return { map: "sequential", low: minimum, high: maximum };
}

/**
 * The scale that nearly all values fill; `null`: the whole one does for all. Zeros do not count (masked attention, dead
 * units), else few true amounts among them would pass for outliers. `sorted`: in ascending order.
 */
function clippedScale(sorted: Float32Array, whole: Scale): Scale | null {
  const amounts = sorted.filter((value) => value !== 0);
  if (amounts.length < MIN_FOR_OUTLIERS) return null;
  const few = Math.ceil((amounts.length * (1 - NEARLY_ALL)) / 2);
  const low = amounts[few] ?? 0;
  const high = amounts[amounts.length - 1 - few] ?? 0;
  if (whole.map === "diverging") {
    const limit = Math.max(-low, high);
    return whole.high > OUTLIER_FACTOR * limit ? { ...whole, low: -limit, high: limit } : null;
  }
  const far = OUTLIER_FACTOR * (high - low);
  const isLowFar = low - whole.low > far;
  const isHighFar = whole.high - high > far;
  if (far === 0 || !(isLowFar || isHighFar)) return null;
  return { ...whole, low: isLowFar ? low : whole.low, high: isHighFar ? high : whole.high };
}

/** Summarizes a matrix before it is drawn. */
export function summarize(values: Float32Array): Summary {
  const amounts = values.filter(isOnScale).sort();
  const missing = values.length - amounts.length;
  const minimum = amounts[0];
  const maximum = amounts[amounts.length - 1];
  if (minimum === undefined || maximum === undefined) {
    const whole: Scale = { map: "sequential", low: 0, high: 0 };
    return { minimum: null, maximum: null, mean: null, missing, full: whole, clipped: null, outliers: 0 };
  }
  const mean = amounts.reduce((sum, value) => sum + value, 0) / amounts.length;
  const whole = scaleOf(minimum, maximum);
  const cut = clippedScale(amounts, whole);
  const beyond = cut === null ? 0 : amounts.filter((value) => value < cut.low || value > cut.high).length;
  return { minimum, maximum, mean, missing, full: whole, clipped: cut, outliers: beyond };
}

/** The largest distance from zero; 0 without values. */
export function largestMagnitude(values: ArrayLike<number>): number {
  let largest = 0;
  for (let at = 0; at < values.length; at++) largest = Math.max(largest, Math.abs(values[at] ?? 0));
  return largest;
}

/** `null`: the value is missing or a fill value. */
export function colorOf(value: number, scale: Scale): Rgb | null {
  return isOnScale(value) ? color(positionOn(scale, value), scale.map) : null;
}

/** The size of a cell in whole device pixels (so that all cells look the same), for a plot of about `box` CSS pixels. */
export function cellSize(plane: { rows: number; columns: number }, box: Size, ratio: number): Size {
  const fit = (length: number, count: number) =>
    Math.max(Math.ceil(ratio), Math.min(Math.floor((length * ratio) / Math.max(count, 1)), Math.round(26 * ratio)));
  const width = fit(box.width, plane.columns);
  const height = fit(box.height, plane.rows);
  if (plane.rows === plane.columns) {
    const side = Math.min(width, height);
    return { width: side, height: side };
  }
  // Bars rather than squares where one side is long, but not very thin ones.
  const thick = Math.round(14 * ratio);
  return { width: Math.min(width, Math.max(height, thick)), height: Math.min(height, Math.max(width, thick)) };
}
