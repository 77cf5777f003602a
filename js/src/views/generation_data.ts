/** The numbers of a generation view, as `GenerationView._packed` in notebook/views/generation.py writes them. */
import { PackedNumbers } from "../inflate";
import type { Generation } from "../kernel/protocol";

/** The steps of one line. */
export interface Steps {
  /** Positions in the vocabulary. */
  tokens: Uint32Array;
  logProbability: Float32Array;
  entropy: Float32Array;
  /** The most probable tokens, `top` for each step. */
  top: Uint32Array;
  probabilities: Float32Array;
}

export interface GenerationNumbers {
  lines: Steps[];
  /** The scores that were given for the first line; `null`: none were. */
  given: Float32Array | null;
}

export async function readGeneration(generation: Generation, data: DataView): Promise<GenerationNumbers> {
  const packed = await PackedNumbers.of(data);
  const lines = generation.lines.map(({ steps }) => ({
    tokens: packed.counts(steps),
    logProbability: packed.floats(steps),
    entropy: packed.floats(steps),
    top: packed.counts(steps * generation.top),
    probabilities: packed.floats(steps * generation.top),
  }));
  const given = generation.has_given ? packed.floats(generation.lines[0]?.steps ?? 0) : null;
  packed.end();
  return { lines, given };
}
