import { describe, expect, it } from "vitest";
import {
  formatCount,
  formatNumber,
  formatPercent,
  formatSeconds,
  formatShape,
  formatWithError,
  visibleToken,
} from "../../src/page/text";
import { statisticsRows } from "../../src/plots/plots";
import { statistics } from "../job_fixtures";

describe("formatNumber", () => {
  it.each([
    [0, "0"],
    [-0, "0"],
    [1, "1"],
    [-12345, "-12,345"],
    [65504, "65,504"],
    [1234567890, "1,234,567,890"],
    [0.5, "0.5"],
    [1.25, "1.25"],
    [0.1 + 0.2, "0.3000"],
    [Math.fround(0.1), "0.1000"],
    [0.99999, "1.000"],
    [1.00001, "1.000"],
    [12345.678, "12,345.7"],
    [999999.96, "1,000,000.0"],
    [1234567.5, "1.235e+6"],
    [0.001, "0.001"],
    [0.00012345, "1.234e-4"],
    [-4e-5, "-4e-5"],
    [3.4028234663852886e38, "3.403e+38"],
    [5e-324, "4.941e-324"],
    [Number.NaN, "NaN"],
    [Number.POSITIVE_INFINITY, "inf"],
    [Number.NEGATIVE_INFINITY, "-inf"],
    [null, "–"],
  ])("%s is %s", (value, text) => {
    expect(formatNumber(value)).toBe(text);
  });

  it("never rounds a non-integer to an integer, nor a nonzero number to zero", () => {
    for (const value of [1.0000001, 999.99999, 1e5 + 0.01, 1e-12, 123456.4999]) {
      expect(formatNumber(value)).toMatch(/\.|e/);
      expect(Number(formatNumber(value).replaceAll(",", ""))).not.toBe(0);
    }
  });
});

it.each([
  [0, "0%"],
  [1, "100%"],
  [0.4821, "48.2%"],
  [0.00001, "<0.1%"],
  [0.99999, ">99.9%"],
  [12.5, "1,250%"],
  [Number.NaN, "NaN"],
])("formatPercent(%s) is %s", (part, text) => {
  expect(formatPercent(part)).toBe(text);
});

it.each([
  [0.0001, "<1 ms"],
  [0.25, "250 ms"],
  [0.9996, "1.0 s"],
  [59.96, "1 min 0 s"],
  [75, "1 min 15 s"],
  [3700, "1 h 1 min"],
])("formatSeconds(%s) is %s", (seconds, text) => {
  expect(formatSeconds(seconds)).toBe(text);
});

it("formats counts and shapes", () => {
  expect([formatCount(1, "value"), formatCount(12000, "value")]).toEqual(["1 value", "12,000 values"]);
  expect([formatShape([]), formatShape([1, 8])]).toEqual(["one number", "[1, 8]"]);
});

it.each([
  [" the", "␣the"],
  ["\n\n", "⏎⏎"],
  ["", "(empty)"],
  ["a\tb", "a⇥b"],
  ["\u202egnp", "\\u202egnp"],
  ["\u200b", "\\u200b"],
  ["\u0301e", "◌\u0301e"],
  ["日本", "日本"],
  ["<b>", "<b>"],
])("visibleToken(%j) is %s", (text, seen) => {
  expect(visibleToken(text)).toBe(seen);
});

describe("statistics", () => {
  it("warn about values left out of mean and deviation", () => {
    const rows = statisticsRows(statistics({ nan: 3, infinite: 1 }));
    expect(rows).toContainEqual(["NaN", "3 values", true]);
    expect(rows).toContainEqual(["infinite", "1 value", true]);
    expect(statisticsRows(statistics()).map(([term]) => term)).not.toContain("NaN");
  });

  it("have no mean and deviation if nothing is finite", () => {
    const terms = statisticsRows(statistics({ mean: null, std: null, min: null, max: null, nan: 256 })).map(
      ([term]) => term,
    );
    expect(terms).toEqual(["shape", "dtype", "device", "values", "NaN"]);
  });
});

describe("formatWithError", () => {
  it.each([
    [0.2392, 0.00196, "0.24"],
    [-0.1372, 0.0039, "-0.14"],
    [0.0039, 0.00196, "<0.02"],
    [-0.0039, 0.00196, ">-0.02"],
    [1, 0.00196, "1"],
    [1.098, 0.004, "1.10"],
    [0.01961, 0.00004, "0.0196"],
    [0, 0.002, "0"],
    [0.123456, 0, "0.12346"],
  ])("writes %d, with error %d, as %s", (value, error, text) => expect(formatWithError(value, error)).toBe(text));

  it("shows only the digits a number sent as a byte is accurate to", () => {
    const scale = 0.83;
    for (let at = 1; at < 1000; at++) {
      const exact = (at / 1000) * scale;
      const sent = (Math.round((exact * 255) / scale) / 255) * scale;
      const shown = formatWithError(sent, scale / 510);
      if (shown.startsWith("<")) expect(exact).toBeLessThan(Number(shown.slice(1)));
      else expect(Math.abs(Number(shown) - exact)).toBeLessThan(0.01);
    }
  });
});
