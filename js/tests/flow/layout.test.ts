import { expect, test } from "vitest";
import { type Box, type Line, layOut } from "../../src/flow/layout";

/** Reproducible numbers from 0 to 1. */
function numbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return state / 2147483648;
  };
}

/** A graph as operations make it: most read what was just computed, some read what is far above. */
function randomGraph(seed: number, count: number): [Box[], Line[]] {
  const random = numbers(seed);
  const boxes = Array.from({ length: count }, () => ({ width: 40 + 100 * random(), height: 20 + 30 * random() }));
  const lines: Line[] = [];
  for (let to = 1; to < count; to++) {
    const reads = new Set([to - 1 - Math.floor(random() * Math.min(to, 3))]);
    if (random() < 0.5) reads.add(Math.max(0, to - 1 - Math.floor(random() * 12)));
    if (random() < 0.1) reads.add(0);
    for (const from of reads) lines.push({ from, to, value: from });
  }
  return [boxes, lines];
}

const SEEDS = [1, 2, 3, 4, 5, 6, 7, 8];

test.each(SEEDS)("lines run downward, boxes are apart, and all of it is in the picture (%i)", (seed) => {
  const [boxes, lines] = randomGraph(seed, 5 + 12 * seed);
  const { centers, ways, width, height } = layOut(boxes, lines);
  const box = (at: number) => {
    const [{ width: w, height: h }, [x, y]] = [boxes[at] as Box, centers[at] as [number, number]];
    return { left: x - w / 2, right: x + w / 2, top: y - h / 2, bottom: y + h / 2, x };
  };
  const wrong: string[] = [];
  for (const [line, { from, to }] of lines.entries()) {
    let last = box(from).bottom;
    for (const [x, top, bottom] of ways[line] ?? []) {
      if (top <= last) wrong.push(`line ${line} runs upward`);
      for (const at of boxes.keys()) {
        const { left, right, top: boxTop, bottom: boxBottom } = box(at);
        const isBeside = x < left || x > right || boxBottom < top || boxTop > bottom;
        if (!isBeside) wrong.push(`line ${line} passes behind box ${at}`);
      }
      last = bottom;
    }
    if (box(to).top <= last) wrong.push(`line ${line} ends upward`);
  }
  for (const one of boxes.keys()) {
    const { left, right, top, bottom } = box(one);
    if (Math.min(left, top, width - right, height - bottom) < 0) wrong.push(`box ${one} is outside`);
    for (const other of boxes.keys()) {
      const that = box(other);
      const isApart = left > that.right || right < that.left || top > that.bottom || bottom < that.top;
      if (other > one && !isApart) wrong.push(`boxes ${one} and ${other} overlap`);
    }
  }
  expect(wrong).toEqual([]);
});

test("a chain is a straight line, and the branches of a value share one way", () => {
  const boxes = Array.from({ length: 8 }, () => ({ width: 60, height: 20 }));
  const chain = boxes.slice(1).map((_, at) => ({ from: at, to: at + 1, value: at }));
  expect(new Set(layOut(boxes, chain).centers.map(([x]) => x)).size).toBe(1);
  const far = [3, 5, 7].map((to) => ({ from: 0, to, value: 0 }));
  const { ways } = layOut(boxes, [...chain, ...far]);
  const [short, middle, long] = ways.slice(-3);
  expect(long?.slice(0, middle?.length)).toEqual(middle);
  expect(middle?.slice(0, short?.length)).toEqual(short);
  expect(new Set(long?.map(([x]) => x)).size).toBe(1);
});

test("inputs are in the first row and the output is in the last; a loop is drawn, too", () => {
  const boxes: Box[] = Array.from({ length: 5 }, () => ({ width: 60, height: 20 }));
  boxes[3] = { width: 60, height: 20, isLast: true };
  const lines = [
    { from: 0, to: 1, value: 0 },
    { from: 1, to: 4, value: 1 },
    { from: 4, to: 2, value: 4 },
    { from: 0, to: 3, value: 0 },
    { from: 2, to: 1, value: 2 },
  ];
  const { centers } = layOut(boxes, lines);
  const ys = centers.map(([, y]) => y);
  expect(ys[0]).toBe(Math.min(...ys));
  expect(ys[3]).toBe(Math.max(...ys));
  expect(centers.flat().every(Number.isFinite)).toBe(true);
});

test("nothing, one box, and 5,000 boxes", () => {
  expect(layOut([], [])).toMatchObject({ centers: [], ways: [] });
  expect(layOut([{ width: 60, height: 20 }], []).centers).toHaveLength(1);
  const { centers } = layOut(...randomGraph(9, 5000));
  expect(centers).toHaveLength(5000);
}, 60_000); // a second, on a machine that does nothing else
