// Bundles js/src into graphpatch_notebook/static/: widget.js and widget.css, the loader that unpacks them in the browser,
// what shows saved views in a page without a kernel, and a stamp that says what they were made of.
//
//     npm run build        once
//     npm run dev          again after every change (with ANYWIDGET_HMR=1 the notebook takes it up)
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build, context } from "esbuild";

const root = dirname(dirname(fileURLToPath(import.meta.url)));
const out = join(root, "graphpatch_notebook", "static");
const sources = ["js/src", "js/build.mjs", "js/tsconfig.json", "package.json", "package-lock.json"];

function files(path) {
  return statSync(path).isFile() ? [path] : readdirSync(path).flatMap((name) => files(join(path, name)));
}

/** The hash of everything that the bundle may depend on; js/hatch_build.py computes the same. */
function digest() {
  const hash = createHash("sha256");
  const named = sources
    .flatMap((source) => files(join(root, source)))
    .map((path) => [relative(root, path).split(sep).join("/"), path]);
  for (const [name, path] of named.sort(([a], [b]) => (a < b ? -1 : 1))) {
    hash.update(name).update(readFileSync(path, "latin1").replaceAll("\r\n", "\n"), "latin1");
  }
  return hash.digest("hex");
}

const stamp = {
  name: "stamp",
  setup: ({ onEnd }) =>
    onEnd(({ errors }) => {
      if (errors.length === 0) writeFileSync(join(out, "source.sha256"), `${digest()}\n`);
    }),
};

const options = {
  absWorkingDir: root,
  entryPoints: [
    { in: "js/src/index.ts", out: "widget" },
    { in: "js/src/style.css", out: "widget" },
    { in: "js/src/loader.ts", out: "loader" },
    { in: "js/src/page/saved_page.ts", out: "saved_page" },
  ],
  outdir: out,
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none",
  logLevel: "info",
  plugins: [stamp],
};

if (process.argv.includes("--watch")) {
  await (await context(options)).watch();
} else {
  await build(options);
}
