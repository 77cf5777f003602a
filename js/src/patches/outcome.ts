/** What a patch would be applied to, as the kernel says: recorded shape, the part of it, warnings. */

import type { Checked } from "../kernel/protocol";
import { element, replaceChildren } from "../page/dom";
import { shapeText } from "./edits";

export class Outcome {
  readonly element = element("div", { class: "gp-outcome", role: "status" });

  /** The next answer is awaited: the last one stays, paler, so that nothing jumps while one types. */
  wait(): void {
    this.element.classList.add("gp-stale");
  }

  clear(): void {
    this.element.classList.remove("gp-stale");
    replaceChildren(this.element);
  }

  /** @param isKept Whether the part is kept in a variable rather than patched. */
  show({ shape, sliced, warning }: Checked, isKept: boolean): void {
    this.element.classList.remove("gp-stale");
    replaceChildren(
      this.element,
      element("div", { class: "gp-shapes" }, ...shapes(shape, sliced, isKept ? "kept" : "patched")),
      warning === null ? null : element("div", { class: "gp-warning" }, warning),
    );
  }
}

function shapes(shape: number[] | null, sliced: number[] | null, what: string): (string | HTMLElement)[] {
  const code = (sizes: number[]) => element("code", {}, shapeText(sizes));
  if (shape === null) return sliced === null ? [] : [code(sliced), ` ${what}`];
  if (sliced === null) return ["Recorded ", code(shape)];
  if (shapeText(sliced) === shapeText(shape)) return ["Recorded ", code(shape), `, all of it ${what}`];
  return ["Recorded ", code(shape), " → ", code(sliced), ` ${what}`];
}
