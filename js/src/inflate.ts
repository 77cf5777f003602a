/** Returns the text that a zlib stream holds. */
export async function inflated(data: DataView): Promise<string> {
  return new TextDecoder().decode(await inflatedBytes(data));
}

/** Returns the bytes that a zlib stream holds, in a buffer of their own. */
export async function inflatedBytes(data: DataView): Promise<Uint8Array<ArrayBuffer>> {
  const bytes = new Uint8Array(data.buffer as ArrayBuffer, data.byteOffset, data.byteLength);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
