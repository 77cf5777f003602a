/** What a run depends on: the inputs typed in the run panel, which activations use too, and the enabled patches. */
import type { SessionState } from "../kernel/protocol";
import type { View } from "../view";

const typed = new WeakMap<HTMLElement, string>();

/** As Python; `null`: the example inputs. */
export function inputsOf(view: View): string | null {
  return typed.get(view.root)?.trim() || null;
}

export function setInputs(view: View, text: string): void {
  typed.set(view.root, text);
}

/** Describes inputs whose code is not known. */
export function describeUnknownInputs(isGiven: boolean): string {
  return isGiven ? "the inputs given to the browser" : "the example inputs";
}

/** Describes the inputs, for display. */
export function describeInputs(view: View): string {
  const { arguments: written, has_given_inputs } = view.model.get("about");
  return inputsOf(view) ?? written ?? describeUnknownInputs(has_given_inputs);
}

/** Returns a key of the enabled patches: equal keys give equal runs. Probe names and warnings do not change a number. */
export function patchesKey({ patches }: SessionState): string {
  const enabled = patches.filter((patch) => patch.is_enabled);
  return JSON.stringify(
    enabled.map((patch) => [
      patch.number,
      patch.path,
      patch.kind,
      patch.slice,
      patch.value,
      patch.steps,
      patch.positions,
      patch.position_dim,
      patch.any_shape,
      patch.allow_empty,
    ]),
  );
}

export function enabledNumbers({ patches }: SessionState): number[] {
  return patches.filter((patch) => patch.is_enabled).map((patch) => patch.number);
}
