/** Text of the model or the user such that it shows as text and nothing else. What is copied stays as it is. */

/** Controls, what turns the direction of writing around, halves of characters, line ends, and spaces that are not seen. */
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu;
const NAMED: Record<string, string> = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** On one line, as `graphpatch_notebook/notebook/display/labels.py` writes it: a direction override as `\u202e`. */
export function visible(text: string): string {
  return text.replace(UNSEEN, escaped);
}

/** As `visible`, with the line ends of a message of several lines. */
export function visibleLines(text: string): string {
  return text.split("\n").map(visible).join("\n");
}

function escaped(character: string): string {
  const digits = (character.codePointAt(0) ?? 0).toString(16);
  const written = digits.length <= 2 ? `x${digits.padStart(2, "0")}` : `u${digits.padStart(4, "0")}`;
  return NAMED[character] ?? `\\${digits.length <= 4 ? written : `U${digits.padStart(8, "0")}`}`;
}

const TOKEN_MARKS: Record<string, string> = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
/** Controls, separators, what is put over other characters, and what turns the direction of writing around. */
const UNSEEN_IN_TOKENS = /[\p{C}\p{Z}]/gu;
/** An accent that would combine with the text before the token. */
const LOOSE_MARK = /^\p{M}/u;

function seen(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  return TOKEN_MARKS[character] ?? `\\u${code.toString(16).padStart(4, "0")}`;
}

/** ` the` as `␣the`; line ends, tabs and invisible characters are seen, too. */
export function visibleToken(text: string): string {
  if (text === "") return "(empty)";
  const marked = LOOSE_MARK.test(text) ? `◌${text}` : text;
  return marked.replace(UNSEEN_IN_TOKENS, seen);
}
