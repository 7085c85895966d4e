/** The settings, and the requests that follow from them. */

import { keep, kept } from "./kept.js";

// Settings that a reload keeps. The API key is not one of them.
const KEPT = ["drafter", "temperature", "seed", "max_tokens", "system"];

export class Settings {
  #form;
  #details;
  #model = null;

  /** @param {HTMLDetailsElement} details The settings with their form. */
  constructor(details) {
    this.#details = details;
    this.#form = details.querySelector("form");
    this.#restore();
    this.#form.addEventListener("input", () => {
      keep("settings", Object.fromEntries(KEPT.map((name) => [name, this.#form.elements[name].value])));
      this.#describe();
    });
    this.#form.addEventListener("submit", (event) => event.preventDefault());
  }

  get model() {
    return this.#model;
  }

  /** Shows the drafters of a model; keeps the chosen one. */
  set model(model) {
    this.#model = model;
    const select = this.#form.elements.drafter, chosen = select.value;
    select.replaceChildren(...[...model.drafters, "none"].map((name) => new Option(name, name)));
    if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
    this.#describe();
  }

  get drafter() {
    return this.#form.elements.drafter.value || "none";
  }

  /** Maximum number of tokens of an answer; null: none. */
  get limit() {
    const { value } = this.#form.elements.max_tokens;
    return value === "" ? null : Number(value);
  }

  get key() {
    return this.#form.elements.key.value;
  }

  /** Calls back when the key was changed. */
  onKey(changed) {
    this.#form.elements.key.addEventListener("change", changed);
  }

  /** Opens the settings and asks for the key. */
  askForKey() {
    this.#details.open = true;
    this.#form.elements.key.focus();
  }

  /**
   * Path and body of a request for the next turn. A model without a chat template continues the
   * text of all turns.
   *
   * @param {{role: string, content: string}[]} turns Messages, oldest first.
   * @param {object} [changes] Fields of the body that differ from the settings.
   */
  request(turns, changes = {}) {
    if (!this.#form.checkValidity()) {
      this.#details.open = true;
      this.#form.reportValidity();
      throw new Error("A setting is not valid.");
    }
    const value = (name) => this.#form.elements[name].value.trim();
    const body = {
      model: this.#model.id,
      stream: true,
      stream_options: { include_usage: true, include_rounds: true },
      drafter: this.#model.max_model_len ? this.drafter : undefined, // its drafters are not known yet
      temperature: Number(value("temperature")),
      seed: value("seed") === "" ? null : Number(value("seed")),
      max_tokens: this.limit,
      ...changes,
    };
    if (!this.#model.chat_template) {
      const prompt = turns.map((turn) => turn.content).join("");
      for (const name of ["continue_final_message", "add_generation_prompt"]) delete body[name];
      body.max_tokens ??= this.#model.max_model_len; // the default of a completion is small
      return { path: "v1/completions", body: { ...body, prompt } };
    }
    const messages = turns.map(({ role, content }) => ({ role, content }));
    const system = value("system") ? [{ role: "system", content: value("system") }] : [];
    return { path: "v1/chat/completions", body: { ...body, messages: [...system, ...messages] } };
  }

  #restore() {
    const values = kept("settings");
    if (!values) return;
    this.#form.elements.drafter.replaceChildren(new Option(values.drafter, values.drafter));
    for (const name of KEPT) this.#form.elements[name].value = values[name];
    this.#describe();
  }

  #describe() {
    const { temperature, seed, max_tokens } = this.#form.elements;
    this.#details.querySelector("#chosen").textContent = [
      this.drafter === "none" ? "no drafter" : this.drafter,
      `temperature ${temperature.value}`,
      seed.value === "" ? "random seed" : `seed ${seed.value}`,
      max_tokens.value === "" ? "no limit" : `${max_tokens.value} tokens`,
    ].join(" · ");
  }
}
