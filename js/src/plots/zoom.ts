/** Two buttons that make something larger and smaller. */
import { element, setAttribute } from "../page/dom";

const STEP = 1.5;

export interface Zoom {
  readonly element: HTMLElement;
  /** How many times larger than at first. */
  readonly factor: number;
}

/** `most`: the largest factor; `onChange`: called after each change. */
export function makeZoom(most: number, onChange: () => void): Zoom {
  let steps = 0;
  const largest = Math.max(0, Math.floor(Math.log(Math.max(most, 1)) / Math.log(STEP)));
  const button = (by: number, text: string, label: string) =>
    element("button", { type: "button", class: "gp-step", "aria-label": label, onclick: () => change(by) }, text);
  const smaller = button(-1, "−", "Smaller cells");
  const larger = button(1, "+", "Larger cells");
  const show = () => {
    setAttribute(smaller, "aria-disabled", steps === 0);
    setAttribute(larger, "aria-disabled", steps === largest);
  };
  const change = (by: number) => {
    const wanted = Math.min(Math.max(steps + by, 0), largest);
    if (wanted === steps) return;
    steps = wanted;
    show();
    onChange();
  };
  show();
  return {
    element: element(
      "span",
      { class: "gp-zoom", role: "group", "aria-label": "Size of cells", hidden: largest === 0 },
      smaller,
      larger,
    ),
    get factor() {
      return STEP ** steps;
    },
  };
}
