/** The popup with the details of a node. */
import { asRequestError } from "../kernel/kernel";
import type { Details, Kind, Link, Source } from "../kernel/protocol";
import { buttonElement, copyText, element, icon } from "../page/dom";
import { Dialog } from "../page/floating";
import { visible, visibleLines } from "../page/text";
import { shapeText } from "../patches/edits";
import { patchedRow, whyUnpatchable } from "../tree/skeleton";
import type { Part, View } from "../view";
import { ActivationSection } from "./activation_view";

/** The term for the torch function or class of a row. */
const FACT_NAMES: Partial<Record<Kind, string>> = { graph: "module", unused: "module", op: "operation" };
/** With more links, the rest are behind a button. */
const MAX_LINKS = 12;

export class NodePopup implements Part {
  readonly element: HTMLElement;
  private readonly dialog: Dialog;
  private row = -1;
  private anchor: Element | null = null;
  private activation: ActivationSection | null = null;

  constructor(private readonly view: View) {
    this.dialog = new Dialog(view, {
      class: "gp-popup",
      height: 460,
      closesOnOutsideClick: true,
      onEscape: () => this.close(),
      onClose: () => this.activation?.close(),
    });
    this.element = this.dialog.element;
  }

  show(row: number, anchor: Element): void {
    this.activation?.close();
    this.row = row;
    this.anchor = anchor;
    const path = this.view.skeleton.path(row);
    this.fill(path, this.waiting());
    this.dialog.open(anchor, path || this.nameOfModel());
    this.element.focus({ preventScroll: true });
    void this.load(row, path);
  }

  close(): void {
    this.row = -1;
    this.dialog.close();
  }

  private async load(row: number, path: string): Promise<void> {
    const stop = this.view.kernel.onChange(() => {
      if (this.row === row) this.fill(path, this.waiting());
    });
    try {
      const { result } = await this.view.kernel.ask("details", { row });
      stop();
      if (this.row === row && this.dialog.isOpen) this.fill(path, this.body(result));
    } catch (reason) {
      stop();
      if (this.row === row && this.dialog.isOpen)
        this.fill(path, this.failure(row, path, asRequestError(reason).message));
    }
  }

  private fill(path: string, body: HTMLElement): void {
    this.dialog.fill(visible(path || this.nameOfModel()), body, ...(path ? [this.copyButton(path)] : []));
  }

  private nameOfModel(): string {
    return this.view.model.get("about").module;
  }

  private copyButton(path: string): HTMLElement {
    const label = element("span", "Copy");
    const copy = async () => {
      const isCopied = await copyText(path, this.element);
      if (isCopied) this.view.notices.announce("path copied");
      else this.view.notices.error(`The browser does not allow copying. The path is: ${path}`);
      label.textContent = isCopied ? "Copied" : "Copy";
    };
    return buttonElement({ onclick: copy }, icon("copy"), label);
  }

  private waiting(): HTMLElement {
    const isBusy = this.view.kernel.state === "busy";
    return element(
      "div.gp-floating-body.gp-waiting.gp-muted",
      { role: "status" },
      element("span.gp-spinner", { "aria-hidden": true }),
      isBusy ? "The kernel is busy: the answer follows when it is idle." : "Asking the kernel …",
    );
  }

  private failure(row: number, path: string, message: string): HTMLElement {
    const again = () => {
      this.fill(path, this.waiting());
      void this.load(row, path);
    };
    const saved = { class: "gp-muted gp-message", role: "status" };
    return element(
      "div.gp-floating-body",
      element("p", this.view.kernel.isSaved ? saved : { class: "gp-error gp-message", role: "alert" }, message),
      this.facts(row, null),
      this.view.kernel.state === "lost" ? null : element("div", buttonElement({ onclick: again }, "Ask again")),
    );
  }

  private body(details: Details): HTMLElement {
    const { row } = details;
    const valueRow = patchedRow(this.view.skeleton, row);
    this.activation = valueRow === null ? null : new ActivationSection(this.view, valueRow);
    return element(
      "div.gp-floating-body",
      { tabindex: -1 },
      this.facts(row, details),
      details.notes.length > 0
        ? element("ul.gp-notes", ...details.notes.map((note) => element("li", visibleLines(note))))
        : null,
      this.patching(row),
      this.activation?.element,
      ...codeSection(details),
      ...this.links("Inputs", details.inputs),
      ...this.links("Used by", details.users),
      ...sourceSection(details.source),
    );
  }

  private facts(row: number, details: Details | null): HTMLElement {
    const { skeleton } = this.view;
    const [kind, op] = [skeleton.kindOf(row), skeleton.opOf(row)];
    const facts: [string, string | null][] = [
      [FACT_NAMES[kind] ?? "kind", op || kind],
      ["shape", details?.shape ? shapeText(details.shape) : null],
      ["dtype", details?.dtype ?? null],
      ["device", details?.device ?? null],
    ];
    if (!details?.shape && skeleton.labelOf(row)) facts.push(["value", skeleton.labelOf(row)]);
    return element(
      "dl.gp-line.gp-facts",
      ...facts.map(([name, fact]) =>
        fact === null ? null : element("div", element("dt", name), element("dd.gp-mono", visible(fact))),
      ),
    );
  }

  private patching(row: number): HTMLElement {
    const { skeleton } = this.view;
    const unpatchable = whyUnpatchable(skeleton, row);
    const edit = (target: number) => (event: MouseEvent) => {
      const anchor = this.anchor?.isConnected ? this.anchor : (event.currentTarget as Element);
      this.view.editPatch({ row: target }, anchor);
      this.close();
    };
    const instead = unpatchable === null ? patchedRow(skeleton, row) : unpatchable.instead;
    const name = instead === null || instead === row ? "" : shortened(skeleton.path(instead), skeleton.path(row));
    return element(
      "div.gp-line.gp-popup-actions",
      unpatchable && element("p.gp-muted", unpatchable.why),
      instead === null
        ? null
        : buttonElement({ class: "gp-button gp-primary", onclick: edit(instead) }, `Patch ${visible(name)}`.trim()),
    );
  }

  private links(title: string, links: Link[]): HTMLElement[] {
    if (links.length === 0) return [];
    const list = element(
      "ul.gp-list.gp-line.gp-tight.gp-links",
      ...links.slice(0, MAX_LINKS).map((link) => this.link(link)),
    );
    if (links.length > MAX_LINKS) {
      const more = buttonElement({ class: "gp-node-link" }, `${links.length - MAX_LINKS} more`);
      const item = element("li", more);
      more.addEventListener("click", () => {
        const rest = links.slice(MAX_LINKS).map((link) => this.link(link));
        item.replaceWith(...rest);
        rest[0]?.querySelector("button")?.focus();
      });
      list.append(item);
    }
    return [element("section", heading(title), list)];
  }

  private link({ row, text }: Link): HTMLElement {
    const go = () => {
      this.view.reveal(row);
      this.close();
      this.view.focusTree();
    };
    return element("li", buttonElement({ class: "gp-node-link", onclick: go }, visible(text)));
  }
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
