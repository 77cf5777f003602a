// Prints what tests/interpreters/ finds in the Python of one Pyodide. Two of them do not run in one process.

import { fileURLToPath } from "node:url";

const { loadPyodide } = await import(process.argv[2]);
const python = await loadPyodide();
python.FS.mkdirTree("/checkout");
const root = fileURLToPath(new URL("../../..", import.meta.url));
python.FS.mount(python.FS.filesystems.NODEFS, { root }, "/checkout");
const found = python.runPython(`
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, "/checkout")
from tests.interpreters.without_torch import results
results()
`);
console.log(found);
