import { element, onSend, setAccent } from "./elements.js";
import { Panel } from "./panel.js";
import { rate, Run, stepsOf } from "./run.js";
import { linkTokens, TokenText } from "./tokens.js";

// Times that differ by a smaller share count as equal.
const ALIKE = 0.03;
// Time between two looks at the clock while a request runs, in milliseconds.
const TICK = 100;
// Runs of each; the median is shown.
const RUNS = 3;
// Tokens of each run where the settings have no limit: some models never end.
const LIMIT = 384;

/**
 * The same request without and with a drafter, some times, and a replay of the pair with the median
 * ratio of times by the recorded times. No run drafts from the text of another.
 */
export class Race {
  #root;
  #context;
  #panel;
  #lanes = [];
  #abort = null;
  #replay = 0; // the frame that the replay waits for

  /**
   * @param {HTMLElement} root The view.
   * @param {{gateway: Gateway, settings: Settings, failed: (error: Error) => void}} context
   */
  constructor(root, context) {
    this.#root = root;
    this.#context = context;
    this.#panel = new Panel(root.querySelector(".panel"));
    onSend(root.querySelector(".composer"), () => this.#start(), () => this.stop());
    const { play, time } = this.#controls;
    play.addEventListener("click", () => this.#play());
    time.addEventListener("input", () => {
      cancelAnimationFrame(this.#replay);
      this.#show(Number(time.value));
    });
  }

  /** Ends the running requests and the replay. */
  stop() {
    this.#abort?.abort();
    cancelAnimationFrame(this.#replay);
  }

  get #controls() {
    return this.#root.querySelector(".replay").elements;
  }

  async #start() {
    const form = this.#root.querySelector(".composer"), error = this.#root.querySelector(".error");
    const prompt = form.querySelector("textarea").value;
    if (!prompt.trim() || this.#abort) return;
    this.stop();
    const abort = this.#abort = new AbortController();
    form.elements.start.disabled = true;
    form.elements.stop.disabled = false;
    error.textContent = "";
    this.#say("Reading the prompt …");
    this.#root.querySelector(".replay").hidden = true;
    try {
      await this.#run(prompt, form.elements.order.value, abort.signal);
    } catch (failure) {
      abort.abort(); // the other lane's request, if both run
      this.#say(failure.name === "AbortError" ? "Stopped." : "");
      if (failure.name !== "AbortError") {
        error.textContent = failure.message;
        this.#context.failed(failure);
      }
    }
    this.#abort = null;
    form.elements.start.disabled = false;
    form.elements.stop.disabled = true;
  }

  async #run(prompt, order, signal) {
    const { settings, gateway } = this.#context;
    if (!settings.model) settings.model = await gateway.model();
    const drafter = settings.drafter === "none" ? settings.model.drafters[0] : settings.drafter;
    if (!drafter) {
      throw new Error("A race needs a drafter, and the gateway finds none. `paceline serve` and `paceline drafter` start one.");
    }
    const turns = [{ role: "user", content: prompt }];
    const seed = settings.request(turns).body.seed ?? Math.floor(Math.random() * 2 ** 31);
    const common = { seed, isolated: true, max_tokens: settings.limit ?? LIMIT };
    const request = (changes) => settings.request(turns, { ...common, ...changes });
    const warm = request({ drafter: "none", max_tokens: 1 });
    await new Run().follow(gateway.stream(warm.path, warm.body, signal));
    const race = (lane) => {
      const { path, body } = request({ drafter: lane.drafter });
      // The panel waits for the end: it shows drafts alone, and drawing it takes a core of the model.
      return lane.follow(gateway.stream(path, body, signal));
    };
    const pairs = [];
    for (let number = 1; number <= RUNS; number++) {
      const context = settings.model.max_model_len;
      const plain = new Lane("Without a drafter", "none", "plain", context);
      const drafted = new Lane(`With ${drafter}`, drafter, settings.accent(drafter), context);
      linkTokens(drafted.root, drafted.run, this.#panel, () => {});
      this.#setLanes([plain, drafted]);
      const say = (what) => this.#say(`Run ${number} of ${RUNS}: ${what} …`);
      if (order === "together") {
        say("both");
        await Promise.all([race(plain), race(drafted)]);
      } else {
        say("without a drafter");
        await race(plain);
        say(`with ${drafter}`);
        await race(drafted);
      }
      pairs.push([plain, drafted]);
      if (firstDifference(plain.run.tokens, drafted.run.tokens) !== null) break;
    }
    this.#judge(pairs, drafter, order);
    this.#root.querySelector(".replay").hidden = false;
    this.#controls.time.max = this.#length;
    if (order === "together" || matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.#show(this.#length);
    } else {
      this.#play();
    }
  }

  #setLanes(lanes) {
    this.#lanes = lanes;
    this.#root.querySelector(".lanes").replaceChildren(...lanes.map((lane) => lane.root));
  }

  /** Seconds of the slower run. */
  get #length() {
    return Math.max(...this.#lanes.map((lane) => lane.run.ended));
  }

  #play() {
    cancelAnimationFrame(this.#replay);
    const pace = Number(this.#controls.pace.value), began = performance.now();
    const frame = () => {
      const at = Math.min(((performance.now() - began) / 1000) * pace, this.#length);
      this.#show(at);
      if (at < this.#length) this.#replay = requestAnimationFrame(frame);
    };
    frame();
  }

  #show(at) {
    this.#controls.time.value = at;
    for (const lane of this.#lanes) lane.show(at);
    this.#showPanel(at >= this.#length ? Infinity : at);
  }

  #showPanel(at = Infinity) {
    const { run, drafter } = this.#lanes[1], { settings } = this.#context;
    this.#panel.show(run, {
      drafter, drafters: settings.model.drafters, accent: settings.accent(drafter), at,
    });
  }

  #say(text) {
    const verdict = this.#root.querySelector(".verdict");
    verdict.className = "verdict";
    verdict.replaceChildren(element("p", text));
  }

  /** Compares the tokens and the times of all pairs of runs, and shows that of the median ratio. */
  #judge(pairs, drafter, order) {
    const verdict = this.#root.querySelector(".verdict");
    const last = pairs.at(-1).map((lane) => lane.run);
    const differs = firstDifference(last[0].tokens, last[1].tokens);
    setAccent(verdict, this.#context.settings.accent(drafter));
    if (differs === null) {
      const ratio = ([without, with_]) => without.run.ended / with_.run.ended;
      const sorted = [...pairs].sort((a, b) => ratio(a) - ratio(b)), ratios = sorted.map(ratio);
      const middle = sorted[Math.floor(sorted.length / 2)];
      this.#setLanes(middle);
      const [plain, drafted] = middle.map((lane) => lane.run);
      // Then both are plain decoding, and what their times differ by is chance.
      const idle = !pairs.some(([, with_]) => with_.run.rounds.some((round) => round.tree));
      const how = order === "together"
        ? "Both ran at the same time and shared the machine."
        : "They ran one after the other; the replay shows both by their recorded times.";
      verdict.replaceChildren(
        element("p", idle ? `With ${drafter} nothing was drafted` : compareTimes(ratios, drafter), "headline"),
        element("p", `✓ All ${plain.tokens.length} tokens are the same.`, "same"),
        element("p", `It took ${plain.ended.toFixed(2)} s without and ${drafted.ended.toFixed(2)} s with a drafter in the median of ${RUNS} runs`
          + ` (${ratios.map((each) => `${each.toFixed(2)}×`).join(", ")}). ${how}`),
        element("p", "This is one prompt, timed in this browser beside whatever else the machine does."
          + " `paceline compare` measures several.", "caveat"),
        ...(idle || drafted.ended > plain.ended / (1 + ALIKE) ? [element("p", explain(plain, drafted))] : []),
      );
      return;
    }
    const [plain, drafted] = last;
    for (const lane of this.#lanes) lane.differsFrom = differs;
    const quote = (run) => JSON.stringify(run.tokens[differs]?.text ?? "the end");
    const { batch_invariant: invariant, batch_invariance_reason: reason } = this.#context.settings.model;
    verdict.classList.add("different");
    verdict.replaceChildren(
      element("p", `The texts differ from token ${differs + 1} on`, "headline"),
      element("p", `Without a drafter it is ${quote(plain)}, with ${drafter} ${quote(drafted)}. ` + (invariant
        ? "This must not happen: please report it with the prompt and the settings."
        : `This verifier is not batch-invariant (${reason}): near ties may be decided otherwise.`)),
    );
  }
}

/** One of the two runs: a clock, its sums and its text. */
class Lane {
  root = document.getElementById("lane").content.cloneNode(true).firstElementChild;
  run = new Run();
  differsFrom = Infinity;
  #text;

  constructor(title, drafter, accent, context) {
    this.drafter = drafter;
    this.context = context;
    this.root.querySelector("h2").textContent = title;
    this.root.querySelector(".text").ariaLabel = title;
    this.#text = new TokenText(this.root.querySelector(".text"));
    this.root.classList.add(accent);
  }

  /** Runs, with the clock going. The text waits for the end: drawing it takes a core of the model. */
  async follow(events) {
    const ticking = setInterval(() => this.#showFigures(this.run.now), TICK);
    try {
      await this.run.follow(events);
    } finally {
      clearInterval(ticking);
      this.show(this.run.ended);
    }
  }

  /** Shows what had arrived at a time. */
  show(at) {
    const count = this.#showFigures(at);
    const text = this.root.querySelector(".text");
    this.#text.show(this.run.tokens, count);
    [...text.children].slice(this.differsFrom).forEach((token) => token.classList.add("differs"));
    text.scrollTop = text.scrollHeight;
  }

  #showFigures(at) {
    const seconds = Math.min(at, this.run.ended ?? at), count = this.run.countAt(at);
    const ended = this.run.ended !== null && at >= this.run.ended;
    this.root.classList.toggle("ended", ended);
    this.root.querySelector(".seconds").textContent = seconds.toFixed(2);
    this.root.querySelector(".figures").textContent = [
      `${count} tokens`,
      `${rate(count, seconds)} tokens/s`,
      ended ? this.run.cut(this.context) : "",
    ].filter(Boolean).join(" · ");
    return count;
  }
}

/** Which was faster, and how much, by the ratios of all pairs, sorted: where they disagree about which was, neither. */
function compareTimes(ratios, drafter) {
  const ratio = ratios[Math.floor(ratios.length / 2)];
  const agree = ratios[0] > 1 || ratios.at(-1) < 1;
  if (!agree || Math.abs(ratio - 1) < ALIKE) return `With ${drafter} it is as fast as plain decoding`;
  if (ratio > 1) return `With ${drafter} it is ${ratio.toFixed(2)} times as fast as plain decoding`;
  return `Slower: with ${drafter} it takes ${(1 / ratio).toFixed(2)} times as long as plain decoding`;
}

/** Why drafting brought nothing: what drafted steps gave and took, in plain steps. */
function explain(plain, drafted) {
  const rounds = drafted.rounds.filter((round) => round.tree);
  if (!rounds.length) return "No step was drafted: the scheduler expected no gain.";
  const tokens = rounds.reduce((sum, round) => sum + round.tokens, 0) / rounds.length;
  const all = stepsOf(drafted.rounds), plainStep = plain.generating / stepsOf(plain.rounds);
  const brought = `${rounds.length} of ${all} steps were drafted. One brought ${tokens.toFixed(1)} tokens`;
  const took = (drafted.generating / plainStep - (all - rounds.length)) / rounds.length;
  // Of a few drafted steps among many the time cannot be told.
  if (!(took >= 0.05) || 2 * rounds.length < all) return `${brought}.`;
  return `${brought} and took as long as ${took.toFixed(1)} plain steps.`;
}

/** Index of the first token that differs; null if all are the same. */
function firstDifference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i++) if (one[i]?.id !== other[i]?.id) return i;
  return null;
}
