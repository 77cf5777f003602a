// What depends on the Python interpreter, in newer ones than the tests with torch run in.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const SCRIPT = fileURLToPath(new URL("interpreter.mjs", import.meta.url));

for (const version of ["3.12", "3.13", "3.14"]) {
  test(`Python ${version}`, async () => {
    const module = `pyodide-${version.replace(".", "")}`;
    const { stdout } = await promisify(execFile)(process.execPath, [SCRIPT, module]);
    const found = JSON.parse(stdout);
    assert.ok(found.version.startsWith(`${version}.`), found.version);
    assert.deepEqual(found.problems, { assignments: [], call_sites: [], source: [] });
  });
}
