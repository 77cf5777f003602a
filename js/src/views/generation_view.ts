/** The generation view: tokens colored by a score of each step, branches at a token, and patches of steps. */
import { PackedNumbers } from "../inflate";
import type { Act, Generation, GenerationTraits, Requests, Score } from "../kernel/protocol";
import { buttonElement, element, iconButton, replaceChildren, setAttribute, setOptions, textField } from "../page/dom";
import { formatNumber, formatPercent, visibleToken } from "../page/text";
import { tryEdit } from "../patches/edits";
import { makeRange } from "../plots/heatmap";
import { color } from "../plots/matrix";
import { makeTokenTable } from "../plots/plots";
import type { Linked, Part } from "../view";
import { labeled, type MakeView, makePatchStrip, makeUpdates, showRemarks, showTraits } from "./linked_view";
import { itemOf } from "./selection";
import { paintToken, watchTokens } from "./tokens_view";

const SCORES: Record<Score, string> = { probability: "probability", entropy: "entropy (nats)" };
/** The actions of the form, with an example of their value. */
const STEP_ACTIONS: readonly [act: Act, text: string, example: string | null][] = [
  ["zero", "Zero", null],
  ["mean", "Mean", null],
  ["steer", "Steer by", "4.0 * direction"],
];

export const makeGenerationView: MakeView<GenerationTraits> = async (view, place, onError) => {
  const shown = new GenerationView(view);
  place(shown);
  const read = async () => {
    const generation = view.model.get("generation");
    return [generation, await readGeneration(generation, view.model.get("numbers"))] as const;
  };
  await showTraits(view, ["generation", "numbers"], read, (found) => shown.show(...found), onError);
};

interface StepNumbers {
  /** Positions in the vocabulary. */
  tokens: Uint32Array;
  logProbability: Float32Array;
  entropy: Float32Array;
  /** The most probable tokens, `top` for each step. */
  top: Uint32Array;
  probabilities: Float32Array;
}

interface GenerationNumbers {
  lines: StepNumbers[];
}

/** Reads the numbers as `GenerationView._packed` in notebook/views/generation.py writes them. */
async function readGeneration(generation: Generation, data: DataView): Promise<GenerationNumbers> {
  const packed = await PackedNumbers.of(data);
  const lines = generation.lines.map(({ steps }) => ({
    tokens: packed.unsigned(steps),
    logProbability: packed.floats(steps),
    entropy: packed.floats(steps),
    top: packed.unsigned(steps * generation.top),
    probabilities: packed.floats(steps * generation.top),
  }));
  packed.checkAllRead();
  return { lines };
}

class GenerationView implements Part {
  readonly element: HTMLElement;
  private readonly lines = element("div.gp-stack.gp-generation-lines");
  private readonly details = element("div.gp-lens-details");
  private readonly legend = element("div.gp-line.gp-tight.gp-legend.gp-muted");
  private readonly scores = element("select.gp-field");
  private readonly remarks = element("ul.gp-remarks.gp-note");
  private readonly form: StepForm;
  private readonly updates;
  private generation!: Generation;
  private numbers!: GenerationNumbers;
  private tokens: HTMLButtonElement[][] = [];
  /** The token whose alternatives are shown. */
  private pinned: [line: number, step: number] | null = null;
  /** What the details are of. */
  private content = "";

  constructor(private readonly view: Linked<GenerationTraits>) {
    this.updates = makeUpdates(
      view,
      () => view.model.get("generation").version,
      () => this.ask({}),
      this.lines,
    );
    this.form = new StepForm(view);
    this.scores.addEventListener("change", () => this.colorTokens());
    watchTokens(this.lines, () => this.tokens);
    const bar = element(
      "div.gp-line",
      element("h3.gp-heading.gp-muted", "Generation"),
      labeled("Color", this.scores),
      this.legend,
      this.updates.element,
    );
    this.element = element(
      "section.gp-result.gp-stack.gp-generation",
      { "aria-label": "Generation" },
      bar,
      element("div.gp-generation-body", this.lines, this.details),
      this.remarks,
      this.form.element,
      makePatchStrip(view).element,
    );
    view.onRemove(view.selection.onChange(() => this.followSelection()));
    view.onRemove(view.kernel.onChange(() => this.generation && this.showDetails()));
  }

  show(generation: Generation, numbers: GenerationNumbers): void {
    const before = this.scores.value;
    this.generation = generation;
    this.numbers = numbers;
    setOptions(this.scores, Object.entries(SCORES), before || "probability");
    showRemarks(this.remarks, generation.remarks);
    const [line, step] = this.pinned ?? [-1, -1];
    if (step >= (generation.lines[line]?.steps ?? 0)) this.pinned = null;
    this.draw();
  }

  private draw(): void {
    this.content = "";
    const prompt = this.generation.prompt.map((text) => element("span.gp-token", visibleToken(text)));
    const first = element("p.gp-generation-prompt", element("span.gp-muted", "Prompt "), element("code", ...prompt));
    this.tokens = this.numbers.lines.map((steps, line) => this.buttonsOf(steps, line));
    const lines = this.generation.lines.map(({ name, branch }, line) => {
      const remove = branch === null ? null : this.removeButton(branch, name);
      return element(
        "div.gp-generation-line",
        { role: "group", "aria-label": name },
        element("h4.gp-run-title", name, remove),
        element("div.gp-line.gp-tight.gp-generation-tokens", ...(this.tokens[line] ?? [])),
      );
    });
    replaceChildren(this.lines, this.generation.prompt.length > 0 && first, ...lines);
    this.colorTokens();
    this.followSelection();
  }

  private buttonsOf(steps: StepNumbers, line: number): HTMLButtonElement[] {
    const start = this.generation.lines[line]?.start ?? 0;
    const isBranch = this.generation.lines[line]?.branch !== null;
    return Array.from(steps.tokens, (token, step) => {
      const point = () => this.showDetails([line, step]);
      const listeners = {
        onpointerenter: point,
        onfocus: point,
        onpointerleave: () => this.showDetails(),
        onclick: (event: MouseEvent) => this.selectToken(line, step, event.shiftKey),
      };
      const attributes = { class: "gp-generated", tabindex: line === 0 && step === 0 ? 0 : -1, ...listeners };
      const button = buttonElement(attributes, this.text(token));
      if (isBranch && step < start) button.classList.add("gp-generated-before");
      if (isBranch && step === start) button.classList.add("gp-generated-branch");
      return button;
    });
  }

  private removeButton(branch: number, name: string): HTMLElement {
    const onclick = () => this.updates.follow(this.ask({ remove: branch }));
    return iconButton("close", `Remove: ${name}`, { title: "Remove", onclick });
  }

  /** Asks for the tokens, with a new branch or without one of the branches. */
  private ask(change: Partial<Requests["generation"]["payload"]>) {
    const unchanged = { line: null, step: null, token: null, remove: null };
    return this.view.kernel.ask("generation", { ...unchanged, ...change });
  }

  private text(token: number): string {
    return visibleToken(this.generation.vocabulary[token] ?? "");
  }

  private get score(): Score {
    return this.scores.value as Score;
  }

  private scoreOf(line: number, step: number): number {
    const steps = this.numbers.lines[line];
    return (this.score === "entropy" ? steps?.entropy[step] : Math.exp(steps?.logProbability[step] ?? 0)) ?? 0;
  }

  private format(score: number): string {
    return this.score === "entropy" ? formatNumber(score, 3) : formatPercent(score);
  }

  /** On a scale that is the same for all generations: a probable token looks probable. */
  private colorTokens(): void {
    const high = this.score === "entropy" ? Math.log(this.generation.size) : 1;
    this.tokens.forEach((buttons, line) => {
      buttons.forEach((button, step) => {
        const score = this.scoreOf(line, step);
        paintToken(button, color(score / high, "sequential"));
        const token = this.text(this.numbers.lines[line]?.tokens[step] ?? 0);
        setAttribute(button, "aria-label", `step ${step}: ${token}, ${SCORES[this.score]} ${this.format(score)}`);
      });
    });
    replaceChildren(this.legend, makeRange("sequential", this.format(0), this.format(high)));
  }

  private selectToken(line: number, step: number, isMore: boolean): void {
    this.pinned = [line, step];
    this.view.selection.click(itemOf(null, { position: this.generation.prompt.length + step }), isMore);
    this.showDetails();
  }

  /** The steps of the selected tokens; their positions include the prompt. */
  private get steps(): number[] {
    const first = this.generation.prompt.length;
    const longest = Math.max(...this.generation.lines.map(({ steps }) => steps));
    const steps = this.view.selection.items.map(({ position }) => (position ?? -1) - first);
    return [...new Set(steps.filter((step) => step >= 0 && step < longest))].sort((one, other) => one - other);
  }

  private followSelection(): void {
    if (this.generation === undefined) return;
    const chosen = new Set(this.steps);
    for (const buttons of this.tokens) {
      buttons.forEach((button, step) => {
        setAttribute(button, "aria-pressed", chosen.has(step));
      });
    }
    this.form.show([...chosen]);
    this.showDetails();
  }

  /** Shows the probable tokens of a step, each with a button for a branch. */
  private showDetails(pointed: [line: number, step: number] | null = null): void {
    const [line, step] = pointed ?? this.pinned ?? [0, 0];
    const steps = this.numbers.lines[line];
    const { lines, top, tokens } = this.generation;
    if (steps === undefined) return;
    const isLost = this.view.kernel.state === "lost";
    const isHinted = pointed === null && this.pinned === null;
    // What is shown stays: its buttons are on the way of the pointer.
    const content = JSON.stringify([line, step, isLost, isHinted]);
    if (content === this.content) return;
    this.content = content;
    const rows = Array.from({ length: top }, (_, rank) => {
      const token = steps.top[step * top + rank] ?? 0;
      const isMarked = token === steps.tokens[step];
      const label = `Branch with ${this.text(token)} at step ${step}`;
      const onclick = () => this.updates.follow(this.ask({ line, step, token: tokens[token] ?? 0 }));
      return {
        token: this.generation.vocabulary[token] ?? "",
        probability: steps.probabilities[step * top + rank] ?? 0,
        isMarked,
        more: isMarked
          ? element("span.gp-muted", "taken")
          : buttonElement({ "aria-label": label, disabled: isLost, onclick }, "Branch"),
      };
    });
    const heading = element("h4.gp-run-title", `${lines[line]?.name}, step ${step}`);
    const log = steps.logProbability[step] ?? 0;
    const entropy = formatNumber(steps.entropy[step] ?? 0, 3);
    const numbers = `probability ${formatPercent(Math.exp(log))} (${formatNumber(log, 3)} nats), entropy ${entropy} nats`;
    const list = element("div.gp-generation-list", makeTokenTable(null, rows));
    const how = "Point at a token to see what else was probable; click it to keep that.";
    const hint = isHinted && element("p.gp-note", how);
    replaceChildren(this.details, heading, element("p.gp-note", numbers), hint, list);
  }
}

class StepForm implements Part {
  readonly element: HTMLFormElement;
  private readonly words = element("span.gp-muted");
  private readonly path = textField("Value to patch", { placeholder: "layers[0].mlp_out" });
  private readonly value = textField("Value, as Python");
  private readonly act = element("select.gp-field", { "aria-label": "What the patch does" });
  private readonly apply = element("button", { type: "submit", class: "gp-button gp-primary" }, "Patch these steps");
  private steps: number[] = [];
  /** The path of the selection, which the field shows until the user types another one. */
  private followedPath = "";

  constructor(private readonly view: Linked<GenerationTraits>) {
    setOptions(
      this.act,
      STEP_ACTIONS.map(([act, text]) => [act, text]),
      "zero",
    );
    this.element = element(
      "form.gp-line.gp-tight.gp-action-form",
      this.words,
      this.act,
      this.path,
      this.value,
      this.apply,
    );
    this.act.addEventListener("change", () => this.showAct());
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.add();
    });
    view.onRemove(view.kernel.onChange(() => this.show(this.steps)));
    this.showAct();
    this.show([]);
  }

  show(steps: number[]): void {
    this.steps = steps;
    const named = this.view.selection.items.findLast(({ name }) => name !== null)?.name;
    if (named && this.path.value === this.followedPath) this.path.value = this.followedPath = named;
    this.apply.disabled = steps.length === 0 || this.view.kernel.state === "lost";
    const chosen = `${steps.length === 1 ? "Step" : "Steps"} ${steps.join(", ")}:`;
    this.words.textContent = steps.length === 0 ? "Select tokens to patch their steps." : chosen;
  }

  private showAct(): void {
    const example = STEP_ACTIONS.find(([act]) => act === this.act.value)?.[2] ?? null;
    this.value.hidden = example === null;
    this.value.placeholder = example ?? "";
  }

  private async add(): Promise<void> {
    if (this.path.value.trim() === "") return this.path.focus();
    const item = itemOf(this.path.value.trim());
    const steps = this.steps.join(", ");
    const value = this.value.hidden ? null : this.value.value;
    const said = `patched ${item.name} in steps ${steps}`;
    await tryEdit(this.view, () => ({ action: "act", act: this.act.value as Act, items: [item], value, steps }), said);
  }
}
