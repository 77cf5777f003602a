/** The popup with the details of a node. */
import { asRequestError } from "../kernel/kernel";
import type { Details, Kind, Link, Source } from "../kernel/protocol";
import { buttonElement, copyText, element, icon } from "../page/dom";
import { makeDialog } from "../page/floating";
import { visible, visibleLines } from "../page/text";
import { shapeText } from "../patches/edits";
import { patchedRow, whyUnpatchable } from "../tree/skeleton";
import type { View } from "../view";
import { makeActivation } from "./activation_view";

/** The term for the torch function or class of a row. */
const FACT_NAMES: Partial<Record<Kind, string>> = { graph: "module", unused: "module", op: "operation" };
/** With more links, the rest are behind a button. */
const MAX_LINKS = 12;

export type NodePopup = ReturnType<typeof makeNodePopup>;

export function makeNodePopup(view: View) {
  const { kernel, model, notices, skeleton } = view;
  let row = -1;
  let anchor: Element | null = null;
  let activation: ReturnType<typeof makeActivation> | null = null;
  const close = () => {
    row = -1;
    dialog.close();
  };
  const dialog = makeDialog(view, {
    class: "gp-popup",
    height: 460,
    closesOnOutsideClick: true,
    onEscape: close,
    onClose: () => activation?.close(),
  });
  const nameOf = (path: string) => path || model.get("about").module;

  const show = (shown: number, beside: Element) => {
    activation?.close();
    [row, anchor] = [shown, beside];
    const path = skeleton.path(row);
    fill(path, waiting());
    dialog.open(beside, nameOf(path));
    dialog.element.focus({ preventScroll: true });
    void load(row, path);
  };
  const load = async (shown: number, path: string) => {
    const isShown = () => row === shown && dialog.isOpen;
    const stop = kernel.onChange(() => row === shown && fill(path, waiting()));
    try {
      const { result } = await kernel.ask("details", { row: shown });
      stop();
      if (isShown()) fill(path, body(result));
    } catch (reason) {
      stop();
      if (isShown()) fill(path, failure(path, asRequestError(reason).message));
    }
  };
  const fill = (path: string, content: HTMLElement) =>
    dialog.fill(visible(nameOf(path)), content, ...(path ? [copyButton(path)] : []));
  const copyButton = (path: string) => {
    const label = element("span", "Copy");
    const copy = async () => {
      const isCopied = await copyText(path, dialog.element);
      if (isCopied) notices.announce("path copied");
      else notices.error(`The browser does not allow copying. The path is: ${path}`);
      label.textContent = isCopied ? "Copied" : "Copy";
    };
    return buttonElement({ onclick: copy }, icon("copy"), label);
  };
  const waiting = () =>
    element(
      "div.gp-floating-body.gp-waiting.gp-muted",
      { role: "status" },
      element("span.gp-spinner", { "aria-hidden": true }),
      kernel.state === "busy" ? "The kernel is busy: the answer follows when it is idle." : "Asking the kernel …",
    );
  const failure = (path: string, message: string) => {
    const again = () => {
      fill(path, waiting());
      void load(row, path);
    };
    const saved = { class: "gp-muted gp-message", role: "status" };
    return element(
      "div.gp-floating-body",
      element("p", kernel.isSaved ? saved : { class: "gp-error gp-message", role: "alert" }, message),
      facts(null),
      kernel.state !== "lost" && element("div", buttonElement({ onclick: again }, "Ask again")),
    );
  };
  const body = (details: Details) => {
    const { inputs, notes, source, users } = details;
    const valueRow = patchedRow(skeleton, row);
    activation = valueRow === null ? null : makeActivation(view, valueRow);
    return element(
      "div.gp-floating-body",
      { tabindex: -1 },
      facts(details),
      notes.length > 0 && element("ul.gp-notes", ...notes.map((note) => element("li", visibleLines(note)))),
      patching(),
      activation?.element,
      ...codeSection(details),
      ...links("Inputs", inputs),
      ...links("Used by", users),
      ...sourceSection(source),
    );
  };
  const facts = (details: Details | null) => {
    const [kind, op] = [skeleton.kindOf(row), skeleton.opOf(row)];
    const all: [string, string | null | undefined][] = [
      [FACT_NAMES[kind] ?? "kind", op || kind],
      ["shape", details?.shape && shapeText(details.shape)],
      ["dtype", details?.dtype],
      ["device", details?.device],
      ["value", details?.shape ? null : skeleton.labelOf(row)],
    ];
    const pairs = all.map(
      ([name, fact]) => fact && element("div", element("dt", name), element("dd.gp-mono", visible(fact))),
    );
    return element("dl.gp-line.gp-facts", ...pairs);
  };
  const patching = () => {
    const unpatchable = whyUnpatchable(skeleton, row);
    const instead = unpatchable === null ? patchedRow(skeleton, row) : unpatchable.instead;
    const name = instead === null || instead === row ? "" : shortened(skeleton.path(instead), skeleton.path(row));
    const edit = (event: MouseEvent) => {
      view.editPatch({ row: instead ?? row }, anchor?.isConnected ? anchor : (event.currentTarget as Element));
      close();
    };
    return element(
      "div.gp-line.gp-popup-actions",
      unpatchable && element("p.gp-muted", unpatchable.why),
      instead !== null &&
        buttonElement({ class: "gp-button gp-primary", onclick: edit }, `Patch ${visible(name)}`.trim()),
    );
  };
  const links = (title: string, all: Link[]): HTMLElement[] => {
    if (all.length === 0) return [];
    const rest = all.slice(MAX_LINKS).map(link);
    const onclick = () => {
      more.replaceWith(...rest);
      rest[0]?.querySelector("button")?.focus();
    };
    const more: HTMLElement = element("li", buttonElement({ class: "gp-node-link", onclick }, `${rest.length} more`));
    const items = [...all.slice(0, MAX_LINKS).map(link), rest.length > 0 && more];
    return [element("section", heading(title), element("ul.gp-list.gp-line.gp-tight.gp-links", ...items))];
  };
  const link = ({ row: other, text }: Link) => {
    const go = () => {
      view.reveal(other);
      close();
      view.focusTree();
    };
    return element("li", buttonElement({ class: "gp-node-link", onclick: go }, visible(text)));
  };
  return { element: dialog.element, show, close };
}

/** A path relative to `above`. */
function shortened(path: string, above: string): string {
  return above !== "" && path.startsWith(above) ? path.slice(above.length + 1) : path;
}

function heading(text: string): HTMLElement {
  return element("h3.gp-heading.gp-muted", text);
}

function codeSection(details: Details): HTMLElement[] {
  if (details.code === "") return [];
  const title = details.kind === "graph" ? "Code of the graph" : "Code";
  return [element("section", heading(title), codeBlock(details.code, title))];
}

function codeBlock(code: string, name: string): HTMLElement {
  const block = element("pre.gp-code", { tabindex: 0, role: "group", "aria-label": name });
  block.append(coloredPython(code));
  return block;
}

function sourceSection(source: Source[]): HTMLElement[] {
  if (source.length === 0) return [];
  const lines = source.map(({ file, line, function: name, text }) => {
    const code = element("code.gp-source-line");
    code.append(coloredPython(text.trim()));
    return element(
      "li",
      element("div.gp-source-place.gp-muted", { title: file }, `${baseName(file)}:${line}`, name ? ` in ${name}` : ""),
      code,
    );
  });
  return [
    element("section", heading("Source lines, outermost first"), element("ol.gp-list.gp-stack.gp-source", ...lines)),
  ];
}

function baseName(file: string): string {
  return file.split(/[\\/]/).at(-1) || file;
}

// -- Syntax highlighting of Python ---------------------------------------------------------------------------------------

const KEYWORDS =
  "False None True and as assert async await break class continue def del elif else except finally for from global if " +
  "import in is lambda nonlocal not or pass raise return try while with yield";
/** Strings first: they may contain what looks like a comment or a keyword. */
const TOKENS = new RegExp(
  [
    "(?<string>[rRbBfFuU]{0,2}(?:\"\"\"[^]*?(?:\"\"\"|(?![^]))|'''[^]*?(?:'''|(?![^]))|\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'?))",
    "(?<comment>#.*)",
    "(?<decorator>(?<=^[ \\t]*)@[\\w.]+)",
    `(?<keyword>(?<![\\w.])(?:${KEYWORDS.replaceAll(" ", "|")})(?!\\w))`,
    "(?<self>(?<![\\w.])self(?!\\w))",
    "(?<number>(?<![\\w.])(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*\\.?[\\d_]*(?:[eE][+-]?\\d+)?j?|\\.\\d+(?:[eE][+-]?\\d+)?)(?!\\w))",
    "(?<call>(?<!\\w)[A-Za-z_]\\w*(?=\\())",
    // Whole names, so that keywords within a name do not match.
    "(?:\\w+)",
  ].join("|"),
  "gm",
);
/** The rest of longer code is not colored. */
const MAX_COLORED = 60_000;

/** Returns the code as text nodes and spans of class `gp-py-...`, which together have exactly the text of `code`. */
export function coloredPython(code: string): DocumentFragment {
  const fragment = document.createDocumentFragment();
  let end = 0;
  for (const match of code.slice(0, MAX_COLORED).matchAll(TOKENS)) {
    const kind = Object.entries(match.groups ?? {}).find(([, text]) => text !== undefined)?.[0];
    if (kind === undefined) continue;
    fragment.append(code.slice(end, match.index));
    const span = document.createElement("span");
    span.className = `gp-py-${kind}`;
    span.textContent = match[0];
    fragment.append(span);
    end = match.index + match[0].length;
  }
  fragment.append(code.slice(end));
  return fragment;
}
