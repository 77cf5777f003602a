/** The traits that the views of one model share: read, set, and sent in bursts. */

import type { View } from "./parts";
import type { Traits } from "./protocol";

/** The last changes of a burst are sent together. */
const SAVE_AFTER = 60;

export class SharedTraits {
  private saving: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly view: View) {
    view.onRemove(() => this.flush());
  }

  get<K extends keyof Traits>(trait: K): Traits[K] {
    return this.view.model.get(trait);
  }

  /** Sets what the front end may set; views in this page hear of it at once. */
  set<K extends "expanded" | "selected" | "query" | "shows_plumbing">(trait: K, value: Traits[K]): void {
    if (this.get(trait) === value) return;
    this.view.model.set(trait, value);
    this.saving ??= setTimeout(() => this.flush(), SAVE_AFTER);
  }

  listen(trait: keyof Traits, listener: () => void): void {
    const { model } = this.view;
    model.on(`change:${trait}`, listener);
    this.view.onRemove(() => model.off(`change:${trait}`, listener));
  }

  private flush(): void {
    if (this.saving === undefined) return;
    clearTimeout(this.saving);
    this.saving = undefined;
    this.view.model.save_changes();
  }
}
