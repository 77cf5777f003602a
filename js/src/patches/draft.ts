/** A patch while the user types it: the texts of all fields, including those that the current kind hides. */
import type { PatchFields, PatchKind } from "../kernel/protocol";

/** The fields with a checkbox. */
export const FLAGS = ["any_shape", "allow_empty"] as const;

export type Flag = (typeof FLAGS)[number];
export type FieldName = "kind" | "slice" | "value" | "name" | "steps" | "positions" | "position_dim" | Flag;

export interface Draft {
  path: string;
  kind: PatchKind;
  slice: string;
  value: string;
  name: string;
  steps: string;
  positions: string;
  position_dim: string;
  any_shape: boolean;
  allow_empty: boolean;
}

export interface FieldError {
  field: FieldName | null;
  message: string;
}

/** Returns a new patch of the first kind. */
export function newDraft(path: string, kinds: readonly PatchKind[]): Draft {
  const kind = kinds[0];
  if (kind === undefined) throw new Error("the kernel has sent no kinds of patches");
  const texts = { slice: "", value: "", name: "", steps: "", positions: "", position_dim: "" };
  return { path, kind, ...texts, any_shape: false, allow_empty: false };
}

export function draftOf(patch: PatchFields, kinds: readonly PatchKind[]): Draft {
  return {
    path: patch.path,
    kind: kindNamed(patch.kind, kinds),
    slice: patch.slice ?? "",
    value: patch.value ?? "",
    name: patch.name ?? "",
    steps: patch.steps ?? "",
    positions: patch.positions ?? "",
    position_dim: patch.position_dim === null ? "" : String(patch.position_dim),
    any_shape: patch.any_shape,
    allow_empty: patch.allow_empty,
  };
}

export function kindNamed(name: string, kinds: readonly PatchKind[]): PatchKind {
  const kind = kinds.find((one) => one.name === name);
  if (kind === undefined) throw new Error(`the kernel has sent no kind of patch ${name}`);
  return kind;
}

export function hasField(kind: PatchKind, field: FieldName): boolean {
  return field === "kind" || kind.fields.includes(field);
}

/** Returns the patch for the kernel: only the fields of its kind, with `null` for empty texts. */
export function fields(draft: Draft): PatchFields {
  const text = (field: "slice" | "value" | "name" | "steps" | "positions") =>
    hasField(draft.kind, field) && draft[field].trim() !== "" ? draft[field].trim() : null;
  return {
    path: draft.path,
    kind: draft.kind.name,
    slice: text("slice"),
    value: text("value"),
    name: text("name"),
    steps: text("steps"),
    positions: text("positions"),
    position_dim: draft.position_dim.trim() === "" ? null : Number(draft.position_dim),
    any_shape: draft.any_shape,
    allow_empty: draft.allow_empty,
  };
}

/** Returns an error that needs no kernel; `null` if there is none. */
export function localError(draft: Draft): FieldError | null {
  if (/^\s*([+-]?\d+)?\s*$/.test(draft.position_dim)) return null;
  return { field: "position_dim", message: "a whole number: 1, or -2 counted from the end" };
}

/** Returns a prompt for the value if it is missing; `null` if it is not. */
export function missingValue(draft: Draft): string | null {
  if (draft.kind.value === null || draft.value.trim() !== "") return null;
  return `Type ${draft.kind.value.noun}: a variable or a Python expression.`;
}

/** Whether two patches are equal. */
export function areEqual(one: PatchFields, other: PatchFields): boolean {
  return JSON.stringify(Object.entries(one).sort()) === JSON.stringify(Object.entries(other).sort());
}
