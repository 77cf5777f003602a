/** What tests of runs and activations share: statuses, and plots with known values. */

import type {
  ActivationStatus,
  ActivationView,
  Heatmap,
  Histogram,
  RunReport,
  RunStatus,
  Statistics,
} from "../src/kernel/protocol";
import type { JobReply } from "../src/runs/jobs";

/** Little-endian float32 that start at an odd address, as a buffer beside a message may. */
export function float32(values: readonly number[], offset = 1): DataView {
  const view = new DataView(new ArrayBuffer(4 * values.length + offset), offset);
  values.forEach((value, index) => {
    view.setFloat32(4 * index, value, true);
  });
  return view;
}

export function heatmap(rows: number, columns: number, changes: Partial<Heatmap> = {}): Heatmap {
  const full: [number, number] = [rows, columns];
  const size = { type: "heatmap" as const, buffer: 0, rows, columns, full };
  return { ...size, reduced: null, slice: "0, 3, :, :", constant: null, ...changes };
}

export const HISTOGRAM: Histogram = { type: "histogram", counts: [1, 0, 6, 3], edges: [-2, -1, 0, 1, 2], slice: null };

export function statistics(changes: Partial<Statistics> = {}): Statistics {
  const place = { shape: [1, 4, 8, 8], dtype: "float32", device: "cpu", count: 256 };
  return { ...place, mean: 0.125, std: 0.25, min: 0, max: 1, nan: 0, infinite: 0, ...changes };
}

/** Of a probe that the patches do not change. */
export const UNCHANGED = { change: null, before: null, difference: null };

const JOB = { seconds: 0.25, fraction: null, error: null, waits_for: null };

export function runStatus(id: number, changes: Partial<RunStatus> = {}): JobReply<RunStatus> {
  return { result: { ...JOB, id, state: "running", report: null, ...changes }, buffers: [] };
}

export function report(changes: Partial<RunReport> = {}): RunReport {
  const change = { path: "logits", shape: [1, 8, 100], dtype: "float32", note: null };
  const norms = { norm_before: 8, norm_after: 9, norm_difference: 2 };
  const largest = [{ index: [0, 7, 42], before: 1.5, after: -2.5 }];
  return {
    call: "pg(ids)",
    seconds: 0.25,
    patches: [1],
    warnings: [],
    predictions: [],
    changes: [{ ...change, ...norms, largest }],
    probes: [],
    ...changes,
  };
}

export function activationStatus(
  id: number,
  changes: Partial<ActivationStatus> = {},
  buffers: DataView[] = [],
): JobReply<ActivationStatus> {
  return { result: { ...JOB, id, state: "running", view: null, ...changes }, buffers };
}

export function activation(changes: Partial<ActivationView> = {}): ActivationView {
  const labels = { row_labels: null, column_labels: null };
  return { path: "h_0.attn.weights", statistics: statistics(), plot: heatmap(8, 8), ...labels, ...changes };
}
