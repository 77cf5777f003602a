/**
 * The selection, which all views of one `group` share: in the page by events of the document, so also without a kernel;
 * and through the kernel by the trait `selection`, also in other windows.
 */
import type { Item, LinkedTraits } from "../kernel/protocol";
import { SharedTraits } from "../kernel/shared_traits";
import { Listeners, type Model } from "../view";

const EVENT = "graphpatch:selection";

interface SelectionChange {
  group: string;
  items: readonly Item[];
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

  constructor(
    private readonly model: Model<Pick<LinkedTraits, "group" | "selection">>,
    onRemove: (undo: () => void) => void,
  ) {
    this.traits = new SharedTraits({ model, onRemove });
    const heard = (event: Event) => {
      const { group, items } = (event as CustomEvent<SelectionChange>).detail;
      if (group === model.get("group") && !areEqual(items, this.items)) model.set("selection", [...items]);
    };
    document.addEventListener(EVENT, heard);
    onRemove(() => document.removeEventListener(EVENT, heard));
    this.traits.listen("selection", () => this.listeners.notify());
  }

  get items(): readonly Item[] {
    return this.model.get("selection") ?? [];
  }

  /** Replaces the selection in all views. */
  set(items: readonly Item[]): void {
    if (areEqual(items, this.items)) return;
    this.traits.set("selection", [...items]);
    const detail: SelectionChange = { group: this.model.get("group"), items };
    document.dispatchEvent(new CustomEvent<SelectionChange>(EVENT, { detail }));
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

  /** Returns a function that removes the listener. */
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
