import { describe, expect, it } from "vitest";
import { rolesOf, withIndex } from "../../src/details/activation_view";
import { cellSize, color, colorOf, type Matrix, type Rgb, readMatrix, summarize } from "../../src/plots/matrix";
import { float32, heatmap } from "../job_fixtures";

function plane(rows: number, columns: number, values: number[]): Matrix {
  return readMatrix(heatmap(rows, columns), [float32(values)]);
}

/** CIE lightness. */
function lightness([red, green, blue]: Rgb): number {
  const linear = (channel: number) => (channel <= 10 ? channel / 3294 : ((channel / 255 + 0.055) / 1.055) ** 2.4);
  return 116 * Math.cbrt(0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)) - 16;
}

const summarized = ({ values }: Matrix) => summarize(values);

describe("colors", () => {
  const steps = Array.from({ length: 101 }, (_, step) => step / 100);

  it("of the sequential map get steadily lighter", () => {
    const lights = steps.map((value) => lightness(color(value, "sequential")));
    lights.slice(1).forEach((light, index) => {
      expect(light).toBeGreaterThan(lights[index] ?? 0);
    });
  });

  it("of the diverging map are equally light at the same distance from zero", () => {
    for (const distance of [0.1, 0.25, 0.4, 0.5]) {
      const [below, above] = [color(0.5 - distance, "diverging"), color(0.5 + distance, "diverging")];
      expect(Math.abs(lightness(below) - lightness(above))).toBeLessThan(5);
      expect(below[2]).toBeGreaterThan(below[0]);
      expect(above[0]).toBeGreaterThan(above[2]);
    }
    expect(color(0.5, "diverging")).toEqual([245, 245, 245]);
  });

  it("are clamped at the ends", () => {
    expect(color(7, "sequential")).toEqual(color(1, "sequential"));
    expect(color(-7, "diverging")).toEqual(color(0, "diverging"));
  });
});

describe("a plane", () => {
  it("is read from any buffer offset", () => {
    for (const offset of [0, 1, 2, 3]) {
      expect([...readMatrix(heatmap(1, 3), [float32([1.5, -2, 3e30], offset)]).values]).toEqual([
        1.5,
        -2,
        Math.fround(3e30),
      ]);
    }
  });

  it("is refused if values are missing", () => {
    expect(() => readMatrix(heatmap(2, 2), [float32([1, 2, 3])])).toThrow(/12 bytes for a heatmap of 2 x 2/);
    expect(() => readMatrix(heatmap(2, 2, { buffer: 1 }), [float32([1, 2, 3, 4])])).toThrow(/sent 0 bytes/);
  });

  it("with both signs has a range symmetric about zero; otherwise from minimum to maximum", () => {
    expect(summarized(plane(1, 3, [-1, 0, 3])).full).toEqual({ map: "diverging", low: -3, high: 3 });
    expect(summarized(plane(1, 3, [1, 2, 3])).full).toEqual({ map: "sequential", low: 1, high: 3 });
    expect(summarized(plane(1, 2, [-1, -3])).full).toEqual({ map: "sequential", low: -3, high: -1 });
  });

  it("leaves out NaN, infinities and fill values of masks", () => {
    const summary = summarized(plane(1, 6, [1, Number.NaN, Number.NEGATIVE_INFINITY, -3.4e38, 3, 2]));
    expect(summary).toMatchObject({ minimum: 1, maximum: 3, mean: 2, missing: 3 });
    expect(colorOf(-3.4e38, summary.full)).toBeNull();
    expect(summarized(plane(1, 2, [Number.NaN, Number.NaN]))).toMatchObject({ minimum: null, missing: 2 });
  });

  it("has one color, the middle one, if all values are equal", () => {
    const { full: whole } = summarized(plane(1, 2, [4, 4]));
    expect(colorOf(4, whole)).toEqual(color(0.5, "sequential"));
  });

  const waves = (count: number) => Array.from({ length: count }, (_, index) => Math.sin(index));

  it("clips outliers, and counts them", () => {
    const values = waves(1000);
    values[17] = 300;
    values[18] = -400;
    const summary = summarized(plane(10, 100, values));
    expect(summary.full).toEqual({ map: "diverging", low: -400, high: 400 });
    expect(summary.clipped?.high).toBeCloseTo(1, 1);
    expect(summary.outliers).toBeGreaterThanOrEqual(2);
    expect(summarized(plane(10, 100, waves(1000))).clipped).toBeNull();
  });

  it("clips only the side with outliers", () => {
    const values = waves(1000).map((value) => value + 2);
    values[17] = 300;
    const { clipped: cut, full: whole } = summarized(plane(10, 100, values));
    expect(cut?.low).toBe(whole.low);
    expect(cut?.high).toBeCloseTo(3, 1);
  });

  it("of attention to single tokens is not clipped, however many zeros are masked", () => {
    const size = 64;
    const values = Array.from({ length: size * size }, (_, index) => (index % (size + 1) === 0 ? 0.9 : 0));
    expect(summarized(plane(size, size, values)).clipped).toBeNull();
  });
});

describe("cells", () => {
  const box = { width: 420, height: 320 };

  it("of attention are squares of whole device pixels, at least one pixel", () => {
    expect(cellSize({ rows: 14, columns: 14 }, box, 1)).toEqual({ width: 22, height: 22 });
    expect(cellSize({ rows: 256, columns: 256 }, box, 1)).toEqual({ width: 1, height: 1 });
    expect(cellSize({ rows: 256, columns: 256 }, box, 2)).toEqual({ width: 2, height: 2 });
    expect(cellSize({ rows: 900, columns: 900 }, box, 1.25)).toEqual({ width: 2, height: 2 });
  });

  it("are large for few values, and bars for long rows", () => {
    expect(cellSize({ rows: 3, columns: 4 }, box, 1)).toEqual({ width: 26, height: 26 });
    expect(cellSize({ rows: 8, columns: 256 }, box, 1)).toEqual({ width: 1, height: 14 });
  });
});

describe("dimensions", () => {
  const words = (slice: string, shape: number[], axes: [number, number] | null = null) =>
    rolesOf(slice, shape, axes)?.map(({ role, index }) => (role === "index" ? index : role));

  it("are rows, columns, facets, or have one index", () => {
    expect(words("0, 3, :, :", [1, 12, 8, 8])).toEqual([0, 3, "rows", "columns"]);
    expect(words("-1, ...", [4, 8, 8])).toEqual([3, "rows", "columns"]);
    expect(words("..., 5", [4, 8, 8])).toEqual(["rows", "columns", 5]);
    expect(words("0, :, 2:, :", [1, 12, 8, 8], [3, 1])).toEqual([0, "columns", "facets", "rows"]);
  });

  it("are not known if the slice does not determine them", () => {
    for (const slice of ["None, 0", "i, :", "0, ..., ...", "0, 0, 0, 0", "0, 0, :"]) {
      expect(rolesOf(slice, [4, 8, 8], null)).toBeNull();
    }
  });

  it("can be stepped through, within bounds", () => {
    expect(withIndex("0, 3, :, :", [1, 12, 8, 8], 1, 4)).toBe("0, 4, :, :");
    expect(withIndex("3, ...", [12, 8, 8], 0, 2)).toBe("2, :, :");
    expect(withIndex("0, 11, :, :", [1, 12, 8, 8], 1, 12)).toBeNull();
    expect(withIndex("0, 0, :, :", [1, 12, 8, 8], 1, -1)).toBeNull();
  });
});
