/** Light or dark, as the host says, also inside of a shadow root, where the rules of theme.css do not see the page. */

import { setAttribute } from "./dom";

/** Keeps `data-gp-theme` of the root as the page around it is. Returns what stops that. */
export function followTheme(root: HTMLElement): () => void {
  const show = () => setAttribute(root, "data-gp-theme", themeOf(document));
  const observer = new MutationObserver(show);
  const attributeFilter = ["class", "theme", "data-jp-theme-light", "data-theme"];
  for (const place of [document.documentElement, document.body]) observer.observe(place, { attributeFilter });
  show();
  return () => observer.disconnect();
}

/** `null`: the page does not say, what the system prefers counts. */
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
