import { element, setAccent } from "./elements.js";
import { explain } from "./reasons.js";
import { accepted, stepsOf } from "./run.js";
import { drawSteps, drawTree } from "./tree.js";

/** The steps of a run: the newest tree, tokens of each step, sums, and why steps were not drafted. */
export class Panel {
  #root;

  /** @param {HTMLDetailsElement} root An empty element. */
  constructor(root) {
    this.#root = root;
    root.append(document.getElementById("panel").content.cloneNode(true));
    // On a small screen the text comes first.
    root.open = matchMedia("(min-width: 60rem)").matches;
  }

  /**
   * Shows the steps of a run up to now or to a time.
   *
   * @param {Run} run The run.
   * @param {{drafter: string, drafters: string[], accent: string, at?: number}} about
   */
  show(run, { drafter, drafters, accent, at = Infinity }) {
    const find = (selector) => this.#root.querySelector(selector);
    const rounds = run.roundsAt(at);
    const drafted = rounds.filter((round) => round.tree);
    const newest = drafted.at(-1)?.tree ?? null;
    setAccent(this.#root, accent);
    find(".why").textContent = explain(rounds, run.usage, drafter, drafters);
    find(".round").textContent = newest
      ? `${rounds.lastIndexOf(drafted.at(-1))}: ${newest.tokens.length} drafted, ${newest.accepted.length} accepted`
      : "";
    drawTree(find(".tree"), newest);
    drawSteps(find(".steps"), rounds);
    find("dl").replaceChildren(...this.#sums(run, rounds, drafted, at).flatMap(([name, value]) => [
      element("dt", name), element("dd", value),
    ]));
  }

  #sums(run, rounds, drafted, at) {
    const sum = (of, from = rounds) => from.reduce((total, round) => total + of(round), 0);
    const sums = [
      ["Verifier steps", `${stepsOf(rounds)}, of which ${drafted.length} drafted`],
      ["Tokens per drafted step", drafted.length ? (sum((round) => round.tokens, drafted) / drafted.length).toFixed(2) : "–"],
      ["Accepted tokens", `${sum(accepted)} of ${sum((round) => round.tree?.tokens.length ?? 0)} drafted tokens`],
    ];
    const spent = at === Infinity && run.usage?.speculation;
    if (spent) {
      sums.push(
        ["Time to first token", `${spent.first_token_ms.toFixed(0)} ms`],
        ["Drafter time", `${spent.draft_ms.toFixed(0)} ms`],
        ["Verifier time", `${spent.verify_ms.toFixed(0)} ms`],
        ["Drafter", spent.drafter_versions.join(", ") || "–"],
        ["Accepted by source", Object.entries(spent.sources).map(([name, each]) => `${name} ${each.accepted}`).join(", ") || "–"],
      );
    }
    return sums;
  }
}
