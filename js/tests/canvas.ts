/** Cells of heatmaps on a canvas. `[rows, columns]` is the size of the heatmap. */

type Pair = readonly [number, number];

/** The color in the middle of a cell: red, green, blue. */
export function cellColor(canvas: HTMLCanvasElement, [row, column]: Pair, [rows, columns]: Pair): number[] {
  const x = Math.floor(((column + 0.5) / columns) * canvas.width);
  const y = Math.floor(((row + 0.5) / rows) * canvas.height);
  return [...(canvas.getContext("2d")?.getImageData(x, y, 1, 1).data.slice(0, 3) ?? [])];
}

/** Where the mouse points at the middle of a cell. */
export function cellCenter(canvas: HTMLCanvasElement, [row, column]: Pair, [rows, columns]: Pair) {
  const { width, height } = canvas.getBoundingClientRect();
  return { position: { x: ((column + 0.5) * width) / columns, y: ((row + 0.5) * height) / rows } };
}
