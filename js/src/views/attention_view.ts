/**
 * The attention view: all heads as thumbnails, one head (or several, overlaid) large, and the tokens. Hovering previews
 * a head or token; a click selects it in all views of the graph. When the patches change, the kernel runs the model
 * with them, and the patterns without and with them are shown side by side.
 */
import type { AttentionLayer, AttentionRun, AttentionTraits, Item, PatchState } from "../kernel/protocol";
import { buttonElement, checkbox, element, refresh, replaceChildren, setAttribute, setOptions } from "../page/dom";
import { formatWithError, visibleToken } from "../page/text";
import { describePosition, type HeatmapFigure, makeFigure, type ResultOptions } from "../plots/heatmap";
import { cssColor, largestMagnitude, type Rgb, type Scale } from "../plots/matrix";
import { follow, saveChanges } from "../view";
import { type HeadIndex, type Mode, type Pattern, Patterns } from "./attention_data";
import { type MakeView, makeActions, makePatchStrip, makeUpdates, showTraits } from "./linked_view";
import { isOfOneStack, itemOf, makeFilterNote } from "./selection";
import { makeThumbnails } from "./thumbnails";
import { makeTokenStrips, type Side, type TokenImage } from "./token_strips";

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
/** What the cells of a reduced pattern are. */
const REDUCED: Record<Mode, string> = {
  pattern: "each cell is the largest of a block",
  values: "each cell is the largest weight of a block times the longest value",
  difference: "each cell is the largest patched weight of a block minus the largest clean one",
};
const ROW_NEEDS_KERNEL = "Another row of the batch needs the kernel.";
const NEEDS_KERNEL = "Only a smaller picture of this head is here; its weights need the kernel.";
const WIDE_WIDTH = 900;
/** With more keys, colors are logarithmic at first: weights of one in hundreds would all be black. */
const MANY_KEYS = 64;
/** In CSS pixels: the gap between two patterns, the width of labels, the size of one of two patterns. */
const [GAP, LABELS, MIN_SIZE, MAX_SIZE] = [20, 70, 180, 330];

type Tokens = { query: number | null; key: number | null };

export const makeAttentionView: MakeView<AttentionTraits> = async (view, place, onError) => {
  const { filter, kernel, model, root, selection } = view;
  let patterns: Patterns | null = null;
  let mode: Mode = "pattern";
  /** The end of the color scale of all heads; `null`: each has its own scale. */
  let limit: number | null = null;
  let previewed: HeadIndex | null = null;
  let hovered: Tokens | null = null;
  let figures: HeatmapFigure[] = [];
  let images: TokenImage[] = [];
  let remark = "";
  const large = element("div.gp-beside.gp-large-heads");
  const [common, isCommonScale] = switchOf("One scale for all heads", () => draw());
  const [mean, isMean] = switchOf("Mean of the selected heads", () => drawLarge());
  const [log, isLog] = switchOf("Logarithmic colors", () => draw());

  const layerOf = (head: HeadIndex): AttentionLayer => {
    if (patterns === null) throw new Error("nothing is shown yet");
    return patterns.layer(head);
  };
  const headItem = (head: HeadIndex, more: Partial<Item> = {}, part = "z") =>
    itemOf(`${layerOf(head).name}.heads[${head[1]}].${part}`, more);
  const nameOf = (head: HeadIndex) => `Layer ${layerOf(head).title}, head ${head[1]}`;
  const lastRun = (): AttentionRun => (patterns?.has("patched") ? "patched" : "clean");

  /** The heads of the selected items, without duplicates. */
  const selectedHeads = (): HeadIndex[] => {
    const layers = patterns?.about.layers ?? [];
    const found = new Map<string, HeadIndex>();
    for (const { name, head } of selection.items) {
      const layer = layers.findIndex((one) => name?.startsWith(`${one.name}.`));
      if (head !== null && head < (layers[layer]?.heads ?? 0)) found.set(`${layer} ${head}`, [layer, head]);
    }
    return [...found.values()];
  };
  /** The heads that are shown large: the previewed one, else the selected ones, else the first head. */
  const largeHeads = (): HeadIndex[] => {
    const chosen = selectedHeads();
    return previewed !== null ? [previewed] : chosen.length > 0 ? chosen : [[0, 0]];
  };
  /** Whether the large heads are of cross-attention. */
  const isCross = () =>
    largeHeads()
      .slice(0, 1)
      .some((head) => layerOf(head).is_cross);
  /** A token as a query and as a key, which are the same token except in cross-attention. */
  const tokenAt = (position: number, side: Side): Tokens => ({
    query: isCross() && side !== "query" ? null : position,
    key: isCross() && side !== "key" ? null : position,
  });
  const pinnedTokens = (): Tokens => {
    const last = selection.items.findLast(({ position, key }) => position !== null || key !== null);
    const query = last?.position ?? null;
    return { query, key: last?.key ?? (isCross() ? null : query) };
  };
  const chooseHead = (head: HeadIndex, isMore: boolean) => {
    const position = isMore ? pinnedTokens().query : null;
    selection.click(headItem(head, { position }), isMore);
  };
  const chooseLayer = (layer: number) => {
    const { heads } = layerOf([layer, 0]);
    selection.set(Array.from({ length: heads }, (_, head) => headItem([layer, head])));
  };
  /**
   * Pins a token: selects the large heads at this position, or in cross-attention their weights for a key; a second
   * click unpins it. `isMore`: adds it to the pinned tokens.
   */
  const chooseToken = (position: number, side: Side, isMore: boolean) => {
    const { query, key } = tokenAt(position, side);
    const heads = largeHeads();
    const items = heads.map((head) =>
      query === null ? headItem(head, { key }, "pattern") : headItem(head, { position }),
    );
    const isPinned = items.every((item) => selection.has(item));
    const others = selection.items.filter((one) => (one.position ?? one.key) !== null && !includesItem(one, items));
    if (isMore && !isPinned) selection.set([...others, ...items]);
    else if (isMore && others.length > 0) selection.set(others);
    else selection.set(isPinned ? heads.map((head) => headItem(head)) : items);
  };

  const thumbnails = makeThumbnails({
    preview: (head) => {
      previewed = head;
      drawLarge();
    },
    choose: chooseHead,
    chooseLayer,
    describe: nameOf,
  });
  const strips = makeTokenStrips({
    preview: (position, side) => {
      hovered = position === null ? null : tokenAt(position, side);
      showTokens();
    },
    choose: chooseToken,
  });

  // -- The controls ------------------------------------------------------------------------------------------------------

  const modes = () =>
    MODES.map(({ mode: own, name, title }) => {
      const isOff = own === "difference" ? !patterns?.has("patched") : own === "values" && !patterns?.hasLengths;
      const why = own === "difference" ? "Choose a patch first" : "The values of this model were not found";
      const onclick = () => {
        mode = own;
        refresh(controls);
        draw();
      };
      return buttonElement(
        { title: isOff ? why : title, disabled: isOff, "aria-pressed": own === mode, onclick },
        name,
      );
    });
  const say = (text: string) => {
    remark = text;
    refresh(status);
  };
  const chooseRow = () => {
    model.set("row", Number(rowChoice.value));
    if (!saveChanges(model)) say(ROW_NEEDS_KERNEL);
  };
  // Without a kernel, only the row that was sent can be shown.
  const isLost = () => kernel.state === "lost";
  const rowChoice = element("select.gp-field", {
    "aria-label": "Row of the batch",
    hidden: () => (patterns?.about.rows ?? 0) < 2,
    disabled: isLost,
    title: () => (isLost() ? ROW_NEEDS_KERNEL : ""),
    onchange: chooseRow,
  });
  const group = { role: "group", "aria-label": "What is shown" };
  const modeGroup = element("div.gp-line.gp-tight.gp-button-group", group, modes);
  const controls = element("div.gp-line", modeGroup, rowChoice, common, log, mean);
  const status = element("p.gp-note", { role: "status", hidden: () => remark === "" }, () => remark);

  // -- The patterns ------------------------------------------------------------------------------------------------------

  /** The colors of some heads, the same small and large, without and with patches. */
  const scaleOf = (heads: readonly HeadIndex[]): Scale => {
    const runs = mode === "difference" ? (["patched"] as const) : (patterns?.about.runs ?? []);
    const all = heads.flatMap((head) => runs.map((run) => patterns?.pattern(head, run, mode).values ?? []));
    const high = limit ?? Math.max(...all.map(largestMagnitude));
    if (mode === "difference") return { map: "diverging", low: -high, high };
    const keys = heads[0] === undefined ? 1 : layerOf(heads[0]).full[1];
    return { map: "sequential", low: isLog() ? high / (10 * keys) : 0, high, isLog: isLog() };
  };
  /** The patches on a head; for `null`, those on all heads of the layer. */
  const patchesOf = (layer: number, head: number | null): PatchState[] => {
    const { name } = layerOf([layer, 0]);
    const isOn = ({ path }: PatchState) => path.startsWith(`${name}.`) && itemOf(path).head === head;
    return model.get("session").patches.filter((patch) => patch.is_enabled && isOn(patch));
  };
  const draw = () => {
    drawThumbnails();
    drawLarge();
  };
  const drawThumbnails = () => {
    if (patterns === null) return;
    const { about } = patterns;
    const width = root.clientWidth || WIDE_WIDTH;
    const isBeside = width >= WIDE_WIDTH;
    setAttribute(main, "data-narrow", !isBeside);
    const shown = about.layers.map(({ heads }, layer) =>
      Array.from({ length: heads }, (_, head) => patterns?.pattern([layer, head], lastRun(), mode) as Pattern),
    );
    // Differences are only comparable on one scale.
    const isCommon = isCommonScale() || mode === "difference";
    limit = isCommon ? largestMagnitude(shown.flat().map(({ values }) => largestMagnitude(values))) : null;
    thumbnails.draw(shown, about.layers, isBeside ? Math.min(620, width / 2) : width, {
      scaleOf: (head) => scaleOf([head]),
      patchesOf: (...head) =>
        patchesOf(...head)
          .map(({ number }) => `#${number}`)
          .join(" "),
      isKept: (head) => filter.keeps(headItem(head)),
    });
    mark();
  };
  const mark = () => {
    const layers = patterns?.about.layers ?? [];
    const marked = [...layers.keys()].filter((at) => selection.items.some((item) => isOfLayer(item, layers[at])));
    thumbnails.mark(selectedHeads(), (at) => cssColor(hue(at)), new Set(marked));
  };
  const drawLarge = () => {
    if (patterns === null) return;
    const heads = largeHeads();
    const runs: AttentionRun[] = mode === "difference" ? ["patched"] : patterns.about.runs;
    mean.hidden = selectedHeads().length < 2;
    replaceChildren(title, ...titleParts(heads));
    figures = [];
    const boxes = runs.map((run) => {
      const caption = runs.length > 1 && element("p.gp-run-title", run === "clean" ? "Clean" : "Patched");
      return element("div.gp-large-head", caption, figureOf(heads, run, runs.length));
    });
    setAttribute(large, "data-beside", runs.length > 1 && sideBySideSize() !== null);
    replaceChildren(large, ...boxes);
    showTokens();
    showCell();
    if (previewed === null) void loadMissing(heads);
  };
  /** Requests the full patterns of the large heads. */
  const loadMissing = async (heads: readonly HeadIndex[]) => {
    const current = patterns;
    const missing = heads.filter((head) => !current?.pattern(head, "clean", "pattern").isFull);
    if (current === null || missing.length === 0) return;
    const found = await Promise.all(missing.map((head) => current.loadFull(head, kernel)));
    if (patterns !== current) return;
    if (!found.every(Boolean)) say(NEEDS_KERNEL);
    else if (previewed === null) drawLarge();
  };
  const titleParts = (heads: readonly HeadIndex[]): (HTMLElement | string)[] => {
    const [only] = heads;
    if (heads.length === 1 && only) {
      const marks = patchesOf(...only).map(({ number, kind }) => element("mark", `#${number} ${kind}`));
      return [nameOf(only), ...marks];
    }
    if (isMean()) return [`Mean of ${heads.map(nameOf).join("; ")}`];
    return heads.map((head, at) => {
      const patch = element("span.gp-hue", { "aria-hidden": true });
      patch.style.backgroundColor = cssColor(hue(at));
      return element("span.gp-pair.gp-hue-name", patch, nameOf(head));
    });
  };
  const figureOf = (heads: readonly HeadIndex[], run: AttentionRun, count: number): HTMLElement => {
    const [first] = heads;
    const found = heads.flatMap((head) => patterns?.pattern(head, run, mode) ?? []);
    const [pattern] = found;
    if (patterns === null || first === undefined || pattern === undefined || !areAlike(found)) {
      return element("p.gp-note", "These heads have patterns of different sizes: select heads of one kind.");
    }
    const { tokens } = patterns.about;
    const layer = layerOf(first);
    const [rows, columns] = layer.full;
    const shown = combined(found, pattern);
    const scale = scaleOf(heads);
    const labelsOf = (at: number, noun: string) => {
      const texts = pattern.isFull ? (tokens[at] ?? []).map(visibleToken) : [];
      const labels = { texts, describe: (index: number) => `${noun} ${index} ${texts[index] ?? ""}` };
      return [texts, texts.length > 0 ? labels : null] as const;
    };
    const [queries, rowLabels] = labelsOf(layer.queries, "query");
    const [keys, columnLabels] = labelsOf(layer.keys, "key");
    const side = count > 1 ? (sideBySideSize() ?? MAX_SIZE) : 460;
    const result: ResultOptions = {
      scale,
      name: { pattern: "weight", values: "weight × length of the value", difference: "patched − clean" }[mode],
      missing: null,
      rowTitle: "query ↓",
      columnTitle: "key →",
      rowLabels,
      columnLabels,
      describe: (row, column) => {
        const query = describePosition("query", row, pattern.rows, rows, queries, "queries");
        return `${query}, ${describePosition("key", column, pattern.columns, columns, keys)}`;
      },
      onSelect: (position, key, isMore) => {
        const [head] = largeHeads().slice(-1);
        if (pattern.isFull && head) selection.click(headItem(head, { position, key }, "pattern"), isMore);
      },
      onHover: (cell) => {
        hovered = cell === null || !pattern.isFull ? null : { query: cell[0], key: cell[1] };
        showTokens();
      },
      valueText: (row, column) => {
        const value = shown.values[row * shown.columns + column] ?? 0;
        return formatWithError(value, shown.error(value));
      },
      box: { width: side, height: side },
      ...(found.length > 1 && !isMean() ? { overlay: overlayOf(found, heads, scale.high) } : {}),
    };
    const name = `${heads.map(nameOf).join("; ")}${count > 1 ? `, ${run}` : ""}`;
    const source = { full: layer.full, reduced: pattern.isFull ? null : REDUCED[mode] };
    const figure = makeFigure(source, shown, { title: name, result });
    figures.push(figure);
    return figure.element;
  };
  /** The size of one of two patterns side by side; `null`: there is not enough space. */
  const sideBySideSize = () => {
    const room = (panel.clientWidth - GAP) / 2 - LABELS;
    return room < MIN_SIZE ? null : Math.min(MAX_SIZE, room);
  };
  /** Combines several patterns: their mean, or if they are overlaid the largest weight of each cell. */
  const combined = (found: readonly Pattern[], first: Pattern): Pattern => {
    if (found.length < 2) return first;
    const error = (value: number) => Math.max(...found.map((one) => one.error(value)));
    return { ...first, values: isMean() ? meanOf(found) : largestByMagnitude(found), error };
  };
  /** Overlays the heads, each in its own color on the background color. */
  const overlayOf = (found: readonly Pattern[], heads: readonly HeadIndex[], most: number) => {
    const isDark = getComputedStyle(root).colorScheme === "dark";
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
    const strongest = `${mode === "difference" ? "strongest, up or down" : "strongest"}: ${most.toPrecision(3)}`;
    return { color, legend: element("span.gp-line.gp-tight.gp-legend.gp-muted", ...titleParts(heads), strongest) };
  };
  const showTokens = () => {
    const heads = largeHeads();
    const found = heads.flatMap((head) => patterns?.pattern(head, lastRun(), mode) ?? []);
    const [pattern] = found;
    if (patterns === null || pattern === undefined || !areAlike(found)) return;
    const { tokens } = patterns.about;
    const layer = layerOf(heads[0] ?? [0, 0]);
    const { query, key } = pinnedTokens();
    strips.show({
      pattern: combined(found, pattern),
      queries: tokens[layer.queries] ?? [],
      keys: tokens[layer.keys] ?? [],
      run: mode === "pattern" && patterns.has("patched") ? "patched: " : "",
      patched: new Set(heads.flatMap((head) => patchesOf(...head).flatMap(patchedPositions))),
      image: layer.image === null ? null : (images[layer.image] ?? null),
      query: inRange(hovered?.query ?? query, layer.full[0]),
      key: inRange(hovered?.key ?? key, layer.full[1]),
    });
  };
  /** Marks the selected weight, or the selected query. */
  const showCell = () => {
    const last = selection.items.at(-1);
    const [head] = largeHeads().slice(-1);
    const isWhole = head && patterns?.pattern(head, lastRun(), mode).isFull;
    const [queries, keys] = head ? layerOf(head).full : [0, 0];
    const isWeight = head && last?.name === headItem(head, {}, "pattern").name;
    const row = isWhole ? inRange(last?.position ?? null, queries) : null;
    const column = isWhole && isWeight ? inRange(last?.key ?? null, keys) : null;
    for (const figure of figures) figure.markSelected(row === null && column === null ? [] : [[row, column]]);
  };

  const updates = makeUpdates(view, large, {
    version: () => model.get("attention").patches,
    ask: () => kernel.ask("update", {}),
  });
  const title = element("h3.gp-muted.gp-attention-title");
  const panel = element("div.gp-stack.gp-attention-side", title, large, strips.element);
  const main = element(
    "section.gp-stack.gp-attention",
    { role: "region", "aria-label": "Attention" },
    controls,
    makeActions(view).element,
    makePatchStrip(view).element,
    updates.element,
    status,
    makeFilterNote(filter, view.onRemove),
    element("div.gp-attention-body", thumbnails.element, panel),
  );
  let width = root.clientWidth;
  const observer = new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    draw();
  });
  observer.observe(root);
  view.onRemove(() => observer.disconnect());
  // The colors of overlaid heads start at the background color.
  const themes = new MutationObserver(drawLarge);
  themes.observe(root, { attributeFilter: ["data-gp-theme"] });
  view.onRemove(() => themes.disconnect());
  follow(view, [filter], drawThumbnails);
  follow(view, ["session"], draw);
  follow(view, [kernel], () => refresh(controls));
  follow(view, [selection], () => {
    drawLarge();
    mark();
  });
  place({ element: main });
  const show = (found: Patterns) => {
    const { images: known, layers, picture, rows } = found.about;
    const box = log.querySelector("input");
    if (patterns === null && box !== null) box.checked = layers.some(({ full }) => full[1] > MANY_KEYS);
    patterns = found;
    images = picture === null ? [] : known.map((image) => ({ ...image, picture }));
    if (mode === "difference" ? !found.has("patched") : mode === "values" && !found.hasLengths) mode = "pattern";
    refresh(controls);
    const names = Array.from({ length: rows }, (_, row) => [row, `Row ${row}`] as const);
    setOptions(rowChoice, [[-1, `Mean of ${rows} rows`], ...names], model.get("row"));
    draw();
  };
  const read = () => Patterns.decode(model.get("attention"), model.get("cells"));
  await showTraits(view, ["attention", "cells"], read, show, onError);
};

/** A checkbox, and what says whether it is checked. */
function switchOf(label: string, onChange: () => void): [HTMLElement, () => boolean] {
  const box = checkbox(label, false, onChange);
  return [box, () => box.querySelector("input")?.checked === true];
}

function areAlike(patterns: readonly Pattern[]): boolean {
  return patterns.every(({ values }) => values.length === patterns[0]?.values.length);
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
