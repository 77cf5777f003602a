/** Traits that the views of one model share: those set here are sent to the kernel in bursts. */

import { listen, type Model, saveChanges } from "../view";
import type { Traits } from "./protocol";

/** The last changes of a burst are sent together. */
const SAVE_AFTER = 60;

export class SharedTraits<T extends object = Traits> {
  private saving: ReturnType<typeof setTimeout> | undefined;
  /** Values that were set here and are not sent yet. The host's echo of earlier values would replace them. */
  private readonly unsent = new Map<keyof T, unknown>();

  constructor(private readonly view: { readonly model: Model<T>; onRemove(undo: () => void): void }) {
    view.onRemove(() => this.flush());
  }

  get<K extends keyof T>(trait: K): T[K] {
    return this.view.model.get(trait);
  }

  /** Sets a trait; other views in this page are notified at once. */
  set<K extends keyof T>(trait: K, value: T[K]): void {
    if (this.get(trait) === value) return;
    this.unsent.set(trait, value);
    this.view.model.set(trait, value);
    this.saving ??= setTimeout(() => this.flush(), SAVE_AFTER);
  }

  listen(trait: keyof T & string, listener: () => void): void {
    listen(this.view, `change:${trait}`, () => {
      if (!this.restores(trait)) listener();
    });
  }

  /** Sets a trait back to the value set here, if an older one has arrived meanwhile; listeners are notified of that. */
  private restores(trait: keyof T): boolean {
    const own = this.unsent.get(trait);
    if (!this.unsent.has(trait) || this.get(trait) === own) return false;
    this.view.model.set(trait, own as T[typeof trait]);
    return true;
  }

  private flush(): void {
    if (this.saving === undefined) return;
    clearTimeout(this.saving);
    this.saving = undefined;
    this.unsent.clear();
    saveChanges(this.view.model); // without a connection, what was set is shown in this page only
  }
}
