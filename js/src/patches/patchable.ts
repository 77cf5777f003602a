/** Why a row cannot be patched, and what to patch instead. */
import { FLAG } from "../kernel/protocol";
import type { Skeleton } from "../tree/skeleton";

interface Unpatchable {
  /** In words. */
  why: string;
  /** The row to patch instead, if any. */
  instead: number | null;
}

/** Returns why a row cannot be patched; `null` if it can. */
export function whyUnpatchable(skeleton: Skeleton, row: number): Unpatchable | null {
  if (skeleton.has(row, FLAG.patchable)) return null;
  const kind = skeleton.kindOf(row);
  if (kind === "unused") {
    return { why: "The run on the example inputs never called this module: there is nothing to patch.", instead: null };
  }
  if (kind === "graph") {
    return {
      why: "A module does not have a value: patch its output, or a node inside of it.",
      instead: outputOf(skeleton, row),
    };
  }
  if (kind === "constant") {
    return { why: "This constant is written in the code: patch the node that uses it.", instead: null };
  }
  if (skeleton.specOf(row)?.[3] === "container") {
    return { why: "This value is a container: patch one of the values in it.", instead: firstPatchable(skeleton, row) };
  }
  const label = skeleton.labelOf(row);
  return {
    why: `This value${label ? ` (${label})` : ""} is neither a tensor nor a number: only those can be patched.`,
    instead: null,
  };
}

function outputOf(skeleton: Skeleton, graph: number): number | null {
  const outputs = [...skeleton.children(graph)].filter((child) => skeleton.kindOf(child) === "output");
  for (const output of outputs) {
    const found = firstPatchable(skeleton, output);
    if (found !== null) return found;
  }
  return null;
}

/** The row itself, or the first one in it that can be patched. */
function firstPatchable(skeleton: Skeleton, row: number): number | null {
  for (let inside = row; inside < (skeleton.end[row] ?? 0); inside++) {
    if (skeleton.has(inside, FLAG.patchable)) return inside;
  }
  return null;
}
