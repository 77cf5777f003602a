/** Edits of the chosen patches, one at a time, each with the version that it is based on. */
import { asRequestError } from "../kernel/kernel";
import type { Edit, PatchFields, PatchState } from "../kernel/protocol";
import type { Linked } from "../view";

const CHANGED_MEANWHILE = "The patches were changed meanwhile. Check the updated list, and try again.";

interface Queue {
  last: Promise<unknown>;
  /** The version that our own last edit made: known before the session arrives. */
  version: number;
}
const queues = new WeakMap<object, Queue>();

/**
 * Makes an edit when those before it are answered; rejects with `RequestFailed`.
 *
 * @param edit Returns the edit when it is sent; `null`: there is nothing to do.
 */
export function makeEdit(view: Pick<Linked, "model" | "kernel">, edit: () => Edit | null): Promise<void> {
  const queue = queues.get(view.model) ?? { last: Promise.resolve(), version: 0 };
  queues.set(view.model, queue);
  const made = queue.last.then(async () => {
    const asked = edit();
    if (asked === null) return;
    const based_on = Math.max(view.model.get("session").version, queue.version);
    try {
      const { result } = await view.kernel.ask("edit", { based_on, edit: asked });
      queue.version = result.version;
    } catch (reason) {
      queue.version = 0;
      throw reason;
    }
  });
  queue.last = made.catch(() => undefined);
  return made;
}

/** Makes an edit; shows an error if it fails. Resolves to whether it was made. */
export async function tryEdit(
  view: Pick<Linked, "model" | "kernel" | "notices">,
  edit: () => Edit | null,
  said?: string,
): Promise<boolean> {
  try {
    await makeEdit(view, edit);
  } catch (reason) {
    const { message, field } = asRequestError(reason);
    view.notices.error(field === "version" ? CHANGED_MEANWHILE : message);
    return false;
  }
  if (said !== undefined) view.notices.announce(said);
  return true;
}

/** `add h_0.output[:, -1] 0.5`, as in the kernel. */
export function describe(patch: PatchFields): string {
  return [patch.kind, targetText(patch), patch.value ?? patch.name ?? "", ...restrictions(patch)]
    .filter(Boolean)
    .join(" ");
}

/** Describes all chosen patches in a sentence. */
export function describeAll(patches: readonly PatchState[]): string {
  if (patches.length === 0) return "No patches are chosen now.";
  return `Now there are: ${patches.map((patch) => `#${patch.number} ${describe(patch)}`).join("; ")}.`;
}

/** `h_0.output[:, -1]` */
export function targetText(patch: Pick<PatchFields, "path" | "slice">): string {
  return patch.slice === null ? patch.path : `${patch.path}[${patch.slice}]`;
}

/** The options of a patch, as text. */
export function restrictions(patch: PatchFields): string[] {
  return [
    patch.steps === null ? "" : `steps ${patch.steps}`,
    patch.positions === null ? "" : `positions ${patch.positions}`,
    patch.position_dim === null ? "" : `position dimension ${patch.position_dim}`,
    patch.any_shape ? "any shape" : "",
    patch.allow_empty ? "may be empty" : "",
  ].filter(Boolean);
}

export function shapeText(shape: readonly number[]): string {
  return `[${shape.join(", ")}]`;
}

/** Whether what users type is equal in two patches. */
export function areEqual(one: PatchFields, other: PatchFields): boolean {
  const keys = ["path", "kind", "slice", "value", "name", "steps", "positions", "position_dim"] as const;
  const flags = ["any_shape", "allow_empty"] as const;
  return [...keys, ...flags].every((key) => one[key] === other[key]);
}
