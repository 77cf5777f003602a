/** The same queries find the same rows as in Python: tests/notebook/search/test_search_parity.py writes what they are. */
import { describe, expect, test } from "vitest";
import type { Columns, Component } from "../../src/kernel/protocol";
import { parseQuery, QueryError, SearchIndex } from "../../src/tree/search";
import { Skeleton } from "../../src/tree/skeleton";
import fixture from "../fixtures/queries.json";

interface Case {
  columns: Columns;
  components: Component[];
  paths: string[];
  patched: number[];
  queries: [query: string, rows: number[] | null][];
}

describe.each(Object.entries(fixture as unknown as Record<string, Case>))("%s", (_, model) => {
  const skeleton = new Skeleton(model.columns);
  const index = new SearchIndex(skeleton);
  index.setComponents(model.components);

  test("the paths", () => {
    for (const [row, path] of model.paths.entries()) {
      if (skeleton.kindOf(row) === "unused") continue;
      expect(skeleton.path(row)).toBe(path);
      expect(index.paths[row]).toBe(path);
    }
  });

  test.each(model.queries)("%j", (query, expected) => {
    const patched = new Set(model.patched);
    if (expected === null) expect(() => parseQuery(query)).toThrow(QueryError);
    else expect(index.find(parseQuery(query), patched)).toEqual(expected);
  });
});
