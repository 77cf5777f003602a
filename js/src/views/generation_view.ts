/** The generation view: tokens colored by a score of each step, branches at a token, and patches of steps. */
import { PackedNumbers } from "../inflate";
import type { Act, Generation, GenerationTraits, Requests, Score } from "../kernel/protocol";
import { buttonElement, element, iconButton, refresh, replaceChildren, setOptions, textField } from "../page/dom";
import { formatNumber, formatPercent, visibleToken } from "../page/text";
import { tryEdit } from "../patches/edits";
import { makeRange } from "../plots/heatmap";
import { color } from "../plots/matrix";
import { makeTokenTable } from "../plots/plots";
import { follow, type Linked, type Part } from "../view";
import { labeled, type MakeView, makePatchStrip, makeUpdates, showRemarks, showTraits } from "./linked_view";
import { itemOf } from "./selection";
import { TokenLines } from "./token_lines";

const SCORES: Record<Score, string> = { probability: "probability", entropy: "entropy (nats)" };
/** The actions of the form, with an example of their value. */
const STEP_ACTIONS: readonly [act: Act, text: string, example: string | null][] = [
  ["zero", "Zero", null],
  ["mean", "Mean", null],
  ["steer", "Steer by", "4.0 * direction"],
];

interface StepNumbers {
  /** Positions in the vocabulary. */
  tokens: Uint32Array;
  logProbability: Float32Array;
  entropy: Float32Array;
  /** The most probable tokens, `top` for each step. */
  top: Uint32Array;
  probabilities: Float32Array;
}

/** Reads the numbers as `GenerationView._packed` in notebook/views/generation.py writes them. */
async function readGeneration(generation: Generation, data: DataView): Promise<StepNumbers[]> {
  const packed = await PackedNumbers.of(data);
  const lines = generation.lines.map(({ steps }) => ({
    tokens: packed.unsigned(steps),
    logProbability: packed.floats(steps),
    entropy: packed.floats(steps),
    top: packed.unsigned(steps * generation.top),
    probabilities: packed.floats(steps * generation.top),
  }));
  packed.checkAllRead();
  return lines;
}

type Step = [line: number, step: number];

export const makeGenerationView: MakeView<GenerationTraits> = async (view, place, onError) => {
  const { kernel, model, selection } = view;
  let generation = model.get("generation");
  let numbers: StepNumbers[] = [];
  /** The token whose alternatives are shown. */
  let pinned: Step | null = null;
  /** What the details are of. */
  let content = "";
  const lines = new TokenLines();
  const details = element("div.gp-lens-details");
  const legend = element("div.gp-line.gp-tight.gp-legend.gp-muted");
  const scores = element("select.gp-field", { onchange: () => draw() });
  setOptions(scores, Object.entries(SCORES), "probability");
  const remarks = element("ul.gp-remarks.gp-note");
  const form = makeStepForm(view);
  /** Asks for the tokens, with a new branch or without one of the branches. */
  const ask = (change: Partial<Requests["generation"]["payload"]>) =>
    kernel.ask("generation", { line: null, step: null, token: null, remove: null, ...change });
  const updates = makeUpdates(view, lines.element, {
    version: () => model.get("generation").version,
    ask: () => ask({}),
  });
  const text = (token: number | undefined) => visibleToken(generation.vocabulary[token ?? 0] ?? "");
  const isEntropy = () => scores.value === "entropy";
  const format = (score: number) => (isEntropy() ? formatNumber(score, 3) : formatPercent(score));

  /** On a scale that is the same for all generations: a probable token looks probable. */
  const draw = () => {
    content = "";
    const high = isEntropy() ? Math.log(generation.size) : 1;
    const shown = generation.lines.map(({ name, branch, start }, line) => {
      const own = numbers[line];
      const tokens = Array.from(own?.tokens ?? [], (token, step) => {
        const score = (isEntropy() ? own?.entropy[step] : Math.exp(own?.logProbability[step] ?? 0)) ?? 0;
        const point = () => showDetails([line, step]);
        const kind =
          branch === null || step > start ? "" : step < start ? " gp-generated-before" : " gp-generated-branch";
        const attributes = {
          class: `gp-generated${kind}`,
          "aria-label": `step ${step}: ${text(token)}, ${SCORES[scores.value as Score]} ${format(score)}`,
          onpointerenter: point,
          onfocus: point,
          onpointerleave: () => showDetails(),
          onclick: ({ shiftKey }: MouseEvent) => {
            pinned = [line, step];
            selection.click(itemOf(null, { position: generation.prompt.length + step }), shiftKey);
            showDetails();
          },
        };
        return { text: generation.vocabulary[token] ?? "", color: color(score / high, "sequential"), attributes };
      });
      const onclick = () => updates.follow(ask({ remove: branch }));
      const remove = iconButton("close", `Remove: ${name}`, { title: "Remove", onclick });
      return { name, button: branch === null ? null : remove, tokens };
    });
    const prompt = generation.prompt.map((token) => element("span.gp-token", visibleToken(token)));
    const first = element("p.gp-generation-prompt", element("span.gp-muted", "Prompt "), element("code", ...prompt));
    lines.show(shown, prompt.length > 0 ? first : null);
    replaceChildren(legend, makeRange("sequential", format(0), format(high)));
    followSelection();
  };
  /** Marks the selected tokens, whose positions include the prompt, and shows their steps in the form. */
  const followSelection = () => {
    const longest = Math.max(...generation.lines.map(({ steps }) => steps));
    const steps = selection.items.map(({ position }) => (position ?? -1) - generation.prompt.length);
    const chosen = new Set(steps.filter((step) => step >= 0 && step < longest).sort((one, other) => one - other));
    lines.press(chosen);
    form.show([...chosen]);
    showDetails();
  };
  /** Shows the probable tokens of a step, each with a button for a branch. */
  const showDetails = (pointed: Step | null = null) => {
    const [line, step] = pointed ?? pinned ?? [0, 0];
    const steps = numbers[line];
    const { lines: all, top, tokens } = generation;
    if (steps === undefined) return;
    const isLost = kernel.state === "lost";
    const isHinted = pointed === null && pinned === null;
    // What is shown stays: its buttons are on the way of the pointer.
    const now = JSON.stringify([line, step, isLost, isHinted]);
    if (now === content) return;
    content = now;
    const rows = Array.from({ length: top }, (_, rank) => {
      const token = steps.top[step * top + rank] ?? 0;
      const isMarked = token === steps.tokens[step];
      const label = `Branch with ${text(token)} at step ${step}`;
      const onclick = () => updates.follow(ask({ line, step, token: tokens[token] ?? 0 }));
      return {
        token: generation.vocabulary[token] ?? "",
        probability: steps.probabilities[step * top + rank] ?? 0,
        isMarked,
        more: isMarked
          ? element("span.gp-muted", "taken")
          : buttonElement({ "aria-label": label, disabled: isLost, onclick }, "Branch"),
      };
    });
    const log = steps.logProbability[step] ?? 0;
    const entropy = formatNumber(steps.entropy[step] ?? 0, 3);
    const probability = `probability ${formatPercent(Math.exp(log))} (${formatNumber(log, 3)} nats)`;
    const how = "Point at a token to see what else was probable; click it to keep that.";
    replaceChildren(
      details,
      element("h4.gp-run-title", `${all[line]?.name}, step ${step}`),
      element("p.gp-note", `${probability}, entropy ${entropy} nats`),
      isHinted && element("p.gp-note", how),
      element("div.gp-generation-list", makeTokenTable(null, rows)),
    );
  };
  const read = async () => {
    const found = model.get("generation");
    return [found, await readGeneration(found, model.get("numbers"))] as const;
  };
  follow(view, [selection], followSelection);
  follow(view, [kernel], () => showDetails());
  place({
    element: element(
      "section.gp-result.gp-stack.gp-generation",
      { "aria-label": "Generation" },
      element(
        "div.gp-line",
        element("h3.gp-heading.gp-muted", "Generation"),
        labeled("Color", scores),
        legend,
        updates.element,
      ),
      element("div.gp-generation-body", lines.element, details),
      remarks,
      form.element,
      makePatchStrip(view).element,
    ),
  });
  const show = ([found, read]: readonly [Generation, StepNumbers[]]) => {
    [generation, numbers] = [found, read];
    showRemarks(remarks, generation.remarks);
    const [line, step] = pinned ?? [-1, -1];
    if (step >= (generation.lines[line]?.steps ?? 0)) pinned = null;
    draw();
  };
  await showTraits(view, ["generation", "numbers"], read, show, onError);
};

/** A form that patches the selected steps. */
function makeStepForm(view: Linked<GenerationTraits>): Part & { show(steps: readonly number[]): void } {
  let steps: readonly number[] = [];
  /** The path of the selection, which the field shows until the user types another one. */
  let followedPath = "";
  const path = textField("Value to patch", { placeholder: "layers[0].mlp_out" });
  const act = element("select.gp-field", { "aria-label": "What the patch does", onchange: () => refresh(form) });
  setOptions(
    act,
    STEP_ACTIONS.map(([act, text]) => [act, text]),
    "zero",
  );
  const example = () => STEP_ACTIONS.find(([name]) => name === act.value)?.[2] ?? null;
  const value = textField("Value, as Python", { hidden: () => example() === null, placeholder: () => example() ?? "" });
  const add = async (event: Event) => {
    event.preventDefault();
    const item = itemOf(path.value.trim());
    if (item.name === "") return path.focus();
    const edit = { action: "act" as const, act: act.value as Act, items: [item], steps: steps.join(", ") };
    const typed = value.hidden ? null : value.value;
    await tryEdit(view, () => ({ ...edit, value: typed }), `patched ${item.name} in steps ${edit.steps}`);
  };
  const disabled = () => steps.length === 0 || view.kernel.state === "lost";
  const form: HTMLFormElement = element(
    "form.gp-line.gp-tight.gp-action-form",
    { onsubmit: add },
    element("span.gp-muted", () => {
      const chosen = `${steps.length === 1 ? "Step" : "Steps"} ${steps.join(", ")}:`;
      return steps.length === 0 ? "Select tokens to patch their steps." : chosen;
    }),
    act,
    path,
    value,
    element("button", { type: "submit", class: "gp-button gp-primary", disabled }, "Patch these steps"),
  );
  const show = (now: readonly number[]) => {
    steps = now;
    const named = view.selection.items.findLast(({ name }) => name !== null)?.name;
    if (named && path.value === followedPath) path.value = followedPath = named;
    refresh(form);
  };
  follow(view, [view.kernel], () => refresh(form));
  return { element: form, show };
}
