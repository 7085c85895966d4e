/**
 * One request, and what arrived when. Times are in seconds since the request was sent.
 *
 * A step is what one answer of the verifier brought: `{ at, tokens, tree, undrafted }`. A token is
 * `{ at, id, text, by }`, where `by` is "drafter" or "verifier".
 */
export class Run {
  steps = [];
  tokens = [];
  usage = null;
  /** Reason of the end: "stop" or "length"; empty while it runs and after an abort. */
  finish = "";
  began = null;
  /** Time of the end; null while it runs. */
  ended = null;

  /** Reads events to their end; `onStep` is called after each step. */
  async follow(events, onStep) {
    this.began = performance.now();
    try {
      for await (const event of events) {
        const choice = event.choices[0];
        if (choice?.round) {
          this.#add(choice.round);
          onStep();
        }
        this.finish = choice?.finish_reason ?? this.finish;
        this.usage = event.usage ?? this.usage;
      }
    } finally {
      this.ended = this.tokens.at(-1)?.at ?? this.now;
    }
  }

  get now() {
    return (performance.now() - this.began) / 1000;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Number of tokens that had arrived at a time. */
  countAt(at) {
    const later = this.tokens.findIndex((token) => token.at > at);
    return later < 0 ? this.tokens.length : later;
  }

  /** The steps that had arrived at a time. */
  stepsAt(at) {
    return this.steps.filter((step) => step.at <= at);
  }

  #add(round) {
    const at = this.now;
    round.token_ids.forEach((id, i) =>
      this.tokens.push({ at, id, text: round.pieces[i] ?? "", by: round.proposed_by[i] }));
    // The end of a text may come without a token of its own.
    const rest = round.pieces.slice(round.token_ids.length).join("");
    if (rest && this.tokens.length) this.tokens.at(-1).text += rest;
    this.steps.push({
      at, tokens: round.token_ids.length, tree: round.tree, undrafted: round.undrafted,
    });
  }
}

/** A step's tokens that the drafter proposed. */
export const accepted = (step) => step.tree?.accepted.length ?? 0;

/** Tokens a second, as text. */
export const rate = (tokens, seconds) => (seconds > 0 ? (tokens / seconds).toFixed(0) : "–");
