/** The numbers and words that kernel and front end share. */

import { expect, test } from "vitest";
import { FLAG, KINDS } from "../../src/kernel/protocol";

test("flags are distinct single bits", () => {
  const bits = Object.values(FLAG);
  expect(bits.every((bit) => bit > 0 && (bit & (bit - 1)) === 0)).toBe(true);
  expect(new Set(bits).size).toBe(bits.length);
});

test("kinds are distinct, and the graph comes first: row 0 is one", () => {
  expect(KINDS[0]).toBe("graph");
  expect(new Set(KINDS).size).toBe(KINDS.length);
});
