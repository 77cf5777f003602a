/** The entry point of the front end: creates a view and connects its parts. */
import { makeCircuitPanel, makeCircuitView } from "./circuits/circuit_figure";
import { makeNodePopup } from "./details/popup";
import { makeFlowPanel } from "./flow/flow_panel";
import { inflateText } from "./inflate";
import type { About, CircuitTraits, Component, HeatmapTraits, LinkedTraits, ResultHeatmap } from "./kernel/protocol";
import { copyText, element } from "./page/dom";
import { followTheme, showFailure, watchErrors } from "./page/host";
import { makePatchEditor } from "./patches/editor";
import { tryEdit } from "./patches/edits";
import { makePatchList } from "./patches/patch_list";
import { makeResultHeatmap, makeResultView } from "./plots/result_heatmap";
import { makeRunPanel } from "./runs/run_panel";
import { makeColumnHeads } from "./tree/columns";
import { stopKeyPropagation, type TreeActions, watchKeys } from "./tree/keyboard";
import { decodeSkeleton, type Skeleton } from "./tree/skeleton";
import { makeToolbar } from "./tree/toolbar";
import { connectFilter, connectSelection, TreeState } from "./tree/tree_state";
import { makeOpenedNote, makeTreeView } from "./tree/tree_view";
import { listen, type Model, type View } from "./view";
import { makeAttentionView } from "./views/attention_view";
import { makeGenerationView } from "./views/generation_view";
import { makeLensView } from "./views/lens_view";
import { link, type MakeView } from "./views/linked_view";
import { makeFilterNote } from "./views/selection";
import { makeTokensView } from "./views/tokens_view";

type Undo = () => void;
/** The model of one of the views; `about`, or another trait, says which. */
interface AnyModel extends Pick<Model, "on" | "off"> {
  get(name: string): unknown;
}

const VIEWS: Partial<Record<string, MakeView<never>>> = {
  attention: makeAttentionView,
  lens: makeLensView,
  tokens: makeTokensView,
  generation: makeGenerationView,
  result: makeResultView,
};

/** Shows the model in `el`. Returns a function that removes the view. */
async function render({ model, el }: { model: AnyModel; el: HTMLElement }): Promise<Undo> {
  const root = element("div.gp-root");
  el.append(root);
  let undos: Undo[] = [];
  let shown = 0;
  const clear = () => {
    shown += 1;
    for (const undo of undos.splice(0).reverse()) tryUndo(undo);
    root.replaceChildren();
  };
  const show = async () => {
    clear();
    undos = [followTheme(root)];
    const current = shown;
    const onRemove = (undo: Undo) => undos.push(undo);
    try {
      // `show_heatmap` and `show_circuit` have models without `about`.
      const about = model.get("about") as About | undefined;
      const heatmap = model.get("heatmap") as ResultHeatmap | undefined;
      const make = VIEWS[about?.view ?? ""] as MakeView<LinkedTraits> | undefined;
      onRemove(hideStaticHtml(about?.model_id ?? heatmap?.model_id ?? String(model.get("model_id")), root));
      if (make !== undefined)
        return await showLinkedView(root, model as unknown as Model<LinkedTraits>, make, onRemove);
      if (heatmap !== undefined)
        return root.append(makeResultHeatmap(model as unknown as Model<HeatmapTraits>, onRemove));
      if (about === undefined) return root.append(makeCircuitView(model as unknown as Model<CircuitTraits>, onRemove));
      const skeleton = await decodeSkeleton(model.get("skeleton") as DataView);
      if (shown === current) showTree(root, model as unknown as Model, skeleton, onRemove);
    } catch (error) {
      if (shown !== current) return;
      clear();
      showFailure(root, error);
    }
  };
  // A new skeleton, as after an edit of the graph, has other rows.
  model.on("change:skeleton", show);
  await show();
  return () => {
    model.off("change:skeleton", show);
    clear();
    root.remove();
  };
}

/** Puts the parts into `root`. */
function showTree(root: HTMLElement, model: Model, skeleton: Skeleton, onRemove: (undo: Undo) => void): void {
  const linked = link(root, model, onRemove);
  const { notices } = linked;
  const view: View = {
    ...linked,
    skeleton,
    reveal: (row) => {
      state.reveal(row);
      tree.show(row);
    },
    focusTree: () => tree.focus(),
    showDetails: (row, anchor) => popup.show(row, anchor),
    editPatch: (target, anchor) => {
      popup.close();
      editor.open(target, anchor);
    },
  };
  const actions: TreeActions = {
    edit: (change) => void tryEdit(view, () => change),
    copy: (text) => copyText(text, root),
  };
  const state = new TreeState(view);
  const tree = makeTreeView(view, state, actions);
  const toolbar = makeToolbar(view, state);
  const popup = makeNodePopup(view);
  const editor = makePatchEditor(view);
  const circuit = makeCircuitPanel(view, state);
  const flow = makeFlowPanel(view, state);
  const filtered = { element: makeFilterNote(view.filter, onRemove) };
  const heads = makeColumnHeads(view, state);
  const opened = makeOpenedNote(view, state);
  const parts = [
    circuit,
    toolbar,
    notices,
    filtered,
    flow,
    heads,
    tree,
    opened,
    popup,
    editor,
    makePatchList(view),
    makeRunPanel(view),
  ];
  root.append(...parts.map((part) => part.element));
  watchKeys(view, toolbar);
  connectSelection(view, state);
  connectFilter(view, state);
  onRemove(watchErrors(import.meta.url, (message) => notices.error(message)));
  tree.show(state.active);
  const timer = setTimeout(() => void nameComponents(view, state), 300); // when all is drawn
  onRemove(() => clearTimeout(timer));
}

/** Shows the names of components; requests them from the kernel if they are not saved. */
async function nameComponents(view: View, state: TreeState): Promise<void> {
  const { kernel, model } = view;
  const show = async () => {
    const data = model.get("components");
    if (!data?.byteLength) return;
    const components = JSON.parse(await inflateText(data)) as Component[];
    if (components.length > 0) state.setComponents(components);
  };
  listen(view, "change:components", show);
  await show();
  if (state.components.size > 0 || kernel.state === "lost") return;
  await kernel.ask("components", {}, true).catch(() => null);
}

async function showLinkedView(
  root: HTMLElement,
  model: Model<LinkedTraits>,
  make: MakeView<LinkedTraits>,
  onRemove: (undo: Undo) => void,
): Promise<void> {
  const linked = link(root, model, onRemove);
  stopKeyPropagation(root, onRemove);
  onRemove(watchErrors(import.meta.url, (message) => linked.notices.error(message)));
  await make(
    linked,
    ({ element: part }) => root.append(linked.notices.element, part),
    (error) => showFailure(root, error),
  );
}

/** An error in one part must not keep the others from being removed. */
function tryUndo(undo: Undo): void {
  try {
    undo();
  } catch (error) {
    console.error(error);
  }
}

export default { render };

/** Hides the static tree that the kernel displays beside the view. Returns a function that shows it again. */
function hideStaticHtml(modelId: string, root: Element): () => void {
  const name = `.gp-static-${CSS.escape(modelId)}`;
  // With the output around it, so that there is no gap.
  const around = [".jp-OutputArea-child", ".output_area", ".output-container", ".cell-output-display"];
  const text = `${name} { display: none !important; }
${around.map((output) => `${output}:has(${name}):not(:has(.gp-root))`).join(", ")} { display: none !important; }`;
  const scope = root.getRootNode();
  const places = scope instanceof ShadowRoot ? [document.head, scope] : [document.head];
  const styles = places.map((place) => {
    const style = document.createElement("style");
    style.textContent = text;
    place.append(style);
    return style;
  });
  return () => {
    for (const style of styles) style.remove();
  };
}
