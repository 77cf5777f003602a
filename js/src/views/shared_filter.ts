/**
 * The filter of scores that the views of one `group` share: the view with the scores decides which components pass,
 * and the others show only these. It uses events of the document, and works without a kernel.
 */
import type { Item, LinkedTraits } from "../kernel/protocol";
import { buttonElement, element, replaceChildren } from "../page/dom";
import { Listeners, type Model } from "../view";
import { isOfOneStack } from "./selection";

const [CHANGED, ASKED] = ["graphpatch:filter", "graphpatch:filter-asked"];

/** The items that pass a filter, and a text that describes the filter. */
interface FilterResult {
  items: readonly Item[];
  words: string;
}

interface FilterChange {
  group: string;
  left: FilterResult | null;
}

export class SharedFilter {
  result: FilterResult | null = null;
  private isOwn = false;
  private readonly listeners = new Listeners();

  constructor(
    private readonly model: Model<Pick<LinkedTraits, "group">>,
    onRemove: (undo: () => void) => void,
  ) {
    const heard = (event: Event) => {
      const { group, left } = (event as CustomEvent<FilterChange>).detail;
      if (group !== this.group || left === this.result) return;
      this.isOwn = false;
      this.result = left;
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

  /** Filters all views by scores of this one; `null` ends the filter, also that of another view. */
  set(left: FilterResult | null): void {
    if (left === this.result) return;
    this.isOwn = left !== null;
    this.result = left;
    this.send();
    this.listeners.notify();
  }

  /** Whether the filter is from another view. */
  get isFromOtherView(): boolean {
    return this.result !== null && !this.isOwn;
  }

  /** Whether an item passes the filter, at least in part. */
  keeps(item: Item): boolean {
    return this.result === null || this.result.items.some((one) => overlap(one, item));
  }

  /** Returns a function that removes the listener. */
  onChange(listener: () => void): () => void {
    return this.listeners.add(listener);
  }

  private get group(): string {
    return this.model.get("group");
  }

  private send(): void {
    document.dispatchEvent(
      new CustomEvent<FilterChange>(CHANGED, { detail: { group: this.group, left: this.result } }),
    );
  }
}

/** Describes the filter of another view, with a button that ends it. */
export function makeFilterNote(filter: SharedFilter, onRemove: (undo: () => void) => void): HTMLElement {
  const note = element("p", { class: "gp-line gp-filter-note gp-note", role: "status" });
  const show = () => {
    note.hidden = !filter.isFromOtherView;
    const end = buttonElement({}, "Show all");
    end.addEventListener("click", () => filter.set(null));
    replaceChildren(note, `Only ${filter.result?.words ?? ""}`, end);
  };
  onRemove(filter.onChange(show));
  show();
  return note;
}

/** Whether two items overlap: whatever both define is equal. */
function overlap(one: Item, other: Item): boolean {
  const shared = (["layer", "head", "position"] as const).filter((key) => one[key] !== null && other[key] !== null);
  if (shared.some((key) => one[key] !== other[key])) return false;
  if (one.name === null || other.name === null) return shared.length > 0;
  // Heads have no scores in a result over the residual stream: heads of its layers pass.
  if (other.head !== null && /\.resid_\w+$/.test(one.name)) {
    return one.layer !== null && one.layer === other.layer && isOfOneStack(one.name, other.name);
  }
  return one.name === other.name || (one.layer !== null && blockOf(one.name) === blockOf(other.name));
}

/** The block that computes a component: `layers[3].attn` for `layers[3].attn.heads[1].z` and `layers[3].attn_out`. */
function blockOf(name: string): string {
  return name.replace(/^((?:[^[\]@]+\.)?layers\[\d+\]\.[^.]+?)(?:_out|\..*)?$/, "$1");
}
