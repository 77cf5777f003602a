/** Jobs of the kernel: runs and activations, with the inputs and patches that they depend on. */
import type { JobStatus, SessionState } from "../kernel/protocol";
import { buttonElement, element } from "../page/dom";
import { formatSeconds } from "../page/text";
import { listen, RequestFailed, type View } from "../view";

const FIRST_DELAY = 30;
const LONGEST_DELAY = 300;
/** The ratio of consecutive delays: the end of a job is noticed after at most 20% more of its time. */
const DELAY_FACTOR = 1.2;

export interface JobReply<J extends JobStatus> {
  result: J;
  buffers: DataView[];
}

export interface JobListener<J extends JobStatus> {
  onStatus(reported: JobReply<J>): void;
  /** There is no reply: the kernel is lost, or does not know the job. */
  onError(error: Error): void;
}

/** Asks for the status of a job until it has finished. Polls one job at a time, and ignores late replies for others. */
export class Poller<J extends JobStatus> {
  private round = 0;

  constructor(
    private readonly ask: (id: number) => Promise<JobReply<J>>,
    private readonly listener: JobListener<J>,
  ) {}

  /** `start`: the reply to the request that starts or names the job. */
  async follow(start: Promise<JobReply<J>>): Promise<void> {
    this.round += 1;
    const { round } = this;
    try {
      let reply = await start;
      for (let delay = FIRST_DELAY; round === this.round; delay = Math.min(DELAY_FACTOR * delay, LONGEST_DELAY)) {
        this.listener.onStatus(reply);
        if (reply.result.state !== "running") return;
        await new Promise((resolve) => setTimeout(resolve, delay));
        if (round === this.round) reply = await this.ask(reply.result.id);
      }
    } catch (reason) {
      if (round === this.round) this.listener.onError(reason instanceof Error ? reason : new Error(String(reason)));
    }
  }

  stop(): void {
    this.round += 1;
  }
}

interface JobActions<J extends JobStatus> {
  /** The accessible name of the bar: `Progress of the run`. */
  name: string;
  /** The button that starts a job, and what it says. */
  button: HTMLButtonElement;
  again: string;
  status(id: number): Promise<JobReply<J>>;
  interrupt(id: number): Promise<JobReply<J>>;
  /** The job has ended; before its result or error is shown. */
  onEnd?(reply: JobReply<J> | null): void;
  onDone(reply: JobReply<J>): void;
  /** Returns whether it has shown why there is no reply, or need not. */
  onError(reason: Error, wasRunning: boolean): boolean;
}

/** A job: its progress, with a button that interrupts it, its errors, and the element of its result. */
export class JobView<J extends JobStatus> {
  readonly progress: HTMLElement;
  readonly message = element("p.gp-message.gp-error", { role: "alert", hidden: true });
  readonly outdated = element("p.gp-message.gp-outdated", { hidden: true });
  /** The current job; `null` before the first one, and until the kernel replies. */
  id: number | null = null;
  isRunning = false;
  private readonly bar: HTMLProgressElement;
  private readonly text = element("span.gp-progress-text.gp-cut.gp-muted");
  private readonly waits = element("span.gp-waits.gp-muted", { role: "status", hidden: true });
  private readonly stop: HTMLButtonElement;
  private readonly poller: Poller<J>;
  private stopWaiting: (() => void) | null = null;
  /** The patches when an error was shown. */
  private patchesKey = "";

  constructor(
    private readonly view: View,
    readonly result: HTMLElement,
    private readonly actions: JobActions<J>,
  ) {
    this.bar = element("progress.gp-progress-bar", { max: 1, "aria-label": actions.name });
    this.stop = buttonElement({ onclick: () => this.interrupt() }, "Interrupt");
    this.progress = element(
      "div.gp-line.gp-tight.gp-progress",
      { hidden: true },
      this.bar,
      this.text,
      this.stop,
      this.waits,
    );
    this.poller = new Poller<J>((id) => actions.status(id), {
      onStatus: (reply) => this.onStatus(reply),
      onError: (reason) => this.onError(reason),
    });
    view.onRemove(() => this.close());
    // An error goes with its cause.
    listen(view, "change:session", () => {
      this.message.hidden ||= this.patchesKey !== patchesKey(view.model.get("session"));
    });
  }

  /** Shows a job; `asked`: the request that starts it, or asks for it. */
  follow(asked: Promise<JobReply<J>>): void {
    void this.poller.follow(asked);
  }

  /** Shows that a job starts: the kernel has not replied yet. */
  begin(): void {
    this.isRunning = true;
    this.message.hidden = true;
    this.outdated.hidden = true;
    this.result.classList.add("gp-dimmed");
    this.wait();
  }

  close(): void {
    this.poller.stop();
    this.end();
  }

  private showError(message: string): void {
    this.patchesKey = patchesKey(this.view.model.get("session"));
    const old = this.result.childElementCount > 0 ? "\nBelow is the result of the run before." : "";
    this.message.textContent = message + old;
    this.message.hidden = false;
  }

  showOutdated(isOutdated: boolean, repair: string): void {
    this.outdated.hidden = !isOutdated;
    this.outdated.textContent = isOutdated ? `The chosen patches have changed since: ${repair}.` : "";
  }

  private wait(): void {
    const isBusy = this.view.kernel.state === "busy";
    this.bar.removeAttribute("value");
    this.text.textContent = isBusy ? "The kernel is busy: this starts when it is idle." : "Asking the kernel …";
    this.stop.hidden = true;
    this.progress.hidden = false;
    this.stopWaiting ??= this.view.kernel.onState(() => this.wait());
  }

  private answered(): void {
    this.stopWaiting?.();
    this.stopWaiting = null;
    this.stop.hidden = false;
  }

  private end(): void {
    this.isRunning = false;
    if (this.stop.matches(":focus")) this.actions.button.focus();
    this.answered();
    this.progress.hidden = true;
    this.stop.textContent = "Interrupt";
    this.stop.removeAttribute("aria-disabled");
  }

  /** The kernel interrupts a run between two modules, which can take a moment. */
  private interrupt(): void {
    if (this.id === null) return;
    this.stop.textContent = "Interrupting …";
    this.stop.setAttribute("aria-disabled", "true");
    this.follow(this.actions.interrupt(this.id));
  }

  private onStatus(reply: JobReply<J>): void {
    const { id, state, fraction, seconds, error, waits_for } = reply.result;
    this.id = id;
    if (state === "running") {
      if (!this.isRunning) this.begin();
      this.answered();
      if (fraction === null) this.bar.removeAttribute("value");
      else this.bar.value = fraction;
      const percent = fraction === null ? "" : `${Math.floor(100 * fraction)}% · `;
      this.text.textContent = `${percent}${formatSeconds(seconds)}`;
      this.waits.textContent = waits_for === null ? "" : `The interrupt waits for ${waits_for}`;
      this.waits.hidden = waits_for === null;
      return;
    }
    this.end();
    this.actions.onEnd?.(reply);
    const { again } = this.actions;
    if (state === "done") {
      this.result.classList.remove("gp-dimmed");
      this.actions.onDone(reply);
    } else if (state === "interrupted") {
      this.showError(`Interrupted after ${formatSeconds(seconds)}. Press “${again}” to start again.`);
    } else this.showError(`${error ?? "The run failed."}\nChange the inputs or the patches, and try again.`);
  }

  private onError(reason: Error): void {
    const wasRunning = this.isRunning;
    this.end();
    this.actions.onEnd?.(null);
    if (this.actions.onError(reason, wasRunning)) this.result.classList.remove("gp-dimmed");
    else {
      const isInputs = reason instanceof RequestFailed && reason.error.field === "inputs";
      this.showError(isInputs ? `The inputs, as typed under “Run”: ${reason.message}` : reason.message);
    }
  }
}

// -- what a run depends on: the inputs typed in the run panel, which activations use too, and the enabled patches -------

const typed = new WeakMap<HTMLElement, string>();

/** As Python; `null`: the example inputs. */
export function inputsOf(view: View): string | null {
  return typed.get(view.root)?.trim() || null;
}

export function setInputs(view: View, text: string): void {
  typed.set(view.root, text);
}

/** Describes the inputs, for display; `null`: not those typed here. */
export function describeInputs(view: View, own = inputsOf(view)): string {
  const { arguments: written, has_given_inputs: isGiven } = view.model.get("about");
  return own ?? written ?? (isGiven ? "the inputs given to the browser" : "the example inputs");
}

/** Returns a key of the enabled patches: equal keys give equal runs. Probe names and warnings do not change a number. */
export function patchesKey({ patches }: SessionState): string {
  const enabled = patches.filter((patch) => patch.is_enabled);
  return JSON.stringify(enabled.map(({ name, warning, row, shape, sliced, ...rest }) => rest));
}

export function enabledNumbers({ patches }: SessionState): number[] {
  return patches.filter((patch) => patch.is_enabled).map((patch) => patch.number);
}
