/** What a run has shown: the next tokens, what changed at the output, what the probes saw. */

import type { Change, ProbeReport, RunReport } from "../kernel/protocol";
import { element } from "../page/dom";
import { formatCount, formatNumber, formatPercent, formatSeconds, formatShape, sentence } from "../page/numbers";
import { visible, visibleLines } from "../page/visible";
import { makePlot } from "../plots/plots";
import { makeStatistics } from "../plots/statistics";
import { makeNextTokens } from "./next_tokens";
import { makeProbeChange } from "./probe_change";

export interface ReportContext {
  buffers: readonly DataView[];
  /** Shows the node of a chosen patch in the tree; `null` if it is not chosen any more. */
  revealPatch(number: number): (() => void) | null;
}

const numbered = (numbers: readonly number[]) => numbers.map((number) => `#${number}`).join(", ");

/** `pg(ids)`, how long it took, and with which patches. */
function head({ call, seconds, patches }: RunReport): HTMLElement {
  const what =
    patches.length === 0
      ? "without patches"
      : `with ${patches.length === 1 ? "patch" : "patches"} ${numbered(patches)}`;
  return element(
    "p",
    { class: "gp-report-head" },
    element("code", {}, visible(call)),
    ` ran ${what} in ${formatSeconds(seconds)}.`,
  );
}

function warnings(texts: readonly string[]): HTMLElement | null {
  if (texts.length === 0) return null;
  const items = texts.map((text) => element("li", {}, sentence(visibleLines(text))));
  return element(
    "div",
    { class: "gp-warnings" },
    element("strong", {}, formatCount(texts.length, "warning")),
    element("ul", {}, ...items),
  );
}

export function relativeChange({ norm_before, norm_difference }: Change): string {
  if (norm_difference === 0) return "none";
  return norm_before === 0 ? "from zero" : formatPercent(norm_difference / norm_before);
}

function largest(change: Change): HTMLElement | null {
  if (change.largest.length === 0 || change.norm_difference === 0) return null;
  const items = change.largest.map(({ index, before, after }) =>
    element(
      "li",
      { class: "gp-number" },
      element("code", {}, `[${index.join(", ")}]`),
      ` ${formatNumber(before)} → ${formatNumber(after)}`,
    ),
  );
  return element(
    "details",
    { class: "gp-largest" },
    element("summary", {}, "Entries of ", element("code", {}, visible(change.path)), " that changed most"),
    element("ol", {}, ...items),
  );
}

const CHANGE_HEADS = ["Output", "Shape", "Norm before", "Norm after", "Norm of difference", "Change"];

/** A row, and one below it for what is to be said. Where two outputs were not compared there is no difference to show. */
function changeRows(change: Change): HTMLElement[] {
  const { shape, dtype, norm_before, norm_after, norm_difference, note } = change;
  const path = visible(change.path);
  const isCompared = note === null || norm_difference > 0 || change.largest.length > 0;
  const known = (norm: number) => (isCompared || norm > 0 ? formatNumber(norm) : "–");
  const difference = isCompared ? [formatNumber(norm_difference), relativeChange(change)] : ["–", "–"];
  const numbers = [known(norm_before), known(norm_after), ...difference];
  const row = element(
    "tr",
    {},
    element("th", { scope: "row" }, element("code", { title: path }, path)),
    element("td", { class: "gp-number" }, `${formatShape(shape)} ${dtype}`),
    ...numbers.map((text) => element("td", { class: "gp-number" }, text)),
  );
  if (note === null) return [row];
  return [
    row,
    element("tr", {}, element("td", { class: "gp-muted", colspan: CHANGE_HEADS.length }, sentence(visible(note)))),
  ];
}

function changes(report: RunReport): HTMLElement | null {
  if (report.changes.length === 0) return null;
  const heads = CHANGE_HEADS.map((text) => element("th", { scope: "col" }, text));
  const rows = report.changes.flatMap(changeRows);
  const table = element(
    "table",
    { class: "gp-changes" },
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...rows),
  );
  const isSame = report.changes.every((change) => change.note === null && change.norm_difference === 0);
  const same = element("p", { class: "gp-note" }, "The patches change nothing at the output.");
  return element(
    "section",
    { class: "gp-report-part" },
    element("h4", {}, "At the output"),
    isSame && report.patches.length > 0 ? same : null,
    // What is wider than the panel is scrolled to; with the keyboard, too.
    element("div", { class: "gp-scroll", tabindex: 0, role: "group", "aria-label": "Changes at the output" }, table),
    ...report.changes.map(largest),
  );
}

function probe(report: ProbeReport, { buffers, revealPatch }: ReportContext): HTMLElement {
  const { number, statistics, plot, note } = report;
  const [name, path] = [visible(report.name), visible(report.path)];
  const reveal = revealPatch(number);
  const place = element("code", {}, path);
  const link =
    reveal === null
      ? place
      : element(
          "button",
          { type: "button", class: "gp-underlined", onclick: reveal, title: "Show in the tree" },
          place,
        );
  const options = {
    title: `${name}, ${path}`,
    rowTokens: report.row_labels,
    columnTokens: report.column_labels,
    isSmall: true,
  };
  return element(
    "li",
    { class: "gp-probe" },
    element("div", { class: "gp-probe-head" }, element("code", { class: "gp-probe-name" }, name), ` #${number} `, link),
    note === null ? null : element("p", { class: "gp-note" }, sentence(visibleLines(note))),
    report.change ? makeProbeChange(report.change) : null,
    statistics === null ? null : makeStatistics(statistics),
    statistics === null ? null : makePlot(plot, buffers, options),
  );
}

function probes(report: RunReport, context: ReportContext): HTMLElement | null {
  if (report.probes.length === 0) return null;
  return element(
    "section",
    { class: "gp-report-part" },
    element("h4", {}, "Probes"),
    element("ul", { class: "gp-probes" }, ...report.probes.map((one) => probe(one, context))),
  );
}

export function makeRunReport(report: RunReport, context: ReportContext): HTMLElement {
  const isPatched = report.patches.length > 0;
  return element(
    "div",
    { class: "gp-report" },
    head(report),
    warnings(report.warnings),
    report.tokens === null ? null : makeNextTokens(report.tokens, isPatched),
    changes(report),
    probes(report, context),
  );
}
