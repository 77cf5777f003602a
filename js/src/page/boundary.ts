/** Shows errors of the front end in the widget, with advice. */

import { BrokenSkeleton } from "../tree/skeleton";
import { element } from "./dom";

const ADVICE = "Run the cell again; if that does not help, save the notebook and reload the page.";

/** Shows an error in place of the view. */
export function showFailure(root: HTMLElement, error: unknown): void {
  const why = error instanceof Error ? error.message : String(error);
  const cause = error instanceof BrokenSkeleton ? "The tree cannot be shown" : "This widget failed";
  root.replaceChildren(
    element("div", { class: "gp-failure", role: "alert" }, element("strong", {}, `${cause}: ${why}. `), ADVICE),
  );
  console.error(error);
}

/**
 * Reports uncaught errors of event handlers and promises of this code, which all views of a page share. Returns a function that stops this.
 *
 * @param source The address that this code has in stack traces.
 */
export function watchErrors(source: string, tell: (message: string) => void): () => void {
  const report = (error: unknown) => {
    const why = error instanceof Error ? error.message : String(error);
    tell(`A view of this page raised an error: ${why}. It may be out of date. ${ADVICE}`);
  };
  const onError = (event: ErrorEvent) => {
    if (event.filename === source) report(event.error ?? event.message);
  };
  const onRejection = (event: PromiseRejectionEvent) => {
    if (event.reason instanceof Error && event.reason.stack?.includes(source)) report(event.reason);
  };
  window.addEventListener("error", onError);
  window.addEventListener("unhandledrejection", onRejection);
  return () => {
    window.removeEventListener("error", onError);
    window.removeEventListener("unhandledrejection", onRejection);
  };
}
