import { element } from "./elements.js";
import { explain, UNDRAFTED } from "./reasons.js";
import { accepted, stepsOf } from "./run.js";
import { drawSteps, drawTree, pathsOf, stepAt } from "./tree.js";

/**
 * The steps of a run: the tree of one, tokens of each, sums, and why steps were not drafted. The tree
 * is the newest, unless the reader picks a step by its bar, by a key or by one of its tokens.
 */
export class Panel {
  #root;
  #run = null;
  #steps = [];
  #picked = null;
  #previewed = null;
  #shown = -1;

  /** @param {HTMLDetailsElement} root An empty element. */
  constructor(root) {
    this.#root = root;
    root.append(document.getElementById("panel").content.cloneNode(true));
    // On a small screen the text comes first.
    root.open = matchMedia("(min-width: 60rem)").matches;
    this.#bars.addEventListener("click", ({ clientX }) => this.pick(stepAt(this.#bars, clientX)));
    this.#bars.addEventListener("keydown", (event) => this.#onKey(event));
  }

  get #bars() {
    return this.#root.querySelector(".steps");
  }

  /** What the shown step brought, in words. */
  get title() {
    const step = this.#steps[this.#shown];
    if (!step) return "";
    const text = JSON.stringify(this.#run.textOf(this.#shown));
    const draft = step.tree
      ? `${step.tree.tokens.length} drafted, ${accepted(step)} accepted`
      : `not drafted: ${UNDRAFTED[step.undrafted] ?? step.undrafted}`;
    return `Step ${this.#shown + 1} of ${this.#steps.length}: ${text}, ${draft}`;
  }

  /** Shows a step until another one is picked or the run changes; once more: the newest tree again. */
  pick(step) {
    if (step >= this.#steps.length) return;
    this.#picked = step === this.#picked ? null : step;
    this.#draw();
  }

  /** Shows a step until this is called with null. */
  preview(step) {
    this.#previewed = step;
    this.#draw();
  }

  #onKey(event) {
    const last = this.#steps.length - 1;
    const target = {
      ArrowLeft: this.#shown - 1, ArrowDown: this.#shown - 1, PageDown: this.#shown - 10,
      ArrowRight: this.#shown + 1, ArrowUp: this.#shown + 1, PageUp: this.#shown + 10,
      Home: 0, End: last,
    }[event.key];
    if (target === undefined || last < 0) return;
    event.preventDefault();
    this.#picked = Math.max(0, Math.min(target, last));
    this.#draw();
  }

  #draw() {
    const shown = [this.#previewed, this.#picked].find((step) => step !== null && step < this.#steps.length);
    this.#shown = shown ?? this.#steps.findLastIndex((step) => step.tree);
    this.#root.querySelector(".step").textContent = this.title;
    const tree = this.#steps[this.#shown]?.tree ?? null;
    drawTree(this.#root.querySelector(".tree"), tree);
    this.#root.querySelector(".paths").replaceChildren(...pathsOf(tree).map((path) => element("li", path)));
    drawSteps(this.#bars, this.#steps, this.#shown);
    this.#bars.setAttribute("aria-valuemax", this.#steps.length);
    this.#bars.setAttribute("aria-valuenow", this.#shown + 1);
    this.#bars.setAttribute("aria-valuetext", this.title || "no step");
  }

  /** Shows no run. */
  clear() {
    this.#run = null;
    this.#steps = [];
    this.#draw();
    this.#root.querySelector(".why").textContent = "";
    this.#root.querySelector("dl").replaceChildren();
  }

  /**
   * Shows the steps of a run up to now.
   *
   * @param {Run} run The run.
   * @param {{drafter: string, drafters: string[]}} about
   */
  show(run, { drafter, drafters }) {
    const find = (selector) => this.#root.querySelector(selector);
    const { rounds } = run, drafted = rounds.filter((round) => round.tree);
    find(".why").textContent = explain(rounds, run.usage, drafter, drafters);
    if (run !== this.#run) this.#picked = this.#previewed = null;
    this.#run = run;
    this.#steps = run.steps;
    this.#draw();
    find("dl").replaceChildren(...this.#sums(run, rounds, drafted).flatMap(([name, value]) => [
      element("dt", name), element("dd", value),
    ]));
  }

  #sums(run, rounds, drafted) {
    const sum = (of, from = rounds) => from.reduce((total, round) => total + of(round), 0);
    const sums = [
      ["Verifier steps", `${stepsOf(rounds)}, of which ${drafted.length} had a draft`],
      ["Tokens per drafted step", drafted.length ? (sum((round) => round.tokens, drafted) / drafted.length).toFixed(2) : "–"],
      ["Accepted tokens", `${sum(accepted)} of ${sum((round) => round.tree?.tokens.length ?? 0)} drafted tokens`],
    ];
    const spent = run.usage?.speculation;
    if (spent) {
      sums.push(
        ["Time to first token", `${spent.first_token_ms.toFixed(0)} ms`],
        ["Drafter time", `${spent.draft_ms.toFixed(0)} ms`],
        ["Verifier time", `${spent.verify_ms.toFixed(0)} ms`],
        ["Drafter", spent.drafter_versions.join(", ") || "–"],
        ["Accepted by source", Object.entries(spent.sources).map(([name, source]) => `${name} ${source.accepted}`).join(", ") || "–"],
      );
    }
    return sums;
  }
}
