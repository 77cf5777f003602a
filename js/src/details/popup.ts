/** The popup with the details of a node. */

import { asRequestError } from "../kernel/kernel";
import type { Details, Kind, Link, Source } from "../kernel/protocol";
import { buttonElement, copyText, element, icon, replaceChildren } from "../page/dom";
import { Dialog, focusedElement } from "../page/floating";
import { visible, visibleLines } from "../page/visible";
import { shapeText } from "../patches/edits";
import { whyUnpatchable } from "../patches/patchable";
import type { Part, View } from "../view";
import { ActivationSection } from "./activation_view";
import { coloredPython } from "./python_code";

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
    const stop = this.view.kernel.onState(() => {
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

  /** Replaces the content, and keeps the focus inside. */
  private fill(path: string, body: HTMLElement): void {
    const hadFocus = this.element.contains(focusedElement(this.element));
    replaceChildren(this.element, this.header(path), body);
    if (hadFocus) this.element.focus({ preventScroll: true });
  }

  private nameOfModel(): string {
    return this.view.model.get("about").module;
  }

  private header(path: string): HTMLElement {
    const copy = async () => {
      const isCopied = await copyText(path, this.element);
      if (isCopied) this.view.notices.announce("path copied");
      else this.view.notices.error(`The browser does not allow copying. The path is: ${path}`);
      label.textContent = isCopied ? "Copied" : "Copy";
    };
    const label = element("span", {}, "Copy");
    return element(
      "div",
      { class: "gp-floating-header" },
      element("div", { class: "gp-floating-title" }, visible(path || this.nameOfModel())),
      path ? buttonElement({ onclick: copy }, icon("copy"), label) : null,
      closeButton(() => this.close()),
    );
  }

  private waiting(): HTMLElement {
    const isBusy = this.view.kernel.state === "busy";
    return element(
      "div",
      { class: "gp-floating-body gp-waiting", role: "status" },
      element("span", { class: "gp-spinner", "aria-hidden": true }),
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
      "div",
      { class: "gp-floating-body" },
      element("p", this.view.kernel.isSaved ? saved : { class: "gp-error gp-message", role: "alert" }, message),
      this.facts(row, null),
      this.view.kernel.state === "lost" ? null : element("div", {}, buttonElement({ onclick: again }, "Ask again")),
    );
  }

  private body(details: Details): HTMLElement {
    const { row } = details;
    const hasValue = whyUnpatchable(this.view.skeleton, row) === null;
    this.activation = hasValue ? new ActivationSection(this.view, row) : null;
    return element(
      "div",
      { class: "gp-floating-body", tabindex: -1 },
      this.facts(row, details),
      details.notes.length > 0
        ? element("ul", { class: "gp-notes" }, ...details.notes.map((note) => element("li", {}, visibleLines(note))))
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
      "dl",
      { class: "gp-facts" },
      ...facts.map(([name, fact]) =>
        fact === null ? null : element("div", {}, element("dt", {}, name), element("dd", {}, visible(fact))),
      ),
    );
  }

  private patching(row: number): HTMLElement {
    const unpatchable = whyUnpatchable(this.view.skeleton, row);
    const edit = (target: number) => (event: MouseEvent) => {
      const anchor = this.anchor?.isConnected ? this.anchor : (event.currentTarget as Element);
      this.view.editPatch({ row: target }, anchor);
      this.close();
    };
    if (unpatchable === null) {
      const button = buttonElement({ class: "gp-button gp-primary", onclick: edit(row) }, "Patch");
      return element("div", { class: "gp-popup-actions" }, button);
    }
    const { why, instead } = unpatchable;
    return element(
      "div",
      { class: "gp-popup-actions" },
      element("p", { class: "gp-muted" }, why),
      instead === null
        ? null
        : buttonElement(
            { class: "gp-button gp-primary", onclick: edit(instead) },
            `Patch ${visible(shortened(this.view.skeleton.path(instead), this.view.skeleton.path(row)))}`,
          ),
    );
  }

  private links(title: string, links: Link[]): HTMLElement[] {
    if (links.length === 0) return [];
    const list = element("ul", { class: "gp-links" }, ...links.slice(0, MAX_LINKS).map((link) => this.link(link)));
    if (links.length > MAX_LINKS) {
      const more = buttonElement({ class: "gp-node-link" }, `${links.length - MAX_LINKS} more`);
      const item = element("li", {}, more);
      more.addEventListener("click", () => {
        const rest = links.slice(MAX_LINKS).map((link) => this.link(link));
        item.replaceWith(...rest);
        rest[0]?.querySelector("button")?.focus();
      });
      list.append(item);
    }
    return [element("section", {}, heading(title), list)];
  }

  private link({ row, text }: Link): HTMLElement {
    const go = () => {
      this.view.reveal(row);
      this.close();
      this.view.focusTree();
    };
    return element("li", {}, buttonElement({ class: "gp-node-link", onclick: go }, visible(text)));
  }
}

export function closeButton(onclick: () => void): HTMLElement {
  return buttonElement(
    { class: "gp-button gp-quiet gp-close", "aria-label": "Close", title: "Close (Esc)", onclick },
    icon("close"),
  );
}

/** A path relative to `above`. */
function shortened(path: string, above: string): string {
  return above !== "" && path.startsWith(above) ? path.slice(above.length + 1) : path;
}

function heading(text: string): HTMLElement {
  return element("h3", { class: "gp-heading" }, text);
}

function codeSection(details: Details): HTMLElement[] {
  if (details.code === "") return [];
  const title = details.kind === "graph" ? "Code of the graph" : "Code";
  return [element("section", {}, heading(title), codeBlock(details.code, title))];
}

function codeBlock(code: string, name: string): HTMLElement {
  const block = element("pre", { class: "gp-code", tabindex: 0, role: "group", "aria-label": name });
  block.append(coloredPython(code));
  return block;
}

function sourceSection(source: Source[]): HTMLElement[] {
  if (source.length === 0) return [];
  const lines = source.map(({ file, line, function: name, text }) => {
    const code = element("code", { class: "gp-source-line" });
    code.append(coloredPython(text.trim()));
    return element(
      "li",
      {},
      element("div", { class: "gp-source-place", title: file }, `${baseName(file)}:${line}`, name ? ` in ${name}` : ""),
      code,
    );
  });
  return [
    element("section", {}, heading("Source lines, outermost first"), element("ol", { class: "gp-source" }, ...lines)),
  ];
}

function baseName(file: string): string {
  return file.split(/[\\/]/).at(-1) || file;
}
