/** Runs the model with the chosen patches, and shows what they change. Also shows runs that other views start. */

import type { RunReport, RunStatus } from "../kernel/protocol";
import { buttonElement, element, showFieldError } from "../page/dom";
import { formatSeconds } from "../page/text";
import { listen, type Part, RequestFailed, type View } from "../view";
import { describeInputs, enabledNumbers, inputsOf, type JobReply, JobView, patchesKey, setInputs } from "./jobs";
import { makeRunReport } from "./run_report";

let panels = 0;

export class RunPanel implements Part {
  readonly element: HTMLElement;
  private readonly inputs = element("input", { type: "text", class: "gp-field gp-mono", spellcheck: "false" });
  private readonly inputsError = element("p.gp-small-error.gp-error", { role: "alert", hidden: true });
  private readonly button = buttonElement({ class: "gp-button gp-primary", onclick: () => this.run() }, "Run");
  private readonly job: JobView<RunStatus>;
  /** Whether the run was started in this view, which then announces its end. */
  private isStartedHere = false;
  /** The patches at the start of the current run; `null` if another view started it. */
  private patchesKey: string | null = null;
  /** The shown report, and its patches. */
  private report: RunReport | null = null;
  private reportPatchesKey: string | null = null;

  constructor(private readonly view: View) {
    const { kernel } = view;
    this.job = new JobView<RunStatus>(view, element("div.gp-run-result"), {
      name: "Progress of the run",
      button: this.button,
      again: "Run",
      status: (id) => kernel.ask("run_status", { id }),
      interrupt: (id) => kernel.ask("run_interrupt", { id }),
      onEnd: (reply) => {
        this.button.removeAttribute("aria-disabled");
        // Another view may have started another run meanwhile.
        if (reply !== null) queueMicrotask(() => this.onRun());
      },
      onDone: (reply) => this.showReport(reply),
      onError: (reason, wasRunning) => {
        // A failed request for the status of an old run, as after a restart of the kernel, does not matter.
        if (!(reason instanceof RequestFailed && reason.error.field === "inputs"))
          return !(this.isStartedHere || wasRunning);
        showFieldError(this.inputs, this.inputsError, reason.message);
        this.inputs.focus();
        return true;
      },
    });
    const { message, outdated, progress, result } = this.job;
    const title = element("h3.gp-title", "Run");
    const parts = [title, this.form(), progress, message, outdated, result];
    this.element = element("section.gp-stack.gp-box.gp-run", { "aria-label": "Run" }, ...parts);
    listen(view, "change:run", () => this.onRun());
    listen(view, "change:session", () => this.showOutdated());
    this.onRun();
  }

  private form(): HTMLElement {
    const { view, inputs, inputsError } = this;
    const { no_inputs } = view.model.get("about");
    inputs.id = `gp-run-inputs-${panels++}`;
    inputsError.id = `${inputs.id}-error`;
    // The inputs are kept when the graph is captured again.
    inputs.value = inputsOf(view) ?? "";
    const isKnown = no_inputs === null || view.model.get("about").arguments !== null;
    inputs.placeholder = isKnown ? describeInputs(view, null) : "arguments, as in a call";
    inputs.addEventListener("input", () => {
      setInputs(view, inputs.value);
      showFieldError(inputs, inputsError, null);
    });
    inputs.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      this.run();
    });
    return element(
      "div.gp-line.gp-run-form",
      element("label.gp-muted", { for: inputs.id }, "Inputs"),
      inputs,
      this.button,
      inputsError,
      no_inputs === null ? null : element("p.gp-note", no_inputs),
    );
  }

  private run(): void {
    if (this.job.isRunning) return;
    this.isStartedHere = true;
    this.begin();
    this.job.id = null;
    this.job.follow(this.view.kernel.ask("run", { inputs: this.inputs.value.trim() || null }));
  }

  /** Follows the latest run, which may be of another view, or older than this view. */
  private onRun(): void {
    const run = this.view.model.get("run");
    const isAsking = this.job.isRunning && this.job.id === null;
    if (run === null || run.id <= (this.job.id ?? -1) || isAsking) return;
    this.isStartedHere = false;
    this.job.id = run.id;
    if (run.state === "running") this.begin();
    else this.patchesKey = null;
    this.job.follow(this.view.kernel.ask("run_status", { id: run.id }));
  }

  private begin(): void {
    this.patchesKey = patchesKey(this.view.model.get("session"));
    this.button.setAttribute("aria-disabled", "true");
    showFieldError(this.inputs, this.inputsError, null);
    this.job.begin();
  }

  private showReport({ result, buffers }: JobReply<RunStatus>): void {
    const { view } = this;
    const { report } = result;
    if (report === null) return;
    [this.report, this.reportPatchesKey] = [report, this.patchesKey];
    const revealPatch = (number: number) => {
      const row = view.model.get("session").patches.find((patch) => patch.number === number)?.row ?? -1;
      return row < 0 ? null : () => view.reveal(row);
    };
    this.job.result.replaceChildren(makeRunReport(report, { buffers, revealPatch }));
    this.showOutdated();
    if (this.isStartedHere) view.notices.announce(`The run finished in ${formatSeconds(report.seconds)}.`);
  }

  /** For a run of another view, only the numbers of the patches can be compared. */
  private showOutdated(): void {
    if (this.report === null || this.job.isRunning) return;
    const session = this.view.model.get("session");
    const hasSameNumbers = String(enabledNumbers(session)) === String(this.report.patches);
    const isStale = this.reportPatchesKey === null ? !hasSameNumbers : this.reportPatchesKey !== patchesKey(session);
    this.job.showOutdated(isStale, "run again");
  }
}
