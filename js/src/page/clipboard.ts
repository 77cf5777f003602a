/** Copies text, in hosts that allow it and in frames that do not. */

/** Resolves to whether the text is in the clipboard now. */
export async function copyText(text: string, near: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text, near);
  }
}

/** The old way: needs a selection, and gives the keyboard's focus back. */
function copySelected(text: string, near: HTMLElement): boolean {
  const scope = near.getRootNode() as Document | ShadowRoot;
  const focused = scope.activeElement;
  const area = document.createElement("textarea");
  area.className = "gp-unseen";
  area.readOnly = true;
  area.tabIndex = -1;
  area.setAttribute("aria-hidden", "true");
  area.value = text;
  // Inside what has the focus now: an open dialog keeps it.
  near.append(area);
  area.select();
  let isCopied = false;
  try {
    isCopied = document.execCommand("copy");
  } catch {
    isCopied = false;
  }
  area.remove();
  if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  return isCopied;
}
