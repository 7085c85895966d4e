/**
 * One request, and what arrived when. Times are in seconds since the request was sent.
 *
 * A round is what one answer of the verifier brought: `{ at, steps, tokens, tree, undrafted }`. It is
 * a step with a tree, or some steps without one; none for the first token, which is the prompt's. A
 * token is `{ at, id, text, by }`, where `by` is "drafter" or "verifier".
 */
export class Run {
  rounds = [];
  tokens = [];
  usage = null;
  /** Reason of the end: "stop" or "length"; empty while it runs and after an abort. */
  finish = "";
  began = null;
  /** Time of the end; null while it runs. */
  ended = null;

  /** Reads events to their end; `onRound` is called after each round. */
  async follow(events, onRound) {
    this.began = performance.now();
    try {
      for await (const event of events) {
        const choice = event.choices[0];
        if (choice?.round) {
          this.#add(choice.round);
          onRound();
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

  /** The rounds that had arrived at a time. */
  roundsAt(at) {
    return this.rounds.filter((round) => round.at <= at);
  }

  /** Seconds after the first token, which is the prompt's. */
  get generating() {
    return this.ended - (this.tokens[0]?.at ?? this.ended);
  }

  #add(round) {
    const at = this.now;
    round.token_ids.forEach((id, i) =>
      this.tokens.push({ at, id, text: round.pieces[i] ?? "", by: round.proposed_by[i] }));
    // The end of a text may come without a token of its own.
    const rest = round.pieces.slice(round.token_ids.length).join("");
    if (rest && this.tokens.length) this.tokens.at(-1).text += rest;
    this.rounds.push({
      at, steps: round.steps, tokens: round.token_ids.length, tree: round.tree, undrafted: round.undrafted,
    });
  }
}

/** A round's tokens that the drafter proposed. */
export const accepted = (round) => round.tree?.accepted.length ?? 0;

/** Number of steps of some rounds. */
export const stepsOf = (rounds) => rounds.reduce((sum, round) => sum + round.steps, 0);

/** Tokens a second, as text. */
export const rate = (tokens, seconds) => (seconds > 0 ? (tokens / seconds).toFixed(0) : "–");
