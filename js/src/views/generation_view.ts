/** The generation view: tokens colored by a score of each step, branches at a token, and patches of steps. */
import { PackedNumbers } from "../inflate";
import type { Act, Generation, GenerationTraits, Requests, Score } from "../kernel/protocol";
import { buttonElement, element, icon, replaceChildren, setAttribute } from "../page/dom";
import { formatNumber } from "../page/numbers";
import { visibleToken } from "../page/visible";
import { tryEdit } from "../patches/edits";
import { type ColorMap, color, cssColor, cssGradient, isLight } from "../plots/matrix";
import type { Linked, Part } from "../view";
import { labeled, type MakeView, makePatchStrip, probabilityCell, Remarks, showTraits } from "./linked_view";
import { itemOf } from "./selection";
import { makeUpdates } from "./updates";

const SCORES: Record<Score, string> = {
  log_probability: "log-probability (nats)",
  entropy: "entropy (nats)",
  given: "given score",
};
/** The actions of the form, with an example of their value. */
const STEP_ACTIONS: readonly [act: Act, text: string, example: string | null][] = [
  ["zero", "Zero", null],
  ["mean", "Mean", null],
  ["steer", "Steer by", "4.0 * direction"],
];

export const makeGenerationView: MakeView<GenerationTraits> = async (view, place, onError) => {
  const shown = new GenerationView(view);
  place(shown);
  const read = async (generation: Generation) =>
    [generation, await readGeneration(generation, view.model.get("numbers"))] as const;
  await showTraits(
    view,
    ["generation", "numbers"],
    () => read(view.model.get("generation")),
    (found) => shown.show(...found),
    onError,
  );
};

/** The steps of one line. */
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
  /** The scores that the user gave for the first line, if any. */
  given: Float32Array | null;
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
  const given = generation.has_given ? packed.floats(generation.lines[0]?.steps ?? 0) : null;
  packed.checkAllRead();
  return { lines, given };
}

class GenerationView implements Part {
  readonly element: HTMLElement;
  private readonly lines = element("div", { class: "gp-stack gp-generation-lines" });
  private readonly details = element("div", { class: "gp-lens-details" });
  private readonly legend = element("div", { class: "gp-legend" });
  private readonly scores = element("select", { class: "gp-field" });
  private readonly remarks = new Remarks();
  private readonly form: StepForm;
  private readonly updates;
  private generation!: Generation;
  private numbers!: GenerationNumbers;
  private tokens: HTMLButtonElement[][] = [];
  /** The token whose alternatives are shown. */
  private pinned: [line: number, step: number] | null = null;

  constructor(private readonly view: Linked<GenerationTraits>) {
    this.updates = makeUpdates(
      view,
      () => view.model.get("generation").version,
      () => this.ask({}),
      (isFailed) => this.lines.classList.toggle("gp-dimmed", isFailed),
    );
    this.form = new StepForm(view);
    this.scores.addEventListener("change", () => this.colorTokens());
    this.lines.addEventListener("keydown", (event) => this.onKey(event));
    const bar = element(
      "div",
      { class: "gp-line" },
      element("h3", { class: "gp-heading" }, "Generation"),
      labeled("Color", this.scores),
      this.legend,
      this.updates.element,
    );
    this.element = element(
      "section",
      { class: "gp-result gp-stack gp-generation", "aria-label": "Generation" },
      bar,
      element("div", { class: "gp-beside" }, this.lines, this.details),
      this.remarks.element,
      this.form.element,
      makePatchStrip(view).element,
    );
    const followSelection = () => this.followSelection();
    view.onRemove(view.selection.onChange(followSelection));
    view.onRemove(view.kernel.onState(() => this.generation && this.showDetails()));
  }

  /** Shows new tokens. */
  show(generation: Generation, numbers: GenerationNumbers): void {
    const before = this.scores.value;
    this.generation = generation;
    this.numbers = numbers;
    const known = (Object.keys(SCORES) as Score[]).filter((score) => score !== "given" || generation.has_given);
    this.scores.replaceChildren(...known.map((value) => element("option", { value }, SCORES[value])));
    this.scores.value = before || generation.score;
    this.remarks.show(generation.remarks);
    const [line, step] = this.pinned ?? [-1, -1];
    if (step >= (generation.lines[line]?.steps ?? 0)) this.pinned = null;
    this.draw();
  }

  // -- the tokens ----------------------------------------------------------------------------------------------------

  private draw(): void {
    const prompt = this.generation.prompt.map((text) => element("span", { class: "gp-token" }, visibleToken(text)));
    const first = element(
      "p",
      { class: "gp-generation-prompt" },
      element("span", { class: "gp-muted" }, "Prompt "),
      element("code", {}, ...prompt),
    );
    this.tokens = this.numbers.lines.map((steps, line) => this.buttonsOf(steps, line));
    const lines = this.generation.lines.map(({ name, branch }, line) => {
      const remove = branch === null ? null : this.removeButton(branch, name);
      return element(
        "div",
        { class: "gp-generation-line", role: "group", "aria-label": name },
        element("h4", { class: "gp-run-title" }, name, remove),
        element("div", { class: "gp-generation-tokens" }, ...(this.tokens[line] ?? [])),
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
      const attributes = { class: "gp-generated", tabindex: line === 0 && step === 0 ? 0 : -1 };
      const button = buttonElement(attributes, this.text(token));
      if (isBranch && step < start) button.classList.add("gp-generated-before");
      if (isBranch && step === start) button.classList.add("gp-generated-branch");
      const point = () => this.showDetails([line, step]);
      button.addEventListener("pointerenter", point);
      button.addEventListener("focus", point);
      button.addEventListener("pointerleave", () => this.showDetails());
      button.addEventListener("click", (event) => this.selectToken(line, step, event.shiftKey));
      return button;
    });
  }

  private removeButton(branch: number, name: string): HTMLElement {
    const remove = buttonElement(
      { class: "gp-button gp-quiet", "aria-label": `Remove: ${name}`, title: "Remove" },
      icon("close"),
    );
    remove.addEventListener("click", () => this.updates.follow(this.ask({ remove: branch })));
    return remove;
  }

  /** Asks for the tokens, with a new branch or without one of the branches. */
  private ask(change: Partial<Requests["generation"]["payload"]>) {
    const unchanged = { line: null, step: null, token: null, remove: null };
    return this.view.kernel.ask("generation", { ...unchanged, ...change });
  }

  private text(token: number): string {
    return visibleToken(this.generation.vocabulary[token] ?? "");
  }

  // -- the colors ---------------------------------------------------------------------------------------------------

  private get score(): Score {
    return this.scores.value as Score;
  }

  /** The scores of a line, if it has any. */
  private scoresOf(line: number): Float32Array | null {
    const steps = this.numbers.lines[line];
    if (this.score === "given") return line === 0 ? this.numbers.given : null;
    return (this.score === "entropy" ? steps?.entropy : steps?.logProbability) ?? null;
  }

  private colorTokens(): void {
    const all = this.numbers.lines.flatMap((_, line) => [...(this.scoresOf(line) ?? [])]).filter(Number.isFinite);
    const [least, most] = [Math.min(...all, 0), Math.max(...all, 0)];
    const isSigned = least < 0 && most > 0;
    const map: ColorMap = isSigned ? "diverging" : "sequential";
    const limit = Math.max(-least, most);
    const [low, high] = isSigned ? [-limit, limit] : [least, most];
    this.tokens.forEach((buttons, line) => {
      const scores = this.scoresOf(line);
      const steps = this.numbers.lines[line];
      buttons.forEach((button, step) => {
        const score = scores?.[step];
        const shade = score === undefined ? null : color(high === low ? 0.5 : (score - low) / (high - low), map);
        button.style.background = shade === null ? "" : cssColor(shade);
        button.style.color = shade === null ? "" : isLight(shade) ? "#000" : "#fff";
        const token = this.text(steps?.tokens[step] ?? 0);
        const words = score === undefined ? "" : `, ${SCORES[this.score]} ${formatNumber(score, 3)}`;
        setAttribute(button, "aria-label", `step ${step}: ${token}${words}`);
      });
    });
    const bar = element("span", { class: "gp-legend-bar", "aria-hidden": "true" });
    bar.style.backgroundImage = cssGradient(map);
    const end = (value: number) => element("span", { class: "gp-number" }, formatNumber(value, 3));
    replaceChildren(this.legend, element("span", { class: "gp-range" }, end(low), bar, end(high)));
  }

  // -- selection -----------------------------------------------------------------------------------------------------

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

  private onKey(event: KeyboardEvent): void {
    const focused = event.target as HTMLButtonElement;
    const line = this.tokens.findIndex((buttons) => buttons.includes(focused));
    const step = this.tokens[line]?.indexOf(focused) ?? -1;
    const targets: Record<string, [line: number, step: number]> = {
      ArrowLeft: [line, step - 1],
      ArrowRight: [line, step + 1],
      ArrowUp: [line - 1, step],
      ArrowDown: [line + 1, step],
      Home: [line, 0],
      End: [line, (this.tokens[line]?.length ?? 0) - 1],
    };
    const [to, at] = targets[event.key] ?? [-1, -1];
    const target = this.tokens[to]?.[at];
    if (line < 0 || target === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    for (const button of this.tokens.flat()) button.tabIndex = button === target ? 0 : -1;
    target.focus();
  }

  /** Shows the probable tokens of a step, each with a button for a branch. */
  private showDetails(pointed: [line: number, step: number] | null = null): void {
    const [line, step] = pointed ?? this.pinned ?? [0, 0];
    const steps = this.numbers.lines[line];
    const { lines, top, tokens } = this.generation;
    if (steps === undefined) return;
    const isLost = this.view.kernel.state === "lost";
    const rows = Array.from({ length: top }, (_, rank) => {
      const token = steps.top[step * top + rank] ?? 0;
      const probability = steps.probabilities[step * top + rank] ?? 0;
      const isTaken = token === steps.tokens[step];
      const label = `Branch with ${this.text(token)} at step ${step}`;
      const branch = buttonElement({ "aria-label": label }, "Branch");
      branch.disabled = isLost;
      branch.addEventListener("click", () => this.updates.follow(this.ask({ line, step, token: tokens[token] ?? 0 })));
      return element(
        "tr",
        isTaken ? { class: "gp-lens-target" } : {},
        element("td", {}, element("code", {}, this.text(token))),
        probabilityCell(probability),
        element("td", {}, isTaken ? element("span", { class: "gp-muted" }, "taken") : branch),
      );
    });
    const heading = element("h4", { class: "gp-run-title" }, `${lines[line]?.name}, step ${step}`);
    const log = formatNumber(steps.logProbability[step] ?? 0, 3);
    const numbers = `log-probability ${log}, entropy ${formatNumber(steps.entropy[step] ?? 0, 3)} nats`;
    const list = element("table", { class: "gp-lens-list gp-generation-list" }, element("tbody", {}, ...rows));
    const how = "Point at a token to see what else was probable; click it to keep that.";
    const hint = pointed === null && this.pinned === null && element("p", { class: "gp-note" }, how);
    replaceChildren(this.details, heading, element("p", { class: "gp-note" }, numbers), hint, list);
  }
}

/** A form that adds a patch of the selected steps. */
class StepForm implements Part {
  readonly element: HTMLFormElement;
  private readonly words = element("span", { class: "gp-muted" });
  private readonly path = textField("Value to patch", "layers[0].mlp_out");
  private readonly value = textField("Value, as Python", "");
  private readonly act = element("select", { class: "gp-field", "aria-label": "What the patch does" });
  private readonly apply = element("button", { type: "submit", class: "gp-button gp-primary" }, "Patch these steps");
  private steps: number[] = [];
  /** The path of the selection, which the field shows until the user types another one. */
  private followedPath = "";

  constructor(private readonly view: Linked<GenerationTraits>) {
    this.act.append(...STEP_ACTIONS.map(([value, text]) => element("option", { value }, text)));
    this.element = element(
      "form",
      { class: "gp-line gp-action-form" },
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
    view.onRemove(view.kernel.onState(() => this.show(this.steps)));
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

function textField(label: string, placeholder: string): HTMLInputElement {
  return element("input", { class: "gp-field", type: "text", "aria-label": label, placeholder, spellcheck: "false" });
}
