/** Asks the kernel for new numbers when the patches have changed, and says how that goes. */
import { wordsOf } from "../kernel/kernel";
import { Poller, type Reported } from "../kernel/polling";
import type { JobStatus, LinkedTraits } from "../kernel/protocol";
import { element } from "../page/dom";
import { type Linked, listen, type Part } from "../view";

/** At least so long is between two questions: a burst of edits is two runs. */
const WAIT = 80;

interface Updates extends Part {
  /** Shows how far a request is that computes something. */
  follow(asked: Promise<Reported<JobStatus>>): void;
}

/**
 * @param shownVersion The version of the patches that the numbers are for.
 * @param ask Asks for numbers for the patches as they are now; may be asked again until they are there.
 * @param onFailed Called with whether the numbers that are shown are out of date since the run failed.
 */
export function makeUpdates<T extends LinkedTraits>(
  view: Linked<T>,
  shownVersion: () => number,
  ask: () => Promise<Reported<JobStatus>>,
  onFailed: (isFailed: boolean) => void,
): Updates {
  const words = element("span", {});
  const spinner = element("span", { class: "gp-spinner", "aria-hidden": "true" });
  const line = element("p", { class: "gp-update", role: "status" }, spinner, words);
  const say = (text: string, state: "running" | "failed" | "done") => {
    words.textContent = text;
    spinner.hidden = state !== "running";
    line.classList.toggle("gp-error", state === "failed");
    line.hidden = text === "";
    onFailed(state === "failed");
  };
  const poller = new Poller<JobStatus>(ask, {
    onStatus: ({ result }) => {
      if (result.state === "running") say("Computing …", "running");
      else if (result.state === "failed") say(`The run failed: ${result.error}`, "failed");
      else say("", "done");
    },
    onError: (reason) => say(wordsOf(reason).message, "failed"),
  });
  let timer: ReturnType<typeof setTimeout> | undefined;
  let last = Number.NEGATIVE_INFINITY;
  const askNow = () => {
    last = performance.now();
    poller.follow(ask());
  };
  const check = () => {
    clearTimeout(timer);
    if (view.model.get("session").version === shownVersion()) return;
    if (view.kernel.state === "lost") return say("The patches have changed since these numbers were computed.", "done");
    const rest = last + WAIT - performance.now();
    if (rest <= 0) askNow();
    else timer = setTimeout(askNow, rest);
  };
  listen(view, "change:session", check);
  view.onRemove(() => {
    clearTimeout(timer);
    poller.stop();
  });
  say("", "done");
  check();
  return { element: line, follow: (asked) => poller.follow(asked) };
}
