/** The report of a run: the next tokens, the changes of the output, and the values of probes. */
import type { ActivationView, Change, Predictions, ProbeReport, RunReport } from "../kernel/protocol";
import { buttonElement, element, setAttribute } from "../page/dom";
import {
  formatCount,
  formatNumber,
  formatPercent,
  formatSeconds,
  formatShape,
  sentence,
  visible,
  visibleLines,
  visibleToken,
} from "../page/text";
import { joined, readMatrix } from "../plots/matrix";
import { makePlot, makeStatistics, makeValue, probabilityCell } from "../plots/plots";

interface ReportContext {
  buffers: readonly DataView[];
  /** Returns a function that shows the node of a patch in the tree; `null` if the patch was removed. */
  revealPatch(number: number): (() => void) | null;
}

/** The strongest background of a cell with a change, in percent: text on it is readable. */
const MAX_BACKGROUND = 45;

const numbered = (numbers: readonly number[]) => numbers.map((number) => `#${number}`).join(", ");

/** The call, its duration, and its patches. */
function head({ call, seconds, patches }: RunReport): HTMLElement {
  const what =
    patches.length === 0
      ? "without patches"
      : `with ${patches.length === 1 ? "patch" : "patches"} ${numbered(patches)}`;
  return element(
    "p.gp-report-head.gp-muted",
    element("code", visible(call)),
    ` ran ${what} in ${formatSeconds(seconds)}.`,
  );
}

function warnings(texts: readonly string[]): HTMLElement | null {
  if (texts.length === 0) return null;
  const items = texts.map((text) => element("li", sentence(visibleLines(text))));
  return element(
    "div.gp-message.gp-warnings",
    element("strong", formatCount(texts.length, "warning")),
    element("ul", ...items),
  );
}

function relativeChange({ norm_before, norm_difference }: Change): string {
  if (norm_difference === null || norm_before === null) return "–";
  if (norm_difference === 0) return "none";
  return norm_before === 0 ? "from zero" : formatPercent(norm_difference / norm_before);
}

function largest(change: Change): HTMLElement | null {
  if (change.largest.length === 0 || change.norm_difference === 0) return null;
  const items = change.largest.map(({ index, before, after }) =>
    element(
      "li.gp-number",
      element("code", `[${index.join(", ")}]`),
      ` ${formatNumber(before)} → ${formatNumber(after)}`,
    ),
  );
  return element(
    "details.gp-largest",
    element("summary", "Entries of ", element("code", visible(change.path)), " that changed most"),
    element("ol", ...items),
  );
}

const CHANGE_HEADS = ["Output", "Shape", "Norm before", "Norm after", "Norm of difference", "Change"];

/** A row, and a second one for the note. An output that was not compared has no difference. */
function changeRows(change: Change): HTMLElement[] {
  const { shape, dtype, norm_before, norm_after, norm_difference, note } = change;
  const path = visible(change.path);
  const norms = [norm_before, norm_after, norm_difference].map((norm) => formatNumber(norm));
  const numbers = [...norms, relativeChange(change)];
  const row = element(
    "tr",
    element("th", { scope: "row" }, element("code", { title: path }, path)),
    element("td.gp-number", `${formatShape(shape)} ${dtype}`),
    ...numbers.map((text) => element("td.gp-number", text)),
  );
  if (note === null) return [row];
  return [row, element("tr", element("td.gp-muted", { colspan: CHANGE_HEADS.length }, sentence(visible(note))))];
}

/** A wide table scrolls, also with the keyboard. */
function scrolling(name: string, table: HTMLElement): HTMLElement {
  return element("div.gp-scroll", { tabindex: 0, role: "group", "aria-label": name }, table);
}

function changes(report: RunReport): HTMLElement | null {
  if (report.changes.length === 0) return null;
  const heads = CHANGE_HEADS.map((text) => element("th", { scope: "col" }, text));
  const rows = report.changes.flatMap(changeRows);
  const tokenTable = element("table.gp-changes", element("thead", element("tr", ...heads)), element("tbody", ...rows));
  const isSame = report.changes.every((change) => change.note === null && change.norm_difference === 0);
  const same = element("p.gp-note", "The patches change nothing at the output.");
  return element(
    "section.gp-report-part",
    element("h4", "At the output"),
    isSame && report.patches.length > 0 ? same : null,
    scrolling("Changes at the output", tokenTable),
    ...report.changes.map(largest),
  );
}

function probe(report: ProbeReport, { buffers, revealPatch }: ReportContext): HTMLElement {
  const { change, number, view, note } = report;
  const [name, path] = [visible(report.name), visible(report.path)];
  const onclick = revealPatch(number);
  const place = element("code", path);
  const link = onclick && buttonElement({ class: "gp-underlined", onclick, title: "Show in the tree" }, place);
  return element(
    "li.gp-stack.gp-box.gp-probe",
    element("div.gp-caption", element("code.gp-probe-name", name), ` #${number} `, link ?? place),
    note !== null && element("p.gp-note", sentence(visibleLines(note))),
    change && makeProbeChange(change),
    ...(view === null ? [] : makePictures(report, view, buffers, `${name}, ${path}`)),
  );
}

/** The statistics, and a picture; if the patches change it, one without them and one of the difference beside it. */
function makePictures(report: ProbeReport, view: ActivationView, buffers: readonly DataView[], title: string) {
  const { before, difference } = report;
  const { plot, row_labels: rowTokens, column_labels: columnTokens } = view;
  const parts = [
    ["Without patches", before],
    ["With patches", plot],
    ["Difference", difference],
  ] as const;
  const shared = before?.type === "heatmap" && plot.type === "heatmap";
  const colorsOf = shared ? joined([before, plot].map((one) => readMatrix(one, buffers).values)) : undefined;
  const pictures = parts.map(([name, one]) => {
    const colors = name !== "Difference" && colorsOf ? { colorsOf } : {};
    const options = { title: `${title}, ${name.toLowerCase()}`, rowTokens, columnTokens, isSmall: true, ...colors };
    return one && element("div", element("div.gp-caption", name), makePlot(one, buffers, options));
  });
  if (before === null) return makeValue(view, buffers, title, true);
  return [makeStatistics(view.statistics), element("div.gp-beside", ...pictures)];
}

function probes(report: RunReport, context: ReportContext): HTMLElement | null {
  if (report.probes.length === 0) return null;
  return element(
    "section.gp-report-part",
    element("h4", "Probes"),
    element("ul.gp-list.gp-probes", ...report.probes.map((one) => probe(one, context))),
  );
}

export function makeRunReport(report: RunReport, context: ReportContext): HTMLElement {
  const isPatched = report.patches.length > 0;
  return element(
    "div.gp-stack.gp-report",
    head(report),
    warnings(report.warnings),
    report.predictions.length > 0 &&
      element("div.gp-prompts", ...report.predictions.map((one) => makePredictions(one, isPatched))),
    changes(report),
    probes(report, context),
  );
}

/** A change of a probability, in points of percent, on a background of the color of its sign. */
function changeCell(before: number, after: number): HTMLElement {
  const change = after - before;
  const points = (100 * Math.abs(change)).toFixed(1);
  const isChanged = points !== "0.0";
  const cell = element("td.gp-number.gp-change", `${isChanged ? (change < 0 ? "−" : "+") : ""}${points}`);
  if (isChanged) setAttribute(cell, "data-sign", change < 0 ? "negative" : "positive");
  cell.style.setProperty("--gp-part", `${Math.round(MAX_BACKGROUND * Math.abs(change))}%`);
  return cell;
}

/** What is most probable in either run, with its rank and probability in both. `isPatched`: whether there are two. */
function makePredictions({ position, prompt, rows }: Predictions, isPatched: boolean): HTMLElement {
  const noun = position === null ? "Class" : "Token";
  const runs = isPatched ? (["before", "after"] as const) : (["after"] as const);
  const names = { before: "Without patches", after: isPatched ? "With patches" : "Probability" };
  const heads = runs.flatMap((run) => [element("th.gp-rank", "Rank"), element("th", names[run])]);
  const lines = rows.map((row) =>
    element(
      "tr",
      element(
        "th",
        { scope: "row" },
        element("code.gp-token", position === null ? visible(row.text) : visibleToken(row.text)),
      ),
      ...runs.flatMap((run) => [
        element("td.gp-number.gp-rank.gp-muted", formatNumber(row[run][0])),
        probabilityCell(row[run][1]),
      ]),
      isPatched && changeCell(row.before[1], row.after[1]),
    ),
  );
  const change = isPatched && element("th.gp-change", { title: "In points of percent" }, "Change");
  const head = element("tr", element("th", noun), ...heads, change);
  for (const cell of head.children) cell.setAttribute("scope", "col");
  const title = position === null ? "Most probable classes" : `Next token after position ${position}`;
  const table = element("table.gp-predictions", element("thead", head), element("tbody", ...lines));
  const which = prompt !== null && element("p.gp-prompt.gp-mono", visible(prompt));
  return element("section.gp-report-part", which, element("h4", title), scrolling(title, table));
}

/** `norm 3.2 → 2.9, changed by 0.7 (22%)`; empty where no norm is known. */
function changeText({ norm_before, norm_after, norm_difference }: Change): string {
  if (norm_before === null || norm_after === null) return "";
  const norms = `norm ${formatNumber(norm_before)} → ${formatNumber(norm_after)}`;
  if (norm_difference === null) return norms;
  if (norm_difference === 0) return `norm ${formatNumber(norm_after)}, unchanged`;
  const part = norm_before === 0 ? "" : ` (${formatPercent(norm_difference / norm_before)})`;
  return `${norms}, changed by ${formatNumber(norm_difference)}${part}`;
}

function makeProbeChange(change: Change): HTMLElement {
  const text = changeText(change);
  const { note } = change;
  return element(
    "div.gp-probe-change",
    text !== "" && element("div.gp-number", text),
    note !== null && element("p.gp-note", sentence(visibleLines(note))),
  );
}
