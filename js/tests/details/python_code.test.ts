import { expect, it } from "vitest";
import { coloredPython } from "../../src/details/popup";

function shown(code: string): [text: string, spans: string[][]] {
  const element = document.createElement("pre");
  element.append(coloredPython(code));
  const spans = [...element.querySelectorAll("span")].map((span) => [
    span.className.replace("gp-py-", ""),
    span.textContent,
  ]);
  return [element.textContent ?? "", spans as string[][]];
}

it.each([
  ["x = 1", [["number", "1"]]],
  [
    "for i in range(10):",
    [
      ["keyword", "for"],
      ["keyword", "in"],
      ["call", "range"],
      ["number", "10"],
    ],
  ],
  [
    "h_0 = self.h_0(x1)",
    [
      ["self", "self"],
      ["call", "h_0"],
    ],
  ],
  [
    "a = 'it is # no \\' comment' # but this is",
    [
      ["string", "'it is # no \\' comment'"],
      ["comment", "# but this is"],
    ],
  ],
  ['"""for\nif"""', [["string", '"""for\nif"""']]],
  [
    "f'{x}' + rb\"y\"",
    [
      ["string", "f'{x}'"],
      ["string", 'rb"y"'],
    ],
  ],
  [
    "x = 'not closed\nif y",
    [
      ["string", "'not closed"],
      ["keyword", "if"],
    ],
  ],
  [
    "@torch.no_grad()\ndef f(): ...",
    [
      ["decorator", "@torch.no_grad"],
      ["keyword", "def"],
      ["call", "f"],
    ],
  ],
  ["a @ b", []],
  [
    "1e-5 + 0x1F + 1_000 + .5 + x2",
    [
      ["number", "1e-5"],
      ["number", "0x1F"],
      ["number", "1_000"],
      ["number", ".5"],
    ],
  ],
  ["notation = format_if", []],
  ["x.is_in.not_", []],
  ["", []],
])("colors %j", (code, spans) => {
  expect(shown(code)).toEqual([code, spans]);
});

it("shows markup as text", () => {
  const code = '<img src=x onerror="alert(1)"> # <script>';
  const element = document.createElement("pre");
  element.append(coloredPython(code));
  expect(element.textContent).toBe(code);
  expect(element.querySelector("img, script")).toBeNull();
});

it("terminates for malformed code", () => {
  const strange = `${'"""'.repeat(9)}${"'".repeat(20_001)}${"(".repeat(9999)}${"a".repeat(99_999)}${"1".repeat(30_000)}`;
  expect(shown(strange)[0]).toBe(strange);
});
