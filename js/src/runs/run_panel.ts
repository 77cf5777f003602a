/** Runs the model with the chosen patches, and shows what they change. Also shows runs that other views start. */

import { type JobReply, Poller } from "../kernel/polling";
import type { RunReport, RunStatus } from "../kernel/protocol";
import { buttonElement, element, showFieldError } from "../page/dom";
import { formatSeconds } from "../page/numbers";
import { listen, type Part, RequestFailed, type View } from "../view";
import { describeUnknownInputs, enabledNumbers, inputsOf, patchesKey, setInputs } from "./inputs";
import { Progress } from "./progress";
import { makeRunReport } from "./run_report";

let panels = 0;

export class RunPanel implements Part {
  readonly element: HTMLElement;
  private readonly inputs = element("input", { type: "text", class: "gp-field gp-typed", spellcheck: "false" });
  private readonly inputsError = element("p", { class: "gp-small-error gp-error", role: "alert", hidden: true });
  private readonly button = buttonElement({ class: "gp-button gp-primary" }, "Run");
  private readonly progress: Progress;
  private readonly message = element("p", { class: "gp-message gp-error", role: "alert", hidden: true });
  private readonly outdated = element("p", { class: "gp-message gp-outdated", hidden: true });
  private readonly result = element("div", { class: "gp-run-result" });
  private readonly poller: Poller<RunStatus>;
  /** The number of the current job; `null` before the first one, and until the kernel replies. */
  private id: number | null = null;
  private isRunning = false;
  /** Whether the run was started in this view, which then announces its end. */
  private isStartedHere = false;
  /** The patches at the start of the current run; `null` if another view started it. */
  private patchesKey: string | null = null;
  /** The shown report, and its patches. */
  private report: RunReport | null = null;
  private reportPatchesKey: string | null = null;

  constructor(private readonly view: View) {
    this.progress = new Progress("Progress of the run", view.kernel, () => this.interrupt());
    const title = element("h3", { class: "gp-title" }, "Run");
    this.element = element("section", { class: "gp-run", "aria-label": "Run" }, title, this.form());
    this.element.append(this.progress.element, this.message, this.outdated, this.result);
    this.poller = new Poller<RunStatus>((id) => view.kernel.ask("run_status", { id }), {
      onStatus: (reported) => this.onStatus(reported),
      onError: (reason) => this.onError(reason),
    });
    this.listen();
    this.onRun();
  }

  /** Whether the kernel has not replied yet to a request to run. */
  private get isAsking(): boolean {
    return this.isRunning && this.id === null;
  }

  private form(): HTMLElement {
    const { arguments: example, has_given_inputs, no_inputs } = this.view.model.get("about");
    const id = `gp-run-inputs-${panels++}`;
    this.inputs.id = id;
    // The inputs are kept when the graph is captured again.
    this.inputs.value = inputsOf(this.view) ?? "";
    this.inputs.placeholder =
      example ?? (no_inputs === null ? describeUnknownInputs(has_given_inputs) : "arguments, as in a call");
    this.inputsError.id = `${id}-error`;
    this.button.addEventListener("click", () => this.run());
    return element(
      "div",
      { class: "gp-run-form" },
      element("label", { for: id }, "Inputs"),
      this.inputs,
      this.button,
      this.inputsError,
      no_inputs === null ? null : element("p", { class: "gp-note" }, no_inputs),
    );
  }

  private listen(): void {
    listen(this.view, "change:run", () => this.onRun());
    listen(this.view, "change:session", () => this.showOutdated());
    this.inputs.addEventListener("input", () => {
      setInputs(this.view, this.inputs.value);
      showFieldError(this.inputs, this.inputsError, null);
    });
    this.inputs.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      this.run();
    });
    this.view.onRemove(() => {
      this.poller.stop();
      this.progress.hide();
    });
  }

  private run(): void {
    if (this.isRunning) return;
    this.isStartedHere = true;
    this.begin();
    this.id = null;
    this.poller.follow(this.view.kernel.ask("run", { inputs: this.inputs.value.trim() || null }));
  }

  /** Follows the latest run, which may be of another view, or older than this view. */
  private onRun(): void {
    const run = this.view.model.get("run");
    if (run === null || run.id <= (this.id ?? -1) || this.isAsking) return;
    this.isStartedHere = false;
    this.id = run.id;
    if (run.state === "running") this.begin();
    else this.patchesKey = null;
    this.poller.follow(this.view.kernel.ask("run_status", { id: run.id }));
  }

  private begin(): void {
    this.isRunning = true;
    this.patchesKey = patchesKey(this.view.model.get("session"));
    this.button.setAttribute("aria-disabled", "true");
    this.message.hidden = true;
    this.outdated.hidden = true;
    showFieldError(this.inputs, this.inputsError, null);
    this.result.classList.add("gp-dimmed");
    this.progress.showWaiting();
  }

  private end(): void {
    this.isRunning = false;
    if (this.progress.hasFocus) this.button.focus();
    this.progress.hide();
    this.button.removeAttribute("aria-disabled");
  }

  private interrupt(): void {
    if (this.id === null) return;
    this.progress.showInterrupting();
    this.poller.follow(this.view.kernel.ask("run_interrupt", { id: this.id }));
  }

  private onStatus({ result, buffers }: JobReply<RunStatus>): void {
    this.id = result.id;
    if (result.state === "running") {
      if (!this.isRunning) this.begin();
      this.progress.show(result);
      return;
    }
    this.end();
    if (result.state === "done" && result.report !== null) this.showReport(result.report, buffers);
    else if (result.state === "interrupted") this.showInterrupted(result.seconds);
    else
      this.showError(`${result.error ?? "The run failed."}\nChange the inputs or the patches, then press “Run” again.`);
    // Another view may have started another run meanwhile.
    this.onRun();
  }

  private onError(reason: Error): void {
    const wasRunning = this.isRunning;
    this.end();
    const isInputs = reason instanceof RequestFailed && reason.error.field === "inputs";
    if (isInputs) showFieldError(this.inputs, this.inputsError, reason.message);
    // A failed request for the status of an old run, as after a restart of the kernel, does not matter.
    else if (this.isStartedHere || wasRunning) this.showError(reason.message);
    if (isInputs) {
      this.result.classList.remove("gp-dimmed");
      this.inputs.focus();
    }
  }

  private showReport(report: RunReport, buffers: DataView[]): void {
    const { view } = this;
    this.report = report;
    this.reportPatchesKey = this.patchesKey;
    const revealPatch = (number: number) => {
      const row = view.model.get("session").patches.find((patch) => patch.number === number)?.row ?? -1;
      return row < 0 ? null : () => view.reveal(row);
    };
    this.result.replaceChildren(makeRunReport(report, { buffers, revealPatch }));
    this.result.classList.remove("gp-dimmed");
    this.showOutdated();
    if (this.isStartedHere) view.notices.announce(`The run finished in ${formatSeconds(report.seconds)}.`);
  }

  private showInterrupted(seconds: number): void {
    this.showError(`Interrupted after ${formatSeconds(seconds)}. Press “Run” to start again.`);
  }

  private showError(message: string): void {
    const old = this.report === null ? "" : "\nBelow is the result of the run before.";
    this.message.textContent = `${message}${old}`;
    this.message.hidden = false;
  }

  /** For a run of another view, only the numbers of the patches can be compared. */
  private showOutdated(): void {
    if (this.report === null || this.isRunning) return;
    const session = this.view.model.get("session");
    const hasSameNumbers = String(enabledNumbers(session)) === String(this.report.patches);
    const isStale = this.reportPatchesKey === null ? !hasSameNumbers : this.reportPatchesKey !== patchesKey(session);
    this.outdated.hidden = !isStale;
    this.outdated.textContent = isStale ? "The chosen patches have changed since: run again." : "";
  }
}
