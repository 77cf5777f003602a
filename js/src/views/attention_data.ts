/** The attention patterns: as the kernel sent them, perhaps reduced, and the full patterns that were requested. */
import { PackedNumbers } from "../inflate";
import type { Attention, AttentionLayer, AttentionRun } from "../kernel/protocol";
import type { Cell } from "../page/grid";
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
  /** The largest error of a value: the squares of bytes are sent, which are finer near zero. */
  error(value: number): number;
}

interface Head {
  scale: number;
  cells: Uint8Array;
}

interface LayerData {
  heads: Head[];
  /** The lengths of the value vectors, for each value head; empty for the mean over a batch. */
  lengths: Head[];
}

const LEVELS = 255;

/** A head, by its layer's index in `Attention.layers`. */
export type HeadIndex = Cell;

function numberAt({ scale, cells }: Head, index: number): number {
  return scale * ((cells[index] ?? 0) / LEVELS) ** 2;
}

export class Patterns {
  /** The full patterns that were requested. */
  private readonly full = new Map<string, Head>();

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
      const lengths = heads(packed.floats(value_heads), full[1]);
      return { heads: heads(scales, shape[0] * shape[1]), lengths };
    };
    const runs = new Map(about.runs.map((run) => [run, about.layers.map(read)]));
    packed.checkAllRead();
    return new Patterns(about, runs);
  }

  layer([layer]: HeadIndex): AttentionLayer {
    const found = this.about.layers[layer];
    if (found === undefined) throw new RangeError(`no layer ${layer}`);
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
    const heads =
      mode === "difference" ? [this.head(place, "patched"), this.head(place, "clean")] : [this.head(place, run)];
    const layer = this.layer(place);
    const size = Math.min(...heads.map(({ cells }) => cells.length));
    const isWhole = size === layer.full[0] * layer.full[1];
    const parts = heads.map((head) => (isWhole || head.cells.length === size ? head : this.received(place, run)));
    const [rows, columns] = isWhole ? layer.full : layer.shape;
    const values = new Float32Array(rows * columns);
    const [first, second] = parts;
    if (first === undefined) throw new RangeError(`no head ${place}`);
    for (let index = 0; index < values.length; index++) {
      values[index] = numberAt(first, index) - (second === undefined ? 0 : numberAt(second, index));
    }
    const longest = mode === "values" ? this.scaleByLengths(values, place, run, rows, columns) : 1;
    const most = longest * first.scale;
    // A byte is rounded by at most half a step; of a difference, the bytes are not known.
    const error = (value: number) =>
      second ? (first.scale + second.scale) / LEVELS : (Math.sqrt(Math.abs(value) * most) + most / LEVELS) / LEVELS;
    return { rows, columns, values, isFull: isWhole, error };
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

  private async request([layer, head]: HeadIndex, run: AttentionRun, kernel: Kernel): Promise<void> {
    const key = `${run} ${[layer, head]}`;
    if (this.full.has(key)) return;
    const { result, buffers } = await kernel.ask("head", { version: this.about.version, run, layer, head }, true);
    const [cells] = buffers;
    if (cells === undefined) throw new Error("the kernel sent no pattern");
    this.full.set(key, {
      scale: result.scale,
      cells: new Uint8Array(cells.buffer, cells.byteOffset, cells.byteLength),
    });
  }

  private head(place: HeadIndex, run: AttentionRun): Head {
    return this.full.get(`${run} ${place}`) ?? this.received(place, run);
  }

  private received([layer, head]: HeadIndex, run: AttentionRun): Head {
    const found = this.runs.get(run)?.[layer]?.heads[head];
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
    const [layer, head] = place;
    const lengths = this.runs.get(run)?.[layer]?.lengths[Math.floor((head * value_heads) / heads)];
    if (lengths === undefined) return 1;
    const block = Math.ceil(full[1] / columns);
    for (let column = 0; column < columns; column++) {
      const longest = Math.max(...lengths.cells.subarray(column * block, (column + 1) * block));
      const factor = lengths.scale * (longest / LEVELS) ** 2;
      for (let row = 0; row < rows; row++)
        values[row * columns + column] = (values[row * columns + column] ?? 0) * factor;
    }
    return lengths.scale;
  }
}
