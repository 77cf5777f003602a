/** The arguments that a view's runs are made with: typed in the run panel, used for activations, too. */
import type { View } from "../view";

const typed = new WeakMap<HTMLElement, string>();

/** As Python; `null`: the example inputs. */
export function inputsOf(view: View): string | null {
  return typed.get(view.root)?.trim() || null;
}

export function setInputs(view: View, text: string): void {
  typed.set(view.root, text);
}

/** Inputs of which nobody knows how they are written, in words. */
export function unwritten(isGiven: boolean): string {
  return isGiven ? "the inputs given to the browser" : "the example inputs";
}

/** In words, for a place where they are used but not typed. */
export function describeInputs(view: View): string {
  const { arguments: written, has_given_inputs } = view.model.get("about");
  return inputsOf(view) ?? written ?? unwritten(has_given_inputs);
}
