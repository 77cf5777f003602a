/** Syntax highlighting of Python. */

const KEYWORDS =
  "False None True and as assert async await break class continue def del elif else except finally for from global if " +
  "import in is lambda nonlocal not or pass raise return try while with yield";
/** Strings first: they may contain what looks like a comment or a keyword. */
const TOKENS = new RegExp(
  [
    "(?<string>[rRbBfFuU]{0,2}(?:\"\"\"[^]*?(?:\"\"\"|(?![^]))|'''[^]*?(?:'''|(?![^]))|\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'?))",
    "(?<comment>#.*)",
    "(?<decorator>(?<=^[ \\t]*)@[\\w.]+)",
    `(?<keyword>(?<![\\w.])(?:${KEYWORDS.replaceAll(" ", "|")})(?!\\w))`,
    "(?<self>(?<![\\w.])self(?!\\w))",
    "(?<number>(?<![\\w.])(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*\\.?[\\d_]*(?:[eE][+-]?\\d+)?j?|\\.\\d+(?:[eE][+-]?\\d+)?)(?!\\w))",
    "(?<call>(?<!\\w)[A-Za-z_]\\w*(?=\\())",
    // Whole names, so that keywords within a name do not match.
    "(?:\\w+)",
  ].join("|"),
  "gm",
);
/** The rest of longer code is not colored. */
const MAX_COLORED = 60_000;

/** Returns the code as text nodes and spans of class `gp-py-...`, which together have exactly the text of `code`. */
export function coloredPython(code: string): DocumentFragment {
  const fragment = document.createDocumentFragment();
  let end = 0;
  for (const match of code.slice(0, MAX_COLORED).matchAll(TOKENS)) {
    const kind = Object.entries(match.groups ?? {}).find(([, text]) => text !== undefined)?.[0];
    if (kind === undefined) continue;
    fragment.append(code.slice(end, match.index));
    const span = document.createElement("span");
    span.className = `gp-py-${kind}`;
    span.textContent = match[0];
    fragment.append(span);
    end = match.index + match[0].length;
  }
  fragment.append(code.slice(end));
  return fragment;
}
