/** The arguments that a view's runs are made with: typed in the run panel, used for activations, too. */
import type { View } from "./parts";

const typed = new WeakMap<HTMLElement, string>();

/** As Python; `null`: the example inputs. */
export function inputsOf(view: View): string | null {
  return typed.get(view.root)?.trim() || null;
}

export function setInputs(view: View, text: string): void {
  typed.set(view.root, text);
}

/** In words, for a place where they are used but not typed. */
export function describeInputs(view: View): string {
  const { arguments: example } = view.model.get("about");
  return inputsOf(view) ?? example ?? "the example inputs";
}
