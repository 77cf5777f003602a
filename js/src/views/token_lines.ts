/** Lines of tokens, each token a button in its color; arrow keys go from token to token, and from line to line. */
import { type Attributes, buttonElement, consume, element, replaceChildren, setAttribute } from "../page/dom";
import { gridTarget } from "../page/grid";
import { rove } from "../page/roving";
import { visibleToken } from "../page/text";
import { cssColor, isLight, type Rgb } from "../plots/matrix";

/** A token with its color, its name for screen readers, and its listeners. */
interface ColoredToken extends Attributes {
  "aria-label": string;
}

interface TokenLine {
  name: string;
  /** A button beside the name. */
  button?: HTMLElement | null;
  tokens: readonly { text: string; color: Rgb; attributes: ColoredToken }[];
}

export class TokenLines {
  readonly element = element("div.gp-stack.gp-generation-lines", {
    onkeydown: (event: KeyboardEvent) => this.onKey(event),
  });
  private buttons: HTMLButtonElement[][] = [];

  /** `before`: what is above the lines. */
  show(lines: readonly TokenLine[], before: HTMLElement | null = null): void {
    this.buttons = lines.map(({ tokens }) =>
      tokens.map(({ text, color, attributes }) => {
        const button = buttonElement({ class: "gp-generated", ...attributes }, visibleToken(text));
        button.style.background = cssColor(color);
        button.style.color = isLight(color) ? "#000" : "#fff";
        return button;
      }),
    );
    const parts = lines.map(({ name, button = null }, line) =>
      element(
        "div.gp-generation-line",
        { role: "group", "aria-label": name || "Tokens" },
        name !== "" && element("h4.gp-run-title", name, button),
        element("div.gp-line.gp-tight.gp-generation-tokens", ...(this.buttons[line] ?? [])),
      ),
    );
    rove(this.buttons.flat(), this.buttons[0]?.[0]);
    replaceChildren(this.element, before, ...parts);
  }

  /** Marks the tokens at these places of each line as selected. */
  press(places: ReadonlySet<number | null>): void {
    for (const buttons of this.buttons)
      for (const [place, button] of buttons.entries()) setAttribute(button, "aria-pressed", places.has(place));
  }

  private onKey(event: KeyboardEvent): void {
    const line = this.buttons.findIndex((buttons) => buttons.includes(event.target as HTMLButtonElement));
    const buttons = this.buttons[line] ?? [];
    const at = buttons.indexOf(event.target as HTMLButtonElement);
    const [to, next] = gridTarget(event, [line, at], this.buttons.length, buttons.length) ?? [-1, -1];
    const target = this.buttons[to]?.[next];
    if (line < 0 || target === undefined || event.ctrlKey || event.metaKey) return;
    consume(event);
    rove(this.buttons.flat(), target);
    target.focus();
  }
}
