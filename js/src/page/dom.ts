/** Creates elements: everything from the user's model is text, and nothing is ever parsed as HTML. */

/** A string, number or `true` becomes an attribute, a function a listener; `null`, `undefined` and `false` are left out. */
export type AttributeValue = string | number | boolean | null | undefined | ((event: never) => void);
type Child = Node | string | null | undefined | false;

const SVG = "http://www.w3.org/2000/svg";

/**
 * Returns a new element.
 *
 *     element("button", { class: "gp-button", onclick: () => run(), disabled: !canRun }, icon("play"), "Run")
 */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, AttributeValue> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return withContent(document.createElement(tag), attributes, children);
}

/** A button that does not submit a form, of class `gp-button` unless another class is given. */
export function buttonElement(attributes: Record<string, AttributeValue>, ...children: Child[]): HTMLButtonElement {
  return element("button", { type: "button", class: "gp-button", ...attributes }, ...children);
}

/** As `element`, for SVG. */
export function svgElement<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Record<string, AttributeValue> = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return withContent(document.createElementNS(SVG, tag), attributes, children);
}

function withContent<E extends Element>(made: E, attributes: Record<string, AttributeValue>, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.replace(/^on/, ""), value as EventListener);
    else setAttribute(made, name, value);
  }
  append(made, children);
  return made;
}

/** Sets an attribute, or removes it for `null`, `undefined` and `false`. Booleans of `aria-...` attributes are written out. */
export function setAttribute(target: Element, name: string, value: string | number | boolean | null | undefined): void {
  if (typeof value === "boolean" && name.startsWith("aria-")) target.setAttribute(name, String(value));
  else if (value === null || value === undefined || value === false) target.removeAttribute(name);
  else target.setAttribute(name, value === true ? "" : String(value));
}

/** Replaces the children of an element. */
export function replaceChildren(target: Element, ...children: Child[]): void {
  target.replaceChildren();
  append(target, children);
}

function append(target: Element, children: Child[]): void {
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) target.append(child);
  }
}

/** Shows why the text of a field is invalid in `message`, which must have an id; `null`: it is valid. */
export function showFieldError(field: Element, message: HTMLElement, error: string | null): void {
  message.textContent = error;
  message.hidden = error === null;
  setAttribute(field, "aria-invalid", error === null ? null : "true");
  setAttribute(field, "aria-describedby", error === null ? null : message.id);
}

/** SVG paths in a view box of 16 by 16, drawn with a stroke of 1.4. */
export const ICONS = {
  add: "M8 3.5v9M3.5 8h9",
  arrow: "M3 8h10M9 4l4 4-4 4",
  check: "M3 8.5l3.5 3.5L13 4.5",
  chevron: "M6 4l4 4-4 4",
  close: "M4 4l8 8M12 4l-8 8",
  collapse: "M4 13l4-4 4 4M4 3l4 4 4-4",
  copy: "M6 6V3h7v8h-3M3 6h7v8H3z",
  down: "M8 3v10M4 9l4 4 4-4",
  edit: "M3 13l.6-3L10.5 3 13 5.5 6 12.4z",
  expand: "M4 6l4-4 4 4M4 10l4 4 4-4",
  fold: "M3 3h10M3 13h10M5 6.5l3 2.5 3-2.5",
  info: "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 1 0 0-11M8 7.3v3.7M8 5v.3",
  insert: "M2.5 3h11v4h-11zM8 9.5v4M6 11.5h4",
  play: "M5 3.5v9l7-4.5z",
  redo: "M13 6H6.5a3.5 3.5 0 0 0 0 7H9M10 3l3 3-3 3",
  remove: "M3 4.5h10M6 4.5V3h4v1.5M4.5 4.5l.5 8.5h6l.5-8.5",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 1 0 0-9M10.3 10.3l3.2 3.2",
  stop: "M4 4h8v8H4z",
  undo: "M3 6h6.5a3.5 3.5 0 0 1 0 7H7M6 3L3 6l3 3",
  up: "M8 13V3M4 7l4-4 4 4",
  warning: "M8 2.5l6 11H2zM8 6.5v3.5M8 11.7v.3",
} as const;

/** An icon without a label: the button around it has one. */
export function icon(name: keyof typeof ICONS): SVGSVGElement {
  const outline = svgElement("path", { d: ICONS[name] });
  return svgElement("svg", { class: "gp-icon", viewBox: "0 0 16 16", "aria-hidden": true }, outline);
}

/** Copies text; resolves to whether that succeeded. */
export async function copyText(text: string, near: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text, near);
  }
}

/** Copies where the Clipboard API is not allowed, as in pages without HTTPS. */
function copySelected(text: string, near: HTMLElement): boolean {
  const scope = near.getRootNode() as Document | ShadowRoot;
  const focused = scope.activeElement;
  const area = document.createElement("textarea");
  area.className = "gp-visually-hidden";
  area.readOnly = true;
  area.tabIndex = -1;
  area.setAttribute("aria-hidden", "true");
  area.value = text;
  // Inside `near`, so that an open dialog keeps the focus.
  near.append(area);
  area.select();
  let isCopied = false;
  try {
    isCopied = document.execCommand("copy");
  } catch {
    isCopied = false;
  }
  area.remove();
  if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  return isCopied;
}
