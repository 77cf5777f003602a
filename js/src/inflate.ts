/** Returns the text that a zlib stream holds. */
export async function inflated(data: DataView): Promise<string> {
  return new TextDecoder().decode(await inflatedBytes(data));
}

/**
 * Returns the bytes that a zlib stream holds, in a buffer of their own.
 *
 * Through a writer rather than a `Blob`, whose bytes take a detour through the browser's process: here no task of the
 * page, which has others to do while it shows its first widget, comes in between.
 */
async function inflatedBytes(data: DataView): Promise<Uint8Array<ArrayBuffer>> {
  const { readable, writable } = new DecompressionStream("deflate");
  const writer = writable.getWriter();
  const bytes = new Uint8Array(data.buffer as ArrayBuffer, data.byteOffset, data.byteLength);
  // Of bytes that cannot be read, the reader says so.
  const written = Promise.all([writer.write(bytes), writer.close()]).catch(() => undefined);
  const chunks: Uint8Array<ArrayBuffer>[] = [];
  let length = 0;
  const reader = readable.getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    chunks.push(read.value);
    length += read.value.length;
  }
  await written;
  const inflated = new Uint8Array(length);
  let at = 0;
  for (const chunk of chunks) {
    inflated.set(chunk, at);
    at += chunk.length;
  }
  return inflated;
}

/** Reads the arrays that a zlib stream holds, one after the other; numbers are little-endian. */
export class PackedNumbers {
  private at = 0;

  private constructor(private readonly stream: Uint8Array<ArrayBuffer>) {}

  static async of(data: DataView): Promise<PackedNumbers> {
    return new PackedNumbers(await inflatedBytes(data));
  }

  bytes(count: number): Uint8Array<ArrayBuffer> {
    this.at += count;
    if (this.at > this.stream.length) throw new Error(`${UNREADABLE}: some of them are missing`);
    return this.stream.subarray(this.at - count, this.at);
  }

  /** Copied, since numbers begin at any byte. */
  floats(count: number): Float32Array<ArrayBuffer> {
    return new Float32Array(this.bytes(4 * count).slice().buffer);
  }

  /** Numbers from 0 on, of 4 bytes. */
  counts(count: number): Uint32Array<ArrayBuffer> {
    return new Uint32Array(this.bytes(4 * count).slice().buffer);
  }

  /** Throws an error if something was not read. */
  end(): void {
    if (this.at !== this.stream.length) throw new Error(`${UNREADABLE}: there are more than it shows`);
  }
}

const UNREADABLE = "the numbers of this view cannot be read";
