/** Shape, dtype, device and moments of a value, as a description list. */

import type { Statistics } from "../kernel/protocol";
import { element } from "../page/dom";
import { formatCount, formatNumber, formatShape } from "../page/numbers";

type Row = [term: string, value: string, isWarning?: boolean];

function moments(statistics: Statistics): Row[] {
  const { mean, std, min, max } = statistics;
  if (mean === null && min === null) return [];
  return [
    ["mean", formatNumber(mean)],
    ["std", formatNumber(std)],
    ["min", formatNumber(min)],
    ["max", formatNumber(max)],
  ];
}

/** The numbers of NaN and infinities, which the moments leave out. */
function nonFinite({ nan, infinite }: Statistics): Row[] {
  const rows: Row[] = [];
  if (nan > 0) rows.push(["NaN", formatCount(nan, "value"), true]);
  if (infinite > 0) rows.push(["infinite", formatCount(infinite, "value"), true]);
  return rows;
}

export function statisticsRows(statistics: Statistics): Row[] {
  const { shape, dtype, device, count } = statistics;
  return [
    ["shape", formatShape(shape)],
    ["dtype", dtype],
    ["device", device],
    ["values", formatNumber(count)],
    ...moments(statistics),
    ...nonFinite(statistics),
  ];
}

export function makeStatistics(statistics: Statistics): HTMLElement {
  const list = element("dl", { class: "gp-statistics" });
  for (const [term, value, isWarning] of statisticsRows(statistics)) {
    const pair = element("div", { class: isWarning ? "gp-statistic gp-warned" : "gp-statistic" });
    pair.append(element("dt", {}, term), element("dd", { class: "gp-number" }, value));
    list.append(pair);
  }
  return list;
}
