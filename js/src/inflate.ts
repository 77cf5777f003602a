/** Decompresses a zlib stream to text. */
export async function inflateText(data: DataView): Promise<string> {
  return new TextDecoder().decode(await inflateBytes(data));
}

/**
 * Decompresses a zlib stream to bytes in a new buffer.
 *
 * It uses a writer rather than a `Blob`, whose bytes go through the browser's process: no other task of the page, which
 * is busy while it shows its first widget, runs in between.
 */
async function inflateBytes(data: DataView): Promise<Uint8Array<ArrayBuffer>> {
  const { readable, writable } = new DecompressionStream("deflate");
  const writer = writable.getWriter();
  const bytes = new Uint8Array(data.buffer as ArrayBuffer, data.byteOffset, data.byteLength);
  // The reader throws the error of invalid bytes.
  Promise.all([writer.write(bytes), writer.close()]).catch(() => undefined);
  return new Uint8Array(await new Response(readable).arrayBuffer());
}

/** Reads consecutive arrays of a zlib stream; numbers are little-endian. */
export class PackedNumbers {
  private at = 0;

  private constructor(private readonly stream: Uint8Array<ArrayBuffer>) {}

  static async of(data: DataView): Promise<PackedNumbers> {
    return new PackedNumbers(await inflateBytes(data));
  }

  bytes(count: number): Uint8Array<ArrayBuffer> {
    this.at += count;
    if (this.at > this.stream.length) throw new Error(`${UNREADABLE}: some of them are missing`);
    return this.stream.subarray(this.at - count, this.at);
  }

  /** Returns a copy, since numbers may start at any byte. */
  floats(count: number): Float32Array<ArrayBuffer> {
    return new Float32Array(this.bytes(4 * count).slice().buffer);
  }

  /** Unsigned integers of 4 bytes. */
  unsigned(count: number): Uint32Array<ArrayBuffer> {
    return new Uint32Array(this.bytes(4 * count).slice().buffer);
  }

  /** Throws an error if there are more bytes. */
  checkAllRead(): void {
    if (this.at !== this.stream.length) throw new Error(`${UNREADABLE}: there are more than it shows`);
  }
}

const UNREADABLE = "the numbers of this view cannot be read";
