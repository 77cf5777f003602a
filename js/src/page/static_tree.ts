/** While a view lives, the static tree that the kernel put out beside it is not shown. */

/** Returns what shows it again. */
export function hideStaticTree(modelId: string, root: Element): () => void {
  const name = `.gp-static-${CSS.escape(modelId)}`;
  // With the output around it, so that no gap stays.
  const around = [".jp-OutputArea-child", ".output_area", ".output-container", ".cell-output-display"];
  const text = `${name} { display: none !important; }
${around.map((output) => `${output}:has(${name}):not(:has(.gp-root))`).join(", ")} { display: none !important; }`;
  const scope = root.getRootNode();
  const places = scope instanceof ShadowRoot ? [document.head, scope] : [document.head];
  const styles = places.map((place) => {
    const style = document.createElement("style");
    style.textContent = text;
    place.append(style);
    return style;
  });
  return () => {
    for (const style of styles) style.remove();
  };
}
