/**
 * The attention view: all heads as thumbnails, one head (or several, overlaid) large, and the tokens. Hovering previews
 * a head or token; a click selects it in all views of the graph. When the patches change, the kernel runs the model
 * with them, and the patterns without and with them are shown side by side.
 */
import type { AttentionLayer, AttentionRun, AttentionTraits, Item, PatchState } from "../kernel/protocol";
import { buttonElement, checkbox, element, replaceChildren, setAttribute, setOptions } from "../page/dom";
import { formatWithError, visibleToken } from "../page/text";
import { describePosition, HeatmapFigure, type ResultOptions } from "../plots/heatmap";
import { cssColor, largestMagnitude, type Rgb, type Scale } from "../plots/matrix";
import { type Linked, listen, type Part, saveChanges } from "../view";
import { type HeadIndex, type Mode, type Pattern, Patterns } from "./attention_data";
import { type MakeView, makeActions, makePatchStrip, makeUpdates, showTraits } from "./linked_view";
import { isOfOneStack, itemOf, makeFilterNote } from "./selection";
import { Thumbnails } from "./thumbnails";
import { type Side, type TokenImage, TokenStrips } from "./token_strips";

const MODES: readonly { mode: Mode; name: string; title: string }[] = [
  { mode: "pattern", name: "Pattern", title: "The weights of attention" },
  { mode: "values", name: "Value-weighted", title: "The weights times the lengths of the value vectors" },
  { mode: "difference", name: "Difference", title: "With the patches minus without" },
];
/** Colors of overlaid heads, which color-blind readers can distinguish (Okabe and Ito). */
const HUES: readonly Rgb[] = [
  [0, 114, 178],
  [213, 94, 0],
  [0, 158, 115],
  [204, 121, 167],
  [230, 159, 0],
  [86, 180, 233],
];
const ROW_NEEDS_KERNEL = "Another row of the batch needs the kernel.";
const NEEDS_KERNEL = "Only a smaller picture of this head is here; its weights need the kernel.";
const WIDE_WIDTH = 900;
/** With more keys, colors are logarithmic at first: weights of one in hundreds would all be black. */
const MANY_KEYS = 64;
/** In CSS pixels: the gap between two patterns, the width of labels, the size of one of two patterns. */
const [GAP, LABELS, MIN_SIZE, MAX_SIZE] = [20, 70, 180, 330];

export const makeAttentionView: MakeView<AttentionTraits> = async (view, place, onError) => {
  const shown = new AttentionView(view);
  place(shown);
  const read = () => Patterns.decode(view.model.get("attention"), view.model.get("cells"));
  await showTraits(view, ["attention", "cells"], read, (patterns) => shown.show(patterns), onError);
};

class AttentionView implements Part {
  readonly element: HTMLElement;
  private patterns: Patterns | null = null;
  private mode: Mode = "pattern";
  private isCommonScale = false;
  private isMean = false;
  private isLog = false;
  /** The end of the color scale of all heads; `null`: each has its own scale. */
  private limit: number | null = null;
  private previewedHead: HeadIndex | null = null;
  private hovered: { query: number | null; key: number | null } | null = null;
  private readonly thumbnails: Thumbnails;
  private readonly strips: TokenStrips;
  private readonly large = element("div.gp-beside.gp-large-heads");
  private readonly title = element("h3.gp-muted.gp-attention-title");
  private readonly modes = element("div.gp-line.gp-tight.gp-button-group", {
    role: "group",
    "aria-label": "What is shown",
  });
  private readonly rowChoice = element("select.gp-field", { "aria-label": "Row of the batch" });
  private readonly mean = checkbox("Mean of the selected heads", false, (isChecked) => {
    this.isMean = isChecked;
    this.drawLarge();
  });
  private readonly log = checkbox("Logarithmic colors", false, (isChecked) => {
    this.isLog = isChecked;
    this.draw();
  });
  private readonly status = element("p.gp-note", { role: "status", hidden: true });
  private readonly panel: HTMLElement;
  private figures: HeatmapFigure[] = [];
  private images: TokenImage[] = [];

  constructor(private readonly view: Linked<AttentionTraits>) {
    const { kernel, model } = view;
    this.thumbnails = new Thumbnails({
      preview: (place) => {
        this.previewedHead = place;
        this.drawLarge();
      },
      choose: (place, isMore) => this.chooseHead(place, isMore),
      chooseLayer: (layer) => this.chooseLayer(layer),
      describe: (place) => this.nameOf(place),
    });
    this.strips = new TokenStrips({
      preview: (position, side) => {
        this.hovered = position === null ? null : this.tokenAt(position, side);
        this.showTokens();
      },
      choose: (position, side, isMore) => this.chooseToken(position, side, isMore),
    });
    const updates = makeUpdates(
      view,
      () => model.get("attention").patches,
      () => kernel.ask("update", {}),
      this.large,
    );
    const common = checkbox("One scale for all heads", false, (isChecked) => {
      this.isCommonScale = isChecked;
      this.draw();
    });
    this.rowChoice.addEventListener("change", () => this.chooseRow());
    const head = element("div.gp-line", this.modes, this.rowChoice, common, this.log, this.mean);
    this.panel = element("div.gp-stack.gp-attention-side", this.title, this.large, this.strips.element);
    this.element = element(
      "section.gp-stack.gp-attention",
      { role: "region", "aria-label": "Attention" },
      head,
      makeActions(view).element,
      makePatchStrip(view).element,
      updates.element,
      this.status,
      makeFilterNote(view.filter, view.onRemove),
      element("div.gp-attention-body", this.thumbnails.element, this.panel),
    );
    this.listen();
  }

  private listen(): void {
    const { view } = this;
    let width = view.root.clientWidth;
    const observer = new ResizeObserver(() => {
      if (view.root.clientWidth === width) return;
      width = view.root.clientWidth;
      this.draw();
    });
    observer.observe(view.root);
    view.onRemove(() => observer.disconnect());
    // The colors of overlaid heads start at the background color.
    const themes = new MutationObserver(() => this.drawLarge());
    themes.observe(view.root, { attributeFilter: ["data-gp-theme"] });
    view.onRemove(() => themes.disconnect());
    view.onRemove(view.filter.onChange(() => this.drawThumbnails()));
    listen(view, "change:session", () => this.draw());
    view.onRemove(view.kernel.onChange(() => this.showRowChoice()));
    this.showRowChoice();
    view.onRemove(
      view.selection.onChange(() => {
        this.drawLarge();
        this.mark();
      }),
    );
  }

  show(patterns: Patterns): void {
    const box = this.log.querySelector("input");
    if (this.patterns === null && box !== null)
      box.checked = this.isLog = patterns.about.layers.some(({ full }) => full[1] > MANY_KEYS);
    this.patterns = patterns;
    const { images, picture } = patterns.about;
    this.images = picture === null ? [] : images.map((image) => ({ ...image, picture }));
    if (this.mode === "difference" && !patterns.has("patched")) this.mode = "pattern";
    if (this.mode === "values" && !patterns.hasLengths) this.mode = "pattern";
    this.showControls(patterns);
    this.draw();
  }

  private showStatus(text: string): void {
    this.status.textContent = text;
    this.status.hidden = text === "";
  }

  private chooseRow(): void {
    this.view.model.set("row", Number(this.rowChoice.value));
    if (!saveChanges(this.view.model)) this.showStatus(ROW_NEEDS_KERNEL);
  }

  /** Without a kernel, only the row that was sent can be shown. */
  private showRowChoice(): void {
    const isLost = this.view.kernel.state === "lost";
    this.rowChoice.disabled = isLost;
    this.rowChoice.title = isLost ? ROW_NEEDS_KERNEL : "";
  }

  private headItem(place: HeadIndex, more: Partial<Item> = {}, part = "z"): Item {
    return itemOf(`${this.layer(place).name}.heads[${place[1]}].${part}`, more);
  }

  private layer(place: HeadIndex): AttentionLayer {
    if (this.patterns === null) throw new Error("nothing is shown yet");
    return this.patterns.layer(place);
  }

  /** The heads of the selected items, without duplicates. */
  private selectedHeads(): HeadIndex[] {
    const layers = this.patterns?.about.layers ?? [];
    const found = new Map<string, HeadIndex>();
    for (const { name, head } of this.view.selection.items) {
      const layer = layers.findIndex((one) => name?.startsWith(`${one.name}.`));
      const isThere = head !== null && head < (layers[layer]?.heads ?? 0);
      if (isThere) found.set(`${layer} ${head}`, [layer, head]);
    }
    return [...found.values()];
  }

  /** The heads that are shown large: the previewed one, else the selected ones, else the first head. */
  private largeHeads(): HeadIndex[] {
    if (this.previewedHead !== null) return [this.previewedHead];
    const chosen = this.selectedHeads();
    return chosen.length > 0 ? chosen : [[0, 0]];
  }

  private chooseHead(place: HeadIndex, isMore: boolean): void {
    const { query: position } = this.pinnedTokens();
    this.view.selection.click(this.headItem(place, { position: isMore ? position : null }), isMore);
  }

  private chooseLayer(layer: number): void {
    const { heads } = this.layer([layer, 0]);
    this.view.selection.set(Array.from({ length: heads }, (_, head) => this.headItem([layer, head])));
  }

  /** Whether the large heads are of cross-attention. */
  private get isCross(): boolean {
    const [first] = this.largeHeads();
    return first !== undefined && this.layer(first).is_cross;
  }

  /** A token as a query and as a key, which are the same token except in cross-attention. */
  private tokenAt(position: number, side: Side): { query: number | null; key: number | null } {
    const isOf = (other: Side) => (this.isCross && side !== other ? null : position);
    return { query: isOf("query"), key: isOf("key") };
  }

  private pinnedTokens(): { query: number | null; key: number | null } {
    const last = this.view.selection.items.findLast(({ position, key }) => position !== null || key !== null);
    const query = last?.position ?? null;
    return { query, key: last?.key ?? (this.isCross ? null : query) };
  }

  /**
   * Pins a token: selects the large heads at this position, or in cross-attention their weights for a key; a second
   * click unpins it. `isMore`: adds it to the pinned tokens.
   */
  private chooseToken(position: number, side: Side, isMore: boolean): void {
    const { query, key } = this.tokenAt(position, side);
    const at = (place: HeadIndex) =>
      query === null ? this.headItem(place, { key }, "pattern") : this.headItem(place, { position });
    const places = this.largeHeads();
    const items = places.map(at);
    const { selection } = this.view;
    const isPinned = items.every((item) => selection.has(item));
    const others = selection.items.filter((one) => (one.position ?? one.key) !== null && !includesItem(one, items));
    if (isMore && !isPinned) selection.set([...others, ...items]);
    else if (isMore && others.length > 0) selection.set(others);
    else selection.set(isPinned ? places.map((place) => this.headItem(place)) : items);
  }

  private chooseCell(position: number, key: number, isMore: boolean): void {
    const [place] = this.largeHeads().slice(-1);
    if (place) this.view.selection.click(this.headItem(place, { position, key }, "pattern"), isMore);
  }

  private nameOf(place: HeadIndex): string {
    return `Layer ${this.layer(place).title}, head ${place[1]}`;
  }

  private showControls(patterns: Patterns): void {
    const buttons = MODES.map(({ mode, name, title }) => {
      const isOff = mode === "difference" ? !patterns.has("patched") : mode === "values" && !patterns.hasLengths;
      const why = mode === "difference" ? "Choose a patch first" : "The values of this model were not found";
      const button = buttonElement(
        { title: isOff ? why : title, disabled: isOff, "aria-pressed": String(mode === this.mode) },
        name,
      );
      button.addEventListener("click", () => {
        this.mode = mode;
        for (const [place, other] of buttons.entries())
          setAttribute(other, "aria-pressed", MODES[place]?.mode === mode);
        this.draw();
      });
      return button;
    });
    replaceChildren(this.modes, ...buttons);
    const { rows } = patterns.about;
    this.rowChoice.hidden = rows < 2;
    const names = Array.from({ length: rows }, (_, row) => [row, `Row ${row}`] as const);
    setOptions(this.rowChoice, [[-1, `Mean of ${rows} rows`], ...names], this.view.model.get("row"));
  }

  private draw(): void {
    this.drawThumbnails();
    this.drawLarge();
  }

  private get lastRun(): AttentionRun {
    return this.patterns?.has("patched") ? "patched" : "clean";
  }

  /** The colors of some heads, the same small and large, without and with patches. */
  private scaleOf(places: readonly HeadIndex[]): Scale {
    const { patterns, mode } = this;
    const runs = mode === "difference" ? (["patched"] as const) : (patterns?.about.runs ?? []);
    const all = places.flatMap((place) => runs.map((run) => patterns?.pattern(place, run, mode).values ?? []));
    const high = this.limit ?? Math.max(...all.map(largestMagnitude));
    if (mode === "difference") return { map: "diverging", low: -high, high };
    const keys = places[0] === undefined ? 1 : this.layer(places[0]).full[1];
    const low = this.isLog ? high / (10 * keys) : 0;
    return { map: "sequential", low, high, isLog: this.isLog };
  }

  /** The patches on a head; for `null`, those on all heads of the layer. */
  private patchesOf(layer: number, head: number | null): PatchState[] {
    const { name } = this.layer([layer, 0]);
    const isOn = ({ path }: PatchState) => path.startsWith(`${name}.`) && itemOf(path).head === head;
    return this.view.model.get("session").patches.filter((patch) => patch.is_enabled && isOn(patch));
  }

  private drawThumbnails(): void {
    const { patterns } = this;
    if (patterns === null) return;
    const width = this.view.root.clientWidth || WIDE_WIDTH;
    const isBeside = width >= WIDE_WIDTH;
    setAttribute(this.element, "data-narrow", !isBeside);
    const shown = patterns.about.layers.map(({ heads }, layer) =>
      Array.from({ length: heads }, (_, head) => patterns.pattern([layer, head], this.lastRun, this.mode)),
    );
    // Differences are only comparable on one scale.
    const isCommon = this.isCommonScale || this.mode === "difference";
    this.limit = isCommon ? largestMagnitude(shown.flat().map(({ values }) => largestMagnitude(values))) : null;
    this.thumbnails.draw(shown, patterns, isBeside ? Math.min(620, width / 2) : width, {
      scaleOf: (place) => this.scaleOf([place]),
      patchesOf: (layer, head) =>
        this.patchesOf(layer, head)
          .map(({ number }) => `#${number}`)
          .join(" "),
      isKept: (place) => this.view.filter.keeps(this.headItem(place)),
    });
    this.mark();
  }

  private mark(): void {
    const chosen = this.selectedHeads();
    const { items } = this.view.selection;
    const layers = this.patterns?.about.layers ?? [];
    const marked = [...layers.keys()].filter((at) => items.some((item) => isOfLayer(item, layers[at])));
    this.thumbnails.mark(chosen, (at) => cssColor(hue(at)), new Set(marked));
  }

  private drawLarge(): void {
    const { patterns } = this;
    if (patterns === null) return;
    const places = this.largeHeads();
    this.mean.hidden = this.selectedHeads().length < 2;
    replaceChildren(this.title, ...this.titleParts(places));
    const runs: AttentionRun[] = this.mode === "difference" ? ["patched"] : patterns.about.runs;
    this.figures = [];
    const boxes = runs.map((run) => {
      const caption = runs.length > 1 ? element("p.gp-run-title", run === "clean" ? "Clean" : "Patched") : null;
      return element("div.gp-large-head", caption, this.figureOf(places, run, runs.length));
    });
    setAttribute(this.large, "data-beside", runs.length > 1 && this.sideBySideSize !== null);
    replaceChildren(this.large, ...boxes);
    this.showTokens();
    this.showCell();
    if (this.previewedHead === null) void this.loadMissing(places);
  }

  /** Requests the full patterns of the large heads. */
  private async loadMissing(places: readonly HeadIndex[]): Promise<void> {
    const { patterns } = this;
    const missing = places.filter((place) => !patterns?.pattern(place, "clean", "pattern").isFull);
    if (patterns === null || missing.length === 0) return;
    const found = await Promise.all(missing.map((place) => patterns.loadFull(place, this.view.kernel)));
    if (this.patterns !== patterns) return;
    if (found.every(Boolean)) {
      if (this.previewedHead === null) this.drawLarge();
    } else this.showStatus(NEEDS_KERNEL);
  }

  private titleParts(places: readonly HeadIndex[]): (HTMLElement | string)[] {
    const [only] = places;
    if (places.length === 1 && only) {
      const marks = this.patchesOf(...only).map(({ number, kind }) => element("mark", `#${number} ${kind}`));
      return [this.nameOf(only), ...marks];
    }
    if (this.isMean) return [`Mean of ${places.map((place) => this.nameOf(place)).join("; ")}`];
    return places.flatMap((place, at) => {
      const patch = element("span.gp-hue", { "aria-hidden": true });
      patch.style.backgroundColor = cssColor(hue(at));
      return [element("span.gp-pair.gp-hue-name", patch, this.nameOf(place))];
    });
  }

  private figureOf(places: readonly HeadIndex[], run: AttentionRun, count: number): HTMLElement {
    const { patterns } = this;
    const [first] = places;
    if (patterns === null || first === undefined) return element("div");
    const found = places.map((place) => patterns.pattern(place, run, this.mode));
    const [pattern] = found;
    const isAlike = found.every(({ values }) => values.length === pattern?.values.length);
    if (pattern === undefined || !isAlike) {
      return element("p.gp-note", "These heads have patterns of different sizes: select heads of one kind.");
    }
    const layer = this.layer(first);
    const combined = this.combined(found, pattern);
    const scale = this.scaleOf(places);
    const label = (side: "queries" | "keys") => {
      const texts = (patterns.about.tokens[layer[side]] ?? []).map((text) => visibleToken(text));
      const noun = side === "queries" ? "query" : "key";
      return { texts: pattern.isFull ? texts : [], describe: (at: number) => `${noun} ${at} ${texts[at] ?? ""}` };
    };
    const [rowLabels, columnLabels] = [label("queries"), label("keys")];
    const side = count > 1 ? (this.sideBySideSize ?? MAX_SIZE) : 460;
    const box = { width: side, height: side };
    const options: ResultOptions = {
      scale,
      name: { pattern: "weight", values: "weight × length of the value", difference: "patched − clean" }[this.mode],
      missing: null,
      rowTitle: "query ↓",
      columnTitle: "key →",
      rowLabels: rowLabels.texts.length > 0 ? rowLabels : null,
      columnLabels: columnLabels.texts.length > 0 ? columnLabels : null,
      describe: (row, column) => {
        const query = describePosition("query", row, pattern.rows, layer.full[0], rowLabels.texts, "queries");
        return `${query}, ${describePosition("key", column, pattern.columns, layer.full[1], columnLabels.texts)}`;
      },
      onSelect: (row, column, isMore) => {
        if (pattern.isFull) this.chooseCell(row, column, isMore);
      },
      onHover: (cell) => {
        this.hovered = cell === null || !pattern.isFull ? null : { query: cell[0], key: cell[1] };
        this.showTokens();
      },
      valueText: (row, column) => this.format(combined, combined.values[row * combined.columns + column] ?? 0),
      box,
      ...(found.length > 1 && !this.isMean ? { overlay: this.mixed(found, places, scale.high) } : {}),
    };
    const source = { full: layer.full, reduced: pattern.isFull ? null : this.reducedText };
    const figure = new HeatmapFigure(source, combined, {
      title: `${places.map((place) => this.nameOf(place)).join("; ")}${count > 1 ? `, ${run}` : ""}`,
      result: options,
    });
    this.figures.push(figure);
    return figure.element;
  }

  /** What the cells of a reduced pattern are. */
  private get reducedText(): string {
    if (this.mode === "difference")
      return "each cell is the largest patched weight of a block minus the largest clean one";
    return this.mode === "values"
      ? "each cell is the largest weight of a block times the longest value"
      : "each cell is the largest of a block";
  }

  private format({ error }: Pattern, value: number): string {
    return formatWithError(value, error(value));
  }

  /** The size of one of two patterns side by side; `null`: there is not enough space. */
  private get sideBySideSize(): number | null {
    const room = (this.panel.clientWidth - GAP) / 2 - LABELS;
    return room < MIN_SIZE ? null : Math.min(MAX_SIZE, room);
  }

  /** Combines several patterns: their mean, or if they are overlaid the largest weight of each cell. */
  private combined(found: readonly Pattern[], first: Pattern): Pattern {
    if (found.length < 2) return first;
    const error = (value: number) => Math.max(...found.map((one) => one.error(value)));
    return { ...first, values: this.isMean ? meanOf(found) : largestByMagnitude(found), error };
  }

  /** Overlays the heads, each in its own color on the background color. */
  private mixed(
    found: readonly Pattern[],
    places: readonly HeadIndex[],
    most: number,
  ): NonNullable<ResultOptions["overlay"]> {
    const isDark = getComputedStyle(this.view.root).colorScheme === "dark";
    const ground: Rgb = isDark ? [24, 26, 30] : [255, 255, 255];
    const color = (index: number): Rgb => {
      const parts = found.map(({ values }) => (most > 0 ? Math.min(1, Math.abs(values[index] ?? 0) / most) : 0));
      const total = parts.reduce((sum, part) => sum + part, 0);
      const strength = Math.min(1, Math.max(...parts));
      const mix = (channel: 0 | 1 | 2) => {
        const own = parts.reduce((sum, part, at) => sum + part * hue(at)[channel], 0) / (total || 1);
        return Math.round(ground[channel] + (own - ground[channel]) * strength);
      };
      return [mix(0), mix(1), mix(2)];
    };
    const names = this.titleParts(places);
    const strongest = `${this.mode === "difference" ? "strongest, up or down" : "strongest"}: ${most.toPrecision(3)}`;
    return { color, legend: element("span.gp-line.gp-tight.gp-legend.gp-muted", ...names, strongest) };
  }

  private showTokens(): void {
    const { patterns } = this;
    const places = this.largeHeads();
    const [first] = places;
    if (patterns === null || first === undefined) return;
    const found = places.map((place) => patterns.pattern(place, this.lastRun, this.mode));
    const [pattern] = found;
    if (pattern === undefined || found.some(({ values }) => values.length !== pattern.values.length)) return;
    const layer = this.layer(first);
    const { query, key } = this.pinnedTokens();
    const [rows, columns] = layer.full;
    const { hovered: pointed } = this;
    this.strips.show({
      pattern: this.combined(found, pattern),
      queries: patterns.about.tokens[layer.queries] ?? [],
      keys: patterns.about.tokens[layer.keys] ?? [],
      run: this.mode === "pattern" && patterns.has("patched") ? "patched: " : "",
      patched: new Set(places.flatMap((place) => this.patchesOf(...place).flatMap(patchedPositions))),
      image: layer.image === null ? null : (this.images[layer.image] ?? null),
      query: inRange(pointed?.query ?? query, rows),
      key: inRange(pointed?.key ?? key, columns),
    });
  }

  /** Marks the selected weight, or the selected query. */
  private showCell(): void {
    const last = this.view.selection.items.at(-1);
    const [place] = this.largeHeads().slice(-1);
    const isWhole = place && this.patterns?.pattern(place, this.lastRun, this.mode).isFull;
    const [queries, keys] = place ? this.layer(place).full : [0, 0];
    const isWeight = place && last?.name === this.headItem(place, {}, "pattern").name;
    const row = isWhole ? inRange(last?.position ?? null, queries) : null;
    const column = isWhole && isWeight ? inRange(last?.key ?? null, keys) : null;
    for (const figure of this.figures) figure.markSelected(row === null && column === null ? [] : [[row, column]]);
  }
}

function meanOf(patterns: readonly Pattern[]): Float32Array {
  const [first] = patterns;
  return Float32Array.from(first?.values ?? [], (_, at) => {
    return patterns.reduce((sum, { values }) => sum + (values[at] ?? 0), 0) / patterns.length;
  });
}

/** The positions that a patch names by their numbers. */
function patchedPositions({ positions }: PatchState): number[] {
  return positions !== null && /^\d+(, *\d+)*$/.test(positions) ? positions.split(",").map(Number) : [];
}

function hue(at: number): Rgb {
  return HUES[at % HUES.length] ?? [0, 0, 0];
}

function inRange(position: number | null, count: number): number | null {
  return position !== null && position < count ? position : null;
}

/** For each cell, the value with the largest magnitude. */
function largestByMagnitude(patterns: readonly Pattern[]): Float32Array {
  const [first, ...others] = patterns;
  const found = Float32Array.from(first?.values ?? []);
  for (const { values } of others) {
    for (let at = 0; at < found.length; at++) {
      const value = values[at] ?? 0;
      if (Math.abs(value) > Math.abs(found[at] ?? 0)) found[at] = value;
    }
  }
  return found;
}

function isOfLayer({ name, layer }: Item, attention: AttentionLayer | undefined): boolean {
  return attention !== undefined && layer === attention.layer && isOfOneStack(name, attention.name);
}

function includesItem(item: Item, items: readonly Item[]): boolean {
  return items.some(({ name, position, key }) => item.name === name && item.position === position && item.key === key);
}
