/** The attention patterns: as the kernel sent them, perhaps reduced, and the full patterns that were requested. */
import { PackedNumbers } from "../inflate";
import type { Attention, AttentionLayer, AttentionRun } from "../kernel/protocol";
import type { Kernel } from "../view";

/** Weights; weights times the lengths of the value vectors; with the patches minus without. */
export type Mode = "pattern" | "values" | "difference";

/** The numbers of a head: row by row, the first query first. */
export interface Pattern {
  rows: number;
  columns: number;
  values: Float32Array;
  /** Whether it has all queries and keys, instead of blocks of them. */
  isFull: boolean;
  /** The approximate error of a value: values are sent as bytes. */
  error: number;
}

interface Head {
  scale: number;
  cells: Uint8Array;
}

interface LayerData {
  heads: Head[];
  /** The lengths of the value vectors, for each value head; empty for the mean over a batch. */
  lengths: Head[];
  /** For the mean over a batch: the means of the patterns times the lengths. */
  products: Head[];
}

const LEVELS = 255;

/** A head, by its layer's index in `Attention.layers`. */
export interface HeadIndex {
  layer: number;
  head: number;
}

export class Patterns {
  /** The full patterns that were requested. */
  private readonly full = new Map<string, Promise<Head[]> | Head[]>();

  private constructor(
    readonly about: Attention,
    private readonly runs: Map<AttentionRun, LayerData[]>,
  ) {}

  static async decode(about: Attention, data: DataView): Promise<Patterns> {
    const packed = await PackedNumbers.of(data);
    const heads = (scales: Float32Array, size: number): Head[] =>
      Array.from(scales, (scale) => ({ scale, cells: packed.bytes(size) }));
    const read = ({ heads: count, value_heads, full, shape }: AttentionLayer): LayerData => {
      const scales = packed.floats(count);
      const [isOfRow, isOfMean] = [value_heads > 0 && !about.is_mean, value_heads > 0 && about.is_mean];
      const lengths = isOfRow ? heads(packed.floats(value_heads), full[1]) : [];
      const products = isOfMean ? heads(packed.floats(count), shape[0] * shape[1]) : [];
      return { heads: heads(scales, shape[0] * shape[1]), lengths, products };
    };
    const runs = new Map(about.runs.map((run) => [run, about.layers.map(read)]));
    packed.checkAllRead();
    return new Patterns(about, runs);
  }

  layer(place: HeadIndex): AttentionLayer {
    const found = this.about.layers[place.layer];
    if (found === undefined) throw new RangeError(`no layer ${place.layer}`);
    return found;
  }

  has(run: AttentionRun): boolean {
    return this.runs.has(run);
  }

  get hasLengths(): boolean {
    return this.about.layers.every((layer) => layer.value_heads > 0);
  }

  /** The weights of a head, in the highest resolution so far. The mode `difference` ignores `run`. */
  pattern(place: HeadIndex, run: AttentionRun, mode: Mode): Pattern {
    const isProduct = mode === "values" && this.about.is_mean;
    const heads =
      mode === "difference"
        ? [this.head(place, "patched"), this.head(place, "clean")]
        : [this.head(place, run, isProduct)];
    const layer = this.layer(place);
    const size = Math.min(...heads.map(({ cells }) => cells.length));
    const isWhole = size === layer.full[0] * layer.full[1];
    const parts = heads.map((head) => (isWhole || head.cells.length === size ? head : this.received(place, run)));
    const [rows, columns] = isWhole ? layer.full : layer.shape;
    const values = new Float32Array(rows * columns);
    const [first, second] = parts;
    if (first === undefined) throw new RangeError(`no head ${place.head}`);
    const [up, down] = [first.scale / LEVELS, (second?.scale ?? 0) / LEVELS];
    for (let index = 0; index < values.length; index++) {
      values[index] = (first.cells[index] ?? 0) * up - (second?.cells[index] ?? 0) * down;
    }
    // A byte is rounded by at most half a step; for a mean of products, both factors are rounded.
    const error = isProduct ? up : (up + down) / 2;
    const longest = mode === "values" && !isProduct ? this.scaleByLengths(values, place, run, rows, columns) : 1;
    return { rows, columns, values, isFull: isWhole, error: error * longest };
  }

  /** Requests the full patterns of a head; resolves to whether that succeeded. */
  async loadFull(place: HeadIndex, kernel: Kernel): Promise<boolean> {
    if (this.about.is_whole) return true;
    try {
      await Promise.all(this.about.runs.map((run) => this.request(place, run, kernel)));
      return true;
    } catch {
      return false;
    }
  }

  private async request({ layer, head }: HeadIndex, run: AttentionRun, kernel: Kernel): Promise<void> {
    const key = `${run} ${layer} ${head}`;
    if (this.full.has(key)) {
      await this.full.get(key);
      return;
    }
    const asked = kernel
      .ask("head", { version: this.about.version, run, layer, head }, true)
      .then(({ result, buffers }) => {
        if (buffers.length === 0) throw new Error("the kernel sent no pattern");
        return buffers.map(({ buffer, byteOffset, byteLength }, at) => ({
          scale: result.scales[at] ?? 0,
          cells: new Uint8Array(buffer, byteOffset, byteLength),
        }));
      });
    this.full.set(key, asked);
    try {
      this.full.set(key, await asked);
    } catch (reason) {
      this.full.delete(key);
      throw reason;
    }
  }

  private head(place: HeadIndex, run: AttentionRun, isProduct = false): Head {
    const known = this.full.get(`${run} ${place.layer} ${place.head}`);
    const own = Array.isArray(known) ? known[isProduct ? 1 : 0] : undefined;
    return own ?? this.received(place, run, isProduct);
  }

  private received({ layer, head }: HeadIndex, run: AttentionRun, isProduct = false): Head {
    const found = this.runs.get(run)?.[layer]?.[isProduct ? "products" : "heads"][head];
    if (found === undefined) throw new RangeError(`no head ${head} in layer ${layer}`);
    return found;
  }

  /**
   * Multiplies weights by the lengths of the value vectors; in a reduced pattern by the largest length of each block. Returns
   * the largest length.
   */
  private scaleByLengths(
    values: Float32Array,
    place: HeadIndex,
    run: AttentionRun,
    rows: number,
    columns: number,
  ): number {
    const { heads, full, value_heads } = this.layer(place);
    const lengths = this.runs.get(run)?.[place.layer]?.lengths[Math.floor((place.head * value_heads) / heads)];
    if (lengths === undefined) return 1;
    const block = Math.ceil(full[1] / columns);
    for (let column = 0; column < columns; column++) {
      const longest = Math.max(...lengths.cells.subarray(column * block, (column + 1) * block));
      const factor = (longest * lengths.scale) / LEVELS;
      for (let row = 0; row < rows; row++)
        values[row * columns + column] = (values[row * columns + column] ?? 0) * factor;
    }
    return lengths.scale;
  }
}
