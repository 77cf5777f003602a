/** The numbers of a generation view, as `GenerationView._packed` in notebook/views/generation.py writes them. */
import { inflatedBytes } from "../inflate";
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
  const { buffer } = await inflatedBytes(data);
  let at = 0;
  const take = <T>(make: new (buffer: ArrayBuffer, offset: number, length: number) => T, length: number): T => {
    const made = new make(buffer, at, length);
    at += 4 * length;
    return made;
  };
  const lines = generation.lines.map(({ steps }) => ({
    tokens: take(Uint32Array, steps),
    logProbability: take(Float32Array, steps),
    entropy: take(Float32Array, steps),
    top: take(Uint32Array, steps * generation.top),
    probabilities: take(Float32Array, steps * generation.top),
  }));
  const given = generation.has_given ? take(Float32Array, generation.lines[0]?.steps ?? 0) : null;
  return { lines, given };
}
