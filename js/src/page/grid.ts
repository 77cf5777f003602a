/** The cells of a grid, which the pointer and the arrow keys go over. */

import { consume } from "./dom";

export type Cell = [row: number, column: number];

export interface Size {
  width: number;
  height: number;
}

const PAGE_STEP = 10;

/** The cell of a grid that a key goes to; `null`: another key. It may be outside of the grid. */
export function gridTarget(event: KeyboardEvent, [row, column]: Cell, rows: number, columns: number): Cell | null {
  const isWhole = event.ctrlKey || event.metaKey;
  const targets: Record<string, Cell> = {
    ArrowUp: [row - 1, column],
    ArrowDown: [row + 1, column],
    ArrowLeft: [row, column - 1],
    ArrowRight: [row, column + 1],
    PageUp: [row - PAGE_STEP, column],
    PageDown: [row + PAGE_STEP, column],
    Home: [isWhole ? 0 : row, 0],
    End: [isWhole ? rows - 1 : row, columns - 1],
  };
  return event.altKey ? null : (targets[event.key] ?? null);
}

/** Whether a key chooses what has the focus. */
export function isChoice({ key, altKey }: KeyboardEvent): boolean {
  return (key === "Enter" || key === " ") && !altKey;
}

export function clamp(value: number, least: number, most: number): number {
  return Math.min(Math.max(value, least), most);
}

interface CellGrid {
  rows(): number;
  columns(row: number): number;
  /** The cell at a place of the element, given as fractions of its size; `null`: there is none. */
  cellAt(x: number, y: number): Cell | null;
  /** Called with the cell under the pointer or the keyboard's cursor; `null`: there is none. */
  show(cell: Cell | null, isByKey: boolean): void;
  choose?(cell: Cell, isMore: boolean): void;
}

/** Follows the pointer and the keys; the first key shows where the cursor is. A click, Enter and Space choose. */
export function watchCells(target: HTMLElement | SVGElement, grid: CellGrid): void {
  let current: Cell = [0, 0];
  let isShown = false;
  const show = (cell: Cell | null, isByKey = false) => {
    isShown = cell !== null;
    current = cell ?? current;
    grid.show(cell, isByKey);
  };
  const inside = ([row, column]: Cell): Cell => {
    const seen = clamp(row, 0, grid.rows() - 1);
    return [seen, clamp(column, 0, grid.columns(seen) - 1)];
  };
  const cellOf = ({ clientX, clientY }: MouseEvent) => {
    const { left, top, width, height } = target.getBoundingClientRect();
    return grid.cellAt((clientX - left) / width, (clientY - top) / height);
  };
  target.addEventListener("pointermove", (event) => {
    const cell = cellOf(event as MouseEvent);
    if (cell !== null) show(cell);
  });
  target.addEventListener("click", (event) => {
    const cell = cellOf(event as MouseEvent);
    if (cell === null) return;
    current = cell;
    grid.choose?.(cell, (event as MouseEvent).shiftKey);
  });
  for (const name of ["pointerleave", "blur"]) target.addEventListener(name, () => isShown && show(null));
  target.addEventListener("keydown", (event) => {
    const key = event as KeyboardEvent;
    const next = gridTarget(key, current, grid.rows(), grid.columns(current[0]));
    if (next === null && !(grid.choose && isChoice(key))) return;
    consume(key);
    if (next !== null) show(isShown ? inside(next) : current, true);
    else if (isShown) grid.choose?.(current, key.shiftKey);
  });
}

/** Lays a box over cells of `step` pixels, of which `size` pixels are seen. */
export function placeBox({ style }: HTMLElement, [row, column]: Cell, step: Size, size = step): void {
  style.transform = `translate(${column * step.width}px, ${row * step.height}px)`;
  style.width = `${size.width}px`;
  style.height = `${size.height}px`;
}

/** Calls `move` with how far the pointer has gone since it was pressed, until it is released. */
export function followPointer(event: PointerEvent, move: (x: number, y: number) => void, end?: () => void): void {
  const target = event.currentTarget as Element;
  const { clientX, clientY } = event;
  const pressed = new AbortController();
  const { signal } = pressed;
  const onMove = (to: Event) => move((to as PointerEvent).clientX - clientX, (to as PointerEvent).clientY - clientY);
  const onEnd = () => {
    pressed.abort();
    end?.();
  };
  target.setPointerCapture(event.pointerId);
  target.addEventListener("pointermove", onMove, { signal });
  for (const name of ["pointerup", "lostpointercapture"]) target.addEventListener(name, onEnd, { signal });
}
