/** Jobs of the kernel: runs and activations, with the inputs and patches that they depend on. */
import type { JobStatus, RunState, SessionState } from "../kernel/protocol";
import { buttonElement, element, refresh } from "../page/dom";
import { formatSeconds } from "../page/text";
import { follow, type Part, RequestFailed, type View } from "../view";

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
export function makeJobView<J extends JobStatus>(view: View, result: HTMLElement, actions: JobActions<J>) {
  const { kernel, model } = view;
  /** What the kernel last said of the running job; `null`: nothing yet. */
  let status: J | null = null;
  let isInterrupting = false;
  let error = "";
  /** The patches when an error was shown. */
  let errorKey = "";
  let repair: string | null = null;

  const text = () => {
    if (status === null)
      return kernel.state === "busy" ? "The kernel is busy: this starts when it is idle." : "Asking the kernel …";
    const { fraction, seconds } = status;
    return `${fraction === null ? "" : `${Math.floor(100 * fraction)}% · `}${formatSeconds(seconds)}`;
  };
  /** The kernel interrupts a run between two modules, which can take a moment. */
  const interrupt = () => {
    if (job.id === null) return;
    isInterrupting = true;
    show();
    job.follow(actions.interrupt(job.id));
  };
  const waits = () => (status?.waits_for ? `The interrupt waits for ${status.waits_for}` : "");
  const outdatedText = () => repair && `The chosen patches have changed since: ${repair}.`;
  const onStatus = (reply: JobReply<J>) => {
    const { id, state, seconds, error: why } = reply.result;
    job.id = id;
    if (state === "running") {
      if (!job.isRunning) job.begin();
      status = reply.result;
      show();
      return;
    }
    end();
    actions.onEnd?.(reply);
    if (state === "done") {
      result.classList.remove("gp-dimmed");
      actions.onDone(reply);
    } else if (state === "interrupted") {
      showError(`Interrupted after ${formatSeconds(seconds)}. Press “${actions.again}” to start again.`);
    } else showError(`${why ?? "The run failed."}\nChange the inputs or the patches, and try again.`);
  };
  const onError = (reason: Error) => {
    const wasRunning = job.isRunning;
    end();
    actions.onEnd?.(null);
    if (actions.onError(reason, wasRunning)) result.classList.remove("gp-dimmed");
    else {
      const isInputs = reason instanceof RequestFailed && reason.error.field === "inputs";
      showError(isInputs ? `The inputs, as typed under “Run”: ${reason.message}` : reason.message);
    }
  };
  const poller = new Poller<J>(actions.status, { onStatus, onError });
  const end = () => {
    if (stop.matches(":focus")) actions.button.focus();
    job.isRunning = isInterrupting = false;
    status = null;
    show();
  };
  const showError = (message: string) => {
    errorKey = patchesKey(model.get("session"));
    error = message + (result.childElementCount > 0 ? "\nBelow is the result of the run before." : "");
    show();
  };
  const job = {
    result,
    /** The current job; `null` before the first one, and until the kernel replies. */
    id: null as number | null,
    isRunning: false,
    /** Shows a job; `asked`: the request that starts it, or asks for it. */
    follow: (asked: Promise<JobReply<J>>) => void poller.follow(asked),
    /** Shows that a job starts: the kernel has not replied yet. */
    begin: () => {
      job.isRunning = true;
      status = repair = null;
      error = "";
      result.classList.add("gp-dimmed");
      show();
    },
    close: () => {
      poller.stop();
      end();
    },
    showOutdated: (isOutdated: boolean, how: string) => {
      repair = isOutdated ? how : null;
      show();
    },
  };
  const stop = buttonElement(
    { hidden: () => status === null, "aria-disabled": () => isInterrupting || null, onclick: interrupt },
    () => (isInterrupting ? "Interrupting …" : "Interrupt"),
  );
  const progress = element(
    "div.gp-line.gp-tight.gp-progress",
    { hidden: () => !job.isRunning },
    element("progress.gp-progress-bar", { max: 1, value: () => status?.fraction, "aria-label": actions.name }),
    element("span.gp-progress-text.gp-cut.gp-muted", () => job.isRunning && text()),
    stop,
    element("span.gp-waits.gp-muted", { role: "status", hidden: () => waits() === "" }, waits),
  );
  const message = element("p.gp-message.gp-error", { role: "alert", hidden: () => error === "" }, () => error);
  const outdated = element("p.gp-message.gp-outdated", { hidden: () => repair === null }, outdatedText);
  const show = () => {
    for (const part of [progress, message, outdated]) refresh(part);
  };
  view.onRemove(job.close);
  follow(view, [kernel], show);
  // An error goes with its cause.
  follow(view, ["session"], () => {
    if (errorKey !== patchesKey(model.get("session"))) error = "";
    show();
  });
  return Object.assign(job, { progress, message, outdated });
}

/** The status of a job in one line, for what shows its result elsewhere. */
export interface JobLine extends Part {
  readonly isRunning: boolean;
  follow(asked: Promise<JobReply<JobStatus>>): void;
  say(text: string): void;
}

/** @param onChange Called with the state of the job, after each change. */
export function followJob(
  view: Pick<View, "onRemove">,
  ask: () => Promise<JobReply<JobStatus>>,
  onChange: (state: RunState) => void,
  running = "The model runs …",
): JobLine {
  let [text, state]: [string, RunState] = ["", "done"];
  const kind = () => `gp-pair gp-update ${state === "failed" ? "gp-error" : ""}`;
  const spinner = element("span.gp-spinner", { "aria-hidden": true, hidden: () => state !== "running" });
  const line = element(
    "p",
    { class: kind, role: "status", hidden: () => text === "" },
    spinner,
    element("span", () => text),
  );
  const say = (words: string, now: RunState = "done") => {
    [text, state] = [words, now];
    refresh(line);
    onChange(state);
  };
  const poller = new Poller<JobStatus>(ask, {
    onStatus: ({ result }) => {
      if (result.state === "running") say(running, "running");
      else say(result.state === "failed" ? `The run failed: ${result.error}` : "", result.state);
    },
    onError: (reason) => say(reason.message, "failed"),
  });
  view.onRemove(() => poller.stop());
  return {
    element: line,
    get isRunning() {
      return state === "running";
    },
    follow: (asked) => void poller.follow(asked),
    say,
  };
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
