/** The light or dark theme of the host. CSS alone cannot follow it: rules in a shadow root do not see the page. */

import { setAttribute } from "./dom";

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
