/** The leading dimensions of a 2-D slice: `0, 3, :, :` of a value of four dimensions stands at 0 and 3. */

/** A dimension that one can walk along. */
export interface Leading {
  dimension: number;
  index: number;
  size: number;
}

function expand(slice: string, dimensions: number): string[] | null {
  const parts = slice.split(",").map((part) => part.trim());
  if (parts[parts.length - 1] === "") parts.pop();
  const ellipsis = parts.indexOf("...");
  if (ellipsis >= 0) {
    const missing = dimensions - (parts.length - 1);
    if (missing < 0 || parts.indexOf("...", ellipsis + 1) >= 0) return null;
    parts.splice(ellipsis, 1, ...Array<string>(missing).fill(":"));
  }
  while (parts.length < dimensions) parts.push(":");
  const isPlain = parts.every((part) => /^-?\d+$/.test(part) || part.includes(":"));
  return parts.length === dimensions && isPlain ? parts : null;
}

/** Empty for a slice that takes no single positions, or in which they cannot be told (`None`, names). */
export function leadingOf(slice: string | null, shape: readonly number[]): Leading[] {
  const parts = slice === null ? null : expand(slice, shape.length);
  return (parts ?? []).flatMap((part, dimension) => {
    const size = shape[dimension] ?? 1;
    if (part.includes(":") || size < 2) return [];
    const typed = Number(part);
    const index = typed < 0 ? typed + size : typed;
    return index >= 0 && index < size ? [{ dimension, index, size }] : [];
  });
}

/** The slice with one dimension at another index; `null` if that cannot be written. */
export function moveAlong(slice: string, shape: readonly number[], dimension: number, index: number): string | null {
  const parts = expand(slice, shape.length);
  const size = shape[dimension] ?? 0;
  if (parts === null || index < 0 || index >= size) return null;
  parts[dimension] = String(index);
  return parts.join(", ");
}
