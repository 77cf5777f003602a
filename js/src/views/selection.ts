/**
 * What is selected: the one place for it in the page. Views of one `group` follow one another by events of the document,
 * so also without a kernel. With a kernel, the trait `selection` of all of them follows, also in other windows.
 */
import type { Item, LinkedTraits } from "../kernel/protocol";
import { SharedTraits } from "../kernel/shared_traits";
import { Listeners, type Model } from "../view";

const EVENT = "graphpatch:selection";

interface News {
  group: string;
  items: readonly Item[];
}

/** An item; the layer and the head are those in the name, unless they are given. */
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

/** Whether two names are of the same stack of layers: `encoder` and `decoder` are two; `null` may be of any. */
export function isOfOneStack(one: string | null, other: string | null): boolean {
  const [first, second] = [one, other].map((name) => (name?.includes("layers[") ? name.split("layers[", 1)[0] : null));
  return first === null || second === null || first === second;
}

export class Selection {
  private readonly listeners = new Listeners();
  private readonly traits: SharedTraits<Pick<LinkedTraits, "group" | "selection">>;

  constructor(
    private readonly model: Model<Pick<LinkedTraits, "group" | "selection">>,
    onRemove: (undo: () => void) => void,
  ) {
    this.traits = new SharedTraits({ model, onRemove });
    const heard = (event: Event) => {
      const { group, items } = (event as CustomEvent<News>).detail;
      if (group === model.get("group") && !isSame(items, this.items)) model.set("selection", [...items]);
    };
    document.addEventListener(EVENT, heard);
    onRemove(() => document.removeEventListener(EVENT, heard));
    this.traits.listen("selection", () => this.listeners.notify());
  }

  get items(): readonly Item[] {
    return this.model.get("selection") ?? [];
  }

  /** Selects these items instead of the ones before, in all views. */
  set(items: readonly Item[]): void {
    if (isSame(items, this.items)) return;
    this.traits.set("selection", [...items]);
    const detail: News = { group: this.model.get("group"), items };
    document.dispatchEvent(new CustomEvent<News>(EVENT, { detail }));
  }

  /** What a click does: selects an item alone; with Shift it is added, or taken out if it is selected. */
  click(item: Item, isMore: boolean): void {
    const others = this.items.filter((other) => !isSame([other], [item]));
    if (!isMore) this.set(this.items.length === 1 && others.length === 0 ? [] : [item]);
    else this.set(others.length < this.items.length ? others : [...others, item]);
  }

  has(item: Item): boolean {
    return this.items.some((other) => isSame([other], [item]));
  }

  /** Returns a function that removes the listener. */
  onChange(listener: () => void): () => void {
    return this.listeners.add(listener);
  }
}

const KEYS = ["name", "layer", "head", "position", "key"] as const;

function isSame(ones: readonly Item[], others: readonly Item[]): boolean {
  return (
    ones.length === others.length && ones.every((one, place) => KEYS.every((key) => one[key] === others[place]?.[key]))
  );
}
