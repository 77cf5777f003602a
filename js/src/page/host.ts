/** Shows errors of the front end in the widget, with advice. */

import { BrokenSkeleton } from "../tree/skeleton";
import { element, setAttribute } from "./dom";

const ADVICE = "Run the cell again; if that does not help, save the notebook and reload the page.";

/** Shows an error in place of the view. */
export function showFailure(root: HTMLElement, error: unknown): void {
  const why = error instanceof Error ? error.message : String(error);
  const cause = error instanceof BrokenSkeleton ? "The tree cannot be shown" : "This widget failed";
  root.replaceChildren(element("div.gp-failure", { role: "alert" }, element("strong", `${cause}: ${why}. `), ADVICE));
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

// -- The light or dark theme of the host ---------------------------------------------------------------------------------

/** Keeps `data-gp-theme` of the root up to date with the page. Returns a function that stops this. */
export function followTheme(root: HTMLElement): () => void {
  const show = () => setAttribute(root, "data-gp-theme", themeOf(document));
  const observer = new MutationObserver(show);
  const attributeFilter = ["class", "theme", "data-jp-theme-light", "data-theme"];
  for (const place of [document.documentElement, document.body]) observer.observe(place, { attributeFilter });
  show();
  return () => observer.disconnect();
}

/** `null`: the page has no theme; CSS then follows the system's preference. */
function themeOf({ body, documentElement: html }: Document): "light" | "dark" | null {
  const jupyter = body.dataset.jpThemeLight;
  if (jupyter !== undefined) return jupyter === "false" ? "dark" : "light";
  const classes = [...html.classList, ...body.classList];
  const isLight = ["vscode-light", "vscode-high-contrast-light", "light", "light-theme"];
  if (classes.some((name) => isLight.includes(name))) return "light";
  if (classes.some((name) => ["vscode-dark", "vscode-high-contrast", "dark", "dark-theme"].includes(name)))
    return "dark";
  const named = html.getAttribute("theme") ?? html.dataset.theme ?? body.dataset.theme;
  return named === "dark" || named === "light" ? named : null;
}
