import { Answer } from "./answer.js";
import { copy, element, oncePerFrame, onSend } from "./elements.js";
import { Panel } from "./panel.js";
import { forget, keep, kept } from "./kept.js";
import { rate, Run } from "./run.js";
import { linkTokens, TokenText } from "./tokens.js";

/**
 * A conversation. What is sent is the whole history, through the model's chat template. A reload
 * keeps it.
 */
export class Chat {
  #root;
  #context;
  #panel;
  #turns = []; // { role, content }; of an answer also { run, about }
  #abort = null;

  /**
   * @param {HTMLElement} root The view.
   * @param {{gateway: Gateway, settings: Settings, failed: (error: Error) => void}} context
   */
  constructor(root, context) {
    this.#root = root;
    this.#context = context;
    this.#panel = new Panel(root.querySelector(".panel"));
    onSend(this.#form, () => this.#send(), () => this.stop());
    this.#form.elements.new.addEventListener("click", () => this.#clear());
    for (const example of root.querySelectorAll(".examples button")) {
      example.addEventListener("click", () => {
        this.#message.value = example.textContent;
        this.#send();
      });
    }
    this.#restore();
  }

  /** Ends the running answer; what came of it stays. */
  stop() {
    this.#abort?.abort();
  }

  get #form() {
    return this.#root.querySelector(".composer");
  }

  get #message() {
    return this.#form.querySelector("textarea");
  }

  get #thread() {
    return this.#root.querySelector(".thread");
  }

  #clear() {
    this.stop();
    this.#turns = [];
    forget("chat");
    for (const turn of this.#thread.querySelectorAll(".turn")) turn.remove();
    this.#root.querySelector(".error").textContent = "";
    this.#thread.querySelector(".welcome").hidden = false;
    this.#message.focus();
  }

  #restore() {
    this.#turns = kept("chat") ?? [];
    for (const turn of this.#turns) {
      if (turn.role === "user") {
        this.#thread.append(element("article", turn.content, "turn user"));
        continue;
      }
      turn.run = Run.from(turn.run);
      const view = new AnswerView(this.#panel, turn.run, turn.about);
      this.#thread.append(view.root);
      view.end();
    }
    this.#thread.querySelector(".welcome").hidden = this.#turns.length > 0;
  }

  async #send() {
    const message = this.#message.value, { settings, gateway } = this.#context;
    if (!message.trim() || this.#abort) return;
    const abort = this.#abort = new AbortController();
    const error = this.#root.querySelector(".error");
    error.textContent = "";
    this.#enable(false);
    const history = this.#turns, turns = [...history, { role: "user", content: message }];
    const asked = element("article", message, "turn user");
    const run = new Run();
    let view = null, answered = null;
    const keepPart = () => {
      if (run.tokens.length && this.#turns === history) keep("chat", answered());
    };
    addEventListener("pagehide", keepPart);
    try {
      if (!settings.model) settings.model = await gateway.model();
      const { path, body } = settings.request(turns);
      this.#message.value = "";
      this.#thread.querySelector(".welcome").hidden = true;
      const about = {
        drafter: body.drafter,
        drafters: settings.model.drafters,
        accent: settings.accent(body.drafter),
        markdown: settings.model.chat_template,
        context: settings.model.max_model_len,
      };
      answered = () => [...turns, { role: "assistant", content: run.text, run, about }];
      view = new AnswerView(this.#panel, run, about);
      this.#thread.append(asked, view.root);
      scrollToEnd();
      await run.follow(gateway.stream(path, body, abort.signal), () => view.changed());
      view.end();
    } catch (failure) {
      if (failure.name !== "AbortError") {
        error.textContent = failure.message;
        this.#context.failed(failure);
      }
      if (run.tokens.length) view.end();
    }
    removeEventListener("pagehide", keepPart);
    if (this.#turns === history) {
      if (run.tokens.length) {
        this.#turns = answered();
        keep("chat", this.#turns);
      } else {
        // Nothing was answered: the message goes back, to be sent again.
        asked.remove();
        view?.root.remove();
        this.#message.value ||= message;
        this.#thread.querySelector(".welcome").hidden = history.length > 0;
      }
    } // else a new chat was begun meanwhile
    this.#abort = null;
    this.#enable(true);
    // A button that was disabled has lost the focus.
    if (document.activeElement === document.body) this.#message.focus();
  }

  #enable(idle) {
    this.#form.elements.send.disabled = !idle;
    this.#form.elements.stop.disabled = idle;
  }
}

/** An answer as it comes, with its sums. */
class AnswerView {
  root = element("article", "", "turn assistant");
  #panel;
  #run;
  #about;
  #figures = element("span", "", "figures");
  #copy = element("button", "Copy");
  #text;
  #ended = false;
  changed = oncePerFrame(() => this.#draw());

  /**
   * @param {Panel} panel Shows the steps.
   * @param {Run} run The request.
   * @param {{drafter: string, drafters: string[], accent: string, markdown: boolean, context: number}} about
   */
  constructor(panel, run, about) {
    this.#panel = panel;
    this.#run = run;
    this.#about = about;
    this.#copy.type = "button";
    this.#copy.hidden = true;
    this.#copy.addEventListener("click", () => copy(this.#run.text, this.#copy));
    const footer = element("footer");
    footer.append(this.#figures, this.#copy);
    // Without a chat template the text is a continuation, such as code, and no Markdown.
    const place = element("div", "", about.markdown ? "answer markdown" : "answer plain");
    this.#text = about.markdown ? new Answer(place) : new TokenText(place);
    linkTokens(place, run, panel, () => panel.show(run, about));
    this.root.append(place, footer);
    this.root.classList.add(about.accent);
    // Screen readers read the answer when it is complete.
    this.root.ariaBusy = "true";
    this.#figures.textContent = "…";
    if (run.ended === null) this.#sayWaiting();
  }

  /** Says while the run lasts that nothing has come for some seconds. */
  #sayWaiting() {
    const run = this.#run;
    const timer = setInterval(() => {
      const silent = run.now - (run.rounds.at(-1)?.at ?? 0);
      if (run.ended !== null) clearInterval(timer);
      else if (silent >= 3) this.#figures.textContent = `waiting for the model, ${silent.toFixed(0)} s …`;
    }, 1000);
  }

  end() {
    this.#ended = true;
    this.root.ariaBusy = "false";
    this.#copy.hidden = false;
    this.#draw();
  }

  #draw() {
    const run = this.#run, seconds = run.ended ?? run.now, count = run.tokens.length;
    const followed = nearTheEnd();
    this.#text.show(run.tokens);
    const drafted = run.tokens.filter((token) => token.by === "drafter").length;
    const cached = run.usage?.prompt_tokens_details.cached_tokens;
    this.#figures.textContent = [
      `${rate(count, seconds)} tokens/s`,
      `${count} tokens in ${seconds.toFixed(2)} s`,
      `${((100 * drafted) / Math.max(1, count)).toFixed(0)}% drafted`,
      cached ? `${cached} of ${run.usage.prompt_tokens} prompt tokens cached` : "",
      this.#ended ? run.cut(this.#about.context) : "",
    ].filter(Boolean).join(" · ");
    this.#panel.show(run, this.#about);
    if (followed) scrollToEnd();
  }
}

/** Whether the reader is at the end of the page, so that it should follow the text. */
function nearTheEnd() {
  return window.innerHeight + window.scrollY > document.body.scrollHeight - 80;
}

function scrollToEnd() {
  window.scrollTo(0, document.body.scrollHeight);
}
