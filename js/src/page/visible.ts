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
