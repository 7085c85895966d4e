import { Answer } from "./answer.js";
import { copyButton, button, element, oncePerFrame, onSend } from "./elements.js";
import { Panel } from "./panel.js";
import { chats, deleteChat, keep, keepChat, kept, turnsOf } from "./kept.js";
import { rate, Run } from "./run.js";
import { linkTokens, TokenText } from "./tokens.js";

/**
 * The open conversation, and the choice of another. What is sent is the whole history, through the
 * model's chat template. The browser keeps all conversations until they are deleted.
 */
export class Chat {
  #root;
  #context;
  #panel;
  #id;
  #turns = []; // { role, content }; of an answer also { run, about }
  #edited = null; // index of the message that is written again
  #abort = null;
  #keepPart = () => {}; // keeps what came of the running answer

  /**
   * @param {HTMLElement} root The view.
   * @param {{gateway: Gateway, settings: Settings, failed: (error: Error) => void}} context
   */
  constructor(root, context) {
    this.#root = root;
    this.#context = context;
    this.#panel = new Panel(root.querySelector(".panel"));
    onSend(this.#form, () => this.#send(), () => this.stop());
    const { new: begin, delete: remove, chats: choice } = this.#form.elements;
    begin.addEventListener("click", () => this.#open(newId()));
    choice.addEventListener("change", () => this.#open(choice.value));
    remove.addEventListener("click", () => {
      const id = this.#id;
      this.#open(newId());
      deleteChat(id);
      this.#list();
    });
    for (const example of root.querySelectorAll(".examples button")) {
      example.addEventListener("click", () => {
        this.#message.value = example.textContent;
        this.#send();
      });
    }
    addEventListener("pagehide", () => this.#keepPart());
    this.#open(kept("chat") ?? newId());
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

  set #error(text) {
    this.#root.querySelector(".error").textContent = text;
  }

  /** Shows a chat that is kept, or a new one. A running answer of another chat ends. */
  #open(id) {
    this.#keepPart();
    this.stop();
    this.#id = id;
    keep("chat", id);
    this.#error = "";
    this.#show(turnsOf(id));
    this.#message.focus({ preventScroll: true });
  }

  #show(turns) {
    this.#turns = turns;
    this.#edited = null;
    this.#panel.clear();
    for (const turn of this.#thread.querySelectorAll(".turn")) turn.remove();
    turns.forEach((turn, index) => {
      if (turn.role === "user") {
        this.#thread.append(this.#question(turn.content, index));
        return;
      }
      turn.run = Run.from(turn.run);
      const view = this.#answerView(turn.run, turn.about, index);
      this.#thread.append(view.root);
      view.end();
    });
    this.#list();
  }

  /** The names of all chats. */
  #list() {
    const { chats: choice, delete: remove } = this.#form.elements, all = chats();
    const known = all.some(({ id }) => id === this.#id);
    if (!known) all.unshift({ id: this.#id, title: "New chat" });
    choice.replaceChildren(...all.map(({ id, title }) => new Option(title, id)));
    choice.value = this.#id;
    remove.disabled = !known;
    this.#thread.querySelector(".welcome").hidden = this.#thread.querySelector(".turn") !== null;
  }

  #question(content, index) {
    const turn = element("article", "", "turn user"), footer = element("footer");
    footer.append(button("Edit", () => {
      if (this.#abort) return;
      const same = this.#edited === index;
      this.#thread.querySelector(".edited")?.classList.remove("edited");
      turn.classList.toggle("edited", !same);
      this.#edited = same ? null : index;
      this.#message.value = same ? "" : content;
      this.#message.focus();
    }));
    turn.append(element("div", content, "said"), footer);
    return turn;
  }

  #answerView(run, about, index) {
    return new AnswerView(this.#panel, run, about, {
      again: () => this.#answer(this.#turns.slice(0, index - 1), this.#turns[index - 1].content, { seed: null }),
      goOn: () => this.#goOn(index),
    });
  }

  #send() {
    const message = this.#message.value, history = this.#turns.slice(0, this.#edited ?? undefined);
    if (message.trim()) this.#answer(history, message);
  }

  /** Asks, after a history, which takes the place of all turns. `changes` are of the request. */
  async #answer(history, message, changes = {}) {
    if (this.#abort) return;
    const before = this.#turns, asked = [...history, { role: "user", content: message }];
    const typed = this.#message.value;
    this.#show(history);
    this.#thread.append(this.#question(message, history.length));
    const run = new Run();
    await this.#follow(run, asked, changes, null, () => {
      this.#show(before);
      this.#message.value ||= typed; // nothing was answered: it goes back, to be sent again
    });
  }

  /** Continues an answer, in its place. */
  async #goOn(index) {
    if (this.#abort) return;
    const before = this.#turns, { run, about } = before[index];
    const turns = [...before.slice(0, index), { role: "assistant", content: run.text }];
    const goesOn = { continue_final_message: true, add_generation_prompt: false };
    this.#show(before.slice(0, index));
    await this.#follow(run, turns, goesOn, about, () => this.#show(before));
  }

  /** Adds what the gateway answers to a run; `failed` is called if nothing came. */
  async #follow(run, turns, changes, about, failed) {
    const { settings, gateway } = this.#context, id = this.#id;
    const abort = this.#abort = new AbortController(), count = run.tokens.length;
    const asked = turns.at(-1).role === "user" ? turns : turns.slice(0, -1);
    let view = null;
    this.#error = "";
    this.#enable(false);
    const answered = () => [...asked, { role: "assistant", content: run.text, run, about }];
    this.#keepPart = () => {
      if (run.tokens.length && about) keepChat(id, answered());
    };
    try {
      if (!settings.model) settings.model = await gateway.model();
      const { path, body } = settings.request(turns, changes);
      if (this.#message.value === asked.at(-1).content) this.#message.value = "";
      about ??= {
        drafter: body.drafter,
        drafters: settings.model.drafters,
        markdown: settings.model.chat_template,
        context: settings.model.max_model_len,
      };
      view = this.#answerView(run, about, asked.length);
      this.#thread.append(view.root);
      this.#list();
      scrollToEnd();
      await run.follow(gateway.stream(path, body, abort.signal), () => view.changed());
    } catch (failure) {
      if (failure.name !== "AbortError" && this.#abort === abort) {
        this.#error = failure.message;
        this.#context.failed(failure);
      }
    }
    view?.end();
    if (this.#id === id && this.#abort === abort) {
      if (run.tokens.length > count) {
        this.#turns = answered();
        if (!keepChat(id, this.#turns)) this.#error = "The browser has no room to keep this chat: delete others.";
        this.#list();
      } else {
        failed();
      }
    } // else another chat was opened meanwhile
    this.#keepPart = () => {};
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

const newId = () => `${Date.now()}-${Math.random()}`;

/** An answer as it comes, with its sums. */
class AnswerView {
  root = element("article", "", "turn assistant");
  #panel;
  #run;
  #about;
  #figures = element("span", "", "figures");
  #buttons;
  #goOn;
  #text;
  #thoughts = element("details", "", "thoughts");
  #thought;
  #ended = false;
  changed = oncePerFrame(() => this.#draw());

  /**
   * @param {Panel} panel Shows the steps.
   * @param {Run} run The request.
   * @param {{drafter: string, drafters: string[], markdown: boolean, context: number}} about
   * @param {{again: () => void, goOn: () => void}} actions Answer once more; continue a cut answer.
   */
  constructor(panel, run, about, { again, goOn }) {
    this.#panel = panel;
    this.#run = run;
    this.#about = about;
    this.#goOn = button("Continue", goOn);
    this.#buttons = [this.#goOn, button("Regenerate", again), copyButton(() => this.#run.text)];
    for (const action of this.#buttons) action.hidden = true;
    this.#goOn.className = "continue";
    const footer = element("footer");
    footer.append(this.#figures, ...this.#buttons);
    // Without a chat template the text is a continuation, such as code, and no Markdown.
    const place = element("div", "", about.markdown ? "answer markdown" : "answer plain");
    const thought = element("div", "", "thought");
    this.#text = about.markdown ? new Answer(place) : new TokenText(place);
    this.#thought = new TokenText(thought);
    this.#thoughts.append(element("summary", "Thoughts"), thought);
    this.#thoughts.hidden = true;
    for (const text of [place, thought]) linkTokens(text, run, panel, () => panel.show(run, about));
    this.root.append(this.#thoughts, place, footer);
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
    for (const action of this.#buttons) action.hidden = false;
    this.#goOn.hidden = !this.#run.cut(this.#about.context) || this.#run.full(this.#about.context) || !this.#run.text;
    this.#draw();
  }

  #draw() {
    const run = this.#run, seconds = run.ended ?? run.now, count = run.tokens.length;
    const followed = nearTheEnd(), { thought, answer } = run.parts();
    this.#thoughts.hidden = !thought.length;
    this.#thought.show(thought);
    this.#text.show(answer);
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
