/** Colours for numbers: one map for amounts, one for what has a sign. Both can be told apart by colour-blind people. */

export type ColourMap = "sequential" | "diverging";
export type Rgb = [red: number, green: number, blue: number];

/** What stands for NaN, infinities and fill values: in neither map. */
export const MISSING: Rgb = [134, 134, 134];
export const MISSING_STRIPE: Rgb = [74, 74, 74];

/**
 * Evenly spaced stops. Sequential: viridis (van der Walt and Smith), every 32nd colour of it. Diverging: computed in
 * OKLCH, hues 260 and 28, with the same lightness and chroma at the same distance from the middle.
 */
const STOPS: Record<ColourMap, readonly Rgb[]> = {
  sequential: [
    [68, 1, 84],
    [71, 44, 122],
    [59, 81, 139],
    [44, 113, 142],
    [33, 144, 141],
    [39, 173, 129],
    [92, 200, 99],
    [170, 220, 50],
    [253, 231, 37],
  ],
  diverging: [
    [23, 63, 129],
    [54, 105, 190],
    [106, 152, 229],
    [173, 201, 246],
    [245, 245, 245],
    [242, 183, 174],
    [219, 120, 108],
    [176, 67, 57],
    [117, 32, 26],
  ],
};

/** The colour of a value between 0 and 1; what lies outside gets the colour of the end. */
export function colour(value: number, map: ColourMap): Rgb {
  if (Number.isNaN(value)) return [...MISSING];
  const stops = STOPS[map];
  const position = Math.min(Math.max(value, 0), 1) * (stops.length - 1);
  const below = Math.min(Math.floor(position), stops.length - 2);
  const from = stops[below] ?? MISSING;
  const to = stops[below + 1] ?? MISSING;
  const part = position - below;
  const mix = (channel: 0 | 1 | 2) => Math.round(from[channel] + (to[channel] - from[channel]) * part);
  return [mix(0), mix(1), mix(2)];
}

export function cssColour([red, green, blue]: Rgb): string {
  return `rgb(${red}, ${green}, ${blue})`;
}

/** The whole map as a CSS image, from left to right. */
export function cssGradient(map: ColourMap): string {
  return `linear-gradient(to right, ${STOPS[map].map(cssColour).join(", ")})`;
}
