/** Requests new numbers from the kernel when the patches have changed, and shows the status of the request. */
import { asRequestError } from "../kernel/kernel";
import { type JobReply, Poller } from "../kernel/polling";
import type { JobStatus, LinkedTraits } from "../kernel/protocol";
import { element } from "../page/dom";
import { type Linked, listen, type Part } from "../view";

/** The minimum time between two requests: a burst of edits causes two runs. */
const MIN_INTERVAL_MS = 80;

interface Updates extends Part {
  /** Shows the status of a request. */
  follow(asked: Promise<JobReply<JobStatus>>): void;
}

/**
 * @param shownVersion The version of the patches that the numbers are for.
 * @param ask Requests numbers for the current patches; called again until they are computed.
 * @param onFailed Called with whether the run failed, so that the numbers shown are out of date.
 */
export function makeUpdates<T extends LinkedTraits>(
  view: Linked<T>,
  shownVersion: () => number,
  ask: () => Promise<JobReply<JobStatus>>,
  onFailed: (isFailed: boolean) => void,
): Updates {
  const words = element("span", {});
  const spinner = element("span", { class: "gp-spinner", "aria-hidden": "true" });
  const line = element("p", { class: "gp-update", role: "status" }, spinner, words);
  const showStatus = (text: string, state: "running" | "failed" | "done") => {
    words.textContent = text;
    spinner.hidden = state !== "running";
    line.classList.toggle("gp-error", state === "failed");
    line.hidden = text === "";
    onFailed(state === "failed");
  };
  const poller = new Poller<JobStatus>(ask, {
    onStatus: ({ result }) => {
      if (result.state === "running") showStatus("Computing …", "running");
      else if (result.state === "failed") showStatus(`The run failed: ${result.error}`, "failed");
      else showStatus("", "done");
    },
    onError: (reason) => showStatus(asRequestError(reason).message, "failed"),
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
    if (view.kernel.state === "lost")
      return showStatus("The patches have changed since these numbers were computed.", "done");
    const rest = last + MIN_INTERVAL_MS - performance.now();
    if (rest <= 0) askNow();
    else timer = setTimeout(askNow, rest);
  };
  listen(view, "change:session", check);
  view.onRemove(() => {
    clearTimeout(timer);
    poller.stop();
  });
  showStatus("", "done");
  check();
  return { element: line, follow: (asked) => poller.follow(asked) };
}
