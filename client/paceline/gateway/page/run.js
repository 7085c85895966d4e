/**
 * One request, and what arrived when. Times are in seconds since the request was sent.
 *
 * A round is what one answer of the verifier brought: `{ at, steps, tokens, tree, undrafted }`. It is
 * a step with a tree, or some steps without one; none for the first token, which is the prompt's. A
 * token is `{ at, text, by, step }`, where `by` is "drafter" or "verifier", and `step` is the index
 * of its step: null for the prompt's. A step is `{ tokens, tree, undrafted }`.
 */
export class Run {
  rounds = [];
  steps = [];
  tokens = [];
  /** What the model thought before its answer, and the answer, where the gateway tells them apart. */
  thoughts = "";
  content = "";
  usage = null;
  /** Reason of the end: "stop" or "length"; empty while it runs and after an abort. */
  finish = "";
  began = null;
  /** Time of the end; null while it runs. */
  ended = null;

  /** The run of which `JSON.stringify` made this object. */
  static from(kept) {
    const run = Object.assign(new Run(), kept);
    run.ended ??= run.tokens.at(-1)?.at ?? 0; // it ran when it was kept
    return run;
  }

  /**
   * Reads events to their end, of a text or of its continuation; `onRound` is called after those of
   * an event.
   */
  async follow(events, onRound = () => {}) {
    this.began = performance.now() - 1000 * (this.ended ?? 0);
    this.ended = null;
    this.finish = "";
    try {
      for await (const event of events) {
        const choice = event.choices[0];
        const rounds = choice?.rounds ?? [], { reasoning_content, content } = choice?.delta ?? {};
        this.thoughts += reasoning_content ?? "";
        this.content += content ?? "";
        for (const round of rounds) this.#add(round);
        if (rounds.length) onRound();
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

  /** The answer. */
  get text() {
    return this.parts().answer.map((token) => token.text).join("");
  }

  /** Tokens of the thoughts and of the answer, with their `index`. Marks around them are left out. */
  parts() {
    const raw = this.tokens.map((token) => token.text).join("");
    const from = Math.max(0, raw.indexOf(this.thoughts)), to = from + this.thoughts.length;
    const begin = this.content || !this.thoughts ? raw.indexOf(this.content, to) : raw.length;
    return { thought: this.#slice(from, to), answer: this.#slice(begin < 0 ? to : begin, raw.length) };
  }

  #slice(from, to) {
    let at = 0;
    return this.tokens.flatMap((token, index) => {
      const text = token.text.slice(Math.max(0, from - at), Math.max(0, to - at));
      at += token.text.length;
      return text ? [{ ...token, text, index }] : [];
    });
  }

  /** Whether prompt and text have as many tokens as they may have, the context. */
  full(context) {
    return this.usage?.total_tokens >= context;
  }

  /** Why the text was cut, in words; empty if it has its own end. */
  cut(context) {
    if (!this.finish) return "stopped";
    if (this.finish !== "length") return "";
    if (this.full(context)) return "cut: the context is full";
    return `cut at ${this.tokens.length} tokens`;
  }

  /** Text of the tokens that a step brought. */
  textOf(index) {
    return this.tokens.filter(({ step }) => step === index).map(({ text }) => text).join("");
  }

  #add(round) {
    const at = this.now, { tree, undrafted } = round, first = this.steps.length;
    for (let i = 0; i < round.steps; i++) this.steps.push({ tokens: 0, tree, undrafted });
    round.proposed_by.forEach((by, i) => {
      // Steps that travel together have no tree: each brought a token.
      const step = round.steps ? first + Math.min(i, round.steps - 1) : null;
      if (step !== null) this.steps[step].tokens += 1;
      this.tokens.push({ at, text: round.pieces[i] ?? "", by, step });
    });
    // The end of a text may come without a token of its own.
    const rest = round.pieces.slice(round.token_ids.length).join("");
    if (rest && this.tokens.length) this.tokens.at(-1).text += rest;
    this.rounds.push({ at, steps: round.steps, tokens: round.token_ids.length, tree, undrafted });
  }
}

/** Number of a round's or a step's tokens that the drafter proposed. */
export const accepted = (round) => round.tree?.accepted.length ?? 0;

/** Number of steps of some rounds. */
export const stepsOf = (rounds) => rounds.reduce((sum, round) => sum + round.steps, 0);

/** Tokens a second, as text. */
export const rate = (tokens, seconds) => (seconds > 0 ? (tokens / seconds).toFixed(0) : "–");
