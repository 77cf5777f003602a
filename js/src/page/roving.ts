/** A group of which one member is in the tab order; arrow keys go from one to another. */
import { setAttribute } from "./dom";

/** Puts one member into the tab order, and the others out of it. */
export function rove(members: Iterable<Element>, active: Element | undefined): void {
  for (const member of members) setAttribute(member, "tabindex", member === active ? 0 : -1);
}

type Place = readonly [x: number, y: number];

/** Places of the same row are not farther apart than this, in pixels. */
const ROW = 20;

/**
 * The number of the place that an arrow key goes to: the nearest one in its direction, which for the keys up and down
 * is `near` if one of those is; `from` if there is none, `undefined` for other keys.
 */
export function nextPlace(
  key: string,
  from: number,
  places: readonly Place[],
  isShown: (place: number) => boolean = () => true,
  near: ReadonlySet<number> = new Set(),
): number | undefined {
  const [x, y] = places[from] ?? [0, 0];
  const ahead: Record<string, (to: Place) => number> = {
    ArrowUp: (to) => y - to[1],
    ArrowDown: (to) => to[1] - y,
    ArrowLeft: (to) => (Math.abs(to[1] - y) < ROW ? x - to[0] : 0),
    ArrowRight: (to) => (Math.abs(to[1] - y) < ROW ? to[0] - x : 0),
  };
  const distance = ahead[key];
  if (distance === undefined || places[from] === undefined) return undefined;
  const isAlong = key === "ArrowUp" || key === "ArrowDown";
  const rank = (place: number): number[] => {
    const to = places[place] ?? [0, 0];
    return [isAlong && !near.has(place) ? 1 : 0, distance(to), Math.abs(to[0] - x)];
  };
  const found = [...places.keys()].filter((place) => distance(places[place] ?? [x, y]) > 1 && isShown(place));
  const compare = (one: number[], other: number[]) =>
    one.reduce((order, part, at) => order || part - (other[at] ?? 0), 0);
  return found.sort((one, other) => compare(rank(one), rank(other)))[0] ?? from;
}
