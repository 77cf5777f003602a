/**
 * Python's regular expressions as JavaScript's: what is written differently is translated, what JavaScript does not have
 * is an error. Characters mean what they mean in Python: `\w`, `\d`, `\s`, `\b` know all scripts.
 */

/** What Python takes for white space, for use between brackets. */
export const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";

const WORD = "\\p{L}\\p{N}_";
const CLASSES: Record<string, string> = { d: "\\p{Nd}", w: WORD, s: SPACE };
const CONTROLS: Record<string, string> = { a: "\\x07", f: "\\f", n: "\\n", r: "\\r", t: "\\t", v: "\\v" };
const ANCHORS: Record<string, string> = {
  A: "(?<![^])",
  Z: "(?![^])",
  b: `(?:(?<=[${WORD}])(?![${WORD}])|(?<![${WORD}])(?=[${WORD}]))`,
  B: `(?:(?<=[${WORD}])(?=[${WORD}])|(?<![${WORD}])(?![${WORD}]))`,
};

/** Throws an `Error` that says in words what is wrong with the pattern. */
export function pythonRegex(pattern: string, ignoresCase = false): RegExp {
  const global = /^\(\?([aiLmsux]+)\)/.exec(pattern);
  const letters = global?.[1] ?? "";
  const foreign = /[Lxa]/.exec(letters);
  if (foreign) throw new Error(`the flag (?${foreign[0]}) is Python's only`);
  const flags = new Set([...letters.replaceAll("u", ""), ...(ignoresCase ? "i" : "")]);
  const translation = new Translation(pattern, global?.[0].length ?? 0, flags.has("s"));
  return new RegExp(translation.text(), `v${[...flags].join("")}`);
}

/** The number that a text of decimal digits, of any script, stands for; `null` if it is none. */
export function decimal(text: string): number | null {
  return /^[0-9]+$/.test(text) ? Number(text) : null;
}

class Translation {
  constructor(
    private readonly pattern: string,
    private position: number,
    private readonly dotsAreAll: boolean,
  ) {}

  text(): string {
    let text = "";
    while (this.position < this.pattern.length) text += this.next();
    return text;
  }

  private next(): string {
    const character = this.take();
    switch (character) {
      case "\\":
        return this.escape(false);
      case "[":
        return this.characterClass();
      case "(":
        return this.group();
      case "{":
        return this.repetition();
      case "]":
      case "}":
      case "/":
        return `\\${character}`;
      case ".":
        return this.dotsAreAll ? "[^]" : "[^\\n]";
      default:
        return character;
    }
  }

  /** One character, also where it is two units long. */
  private take(): string {
    const code = this.pattern.codePointAt(this.position);
    if (code === undefined) throw new Error("it does not end");
    const character = String.fromCodePoint(code);
    this.position += character.length;
    return character;
  }

  private taken(expected: RegExp): RegExpExecArray | null {
    const match = new RegExp(expected.source, "y");
    match.lastIndex = this.position;
    const found = match.exec(this.pattern);
    if (found) this.position += found[0].length;
    return found;
  }

  private group(): string {
    const named = this.taken(/\?P<([^>]*)>/);
    if (named) return `(?<${named[1]}>`;
    const reference = this.taken(/\?P=([^)]*)\)/);
    if (reference) return `\\k<${reference[1]}>`;
    if (this.taken(/\?#[^)]*\)/)) return "(?:)";
    const special = this.taken(/\?(?::|=|!|<=|<!)/);
    if (special) return `(${special[0]}`;
    const other = this.taken(/\?.{0,2}/);
    if (other) throw new Error(`a group that begins with (${other[0]} is not understood here`);
    return "(";
  }

  private repetition(): string {
    const counts = this.taken(/([0-9]*)(,?)([0-9]*)\}/);
    if (!counts) return "\\{";
    const [whole, least = "", comma = "", most = ""] = counts;
    if (!least && !comma) return `\\{${whole.slice(0, -1)}\\}`;
    return comma ? `{${least || 0},${most}}` : `{${least}}`;
  }

  private escape(isInClass: boolean): string {
    const character = this.take();
    const lower = character.toLowerCase();
    const characters = CLASSES[lower];
    if (characters) return `[${character === lower ? "" : "^"}${characters}]`;
    const anchor = ANCHORS[character];
    if (anchor && !isInClass) return anchor;
    if (character === "b" && isInClass) return "\\x08";
    const control = CONTROLS[character];
    if (control) return control;
    if (/[0-9]/.test(character)) return this.numbered(character, isInClass);
    const code = { x: /[0-9a-fA-F]{2}/, u: /[0-9a-fA-F]{4}/, U: /[0-9a-fA-F]{8}/ }[character];
    const digits = code && this.taken(code);
    if (digits) return codePoint(Number.parseInt(digits[0], 16));
    if (/[a-zA-Z]/.test(character)) throw new Error(`bad escape \\${character}`);
    return literal(character, isInClass);
  }

  /** A group by its number, or a character by its octal one. */
  private numbered(first: string, isInClass: boolean): string {
    this.position -= 1;
    const octal = this.taken(isInClass ? /[0-7]{1,3}/ : /0[0-7]{0,2}|[0-3][0-7]{2}/);
    if (octal) return codePoint(Number.parseInt(octal[0], 8));
    const group = isInClass ? null : this.taken(/[1-9][0-9]?/);
    if (!group) throw new Error(`bad escape \\${first}`);
    return `(?:\\${group[0]})`;
  }

  private characterClass(): string {
    let text = this.taken(/\^/) ? "[^" : "[";
    for (let isFirst = true; isFirst || this.pattern[this.position] !== "]"; isFirst = false) {
      text += this.member();
      if (!this.taken(/-(?!\])/)) continue;
      text += `-${this.member()}`; // a range; one of `\\w` and the like is an error there as here
    }
    this.position += 1;
    return `${text}]`;
  }

  private member(): string {
    const character = this.take();
    return character === "\\" ? this.escape(true) : literal(character, true);
  }
}

function codePoint(code: number): string {
  return `\\u{${code.toString(16)}}`;
}

function literal(character: string, isInClass: boolean): string {
  return (isInClass ? /[!-/:-@[-^`{-~]/ : /[$()*+./?[\\\]^{|}]/).test(character) && character !== "_"
    ? codePoint(character.codePointAt(0) ?? 0)
    : character;
}
