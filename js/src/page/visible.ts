/** Escapes invisible characters in text of the model or the user for display. What is copied is not escaped. */

/** Control characters, direction overrides, lone surrogates, line ends, and unusual spaces. */
const INVISIBLE = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu;
const NAMED: Record<string, string> = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** The same as in `graphpatch_notebook/notebook/display/labels.py`, on one line: a direction override becomes `\u202e`. */
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
const INVISIBLE_IN_TOKENS = /[\p{C}\p{Z}]/gu;
/** A combining mark, which would combine with the text before the token. */
const COMBINING_MARK = /^\p{M}/u;

function visibleCharacter(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  return TOKEN_MARKS[character] ?? `\\u${code.toString(16).padStart(4, "0")}`;
}

/** Shows spaces, line ends, tabs and invisible characters of a token: `␣the`. */
export function visibleToken(text: string): string {
  if (text === "") return "(empty)";
  const marked = COMBINING_MARK.test(text) ? `◌${text}` : text;
  return marked.replace(INVISIBLE_IN_TOKENS, visibleCharacter);
}
