/** What a run depends on in the chosen patches: to tell whether a result is still true. */
import type { SessionState } from "../kernel/protocol";

/** Two sessions with the same text give the same run. Names of probes and warnings change no number. */
export function choiceOf({ patches }: SessionState): string {
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

export function numbersOf({ patches }: SessionState): number[] {
  return patches.filter((patch) => patch.is_enabled).map((patch) => patch.number);
}
