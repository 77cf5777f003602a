/**
 * Which regular expressions a search takes: none that tries so many ways to match that the page hangs. The same as
 * `graphpatch_notebook/notebook/repetitions.py`; tests/notebook/test_search_parity.py sees to that.
 */

/** How often something may be repeated and still count as written out. */
const FEW = 9;
/** By number of open repetitions: the most letters of a path, such that some 10**9 steps are enough for any pattern. */
const LONGEST = [Number.POSITIVE_INFINITY, 40_000, 1_800, 390, 160, 100, 80];

const TOKENS = new RegExp(
  [
    "(?<skipped>\\(\\?#[^)]*\\)|\\(\\?[aiLmsux]+\\))",
    "(?<item>\\\\.|\\[\\^?\\]?(?:\\\\.|[^\\]\\\\])*\\]|\\(\\?P=[^)]*\\))",
    "(?<opening>\\(\\?P<[^>]*>|\\(\\?\\([^)]*\\)|\\(\\?<[=!]|\\(\\?[aiLmsux-]*[:=!>]|\\()",
    "(?<closing>\\))",
    "(?<choice>\\|)",
    "(?<count>(?:[*+?]|\\{[0-9]+\\}|\\{[0-9]*,[0-9]*\\})[?+]?)",
    "(?<letter>.)",
  ].join("|"),
  "gsu",
);

/** What is in a group: how many open repetitions, and whether there is more than one way to go through it. */
interface Group {
  repetitions: number;
  varies: boolean;
}

/** How many open repetitions, such as `*`, `+` and `{2,}`, there are; throws an `Error` where they take beyond all bounds. */
export function openRepetitions(pattern: string): number {
  const groups: Group[] = [];
  let around: Group = { repetitions: 0, varies: false };
  let last: Group | null = null;
  for (const { groups: token = {} } of pattern.matchAll(TOKENS)) {
    const group: Group | null = last;
    last = null;
    if (token.opening !== undefined) {
      groups.push(around);
      around = { repetitions: 0, varies: false };
    } else if (token.choice !== undefined) around.varies = true;
    else if (token.count !== undefined) count(pattern, token.count, around, group);
    else if (token.closing !== undefined) {
      last = around;
      around = groups.pop() ?? { repetitions: 0, varies: false };
      around.repetitions += last.repetitions;
      around.varies ||= last.varies;
    }
  }
  const { repetitions } = around;
  if (repetitions >= LONGEST.length) {
    throw new Error(
      `this regular expression may take forever: /${pattern}/ has ${repetitions} open repetitions, at most ${LONGEST.length - 1} are searched; write several terms`,
    );
  }
  return repetitions;
}

/** Throws an `Error` where a path is too long for a pattern with so many open repetitions. */
export function checkLength(pattern: string, repetitions: number, path: string): void {
  const longest = LONGEST[repetitions] ?? 0;
  if (path.length <= longest) return;
  const letters = [...path];
  if (letters.length <= longest) return;
  const size = letters.length.toLocaleString("en-US");
  throw new Error(
    `/${pattern}/ has ${repetitions} open repetition${repetitions === 1 ? "" : "s"}, which may take forever on the ${size} letters of ${letters.slice(0, 60).join("")}…; leave this path out with another term, or write fewer of * + {}`,
  );
}

/** Adds to a group that the item in it, perhaps a group, is repeated. */
function count(pattern: string, text: string, around: Group, group: Group | null): void {
  const [least, most] = bounds(text);
  if (group?.varies && most > FEW) {
    throw new Error(
      `this regular expression may take forever: /${pattern}/ repeats a group that itself repeats or chooses; write [ab]* for (a|b)*, or how often: (...){2}`,
    );
  }
  if (group && most > 1 && most <= FEW) around.repetitions += group.repetitions * (most - 1);
  if (least === most) return;
  around.varies = true;
  around.repetitions += Number(most > FEW);
}

/** How often something is repeated, at least and at most, from `*`, `{2,}` and the like. */
function bounds(text: string): [least: number, most: number] {
  if (text[0] !== "{") return [Number(text[0] === "+"), text[0] === "?" ? 1 : Number.POSITIVE_INFINITY];
  const [least = "", most] = text.replace(/[?+]$/, "").slice(1, -1).split(",");
  if (most === undefined) return [Number(least), Number(least)];
  return [Number(least), most === "" ? Number.POSITIVE_INFINITY : Number(most)];
}
