/** Creates elements: everything from the user's model is text, and nothing is ever parsed as HTML. */

type Plain = string | number | boolean | null | undefined;
/** A string, number or `true` becomes an attribute; `null`, `undefined` and `false` are left out. */
export type Attributes = Record<string, Plain | ((event: never) => void)>;
export type Child = Node | string | null | undefined | false;
type Content = Attributes | Child | (() => Child | Child[]);

const SVG = "http://www.w3.org/2000/svg";

/**
 * Returns a new element. The tag can have classes; attributes can be left out. What begins with `on` is a listener; another
 * attribute, or the whole content, that is a function is computed now and by each `refresh`.
 *
 *     element("span.gp-note.gp-wide", { hidden: () => !isShown, onclick: () => run() }, icon("play"), "Run")
 *     element("p", () => `${count} found`)
 */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K | `${K}.${string}`,
  ...content: Content[]
): HTMLElementTagNameMap[K] {
  return withContent(tag, (name) => document.createElement(name as K), content);
}

/** A button that does not submit a form, of class `gp-button` unless another class is given. */
export function buttonElement(attributes: Attributes, ...children: Content[]): HTMLButtonElement {
  return element("button", { type: "button", class: "gp-button", ...attributes }, ...children);
}

/** A listener of clicks that ignores the second click of a double click. */
export function oncePerClick(act: () => unknown): (event: MouseEvent) => void {
  return (event) => {
    if (event.detail < 2) act();
  };
}

/** A button that is only a picture, with a name for screen readers. */
export function iconButton(picture: keyof typeof ICONS, name: string, more: Attributes): HTMLButtonElement {
  return buttonElement({ class: "gp-button gp-quiet", "aria-label": name, title: name, ...more }, icon(picture));
}

/** The last letters of a name, which are seen where there is no room for all of it. */
const TAIL = 8;

/** An element whose text loses its middle where there is no room: paths and names differ at their ends. */
export function cutElement(tag: "span" | `span.${string}`, attributes: Attributes, text: string): HTMLElement {
  if (text.length < 2 * TAIL) return element(`${tag}.gp-cut`, attributes, text);
  const [start, end] = [text.slice(0, -TAIL), text.slice(-TAIL)];
  return element(`${tag}.gp-middle`, attributes, element("span.gp-cut", start), element("span.gp-tail", end));
}

/** A field for Python or a number. */
export function textField(label: string, more: Attributes = {}): HTMLInputElement {
  return element("input.gp-field.gp-mono", { type: "text", "aria-label": label, spellcheck: "false", ...more });
}

export function checkbox(label: string, isChecked: boolean, onchange: (isChecked: boolean) => void): HTMLElement {
  const box = element("input", { type: "checkbox", checked: isChecked, onchange: () => onchange(box.checked) });
  return element("label.gp-pair.gp-check", box, label);
}

/** Replaces the options of a select element. */
export function setOptions(
  select: HTMLSelectElement,
  options: readonly (readonly [value: string | number, text: string])[],
  chosen: string | number,
): void {
  replaceChildren(select, ...options.map(([value, text]) => element("option", { value }, text)));
  select.value = String(chosen);
}

/** As `element`, for SVG. */
export function svgElement<K extends keyof SVGElementTagNameMap>(
  tag: K | `${K}.${string}`,
  ...content: Content[]
): SVGElementTagNameMap[K] {
  return withContent(tag, (name) => document.createElementNS(SVG, name as K), content);
}

function withContent<E extends Element>(tag: string, make: (name: string) => E, content: Content[]): E {
  const [name = "", ...classes] = tag.split(".");
  const made = make(name);
  if (classes.length > 0) setAttribute(made, "class", classes.join(" "));
  for (const part of content) {
    if (typeof part === "function") compute(made, () => replaceChildren(made, ...[part()].flat()));
    else if (typeof part !== "object" || part === null || part instanceof Node) append(made, [part]);
    else setAttributes(made, part);
  }
  return made;
}

/** Sets attributes, and adds listeners. */
export function setAttributes(made: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value !== "function") setAttribute(made, name, value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value as EventListener);
    else compute(made, () => setAttribute(made, name, (value as () => unknown)() as Plain));
  }
}

/** What `refresh` does with an element. */
const COMPUTED = new WeakMap<Element, (() => void)[]>();

function compute(made: Element, show: () => void): void {
  COMPUTED.set(made, [...(COMPUTED.get(made) ?? []), show]);
  show();
}

/** Computes again what was given as functions to an element and those in it. */
export function refresh(root: Element): void {
  for (const part of [root, ...root.querySelectorAll("*")]) for (const show of COMPUTED.get(part) ?? []) show();
}

/** Sets an attribute, or removes it for `null`, `undefined` and `false`. Booleans of `aria-...` attributes are written out. */
export function setAttribute(target: Element, name: string, value: Plain): void {
  if (name === "checked" && target instanceof HTMLInputElement) target.checked = value === true;
  else if (typeof value === "boolean" && name.startsWith("aria-")) target.setAttribute(name, String(value));
  else if (value === null || value === undefined || value === false) target.removeAttribute(name);
  else target.setAttribute(name, value === true ? "" : String(value));
}

/** Adds the classes that are `true`, and removes the others. */
export function toggleClasses(target: Element | undefined, classes: Record<string, boolean>): void {
  for (const [name, isOn] of Object.entries(classes)) target?.classList.toggle(name, isOn);
}

/** Replaces the content. If the focus was in it, the control of the same name gets it, else the one in the same place. */
export function replaceChildren(target: Element, ...children: Child[]): void {
  const controls = () => [...target.querySelectorAll<HTMLElement>("button, input, select, a, [tabindex]")];
  const nameOf = (one: Element | undefined) => one && (one.getAttribute("aria-label") ?? one.textContent);
  const focused = target.contains(focusedElement(target)) ? controls() : [];
  const place = focused.indexOf(focusedElement(target) as HTMLElement);
  target.replaceChildren();
  append(target, children);
  if (place < 0) return;
  const now = controls();
  (now.find((one) => nameOf(one) === nameOf(focused[place])) ?? now[place] ?? now.at(-1))?.focus();
}

/** The element that has the focus, also inside a shadow root. */
export function focusedElement(inside: Element): Element | null {
  return (inside.getRootNode() as Partial<DocumentOrShadowRoot>).activeElement ?? null;
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

/** Keeps an event from the page around. */
export function consume(event: Event): void {
  event.preventDefault();
  event.stopPropagation();
}

/** SVG paths in a view box of 16 by 16, drawn with a stroke of 1.4. */
export const ICONS = {
  add: "M8 3.5v9M3.5 8h9",
  check: "M3 8.5l3.5 3.5L13 4.5",
  chevron: "M6 4l4 4-4 4",
  close: "M4 4l8 8M12 4l-8 8",
  collapse: "M4 13l4-4 4 4M4 3l4 4 4-4",
  copy: "M6 6V3h7v8h-3M3 6h7v8H3z",
  down: "M8 3v10M4 9l4 4 4-4",
  edit: "M3 13l.6-3L10.5 3 13 5.5 6 12.4z",
  expand: "M4 6l4-4 4 4M4 10l4 4 4-4",
  info: "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 1 0 0-11M8 7.3v3.7M8 5v.3",
  insert: "M2.5 3h11v4h-11zM8 9.5v4M6 11.5h4",
  play: "M5 3.5v9l7-4.5z",
  redo: "M13 6H6.5a3.5 3.5 0 0 0 0 7H9M10 3l3 3-3 3",
  remove: "M3 4.5h10M6 4.5V3h4v1.5M4.5 4.5l.5 8.5h6l.5-8.5",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 1 0 0-9M10.3 10.3l3.2 3.2",
  undo: "M3 6h6.5a3.5 3.5 0 0 1 0 7H7M6 3L3 6l3 3",
  up: "M8 13V3M4 7l4-4 4 4",
  warning: "M8 2.5l6 11H2zM8 6.5v3.5M8 11.7v.3",
} as const;

/** An icon without a label: the button around it has one. */
export function icon(name: keyof typeof ICONS): SVGSVGElement {
  const outline = svgElement("path", { d: ICONS[name] });
  return svgElement("svg.gp-icon", { viewBox: "0 0 16 16", "aria-hidden": true }, outline);
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
  const hidden = { readonly: true, tabindex: -1, "aria-hidden": true };
  const area = element("textarea.gp-visually-hidden", hidden, text);
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
