/** Runs the model with the chosen patches, and shows what they change; a run of another view is shown here, too. */

import { Poller, type Reported } from "../kernel/polling";
import type { RunReport, RunStatus } from "../kernel/protocol";
import { buttonElement, element, showFieldError } from "../page/dom";
import { formatSeconds } from "../page/numbers";
import { listen, type Part, RequestFailed, type View } from "../view";
import { choiceOf, inputsOf, numbersOf, setInputs, unwritten } from "./inputs";
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
  private readonly stale = element("p", { class: "gp-message gp-outdated", hidden: true });
  private readonly result = element("div", { class: "gp-run-result" });
  private readonly poller: Poller<RunStatus>;
  /** The number of the current job; `null` before the first one, and until the kernel replies. */
  private id: number | null = null;
  private isRunning = false;
  /** Whether the run was started in this view, which then announces its end. */
  private isOwn = false;
  /** The patches at the start of the current run; `null` if another view started it. */
  private choice: string | null = null;
  /** What is shown, and the patches that it was made with. */
  private report: RunReport | null = null;
  private reported: string | null = null;

  constructor(private readonly view: View) {
    this.progress = new Progress("Progress of the run", view.kernel, () => this.interrupt());
    const title = element("h3", { class: "gp-title" }, "Run");
    this.element = element("section", { class: "gp-run", "aria-label": "Run" }, title, this.form());
    this.element.append(this.progress.element, this.message, this.stale, this.result);
    this.poller = new Poller<RunStatus>((id) => view.kernel.ask("run_status", { id }), {
      onStatus: (reported) => this.onStatus(reported),
      onError: (reason) => this.onError(reason),
    });
    this.listen();
    this.onRun();
  }

  /** The kernel has not answered yet whether it runs what was asked for here. */
  private get isAsking(): boolean {
    return this.isRunning && this.id === null;
  }

  private form(): HTMLElement {
    const { arguments: example, has_given_inputs, no_inputs } = this.view.model.get("about");
    const id = `gp-run-inputs-${panels++}`;
    this.inputs.id = id;
    // The view was there before, of another capture.
    this.inputs.value = inputsOf(this.view) ?? "";
    this.inputs.placeholder = example ?? (no_inputs === null ? unwritten(has_given_inputs) : "arguments, as in a call");
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
    listen(this.view, "change:session", () => this.showStaleness());
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
    this.isOwn = true;
    this.begin();
    this.id = null;
    this.poller.follow(this.view.kernel.ask("run", { inputs: this.inputs.value.trim() || null }));
  }

  /** The trait says which run is the last one: of this view, of another one, or from before this view was there. */
  private onRun(): void {
    const run = this.view.model.get("run");
    if (run === null || run.id <= (this.id ?? -1) || this.isAsking) return;
    this.isOwn = false;
    this.id = run.id;
    if (run.state === "running") this.begin();
    else this.choice = null;
    this.poller.follow(this.view.kernel.ask("run_status", { id: run.id }));
  }

  private begin(): void {
    this.isRunning = true;
    this.choice = choiceOf(this.view.model.get("session"));
    this.button.setAttribute("aria-disabled", "true");
    this.message.hidden = true;
    this.stale.hidden = true;
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

  private onStatus({ result, buffers }: Reported<RunStatus>): void {
    this.id = result.id;
    if (result.state === "running") {
      if (!this.isRunning) this.begin();
      this.progress.show(result);
      return;
    }
    this.end();
    if (result.state === "done" && result.report !== null) this.fill(result.report, buffers);
    else if (result.state === "interrupted") this.showInterrupted(result.seconds);
    else this.fail(`${result.error ?? "The run failed."}\nChange the inputs or the patches, then press “Run” again.`);
    // Another view may have started the next one meanwhile.
    this.onRun();
  }

  private onError(reason: Error): void {
    const wasRunning = this.isRunning;
    this.end();
    const isInputs = reason instanceof RequestFailed && reason.error.field === "inputs";
    if (isInputs) showFieldError(this.inputs, this.inputsError, reason.message);
    // A run of a kernel that was restarted does not matter any more.
    else if (this.isOwn || wasRunning) this.fail(reason.message);
    if (isInputs) {
      this.result.classList.remove("gp-dimmed");
      this.inputs.focus();
    }
  }

  private fill(report: RunReport, buffers: DataView[]): void {
    const { view } = this;
    this.report = report;
    this.reported = this.choice;
    const revealPatch = (number: number) => {
      const row = view.model.get("session").patches.find((patch) => patch.number === number)?.row ?? -1;
      return row < 0 ? null : () => view.reveal(row);
    };
    this.result.replaceChildren(makeRunReport(report, { buffers, revealPatch }));
    this.result.classList.remove("gp-dimmed");
    this.showStaleness();
    if (this.isOwn) view.notices.say(`The run finished in ${formatSeconds(report.seconds)}.`);
  }

  private showInterrupted(seconds: number): void {
    this.fail(`Interrupted after ${formatSeconds(seconds)}. Press “Run” to start again.`);
  }

  private fail(message: string): void {
    const old = this.report === null ? "" : "\nBelow is the result of the run before.";
    this.message.textContent = `${message}${old}`;
    this.message.hidden = false;
  }

  /** For a run that another view started, only the numbers of the patches can be compared. */
  private showStaleness(): void {
    if (this.report === null || this.isRunning) return;
    const session = this.view.model.get("session");
    const hasSameNumbers = String(numbersOf(session)) === String(this.report.patches);
    const isStale = this.reported === null ? !hasSameNumbers : this.reported !== choiceOf(session);
    this.stale.hidden = !isStale;
    this.stale.textContent = isStale ? "The chosen patches have changed since: run again." : "";
  }
}
