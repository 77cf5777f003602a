import axe from "axe-core";

/** What axe finds in an element: each rule with the elements that break it. */
export async function accessibilityViolations(element: Element, options: axe.RunOptions = {}): Promise<unknown[]> {
  const { violations } = await axe.run(element, options);
  return violations.map(({ id, nodes }) => [id, nodes.map((node) => `${node.html} ${node.failureSummary}`)]);
}
