/** Runs the model with the chosen patches, and shows what they change. Also shows runs that other views start. */

import type { RunReport, RunStatus } from "../kernel/protocol";
import { buttonElement, element, showFieldError } from "../page/dom";
import { formatSeconds } from "../page/text";
import { follow, type Part, RequestFailed, type View } from "../view";
import { describeInputs, enabledNumbers, inputsOf, type JobReply, makeJobView, patchesKey, setInputs } from "./jobs";
import { makeRunReport } from "./run_report";

let panels = 0;

export function makeRunPanel(view: View): Part {
  const { kernel, model } = view;
  /** Whether the run was started in this view, which then announces its end. */
  let isStartedHere = false;
  /** The patches at the start of the current run; `null` if another view started it. */
  let startKey: string | null = null;
  /** The shown report, and its patches. */
  let report: RunReport | null = null;
  let reportKey: string | null = null;

  const { no_inputs, arguments: given } = model.get("about");
  const isKnown = no_inputs === null || given !== null;
  const inputs = element("input.gp-field.gp-mono", {
    id: `gp-run-inputs-${panels++}`,
    type: "text",
    spellcheck: "false",
    placeholder: isKnown ? describeInputs(view, null) : "arguments, as in a call",
    oninput: () => {
      setInputs(view, inputs.value);
      showFieldError(inputs, inputsError, null);
    },
    onkeydown: (event: KeyboardEvent) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      run();
    },
  });
  inputs.value = inputsOf(view) ?? ""; // kept when the graph is captured again
  const inputsError = element("p.gp-small-error.gp-error", { id: `${inputs.id}-error`, role: "alert", hidden: true });
  const button = buttonElement({ class: "gp-button gp-primary", onclick: () => run() }, "Run");
  const job = makeJobView<RunStatus>(view, element("div.gp-run-result"), {
    name: "Progress of the run",
    button,
    again: "Run",
    status: (id) => kernel.ask("run_status", { id }),
    interrupt: (id) => kernel.ask("run_interrupt", { id }),
    onEnd: (reply) => {
      button.removeAttribute("aria-disabled");
      // Another view may have started another run meanwhile.
      if (reply !== null) queueMicrotask(onRun);
    },
    onDone: (reply) => showReport(reply),
    onError: (reason, wasRunning) => {
      // A failed request for the status of an old run, as after a restart of the kernel, does not matter.
      if (!(reason instanceof RequestFailed && reason.error.field === "inputs")) return !(isStartedHere || wasRunning);
      showFieldError(inputs, inputsError, reason.message);
      inputs.focus();
      return true;
    },
  });
  const run = () => {
    if (job.isRunning) return;
    isStartedHere = true;
    begin();
    job.id = null;
    job.follow(kernel.ask("run", { inputs: inputs.value.trim() || null }));
  };
  /** Follows the latest run, which may be of another view, or older than this view. */
  const onRun = () => {
    const latest = model.get("run");
    const isAsking = job.isRunning && job.id === null;
    if (latest === null || latest.id <= (job.id ?? -1) || isAsking) return;
    isStartedHere = false;
    job.id = latest.id;
    if (latest.state === "running") begin();
    else startKey = null;
    job.follow(kernel.ask("run_status", { id: latest.id }));
  };
  const begin = () => {
    startKey = patchesKey(model.get("session"));
    button.setAttribute("aria-disabled", "true");
    showFieldError(inputs, inputsError, null);
    job.begin();
  };
  const showReport = ({ result, buffers }: JobReply<RunStatus>) => {
    if (result.report === null) return;
    [report, reportKey] = [result.report, startKey];
    const revealPatch = (number: number) => {
      const row = model.get("session").patches.find((patch) => patch.number === number)?.row ?? -1;
      return row < 0 ? null : () => view.reveal(row);
    };
    job.result.replaceChildren(makeRunReport(report, { buffers, revealPatch }));
    showOutdated();
    if (isStartedHere) view.notices.announce(`The run finished in ${formatSeconds(report.seconds)}.`);
  };
  /** For a run of another view, only the numbers of the patches can be compared. */
  const showOutdated = () => {
    if (report === null || job.isRunning) return;
    const session = model.get("session");
    const hasSameNumbers = String(enabledNumbers(session)) === String(report.patches);
    job.showOutdated(reportKey === null ? !hasSameNumbers : reportKey !== patchesKey(session), "run again");
  };
  const form = element(
    "div.gp-line.gp-run-form",
    element("label.gp-muted", { for: inputs.id }, "Inputs"),
    inputs,
    button,
    inputsError,
    no_inputs !== null && element("p.gp-note", no_inputs),
  );
  const parts = [element("h3.gp-title", "Run"), form, job.progress, job.message, job.outdated, job.result];
  follow(view, ["run"], onRun);
  follow(view, ["session"], showOutdated);
  onRun();
  return { element: element("section.gp-stack.gp-box.gp-run", { "aria-label": "Run" }, ...parts) };
}
