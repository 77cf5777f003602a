/** How far the patches have moved what a probe sees, in one line. */

import type { ProbeChange } from "../kernel/protocol";
import { element } from "../page/dom";
import { formatNumber, formatPercent, sentence } from "../page/numbers";
import { visibleLines } from "../page/visible";

/** `norm 3.2 → 2.9, changed by 0.7 (22%)`; empty where no norm is known. */
export function changeText({ norm_before, norm_after, norm_difference }: ProbeChange): string {
  if (norm_before === null || norm_after === null) return "";
  const norms = `norm ${formatNumber(norm_before)} → ${formatNumber(norm_after)}`;
  if (norm_difference === null) return norms;
  if (norm_difference === 0) return `norm ${formatNumber(norm_after)}, unchanged`;
  const part = norm_before === 0 ? "" : ` (${formatPercent(norm_difference / norm_before)})`;
  return `${norms}, changed by ${formatNumber(norm_difference)}${part}`;
}

export function makeProbeChange(change: ProbeChange): HTMLElement {
  const text = changeText(change);
  const { note } = change;
  return element(
    "div",
    { class: "gp-probe-change" },
    text === "" ? null : element("div", { class: "gp-number" }, text),
    note === null ? null : element("p", { class: "gp-note" }, sentence(visibleLines(note))),
  );
}
