/**
 * The filter of scores that the views of one `group` share: the view with the scores says which components it leaves,
 * and the others show only these. By events of the document, so also without a kernel.
 */
import type { Item, LinkedTraits } from "../kernel/protocol";
import { buttonElement, element, replaceChildren } from "../page/dom";
import { Listeners, type Model } from "../view";
import { isOfOneStack } from "./selection";

const [CHANGED, ASKED] = ["graphpatch:filter", "graphpatch:filter-asked"];

/** What a filter leaves, and what it is in words. */
interface Left {
  items: readonly Item[];
  words: string;
}

interface News {
  group: string;
  left: Left | null;
}

export class SharedFilter {
  left: Left | null = null;
  private isOwn = false;
  private readonly listeners = new Listeners();

  constructor(
    private readonly model: Model<Pick<LinkedTraits, "group">>,
    onRemove: (undo: () => void) => void,
  ) {
    const heard = (event: Event) => {
      const { group, left } = (event as CustomEvent<News>).detail;
      if (group !== this.group || left === this.left) return;
      this.isOwn = false;
      this.left = left;
      this.listeners.notify();
    };
    const asked = (event: Event) => {
      if (this.isOwn && (event as CustomEvent<string>).detail === this.group) this.send();
    };
    document.addEventListener(CHANGED, heard);
    document.addEventListener(ASKED, asked);
    onRemove(() => {
      if (this.isOwn) this.set(null);
      document.removeEventListener(CHANGED, heard);
      document.removeEventListener(ASKED, asked);
    });
    document.dispatchEvent(new CustomEvent(ASKED, { detail: this.group }));
  }

  /** Filters all views by scores of this one; `null` ends that, also for those of another view. */
  set(left: Left | null): void {
    if (left === this.left) return;
    this.isOwn = left !== null;
    this.left = left;
    this.send();
    this.listeners.notify();
  }

  /** Whether the view with the scores is another one. */
  get isOfOther(): boolean {
    return this.left !== null && !this.isOwn;
  }

  /** Whether something is left of what an item means. */
  leaves(item: Item): boolean {
    return this.left === null || this.left.items.some((one) => meet(one, item));
  }

  /** Returns a function that removes the listener. */
  onChange(listener: () => void): () => void {
    return this.listeners.add(listener);
  }

  private get group(): string {
    return this.model.get("group");
  }

  private send(): void {
    document.dispatchEvent(new CustomEvent<News>(CHANGED, { detail: { group: this.group, left: this.left } }));
  }
}

/** The words of a filter of another view, and a button that ends it. */
export function makeFilterNote(filter: SharedFilter, onRemove: (undo: () => void) => void): HTMLElement {
  const note = element("p", { class: "gp-line gp-filter-note gp-note", role: "status" });
  const show = () => {
    note.hidden = !filter.isOfOther;
    const end = buttonElement({}, "Show all");
    end.addEventListener("click", () => filter.set(null));
    replaceChildren(note, `Only ${filter.left?.words ?? ""}`, end);
  };
  onRemove(filter.onChange(show));
  show();
  return note;
}

/** Whether what is left and another item mean, at least in part, the same: what both say is equal. */
function meet(one: Item, other: Item): boolean {
  const shared = (["layer", "head", "position"] as const).filter((key) => one[key] !== null && other[key] !== null);
  if (shared.some((key) => one[key] !== other[key])) return false;
  if (one.name === null || other.name === null) return shared.length > 0;
  // Heads have no scores of their own in a result over the stream: those of its layers are left.
  if (other.head !== null && /\.resid_\w+$/.test(one.name)) {
    return one.layer !== null && one.layer === other.layer && isOfOneStack(one.name, other.name);
  }
  return one.name === other.name || (one.layer !== null && blockOf(one.name) === blockOf(other.name));
}

/** What computes a component: `layers[3].attn` for `layers[3].attn.heads[1].z` and for `layers[3].attn_out`. */
function blockOf(name: string): string {
  return name.replace(/^((?:[^[\]@]+\.)?layers\[\d+\]\.[^.]+?)(?:_out|\..*)?$/, "$1");
}
