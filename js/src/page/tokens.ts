/** Texts of tokens, made such that one sees what is in them. */

const NAMED: Record<string, string> = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
/** Controls, separators, what is put over other characters, and what turns the direction of writing around. */
const UNSEEN = /[\p{C}\p{Z}]/gu;
/** An accent that would land on whatever stands before the token. */
const LOOSE_MARK = /^\p{M}/u;

function seen(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  return NAMED[character] ?? `\\u${code.toString(16).padStart(4, "0")}`;
}

/** ` the` as `␣the`; line ends, tabs and invisible characters are seen, too. */
export function visibleToken(text: string): string {
  if (text === "") return "(empty)";
  const marked = LOOSE_MARK.test(text) ? `◌${text}` : text;
  return marked.replace(UNSEEN, seen);
}
