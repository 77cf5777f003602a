/** The numbers of a lens view, as `LensView._packed` in graphpatch_notebook/notebook/views/lens.py writes them. */
import { PackedNumbers } from "../inflate";
import type { Lens } from "../kernel/protocol";

/** What the states of one stream say in one run; row by row, from the first layer on. */
export interface Readouts {
  /** Positions in the vocabulary, the most probable first: `top` for each cell. */
  tokens: Uint32Array;
  probabilities: Float32Array;
  /** Of the target of the position, one for each cell. */
  target: Float32Array;
  /** How many tokens are more probable than the target. */
  rank: Uint32Array;
}

/** The runs: without patches, and with them if there are any; the streams of each by name. */
export type LensRuns = Map<string, Readouts>[];

export async function readLens(lens: Lens, data: DataView): Promise<LensRuns> {
  const packed = await PackedNumbers.of(data);
  const runs = Array.from({ length: lens.runs }, () => {
    const streams = lens.streams.map(({ name, rows }): [string, Readouts] => {
      const cells = rows.length * lens.target.length;
      const tokens = packed.counts(cells * lens.top);
      const probabilities = packed.floats(cells * lens.top);
      return [name, { tokens, probabilities, target: packed.floats(cells), rank: packed.counts(cells) }];
    });
    return new Map(streams);
  });
  packed.end();
  return runs;
}
