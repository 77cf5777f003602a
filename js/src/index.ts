/** What anywidget loads: puts the parts of a view together. */

import type { Model } from "./parts";
import { decodeSkeleton } from "./skeleton";

export default {
  async render({ model, el }: { model: Model; el: HTMLElement }): Promise<void> {
    el.classList.add("gp-root");
    el.dataset.lmSuppressShortcuts = "true";
    await decodeSkeleton(model.get("skeleton"));
  },
};
