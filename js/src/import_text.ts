/** Runs JavaScript that is given as text; resolves to what it exports by default. */
export async function importText<T>(code: string): Promise<T> {
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  try {
    return ((await import(/* @vite-ignore */ url)) as { default: T }).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}
