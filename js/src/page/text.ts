/** Formats numbers: a rounded number looks rounded (`0.1000`), an exact one looks exact (`0.5`). */

/** Integers below this are written in full; a float64 represents each of them exactly. */
const MAX_EXACT_INTEGER = 1e12;
const MIN_WITHOUT_EXPONENT = 1e-3;
const MAX_WITHOUT_EXPONENT = 1e6;

/** As `formatNumber`, for a positive finite number. */
function formatMagnitude(value: number, digits: number): string {
  if (Number.isInteger(value) && value < MAX_EXACT_INTEGER) return value.toLocaleString("en-US");
  const rounded = Number(value.toPrecision(digits));
  if (value < MIN_WITHOUT_EXPONENT || value >= MAX_WITHOUT_EXPONENT) {
    const text = value.toExponential(digits - 1);
    return rounded === value ? text.replace(/\.?0+e/, "e") : text;
  }
  if (rounded === value) return value.toLocaleString("en-US", { maximumFractionDigits: 20 });
  const decimals = Math.max(1, digits - 1 - Math.floor(Math.log10(rounded)));
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

/** A dash for `null` (unknown). Large numbers keep a decimal, so that they do not look like integers. */
export function formatNumber(value: number | null, digits = 4): string {
  if (value === null) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  return (value < 0 ? "-" : "") + formatMagnitude(Math.abs(value), digits);
}

/** A number that is known up to `error`, without the digits beyond that: `0.24` for 0.2392 and 0.002. */
export function formatWithError(value: number, error: number): string {
  if (!(error > 0) || value === 0 || !Number.isFinite(value)) return formatNumber(value, 5);
  const place = Math.ceil(Math.log10(error));
  const digits = Math.floor(Math.log10(Math.abs(value))) - place + 1;
  if (digits < 1) return `${value < 0 ? ">-" : "<"}${formatNumber(2 * 10 ** place)}`; // with the error, at most that
  return formatNumber(value, Math.min(digits, 5));
}

export function formatCount(count: number, noun: string, plural = `${noun}s`): string {
  return `${formatNumber(count)} ${count === 1 ? noun : plural}`;
}

/** Formats a fraction as a percentage. `100%` and `0%` are exact. */
export function formatPercent(part: number): string {
  if (!Number.isFinite(part)) return formatNumber(part);
  const percent = part * 100;
  if (percent === 0 || percent === 100) return `${percent}%`;
  const magnitude = Math.abs(percent);
  if (magnitude < 0.1) return `${percent < 0 ? ">-" : "<"}0.1%`;
  if (magnitude > 99.9 && magnitude < 100) return percent < 0 ? "<-99.9%" : ">99.9%";
  return `${formatNumber(percent, magnitude >= 100 ? 4 : 3)}%`;
}

export function formatSeconds(seconds: number): string {
  if (seconds < 0.0005) return "<1 ms";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function formatShape(shape: readonly number[]): string {
  return shape.length === 0 ? "one number" : `[${shape.join(", ")}]`;
}

/** Makes a message of the kernel a sentence: capitalized, unless it starts with what may be a name, and with a full stop. */
export function sentence(text: string): string {
  const start = /^[a-z]+ /.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(start) ? start : `${start}.`;
}

// -- Escapes invisible characters in text of the model or the user for display -------------------------------------------

/** A joiner, unless it is beside a visible character that is not ASCII: of Persian, Hindi or an emoji. */
const LONE_JOINER = /(?<![^\0-\x7f\p{C}\p{Z}])[\u200c\u200d](?![^\0-\x7f\p{C}\p{Z}])/u.source;
/** Control characters, direction overrides, lone surrogates, line ends, and unusual spaces. */
const INVISIBLE = new RegExp(`${LONE_JOINER}|(?![\\u200c\\u200d])[\\p{C}\\p{Zl}\\p{Zp}]|(?! )\\p{Zs}`, "gu");
const NAMED: Record<string, string> = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** The same as in `graphpatch_notebook/notebook/display/tables.py`, on one line: a direction override becomes `\u202e`. */
export function visible(text: string): string {
  return text.replace(INVISIBLE, escaped);
}

/** As `visible`, but keeps line ends. */
export function visibleLines(text: string): string {
  return text.split("\n").map(visible).join("\n");
}

function escaped(character: string): string {
  const digits = (character.codePointAt(0) ?? 0).toString(16);
  const written = digits.length <= 2 ? `x${digits.padStart(2, "0")}` : `u${digits.padStart(4, "0")}`;
  return NAMED[character] ?? `\\${digits.length <= 4 ? written : `U${digits.padStart(8, "0")}`}`;
}

const TOKEN_MARKS: Record<string, string> = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
/** Control characters, separators, and direction overrides. */
const INVISIBLE_IN_TOKENS = new RegExp(`${LONE_JOINER}|(?![\\u200c\\u200d])[\\p{C}\\p{Z}]`, "gu");
/** A combining mark, which would combine with the text before the token. */
const COMBINING_MARK = /^\p{M}/u;

function visibleCharacter(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  return TOKEN_MARKS[character] ?? `\\u${code.toString(16).padStart(4, "0")}`;
}

/** Letters that are written from right to left. */
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u;

/** Keeps a text that is written from right to left from turning around the numbers and texts beside it. */
export function isolated(text: string): string {
  return RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text;
}

/** Shows spaces, line ends, tabs and invisible characters of a token: `␣the`. */
export function visibleToken(text: string): string {
  if (text === "") return "(empty)";
  const marked = COMBINING_MARK.test(text) ? `◌${text}` : text;
  return isolated(marked.replace(INVISIBLE_IN_TOKENS, visibleCharacter));
}
