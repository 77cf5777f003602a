/**
 * The selection, which all views of one `group` share: in the page by events of the document, so also without a kernel;
 * and through the kernel by the trait `selection`, also in other windows.
 */
import type { Item, LinkedTraits } from "../kernel/protocol";
import { SharedTraits } from "../kernel/shared_traits";
import { makeOffer } from "../page/notices";
import { Listeners, type Model } from "../view";

interface Group {
  readonly model: Model<Pick<LinkedTraits, "group">>;
  onRemove(undo: () => void): void;
}

/** Calls `heard` with what a view of the group says in this page by the event `name`; returns what says it. */
function shareInPage<T>(name: string, { model, onRemove }: Group, heard: (value: T) => void): (value: T) => void {
  const listener = (event: Event) => {
    const { group, value } = (event as CustomEvent<{ group: string; value: T }>).detail;
    if (group === model.get("group")) heard(value);
  };
  document.addEventListener(name, listener);
  onRemove(() => document.removeEventListener(name, listener));
  return (value) => document.dispatchEvent(new CustomEvent(name, { detail: { group: model.get("group"), value } }));
}

/** Returns an item; the layer and the head are read from the name, unless they are given. */
export function itemOf(name: string | null, more: Partial<Item> = {}): Item {
  const layer = /^(?:[^[\]@]+\.)?layers\[(\d+)\]/.exec(name ?? "")?.[1];
  const head = /\.heads\[(\d+)\]/.exec(name ?? "")?.[1];
  return {
    name,
    layer: layer === undefined ? null : Number(layer),
    head: head === undefined ? null : Number(head),
    position: null,
    key: null,
    ...more,
  };
}

/** Whether two components are in the same stack of layers, such as `encoder` or `decoder`; `null` matches any. */
export function isOfOneStack(one: string | null, other: string | null): boolean {
  const [first, second] = [one, other].map((name) => (name?.includes("layers[") ? name.split("layers[", 1)[0] : null));
  return first === null || second === null || first === second;
}

export class Selection {
  private readonly listeners = new Listeners();
  private readonly traits: SharedTraits<Pick<LinkedTraits, "group" | "selection">>;
  private readonly say: (items: readonly Item[]) => void;

  constructor(
    private readonly model: Model<Pick<LinkedTraits, "group" | "selection">>,
    onRemove: (undo: () => void) => void,
  ) {
    this.traits = new SharedTraits({ model, onRemove });
    const group = { model: model as Group["model"], onRemove };
    this.say = shareInPage("graphpatch:selection", group, (items: readonly Item[]) => {
      if (!areEqual(items, this.items)) model.set("selection", [...items]);
    });
    this.traits.listen("selection", () => this.listeners.notify());
  }

  get items(): readonly Item[] {
    return this.model.get("selection") ?? [];
  }

  /** Replaces the selection in all views. */
  set(items: readonly Item[]): void {
    if (areEqual(items, this.items)) return;
    this.traits.set("selection", [...items]);
    this.say(items);
  }

  /** Selects an item on a click; with `isMore`, adds it to the selection or removes it. */
  click(item: Item, isMore: boolean): void {
    const others = this.items.filter((other) => !areEqual([other], [item]));
    if (!isMore) this.set(this.items.length === 1 && others.length === 0 ? [] : [item]);
    else this.set(others.length < this.items.length ? others : [...others, item]);
  }

  has(item: Item): boolean {
    return this.items.some((other) => areEqual([other], [item]));
  }

  onChange(listener: () => void): () => void {
    return this.listeners.add(listener);
  }
}

const KEYS = ["name", "layer", "head", "position", "key"] as const;

function areEqual(ones: readonly Item[], others: readonly Item[]): boolean {
  return (
    ones.length === others.length && ones.every((one, place) => KEYS.every((key) => one[key] === others[place]?.[key]))
  );
}

// -- The filter of scores that the views of one `group` share: the view with the scores decides which com ----------------

/** The items that pass a filter, and a text that describes the filter. */
interface FilterResult {
  items: readonly Item[];
  words: string;
}

export class SharedFilter {
  result: FilterResult | null = null;
  private isOwn = false;
  private readonly listeners = new Listeners();

  private readonly say: (result: FilterResult | null) => void;

  constructor(model: Model<Pick<LinkedTraits, "group">>, onRemove: (undo: () => void) => void) {
    const group = { model, onRemove };
    onRemove(() => this.isOwn && this.set(null));
    this.say = shareInPage("graphpatch:filter", group, (result: FilterResult | null) => {
      if (result === this.result) return;
      this.isOwn = false;
      this.result = result;
      this.listeners.notify();
    });
    const ask = shareInPage("graphpatch:filter-asked", group, () => this.isOwn && this.say(this.result));
    ask(null);
  }

  /** Filters all views by scores of this one; `null` ends the filter, also that of another view. */
  set(left: FilterResult | null): void {
    if (left === this.result) return;
    this.isOwn = left !== null;
    this.result = left;
    this.say(left);
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

  onChange(listener: () => void): () => void {
    return this.listeners.add(listener);
  }
}

/** Describes the filter of another view, with a button that ends it. */
export function makeFilterNote(filter: SharedFilter, onRemove: (undo: () => void) => void): HTMLElement {
  const note = makeOffer("Show all", () => filter.set(null));
  const show = () => note.say(filter.isFromOtherView ? `Only ${filter.result?.words ?? ""}` : "");
  onRemove(filter.onChange(show));
  show();
  return note.element;
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
