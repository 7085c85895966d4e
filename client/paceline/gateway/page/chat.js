import { Answer } from "./answer.js";
import { copy, element, oncePerFrame, onSend } from "./elements.js";
import { Panel } from "./panel.js";
import { rate, Run } from "./run.js";
import { TokenText } from "./tokens.js";

/** A conversation. What is sent is the whole history, through the model's chat template. */
export class Chat {
  #root;
  #context;
  #panel;
  #turns = [];
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
    for (const turn of this.#thread.querySelectorAll(".turn")) turn.remove();
    this.#root.querySelector(".error").textContent = "";
    this.#thread.querySelector(".welcome").hidden = false;
    this.#message.focus();
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
    const view = new AnswerView(settings, this.#panel);
    const run = new Run();
    try {
      if (!settings.model) settings.model = await gateway.model();
      const { path, body } = settings.request(turns);
      this.#message.value = "";
      this.#thread.querySelector(".welcome").hidden = true;
      this.#thread.append(asked, view.root);
      scrollToEnd();
      view.begin(run, body.drafter);
      await run.follow(gateway.stream(path, body, abort.signal), () => view.changed());
      view.end(abort.signal.aborted);
    } catch (failure) {
      if (failure.name !== "AbortError") {
        error.textContent = failure.message;
        this.#context.failed(failure);
      }
      if (run.tokens.length) view.end(true);
    }
    if (this.#turns === history) {
      if (run.tokens.length) {
        this.#turns = [...turns, { role: "assistant", content: run.text }];
      } else {
        // Nothing was answered: the message goes back, to be sent again.
        asked.remove();
        view.root.remove();
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
  #settings;
  #panel;
  #figures = element("span", "", "figures");
  #copy = element("button", "Copy");
  #text = null;
  #run = null;
  #drafter = "none";
  changed = oncePerFrame(() => this.#draw());

  constructor(settings, panel) {
    this.#settings = settings;
    this.#panel = panel;
    this.#copy.type = "button";
    this.#copy.hidden = true;
    this.#copy.addEventListener("click", () => copy(this.#run.text, this.#copy));
    const footer = element("footer");
    footer.append(this.#figures, this.#copy);
    this.root.append(footer);
  }

  begin(run, drafter) {
    this.#run = run;
    this.#drafter = drafter;
    // Without a chat template the text is a continuation, such as code, and no Markdown.
    const chats = this.#settings.model.chat_template;
    const place = element("div", "", chats ? "answer markdown" : "answer plain");
    this.#text = chats ? new Answer(place) : new TokenText(place);
    this.root.prepend(place);
    this.root.classList.add(this.#settings.accent(drafter));
    // Screen readers read the answer when it is complete.
    this.root.ariaBusy = "true";
    this.#figures.textContent = "…";
  }

  end(stopped) {
    const followed = nearTheEnd();
    this.#draw();
    this.root.ariaBusy = "false";
    this.#copy.hidden = false;
    const { finish, tokens, usage } = this.#run;
    const cached = usage?.prompt_tokens_details.cached_tokens;
    const parts = [this.#figures.textContent];
    if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
    if (stopped) parts.push("stopped");
    if (finish === "length") parts.push(`cut at ${tokens.length} tokens`);
    this.#figures.textContent = parts.join(" · ");
    if (followed) scrollToEnd();
  }

  #draw() {
    const run = this.#run, seconds = run.ended ?? run.now, count = run.tokens.length;
    const followed = nearTheEnd();
    this.#text.show(run.tokens);
    const drafted = run.tokens.filter((token) => token.by === "drafter").length;
    this.#figures.textContent = [
      `${rate(count, seconds)} tokens/s`,
      `${count} tokens in ${seconds.toFixed(2)} s`,
      `${((100 * drafted) / Math.max(1, count)).toFixed(0)}% drafted`,
    ].join(" · ");
    this.#panel.show(run, {
      drafter: this.#drafter,
      drafters: this.#settings.model.drafters,
      accent: this.#settings.accent(this.#drafter),
    });
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
